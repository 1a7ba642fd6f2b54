"""``arclight export`` and ``arclight quantize``: write a trained model as a program file."""

from __future__ import annotations

from pathlib import Path

from arclight.cli.arguments import Parser, UsageError, check_program_name
from arclight.cli.commands import language
from arclight.cli.quantization import parse_quantization
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
        quantized=False,
    )
    return None


def quantize(arguments: list[str]) -> None:
    if language.trained_language(arguments):
        return language.quantize(arguments)
    _write(
        "quantize",
        "Quantize a trained vision model, by default to int8, calibrated on its training images, and write it as a program. Of a language model's run: "
        "arclight quantize RUN --help.",
        arguments,
        quantized=True,
    )
    return None


def _write(verb: str, about: str, arguments: list[str], *, quantized: bool) -> None:
    parser = Parser(prog=f"arclight {verb}", description=about)
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run folder (its best checkpoint)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="the program to write: a file (.onnx), or a folder with --format",
    )
    parser.add_argument(
        "--format",
        choices=("onnx", "openvino"),
        help="write a folder that ONNX Runtime or OpenVINO runs; integers of a quantized one are placed for that runtime",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="images to verify (and calibrate) with (default: the data it was trained on)",
    )
    if quantized:
        parser.add_argument(
            "--observer",
            choices=("histogram", "minmax"),
            help=f"calibration method for ranges of int8 (default: {Int8().observer})",
        )
        parser.add_argument(
            "--calibration-batches",
            type=int,
            metavar="N",
            help=f"batches of 8 images (default: {Int8().calibration_batches})",
        )
    options, recipe = parse_quantization(parser, arguments) if quantized else (parser.parse_args(arguments), None)
    check_program_name(options.out, is_folder=options.format is not None)

    from arclight.deploy.parity import parity_summary, speed_summary
    from arclight.vision.tasks.deployment import export_module

    module = load_vision_module(options.checkpoint)
    settings = module.settings.with_data(str(options.data or module.settings.data))
    if not settings.data.exists():
        raise UsageError(
            f"{settings.data}, the data this model was trained on, is not here: name images to verify the program with --data"
        )
    dataset = settings.data_class()(settings).calibration_dataset()
    with working(f"{'quantizing' if quantized else 'exporting'} {settings.model} and comparing the program with it"):
        program = export_module(module, options.out, dataset, recipe, format=options.format)
    size, proof = f"{program.nbytes / 1e6:.1f} MB", parity_summary(program.metadata) + speed_summary(program.metadata)
    print(f"wrote {options.out}: {program.precision}, {size}, {proof}")
