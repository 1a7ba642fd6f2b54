"""Write a trained model as a program: ``arclight export`` and ``arclight quantize``.

What is named first (`opened`: a run, a checkpoint, a class) becomes a module and its data, and ``deploy.deployment`` ships its deployment; a
language model may be written as a Hugging Face folder instead. `command` calls `export` and `quantize`; `benchmark` and
``comparing.candidates`` open runs and classes by the same functions. Options, and the run's config.toml that is read here, stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight._intervals import kind_of
from arclight.cli import user_module
from arclight.cli.arguments import Parser, UsageError, check_program_name, check_short_flags, check_writable
from arclight.cli.quantization import parse_quantization
from arclight.cli.runs import (
    checkpoint_note,
    load_language_model,
    load_vision_module,
    run_folder,
    trained_language,
)
from arclight.cli.schema import UserRun
from arclight.cli.style import working
from arclight.deploy.settings import Int8, Quantization, calibration_batches

if TYPE_CHECKING:
    from arclight.deploy import Program
    from arclight.trainer import DataModule, Module

USER_CONFIG = "config.toml"
"""File that describes a run of a user's own class."""
WEIGHT_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def export(arguments: list[str]) -> None:
    parser = _parser(
        "export", "Write a trained model as a float32 program, or a language model as a Hugging Face folder."
    )
    options, rest = parser.parse_known_args(arguments)
    is_language = trained_language([options.source])
    if options.format == "hf" or (
        not options.embedding and is_language and options.format is None and options.out.suffix != ".onnx"
    ):
        return _write_hf(parser, options, rest)
    return _ship(parser, options, rest, None)


def quantize(arguments: list[str]) -> None:
    parser = _parser(
        "quantize",
        "Quantize a trained model, by default to int8, calibrated on its training data, and write it as a program.",
    )
    parser.add_argument(
        "--observer",
        choices=("histogram", "minmax"),
        help=f"calibration method for ranges of int8 (default: {Int8().observer})",
    )
    parser.add_argument(
        "--calibration-batches",
        type=int,
        metavar="N",
        help=f"batches to calibrate on (default: {Int8().calibration_batches})",
    )
    parser.add_argument(
        "--max-drop",
        type=float,
        metavar="X",
        help="keep the fewest layers in float with which the metric on the validation data falls by at most this",
    )
    options, rest, recipe, flags = parse_quantization(parser, arguments)
    _ship(parser, options, rest, recipe, flags)


def _parser(verb: str, about: str) -> Parser:
    parser = Parser(
        prog=f"arclight {verb}",
        usage=f"arclight {verb} RUN|CHECKPOINT|package.module:Model --out PATH [options] [--model.argument value ...]",
        description=about,
    )
    parser.add_argument(
        "source", metavar="SOURCE",
        help="a run folder (its best checkpoint), a checkpoint, or package.module:Model, a module of your own",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="the program to write: a file (.onnx), or a folder",
    )
    hf = ", or hf for a Hugging Face folder (the default of a language model where --out does not end in .onnx)"
    parser.add_argument(
        "--format",
        type=formats,
        metavar="FORMAT,FORMAT|fastest",
        help="write a folder: onnx, openvino (the default), pt2 or aoti (these two only with --sign), executorch, or several of them, each as a folder in it; "
        "fastest keeps what takes the least time here; a quantized model is placed for what runs it"
        + hf
        * (verb == "export"),
    )
    parser.add_argument(
        "--candidates",
        type=formats,
        metavar="FORMAT,FORMAT",
        help="formats that --format fastest times (default: openvino,onnx)",
    )
    parser.add_argument(
        "--data", metavar="PATH|TARGET",
        help="images or texts to verify (and calibrate) with, or package.module:Class for a module of your own (default: what it was trained on)",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE", help="settings of a module of your own, as in arclight train"
    )  # fmt: skip
    user_module.add_weights(parser)
    parser.add_argument(
        "--embedding",
        action="store_true",
        help="of a language model, write a program that gives the vectors of texts (means of their last hidden states) in place of text",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="fix the batch size of the program (aoti takes int8 only so)"
    )
    parser.add_argument(
        "--sign", type=Path, metavar="KEY", help="sign the folder with this Ed25519 key; it is made where there is none"
    )
    return parser


def formats(text: str) -> str | list[str]:
    """Read a format, or several with commas between them, as the ``type`` of an argument."""
    names = text.split(",")
    if len(names) > 1 and (wrong := {"hf", "fastest"}.intersection(names)):
        raise argparse.ArgumentTypeError(
            f"{text} lists {', '.join(sorted(wrong))}, which cannot be combined with other formats"
        )
    return names if len(names) > 1 else text


def _ship(
    parser: Parser, options: Namespace, rest: Sequence[str], recipe: Quantization | None, flags: Sequence[str] = ()
) -> None:  # fmt: skip
    """Write the program that ``options`` ask for.

    Raises UsageError or ExportError, before the model is opened, for a place or format that cannot be written.

    flags: those of the recipe. A model that was trained with rounding has its own recipe, and takes none of them.
    """
    check_program_name(options.out, is_folder=options.format is not None)
    from arclight.deploy.deployment import configured, planned, ship, trained_recipe
    from arclight.deploy.parity import parity_summary, speed_summary
    from arclight.text.language_model import LanguageModel

    named: Any = options.candidates
    candidates: Any = [named] if isinstance(named, str) else named
    form: Any = options.format
    planned(options.out, recipe, form, candidates, signed=options.sign is not None)
    module, data = opened(parser, options, rest)
    if options.embedding and not isinstance(module, LanguageModel):
        raise UsageError(
            f"--embedding is for language models, and {options.source} is a {type(module).__name__}: leave it out"
        )
    if (trained := trained_recipe(module)) is not None:
        if flags:
            raise UsageError(
                f"{options.source} was trained with rounding for {kind_of(type(trained[0]))}, and {flags[0]} would round it otherwise: leave that out"
            )
        recipe = None
    verb = "converting" if trained else "exporting" if recipe is None else "quantizing"
    with working(f"{verb} {_name(module)} and comparing the program with it"):
        batches = calibration_batches(recipe)
        deployment = (
            module.configure_embedding(data, batches)
            if options.embedding and isinstance(module, LanguageModel)
            else configured(module, data, batches)
        )
        sign = None if options.sign is None else _signing_key(options.sign)
        written: Any = ship(
            deployment, options.out, recipe, format=form, candidates=candidates, batch_size=options.batch_size,
            max_drop=getattr(options, "max_drop", None), sign=sign,
        )  # fmt: skip
    programs: Sequence[Program] = list(written.values()) if isinstance(written, dict) else [written]
    for program in programs:
        proof = parity_summary(program.metadata) + speed_summary(program.metadata)
        rounded = ", trained with rounding" if trained else ""
        print(f"wrote {program.path}: {program.precision}{rounded}, {_size(program)}, {proof}")
        if "fastest" in program.metadata:
            print(_timed(program))
    if programs[0].signer is not None:
        print(f"signed: it is loaded with --trust {programs[0].signer}")


def _timed(program: Program) -> str:
    """Describe the timed formats and the one that was kept."""
    times = program.metadata["fastest"]["wall_ms"]
    listed = ", ".join(f"{form} {time:.2f} ms" for form, time in sorted(times.items(), key=lambda one: one[1]))
    return f"kept {program.format}, the fastest here on one thread: {listed}"


def _size(program: Program) -> str:
    size = f"{program.nbytes / 1e6:.1f} MB"
    if program.metadata.get("task") == "embedding":
        return f"{size} with tokenizer, for texts of up to {program.metadata['max_positions']} tokens"
    if program.metadata.get("task") != "language":
        return size
    return f"{size} with cache and tokenizer, for up to {program.metadata['max_positions']} tokens"


def _signing_key(path: Path) -> Any:
    """Read the key at ``path``, or make one there."""
    from arclight.fabric.signing import SigningError, SigningKey

    if not path.exists():
        check_writable(path, "--sign")
        key = SigningKey.make(path)
        print(f"made {path}, a private key that stays with you; its public key is {key.public}")
        return key
    try:
        return SigningKey.read(path)
    except (OSError, SigningError) as error:
        raise UsageError(f"--sign: {error}") from error


def _write_hf(parser: Parser, options: Namespace, rest: Sequence[str]) -> None:
    """Write a language model's weights as a folder that Hugging Face's libraries open."""
    _refuse(parser, rest)
    if not trained_language([options.source]):
        raise UsageError(f"--format hf is for runs of language models, and {options.source} is none")
    if options.sign is not None or options.batch_size is not None or options.embedding:
        raise UsageError(
            "--sign, --batch-size and --embedding are of programs, and --format hf writes weights: name a --format of a program"
        )
    if options.out.suffix in WEIGHT_FILES:
        raise UsageError(
            f"--out {options.out}: for Hugging Face a folder is written; call it {options.out.with_suffix('')}"
        )
    check_writable(options.out, "--out")
    from arclight.text import to_hf
    from arclight.text.language_model import RoundsOperands

    model = load_language_model(Path(options.source))
    try:
        to_hf(model.model, options.out, tokenizer=model.tokenizer)
    except (TypeError, ValueError) as error:  # what the family at Hugging Face does not do
        raise UsageError(f"--format hf: {error}") from error
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"wrote {options.out}: {size / 1e6:.1f} MB, opens with transformers.AutoModelForCausalLM.from_pretrained")
    if any(isinstance(layer, RoundsOperands) for layer in model.model.modules()):
        print(
            "these are the float weights of a model that was trained with rounding: --format onnx writes the program that it was trained for"
        )


# -- sources -----------------------------------------------------------------------------------------------------------


def opened(parser: Parser, options: Namespace, rest: Sequence[str]) -> tuple[Module, DataModule | None]:
    """Load the module that ``options.source`` names, and make its data."""
    if (own := user_module.named_module([options.source])) is not None:
        return _own_module(own, options, options.config, options.ckpt_path, rest)
    if own_run := run_of_own_module(Path(options.source)):
        run, kind = own_run
        return _own_module(
            user_module.imported(kind),
            options,
            [run / USER_CONFIG, *options.config],
            options.ckpt_path or options.source,
            rest,
        )
    _refuse(parser, rest)
    if options.config or options.ckpt_path is not None:
        raise UsageError(
            f"--config and --ckpt_path are of a module of your own, and {options.source} names its weights itself"
        )
    if trained_language([options.source]):
        return _language(Path(options.source), options.data)
    module = load_vision_module(Path(options.source))
    settings = module.settings.with_data(str(options.data or module.settings.data))
    if not settings.data.exists():
        raise UsageError(
            f"{settings.data}, the data this model was trained on, is not here: name images to verify the program with --data"
        )
    return module, settings.data_class()(settings)


def _refuse(parser: Parser, rest: Sequence[str]) -> None:
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")


def _name(module: Module) -> str:
    return str(getattr(getattr(module, "settings", None), "model", type(module).__name__))


def _language(path: Path, texts: str | None) -> tuple[Module, DataModule]:
    from arclight.text import TextDataModule
    from arclight.text.data.data_settings import Pretrained

    model = load_language_model(path)
    run = run_folder(path)
    assert run is not None
    settings = model.settings.data
    kept = settings.cache or run.parent.parent / "data"  # where training has left its tokens
    if texts is not None:
        settings = dataclasses.replace(
            settings, data=texts, val=None, mixture={}, tokenizer=Pretrained(path=run / "tokenizer")
        )
    return model, TextDataModule(dataclasses.replace(settings, cache=kept))


def run_of_own_module(place: Path) -> tuple[Path, str] | None:
    """Return the run of ``place`` and the user's own class that it trained; None for others.

    ``place``: the run, or a checkpoint of it.
    """
    run = run_folder(place)
    if run is None or not (run / USER_CONFIG).is_file():
        return None
    try:
        kind = tomllib.loads((run / USER_CONFIG).read_text(encoding="utf-8"))["model"]["kind"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run / USER_CONFIG} does not say which class was trained: {error!r}") from error
    return run, str(kind)


def _own_module(
    model: type, options: Namespace, config: Sequence[Path], weights: str | None, flags: Sequence[str]
) -> tuple[Module, DataModule | None]:
    """Build a user's module with the weights that are named, and its data."""
    from arclight.cli.user_run import build, weights_of

    check_short_flags(flags, UserRun)
    run = user_module.read_run(model, Namespace(config=list(config), data=options.data), flags)
    module, data = build(run)
    if (checkpoint := weights_of(weights, run)) is None:
        print(f"--ckpt_path names no weights: {type(module).__name__} is taken as its constructor makes it")
        module.configure_model()
        return module, data
    print(checkpoint_note(Path(checkpoint)))
    from arclight.deploy.quantizing.trained import trained_by

    loaded: Module = type(module).load_from_checkpoint(
        checkpoint, map_location="cpu", replaced_by=trained_by(checkpoint), **run.model.arguments
    )  # fmt: skip
    return loaded, data
