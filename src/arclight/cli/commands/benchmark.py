"""``arclight benchmark``: time exported programs side by side on the same input."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, UsageError, add_trust, trusted, write_json

if TYPE_CHECKING:
    import torch

    from arclight.deploy import Program


def benchmark(arguments: list[str]) -> None:
    parser = Parser(
        prog="arclight benchmark",
        description="Time programs on one random input, interleaved; ratios are relative to the first.",
    )
    parser.add_argument("program", nargs="+", type=Path, metavar="PATH", help="exported programs (folders or .onnx)")
    add_trust(parser)
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="samples per call (default: %(default)s)")
    parser.add_argument("--size", type=int, default=None, metavar="N", help="value of every dynamic dimension")
    parser.add_argument(
        "--rounds", type=int, default=30, metavar="N", help="calls of each program (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="CPU threads (default: all)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args(arguments)

    import rich

    from arclight import deploy

    programs = {str(path): deploy.Program.load(path, trusted=trusted(options)) for path in options.program}
    first = next(iter(programs.values()))
    table = deploy.benchmark(
        programs, random_inputs(first, options.batch, options.size), rounds=options.rounds, threads=options.threads
    )
    rich.print(table)
    write_json(options.json, table.json())


def random_inputs(program: Program, batch: int, size: int | None) -> list[torch.Tensor]:
    """Numbers in [0, 1) in the shapes that ``program`` takes; the first dimension is the batch."""
    import torch

    inputs = []
    for spec in program.inputs:
        open_size = size if size is not None else program.metadata.get("image_size")
        shape: list[Any] = [batch, *(open_size if isinstance(length, str) else length for length in spec.shape[1:])]
        if None in shape or not spec.dtype.startswith("float"):
            raise UsageError(f"{program.path}: input {spec} has dynamic dimensions: set them with --size")
        inputs.append(torch.rand(shape, dtype=getattr(torch, spec.dtype)))
    return inputs
