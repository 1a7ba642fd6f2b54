"""``arclight export`` and ``arclight quantize``: write a trained model as a program file."""

from __future__ import annotations

from pathlib import Path

from arclight.cli.arguments import Parser, UsageError, check_program_name
from arclight.cli.commands import language
from arclight.cli.runs import load_vision_module
from arclight.cli.style import working
from arclight.deploy.settings import Int8


def export(arguments: list[str]) -> None:
    if language.trained_language(arguments):
        return language.export(arguments)
    _write(
        "export",
        "Write a trained vision model as a float32 program. For the run of a language model: arclight export RUN --help.",
        arguments,
        int8=False,
    )
    return None


def quantize(arguments: list[str]) -> None:
    if language.trained_language(arguments):
        return language.quantize(arguments)
    _write(
        "quantize",
        "Quantize a trained vision model to int8, calibrated on its training images, and write it as a program. Of a language model's run: "
        "arclight quantize RUN --help.",
        arguments,
        int8=True,
    )
    return None


def _write(verb: str, about: str, arguments: list[str], *, int8: bool) -> None:
    parser = Parser(prog=f"arclight {verb}", description=about)
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run folder (its best checkpoint)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the program to write (.onnx)")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="images to verify (and calibrate) with (default: the data it was trained on)",
    )
    if int8:
        defaults = Int8()
        parser.add_argument(
            "--observer",
            choices=("histogram", "minmax"),
            default=defaults.observer,
            help="calibration method for ranges (default: %(default)s)",
        )
        parser.add_argument(
            "--calibration-batches",
            type=int,
            default=defaults.calibration_batches,
            metavar="N",
            help="batches of 8 images (default: %(default)s)",
        )
        parser.add_argument(
            "--skip", action="append", default=[], metavar="MODULE", help="keep this module in float32; may be repeated"
        )
    options = parser.parse_args(arguments)
    check_program_name(options.out)

    from arclight.deploy.parity import parity_summary
    from arclight.vision.tasks.deployment import export_module

    module = load_vision_module(options.checkpoint)
    settings = module.settings.with_data(str(options.data or module.settings.data))
    if not settings.data.exists():
        raise UsageError(
            f"{settings.data}, the data this model was trained on, is not here: name images to verify the program with --data"
        )
    dataset = settings.data_class()(settings).calibration_dataset()
    recipe = (
        Int8(observer=options.observer, calibration_batches=options.calibration_batches, skip=tuple(options.skip))
        if int8
        else None
    )
    with working(f"{'quantizing' if int8 else 'exporting'} {settings.model} and comparing the program with it"):
        program = export_module(module, options.out, dataset, recipe)
    size = f"{program.nbytes / 1e6:.1f} MB"
    print(f"wrote {options.out}: {program.precision}, {size}, {parity_summary(program.metadata)}")
