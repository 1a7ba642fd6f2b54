import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arclight.federated.codecs.sparse import bit_width, pack_bits, packed_bytes, unpack_bits
from arclight.federated.errors import BlobError


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([*range(1, 9), 10, 12, 14, 16]), st.lists(st.integers(0, 65535), max_size=70))
def test_packed_numbers_come_back_and_lie_where_they_should(width: int, numbers: list[int]) -> None:
    numbers = [number % (1 << width) for number in numbers]
    packed = pack_bits(torch.tensor(numbers, dtype=torch.int32), width)
    whole = sum(number << (width * place) for place, number in enumerate(numbers))
    assert bytes(packed.tolist()) == whole.to_bytes(packed_bytes(len(numbers), width), "little")
    assert unpack_bits(packed, width, len(numbers)).tolist() == numbers


def test_more_than_is_packed_at_a_time() -> None:
    numbers = torch.randint(0, 4096, ((1 << 19) + 5,))
    assert torch.equal(unpack_bits(pack_bits(numbers, 12), 12, len(numbers)).long(), numbers)


@pytest.mark.parametrize(
    ("count", "width"), [(1, 1), (2, 1), (3, 2), (256, 8), (257, 10), (2048, 12), (4096, 12), (65536, 16)]
)
def test_widths_hold_their_numbers(count: int, width: int) -> None:
    assert bit_width(count) == width


def test_other_lengths_are_refused() -> None:
    with pytest.raises(BlobError, match="12 bits"):
        unpack_bits(torch.zeros(4, dtype=torch.uint8), 12, 2)
