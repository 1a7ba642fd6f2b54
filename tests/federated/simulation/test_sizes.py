"""Messages weigh what writing them gives."""

from __future__ import annotations

import pytest
import torch
from tests.federated.fakes import TemporaryStore

from arclight.federated.blobs.manifest_io import write_blobs
from arclight.federated.codecs.encoding import encode
from arclight.federated.codecs.settings import BF16, Codec, Int4, Int8, Raw, TopK
from arclight.federated.coordination.settings import Streaming
from arclight.federated.settings import Federation
from arclight.federated.simulation.sizes import Sizes, message_bytes, model_bytes

SHAPES = {
    "embed.weight": (1000, 67), "blocks.0.norm.weight": (1023,), "blocks.0.wide": (70_001,), "blocks.0.w": (96, 129),
    "blocks.1.w": (8, 3, 77, 5), "blocks.1.small": (31, 33), "blocks.2.w": (4097,), "head.bias": (), "blocks.2.v": (64, 64),
}  # fmt: skip


@pytest.mark.parametrize(
    "codec",
    [Raw(), BF16(), Int8(), Int8(block=64), Int4(), Int4(block=30), TopK(), TopK(share=0.2, bits=4, block=128), TopK(bits=1, block=512)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_message_weighs_what_writing_it_gives(codec: Codec, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {f"model/{name}": torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    encoded = ((key, encode(key, tensor, codec)[0]) for key, tensor in tensors.items())
    manifest = write_blobs(encoded, TemporaryStore(), kind="update", base="0" * 64)
    name = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    assert message_bytes(SHAPES, codec, dtype=name) == manifest.size + len(manifest.to_json())
    assert model_bytes(SHAPES, dtype=name) == sum(t.numel() * t.itemsize for t in tensors.values())


def test_large_models_are_counted_by_blob() -> None:
    shapes = {f"w{n}": (1 << 24,) for n in range(9)}
    assert message_bytes(shapes, Raw()) - model_bytes(shapes) < 4000
    with pytest.raises(ValueError, match="F8"):
        message_bytes(shapes, Raw(), dtype="F8")


def test_nodes_fetch_a_chain_of_changes_where_that_is_less() -> None:
    raw = Sizes(Federation(), 1_000_000)
    assert (raw.down(-1, 0), raw.down(3, 3), raw.down(2, 3)) == (raw.whole, 0, raw.whole)
    short = Sizes(Federation(down=Int8(), down_changes=3), 1_000_000)
    one = short.down(4, 5)
    assert one < 0.27 * short.whole
    assert short.down(3, 5) == 2 * one
    assert short.down(1, 5) == short.whole  # too far behind
    streamed = Sizes(Federation(local_steps=8, streaming=Streaming(fragments=4)), 1_000_000)
    assert sum(streamed.down(round, round + 1) for round in range(4)) == pytest.approx(streamed.whole, rel=0.02)
    assert streamed.part(None) == streamed.model == sum(streamed.part(n) for n in range(4))
    assert streamed.up(None) == sum(streamed.up(n) for n in range(4))
