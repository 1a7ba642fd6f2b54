"""What codecs cost and lose: bytes with manifest and headers, processor time per 100 MB, and errors of one and of many messages.

The tensors are those of a small Llama (its shapes), filled with values as changes of weights have them: heavier tails than a
normal distribution's, each row of another size. Times are those of one processor core, so other work on the machine matters little.
"""

from __future__ import annotations

import tempfile
import time

import torch

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import write_blobs
from arclight.federated.codecs.encoding import decode, encode, encode_all
from arclight.federated.codecs.settings import BF16, Codec, Int4, Int8, Raw, TopK
from benchmarks.results import parser, publish, versions

CODECS: dict[str, Codec] = {"raw": Raw(), "bf16": BF16(), "int8": Int8(), "int4": Int4(), "topk": TopK()}
ROUNDS = 20


def changes(megabytes: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width, layers = 512, max(1, megabytes * 250_000 // (12 * 512 * 512))
    shapes = {"embed": (4096, width)}
    for layer in range(layers):
        shapes |= {f"{layer}.norm": (width,), f"{layer}.qkv": (3 * width, width), f"{layer}.out": (width, width)}
        shapes |= {f"{layer}.up": (4 * width, width), f"{layer}.down": (width, 4 * width)}
    found = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        sizes = torch.rand((*shape[:-1], 1), generator=generator).mul_(4).exp2_()
        found[f"model/{name}"] = values.mul_(values.abs().sqrt()).mul_(sizes).mul_(1e-4)
    return found


def measured(codec: Codec, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    whole = sum(tensor.numel() * 4 for tensor in tensors.values())
    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore(folder, durable="none")
        manifest = write_blobs(encode_all(tensors.items(), codec, {}, {}), store, kind="update")
    residuals = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    told, there, lost = 0.0, 0.0, 0.0
    for key, tensor in tensors.items():
        runs = []
        for _ in range(3):
            began = time.process_time()
            encoded, _ = encode(key, tensor, codec, residuals[key])
            middle = time.process_time()
            decoded = decode(key, encoded)
            runs.append((middle - began, time.process_time() - middle))
        told, there = told + min(a for a, _ in runs), there + min(b for _, b in runs)
        lost += float((decoded - tensor).square().sum(dtype=torch.float64))
    size = sum(float(tensor.square().sum(dtype=torch.float64)) for tensor in tensors.values())
    return {
        "bytes": (manifest.size + len(manifest.to_json())) / whole,
        "encode_ms_per_100MB": told / whole * 1e11,
        "decode_ms_per_100MB": there / whole * 1e11,
        "error": lost / size,
        f"error_of_{ROUNDS}": accumulated(codec, tensors),
    }


def accumulated(codec: Codec, tensors: dict[str, torch.Tensor]) -> float:
    """Squared error of the sum of messages that say the same each time, relative to the squared sum: feedback at work."""
    key = max(tensors, key=lambda name: tensors[name].numel())
    tensor, residual, sum_ = tensors[key], None, torch.zeros_like(tensors[key])
    for _ in range(ROUNDS):
        encoded, residual = encode(key, tensor, codec, residual)
        sum_ += decode(key, encoded)
    return float((sum_ / ROUNDS - tensor).square().sum() / tensor.square().sum())


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    tensors = changes(20 if options.quick else 100, seed=1)
    figures: dict[str, float] = {}
    rows = []
    for name, codec in CODECS.items():
        found = measured(codec, tensors)
        figures |= {f"{name}_{what}": value for what, value in found.items()}
        rows.append(
            [
                name,
                f"{found['bytes']:.4f}",
                f"{found['encode_ms_per_100MB']:.0f}",
                f"{found['decode_ms_per_100MB']:.0f}",
                f"{found['error']:.2g}",
                f"{found[f'error_of_{ROUNDS}']:.2g}",
            ]
        )
    publish(
        "federated_codecs",
        "Codecs of federated changes",
        [
            "codec",
            "bytes / float32",
            "encode ms / 100 MB",
            "decode ms / 100 MB",
            "error",
            f"error of the mean of {ROUNDS}",
        ],
        rows,
        figures,
        options=options,
        packages=versions("torch"),
        notes="Errors are squared norms relative to that of the change. Bytes and errors follow from the seed and have no spread; times are the least "
        "of three. 100 MB take 800 ms at 1 Gb/s.",
    )


if __name__ == "__main__":
    main()
