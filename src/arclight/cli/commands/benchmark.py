"""Time programs and models side by side on the same inputs: ``arclight benchmark``.

`command` calls `benchmark`. Programs, and models as `export` opens them, come in; a table goes out, and JSON if asked for.
``deploy.programs.benchmark`` measures. Options and the keys of the JSON are public and stay.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import (
    RUNTIMES,
    Parser,
    UsageError,
    add_trust,
    check_writable,
    count,
    report_runtime,
    runtimes,
    trusted,
    write_json,
)
from arclight.cli.runs import is_program
from arclight.cli.user_module import add_weights

if TYPE_CHECKING:
    import torch

    from arclight.deploy import Program, TensorSpec

WIDTH = 120
"""Least width of the table in characters: a narrower one would cut numbers off."""
PAST = 64
"""Tokens that a language program has read before the one it is timed on, unless --dim past=N says otherwise."""


def benchmark(arguments: list[str]) -> None:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if len(set(options.source)) < len(options.source):
        raise UsageError("a program is named twice: name each once, or a copy of it")
    if options.json is not None:
        check_writable(options.json, "--json")
    programs, inputs = _candidates(parser, options, rest)

    from arclight import deploy
    from arclight.cli.style import console_of

    table = deploy.benchmark(
        programs, inputs, rounds=options.rounds, threads=options.threads, batch_sizes=options.batch, fresh=True
    )
    console = console_of()
    console.width = max(WIDTH, console.width)
    console.print(table)
    write_json(options.json, table.json())


def _parser() -> Parser:
    parser = Parser(
        prog="arclight benchmark",
        usage="arclight benchmark PROGRAM|RUN|CHECKPOINT|package.module:Model ... [options]",
        description="Time programs and models on the same inputs, in turns: latency (p50, p99), throughput, size, seconds to load and most "
        "memory of a process of its own. Ratios are relative to the first.",
    )
    parser.add_argument(
        "source", nargs="+", metavar="PATH",
        help="programs (folders or .onnx), and runs, checkpoints or package.module:Model; inputs are those of the first model, else random ones",
    )  # fmt: skip
    add_trust(parser)
    parser.add_argument(
        "--runtime", type=runtimes, metavar="NAME,NAME",
        help=f"run each program in each of these ({', '.join(RUNTIMES)}), compared with what it was exported for (default: that one)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=counts, default=[1], metavar="N,N", help="samples per call, one number or several (default: 1)"
    )
    parser.add_argument(
        "--threads", type=counts, default=[os.cpu_count() or 1], metavar="N,N", help="CPU threads, one number or several (default: all)"
    )  # fmt: skip
    parser.add_argument(
        "--size", type=count, metavar="N", help="value of every dynamic dimension that --dim does not name"
    )
    parser.add_argument(
        "--dim", action="append", default=[], type=dimension, metavar="NAME=N",
        help=f"value of a dynamic dimension; may be repeated (default of a language program: time=1 past={PAST})",
    )  # fmt: skip
    parser.add_argument(
        "--values", type=count, metavar="N", help="draw integer inputs from 0 to N - 1 (default: the vocabulary, where the program says one; else 0)"
    )  # fmt: skip
    parser.add_argument("--rounds", type=count, default=30, metavar="N", help="calls of each (default: %(default)s)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where programs run: auto takes CUDA where ONNX Runtime has it, but for quantized programs (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--data", metavar="PATH|TARGET", help="data of a model, as in arclight export")
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE", help="settings of a module of your own"
    )
    add_weights(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser


def counts(text: str) -> list[int]:
    """Read whole numbers of 1 or more, commas between them, as the ``type`` of an argument."""
    values = [count(part) for part in text.split(",")]
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text} names a number twice")
    return values


def dimension(text: str) -> tuple[str, int]:
    """Read ``NAME=N`` as the ``type`` of an argument."""
    name, equals, value = text.partition("=")
    if not name or not equals or not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not NAME=N, such as time=128")
    return name, int(value)


def _candidates(
    parser: Parser, options: argparse.Namespace, rest: Sequence[str]
) -> tuple[dict[str, Any], Sequence[torch.Tensor]]:  # fmt: skip
    """Open all candidates, and choose the example inputs."""
    from arclight.deploy import Program
    from arclight.deploy.capture import as_inputs

    found: dict[str, Any] = {}
    example: Sequence[torch.Tensor] | None = None
    for source in options.source:
        if is_program(Path(source)):
            for name, runtime in _runtimes(source, options.runtime):
                program = Program.load(source, device=options.device, trusted=trusted(options), runtime=runtime)
                found[name] = report_runtime(program, runtime)
            continue
        deployment = _deployment(parser, options, source, rest)
        found[source] = deployment.model
        example = as_inputs(deployment.example_inputs) if example is None else example
    programs = [program for program in found.values() if isinstance(program, Program)]
    if options.runtime is not None and not programs:
        raise UsageError("--runtime is about programs, and models are computed by PyTorch: name a program, too")
    if rest and len(programs) == len(found):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    _check_alike(programs)
    if example is None:
        sizes, first = dict(options.dim), programs[0]
        return found, random_inputs(first, options.batch[0], options.size, sizes, options.values)
    if options.dim or options.size is not None or options.values is not None:
        raise UsageError("--dim, --size and --values are of random inputs, and a model that is named brings its own")
    return found, example


def _runtimes(source: str, named: Sequence[Any] | None) -> list[tuple[str, Any]]:
    """Return the runtimes of a program, each with the name of its row.

    Raises UsageError for one that is named twice.
    """
    if named is None:
        return [(source, None)]
    if len(set(named)) < len(named):
        raise UsageError(f"--runtime {','.join(named)} names one twice: name each once")
    return [(f"{source} {runtime}", runtime) for runtime in named]


def _deployment(parser: Parser, options: argparse.Namespace, source: str, rest: Sequence[str]) -> Any:
    from arclight.cli.commands.export import opened
    from arclight.deploy.deployment import configured

    chosen = argparse.Namespace(
        source=source, data=options.data, config=options.config, ckpt_path=options.ckpt_path
    )  # fmt: skip
    module, data = opened(parser, chosen, rest)
    return configured(module, data)


def _check_alike(programs: Sequence[Program]) -> None:
    """Raise UsageError if two programs do not take the same inputs."""
    for other in programs[1:]:
        first, second = programs[0].inputs, other.inputs
        if len(first) != len(second) or not all(a.fits(b, named=False) for a, b in zip(first, second)):
            texts = [", ".join(map(str, specs)) for specs in (first, second)]
            raise UsageError(
                f"{programs[0].path} takes {texts[0]}, and {other.path} takes {texts[1]}: time programs of the same inputs"
            )


def random_inputs(
    program: Program, batch: int, size: int | None, sizes: Mapping[str, int] | None = None, values: int | None = None
) -> list[torch.Tensor]:
    """Return random inputs of ``program``: numbers in [0, 1), integers below ``values``.

    batch: the first dimension. sizes: of other dynamic dimensions by name; size: of those that are not in ``sizes``, by default the image size
    of a vision program. values: by default the size of a language program's vocabulary, else 1. A language program gets one token behind
    `PAST` others, without padding, unless ``sizes`` says otherwise. Raises UsageError for dimensions and types that are not known.
    """
    import torch

    language = program.metadata.get("task") == "language"
    known = {"time": 1, "past": PAST} if language else {}
    shapes = {spec.name: _named_shape(spec, language) for spec in program.inputs}
    free = {name for shape in shapes.values() for name in shape[1:] if isinstance(name, str)}
    if unknown := sorted(set(sizes or {}) - free):
        raise UsageError(
            f"{program.path} has no dynamic dimension {', '.join(unknown)}; it has {', '.join(sorted(free)) or 'none'}"
        )
    wanted_sizes = {**known, **(sizes or {})}
    if language and wanted_sizes["time"] + wanted_sizes["past"] > program.metadata["max_positions"]:
        raise UsageError(
            f"{program.path} takes {program.metadata['max_positions']} tokens, and time + past is {wanted_sizes['time'] + wanted_sizes['past']}: "
            "name fewer with --dim"
        )
    others = size if size is not None else program.metadata.get("image_size")
    if others is not None:
        wanted_sizes = dict.fromkeys(free, int(others)) | wanted_sizes
    drawn = torch.Generator().manual_seed(0)
    highest = values or program.metadata.get("vocab_size", 1)
    inputs = []
    for spec in program.inputs:
        lengths = shapes[spec.name][1:]
        names = [length for length in lengths if isinstance(length, str) and length not in wanted_sizes]
        if names:
            raise UsageError(
                f"{program.path}: input {spec} has dynamic dimensions: set {', '.join(names)} with --size or --dim"
            )
        shape = [batch, *(wanted_sizes[length] if isinstance(length, str) else length for length in lengths)]
        padding = language and spec.name == "padding"
        inputs.append(_drawn(program, spec, shape[: len(spec.shape)], 1 if padding else highest, drawn))
    return inputs


def _named_shape(spec: TensorSpec, language: bool) -> Sequence[int | str]:
    """Return the sizes of an input, named for a language program."""
    places = {1: "time"} if spec.name == "tokens" else {2: "past"}
    if not language or spec.name == "padding":
        return spec.shape
    return [places.get(place, size) if isinstance(size, str) else size for place, size in enumerate(spec.shape)]


def _drawn(program: Program, spec: TensorSpec, shape: list[int], values: int, drawn: torch.Generator) -> torch.Tensor:
    import torch

    dtype: Any = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{program.path}: input {spec} has a type that random inputs cannot be drawn for")
    if dtype.is_floating_point:
        return torch.rand(shape, generator=drawn).to(dtype)
    limit = 2 if dtype == torch.bool else min(values, torch.iinfo(dtype).max)
    return torch.randint(0, limit, shape, generator=drawn).to(dtype)
