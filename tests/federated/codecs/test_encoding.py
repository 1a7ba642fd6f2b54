"""Codecs keep their error bounds, exact residuals and sizes, and refuse invalid values."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federated.fakes import TemporaryStore

from arclight.federated.blobs.manifest_io import Encoded, open_manifest, write_blobs
from arclight.federated.codecs.encoding import decode, encode, encode_all, is_sent_raw
from arclight.federated.codecs.settings import BF16, Codec, Int4, Int8, Raw, TopK, from_table, to_table
from arclight.federated.errors import BlobError, FederatedError, ProtocolError

LOSSY = (BF16(), Int8(), Int4(), TopK())
quick = settings(max_examples=40, deadline=None)


def tensor_of(seed: int, count: int, exponent: int, spread: int = 0) -> torch.Tensor:
    """Normal values around 2^exponent, each block of 64 of another size."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    sizes = torch.randint(exponent - spread, exponent + spread + 1, (-(-count // 64),), generator=generator)
    return (
        torch.ldexp(values, sizes.repeat_interleave(64)[:count]).view(2, -1) if count % 2 == 0 else values.view(1, -1)
    )


def say(x: torch.Tensor, codec: Codec, residual: torch.Tensor | None = None) -> Encoded:
    return encode("k", x, codec, residual)[0]


def read(encoded: Encoded) -> torch.Tensor:
    return decode("k", encoded)


def blocks_of(x: torch.Tensor, block: int) -> torch.Tensor:
    """A row for each block; the last is filled up with zeros, which are encoded without error."""
    x = x.flatten()
    return torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)


cases = st.tuples(st.integers(0, 2**31), st.integers(1024, 9000), st.integers(-60, 60), st.integers(0, 8))


@quick
@given(cases, st.sampled_from([2, 64, 256]))
def test_int8_errs_by_at_most_half_a_step_of_its_block(case: tuple[int, int, int, int], block: int) -> None:
    x = tensor_of(*case)
    error = blocks_of(read(say(x, Int8(block=block))) - x, block).abs()
    # float32 rounds scales and products, each by up to 2 ** -24 of the largest value, which is 254 half steps
    assert (error.amax(1) <= blocks_of(x, block).abs().amax(1) / 254 * (1 + 4 * 254 * 2**-24)).all()


@quick
@given(cases, st.sampled_from([2, 64, 256]))
def test_int4_takes_the_nearest_level(case: tuple[int, int, int, int], block: int) -> None:
    from arclight.federated.codecs.blockwise import _NORMAL_FLOAT

    x = tensor_of(*case)
    levels = torch.tensor(_NORMAL_FLOAT, dtype=torch.float64)
    meant, seen = blocks_of(x, block), blocks_of(read(say(x, Int4(block=block))), block)
    largest = meant.abs().amax(1, keepdim=True)
    nearest = ((levels * largest).unsqueeze(1) - meant.double().unsqueeze(2)).abs().amin(2)
    assert ((seen - meant).abs() <= nearest + largest * 2**-15).all()


@quick
@given(cases, st.sampled_from([64, 1024, 4096]), st.sampled_from([0.01, 0.03, 0.2, 1.0]), st.integers(1, 4))
def test_topk_keeps_the_largest_of_each_block_and_adds_no_energy(
    case: tuple[int, int, int, int], block: int, share: float, bits: int
) -> None:
    x = tensor_of(*case)
    codec = TopK(share=share, bits=bits, block=block)
    seen = read(say(x, codec)).flatten()
    for part, got in zip(x.flatten().split(block), seen.split(block), strict=True):
        count = math.ceil(codec.keep * len(part) / block)
        kept = part.abs().topk(count)
        chosen = got != 0
        assert chosen.sum() <= count
        assert set(chosen.nonzero().flatten().tolist()) <= set(kept.indices.tolist())
        assert (got[chosen].sign() == part[chosen].sign()).all()
        dropped = part.double().square().sum() - kept.values.double().square().sum()
        missed = (got - part).double().square().sum()
        assert dropped * (1 - 1e-6) <= missed <= part.double().square().sum() * (1 + 1e-6)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("shape", [(3, 700), (1025, 2), (70_001,), (2, 3, 1000)])
def test_the_residual_is_exactly_what_the_other_side_misses(codec, dtype, shape) -> None:
    if isinstance(codec, BF16) and dtype == torch.float16:
        pytest.skip("sent as it is")
    x, old = torch.randn(shape, dtype=dtype), torch.randn(shape)
    encoded, left = encode("k", x, codec, old)
    seen = read(encoded)
    assert seen.dtype == dtype
    assert seen.shape == x.shape
    assert left is not None
    assert torch.equal(left, (x.float() + old) - seen.float())


def test_decoding_is_the_same_with_any_threads() -> None:
    x, threads = torch.randn(900_001), torch.get_num_threads()
    try:
        for codec in LOSSY:
            torch.set_num_threads(1)
            alone = say(x, codec)
            seen = read(alone)
            torch.set_num_threads(3)
            together = say(x, codec)
            assert all(torch.equal(alone.parts[part], together.parts[part]) for part in alone.parts)
            assert torch.equal(seen, read(together))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("codec", LOSSY)
def test_decoded_tensors_are_encoded_without_error(codec) -> None:
    once = read(say(torch.randn(30, 999), codec))
    again = say(once, codec)
    if isinstance(codec, TopK):  # two means of values that are two means already
        torch.testing.assert_close(read(again), once, rtol=1e-6, atol=0)
    else:
        torch.testing.assert_close(read(again), once, rtol=2e-7, atol=0)


@pytest.mark.parametrize("codec", [*LOSSY, Int8(feedback=0.5)])
def test_error_feedback_makes_the_sent_mean_equal_the_true_mean(codec) -> None:
    """The sum of all that was said differs from the sum of all that was meant by one residual, which stays bounded."""
    generator = torch.Generator().manual_seed(3)
    meant, said = torch.zeros(4, 1024), torch.zeros(4, 1024)
    residual, sizes = None, []
    for _ in range(200):
        x = torch.randn(4, 1024, generator=generator) + 0.3
        encoded, residual = encode("k", x, codec, residual)
        meant += x
        said += read(encoded)
        sizes.append(float(residual.norm()))
    assert max(sizes[150:]) < 1.2 * max(sizes[:150])
    if codec.feedback == 1:
        torch.testing.assert_close(said + residual, meant, rtol=1e-4, atol=1e-3)
        bound = {BF16: 1e-4, Int8: 1e-3, Int4: 1e-2, TopK: 0.3}[type(codec)]
        assert float((said - meant).norm() / meant.norm()) < bound


def test_without_feedback_nothing_is_kept() -> None:
    assert encode("k", torch.randn(2, 1000), Int8(feedback=0), torch.ones(2, 1000))[1] is None


def test_a_saved_residual_goes_on_with_the_same_bytes(tmp_path) -> None:
    x = torch.randn(2, 5000)
    _first, left = encode("k", x, TopK())
    torch.save(left, tmp_path / "residual")
    here = say(x, TopK(), left)
    there = say(x, TopK(), torch.load(tmp_path / "residual", weights_only=True))
    assert all(torch.equal(here.parts[part], there.parts[part]) for part in here.parts)


def test_raw_sends_the_residual_of_an_earlier_codec() -> None:
    x = torch.randn(64, 64)
    first, left = encode("k", x, TopK())
    second, nothing = encode("k", torch.zeros_like(x), Raw(), left)
    assert second.codec == "raw"
    assert nothing is None
    torch.testing.assert_close(read(first) + read(second), x)


def test_small_and_whole_numbers_go_as_they_are() -> None:
    for tensor in (torch.randn(1023), torch.randn(2, 511), torch.arange(5000).view(5, -1), torch.tensor(3.0)):
        encoded = say(tensor, Int8())
        assert is_sent_raw(tensor, Int8())
        assert encoded.codec == "raw"
        assert torch.equal(read(encoded), tensor)
    assert is_sent_raw(torch.randn(1 << 16), Int8())
    assert not is_sent_raw(torch.randn((1 << 16) + 1), Int8())
    assert say(torch.randn(64, 64).bfloat16(), Raw()).dtype == "BF16"
    assert not is_sent_raw(torch.randn(32, 32), Int8())


@pytest.mark.parametrize("codec", [Raw(), *LOSSY])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4999])
def test_nan_and_infinite_values_are_refused_by_name(codec, bad: float, place: int) -> None:
    x = torch.randn(1, 5000)
    x[0, place] = bad
    with pytest.raises(FederatedError, match=r"model/head\.weight"):
        encode("model/head.weight", x, codec)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("size", [2.0**-140, 2.0**-126, 2.0**125.9, 0.0])
def test_extreme_values_stay_numbers(codec, size: float) -> None:
    x = torch.rand(2, 3000).sub_(0.5) * size
    seen = read(say(x, codec))
    assert seen.isfinite().all()
    assert float((seen.double() - x.double()).abs().max()) <= max(size, 2.0**-100)


def test_a_hostile_half_precision_sum_stops_at_its_largest_number() -> None:
    x = torch.full((32, 64), 65000.0, dtype=torch.float16)
    assert read(say(x, Int8(), torch.full((32, 64), 60000.0))).isfinite().all()


def wrong_parts(encoded: Encoded):
    for part, tensor in encoded.parts.items():
        rest = {k: v for k, v in encoded.parts.items() if k != part}
        yield rest
        yield {**rest, part: tensor.flatten()[:-1]}
        yield {**rest, part: torch.cat([tensor.flatten(), tensor.flatten()[:1]])}
        yield {**rest, part: tensor.to(torch.int64)}
        if tensor.dtype == torch.float32 and encoded.codec != "raw":  # whose values the server checks
            for bad in (math.nan, math.inf, -1.0, 3e38):
                yield {**rest, part: tensor.index_fill(0, torch.tensor([0]), bad)}
    yield {**encoded.parts, "more": torch.zeros(1)}


@pytest.mark.parametrize("codec", [Raw(), *LOSSY])
def test_parts_that_cannot_be_are_refused(codec) -> None:
    encoded = say(torch.randn(3, 5000), codec)
    for parts in wrong_parts(encoded):
        with pytest.raises(BlobError, match=r"layer\.weight"):
            decode("layer.weight", dataclasses.replace(encoded, parts=parts))


@quick
@given(st.integers(0, 2**31))
def test_random_bytes_for_places_are_refused(seed: int) -> None:
    encoded = say(torch.randn(3, 2000), TopK(block=4096))
    noise = torch.randint(0, 256, encoded.parts["index"].shape, generator=torch.Generator().manual_seed(seed))
    with pytest.raises(BlobError, match="rise"):
        decode("k", dataclasses.replace(encoded, parts={**encoded.parts, "index": noise.to(torch.uint8)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codec": "int5"}, "there is no codec 'int5' here"),
        ({"dtype": "I64"}, "values of torch.int64 cannot be quantized"),
        ({"dtype": "F31"}, "there is no type 'F31' here"),
        ({"shape": (-3, 5)}, r"the shape \(-3, 5\) has a negative size"),
        ({"shape": (10**9, 10**9)}, r"expected \d{15,} "),
        ({"settings": {"block": 0}}, "block must be from 2 to 1048576, got 0"),
        ({"settings": {"block": "256"}}, "block must be from 2 to 1048576, got '256'"),
        ({"settings": {"block": 3}}, "block must be (even|a power of two up to 65536), got 3"),
        ({"settings": {"block": True}}, "block must be from 2 to 1048576, got True"),
        ({"settings": {}}, "block must be from 2 to 1048576, got None"),
    ],
)
@pytest.mark.parametrize("codec", [Int8(), Int4(), TopK()])
def test_entries_that_cannot_be_are_refused(change, message: str, codec) -> None:
    encoded = say(torch.randn(3, 5000), codec)
    with pytest.raises(BlobError, match=rf"^layer\.weight.*: {message}"):
        decode("layer.weight", dataclasses.replace(encoded, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": 0}, "keep must be from 1 to 4096, got 0"),
        ({"keep": 5000}, "keep must be from 1 to 4096, got 5000"),
        ({"bits": 0}, "bits must be from 1 to 4, got 0"),
        ({"bits": 9}, "bits must be from 1 to 4, got 9"),
    ],
)
def test_settings_of_top_k_that_cannot_be_are_refused(change, message: str) -> None:
    encoded = say(torch.randn(3, 5000), TopK())
    settings = {"block": 4096, "keep": 123, "bits": 2, **change}
    with pytest.raises(BlobError, match=message):
        decode("layer.weight", dataclasses.replace(encoded, settings=settings))


def test_a_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="residual"):
        encode("k", torch.randn(4, 1000), Int8(), torch.randn(1000, 4))


@pytest.mark.parametrize("codec", [Raw(), BF16(feedback=0.5), Int8(block=64), Int4(), TopK(share=0.1, bits=3)])
def test_tables_bring_codecs_back(codec) -> None:
    assert from_table(to_table(codec)) == codec


@pytest.mark.parametrize("table", [{}, {"kind": "zip"}, {"kind": "int8", "block": 3}, {"kind": "topk", "size": 1}])
def test_tables_of_no_codec_are_refused(table) -> None:
    message = "cannot be as it was asked for" if "block" in table or "size" in table else "there is no codec "
    with pytest.raises(ProtocolError, match=message):
        from_table(table)


def test_messages_of_many_tensors_and_their_residuals() -> None:
    """Tensors that are not sent keep their residual, and refused updates can be sent again."""
    tensors = {"model/a": torch.randn(40, 40), "model/b": torch.randn(40, 40), "model/norm": torch.randn(40)}
    first: dict[str, torch.Tensor] = {}
    assert [key for key, _ in encode_all(tensors.items(), TopK(), {}, first)] == list(tensors)
    assert set(first) == {"model/a", "model/b"}
    kept = {key: value.clone() for key, value in first.items()}
    second: dict[str, torch.Tensor] = {}
    sent = dict(encode_all([("model/a", tensors["model/a"])], TopK(), first, second))
    again: dict[str, torch.Tensor] = {}
    repeated = dict(encode_all([("model/a", tensors["model/a"])], TopK(), first, again))
    assert torch.equal(sent["model/a"].parts["index"], repeated["model/a"].parts["index"])
    assert all(torch.equal(first[key], kept[key]) for key in kept)
    assert torch.equal(second["model/b"], kept["model/b"])
    assert not torch.equal(second["model/a"], kept["model/a"])


@pytest.mark.parametrize(("codec", "most"), [(Int8(), 0.27), (Int4(), 0.14), (BF16(), 0.51), (TopK(), 0.02)])
def test_bytes_on_the_wire_with_headers_and_manifest(codec, most: float) -> None:
    """A small language model's tensors, as they lie in a store."""
    shapes = {"embed": (2000, 256), "head": (2000, 256)}
    for layer in range(1):
        block = {
            "norm.weight": (256,),
            "qkv.weight": (768, 256),
            "qkv.bias": (768,),
            "up": (1024, 256),
            "down": (256, 1024),
        }
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    tensors = {f"model/{name}": torch.randn(shape) for name, shape in shapes.items()}
    store = TemporaryStore()
    manifest = write_blobs(encode_all(tensors.items(), codec, {}, {}), store, kind="update")
    bytes_ = manifest.size + len(manifest.to_json())
    assert bytes_ <= most * sum(tensor.numel() * 4 for tensor in tensors.values())
    for key, encoded in open_manifest(manifest, store).items():
        assert torch.equal(decode(key, encoded), read(say(tensors[key], codec)))


@pytest.mark.parametrize("codec", [Raw(), *LOSSY])
def test_local_moments_keep_the_size_of_each_value(codec) -> None:
    moment = torch.logspace(-20, 0, 4096).view(64, 64)
    left = {"exp_avg_sq/w": torch.ones(64, 64)}
    ((_, encoded),) = encode_all([("exp_avg_sq/w", moment)], codec, dict(left), left)
    assert left == {}
    torch.testing.assert_close(read(encoded), moment, rtol=2**-8, atol=0)
