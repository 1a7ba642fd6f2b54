"""Find run folders and checkpoints that an argument names, and recognise programs.

Verbs that take a run, a checkpoint or a program resolve its path here. The layout of run folders is that of ``trainer.run``: a run is
recognised by its folder ``checkpoints``, one of a language model also by ``tokenizer``. Names of folders and files stay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from arclight.cli.arguments import RECIPE, UsageError

if TYPE_CHECKING:
    from arclight.text import LanguageModel
    from arclight.vision.tasks.module import VisionModule


def is_program(path: Path) -> bool:
    """Return True for an .onnx file and a program's folder."""
    from arclight.deploy.programs.folder import NAME

    return path.suffix == ".onnx" or (path / NAME).is_file()


def run_folder(place: Path) -> Path | None:
    """Return the run of ``place`` (itself, its recipe or checkpoint); None for others."""
    holders = [place, place.parent] if place.name == RECIPE else [place, place.parent.parent]
    return next((folder for folder in holders if (folder / "checkpoints").is_dir()), None)


def checkpoint_of(place: Path) -> Path:
    """Return the checkpoint ``place``, or the best one if ``place`` is a run folder."""
    return best_checkpoint(place) if (place / "checkpoints").is_dir() or (place / RECIPE).is_file() else place


def newest_checkpoint(run: Path) -> Path:
    """Return the newest complete checkpoint of a run. Raises UsageError if it has none."""
    from arclight.checkpoint import find_last

    found = find_last(run / "checkpoints")
    if found is None:
        raise UsageError(f"{run} has no checkpoint: it failed, or was stopped, before it saved one")
    return found


def best_checkpoint(run: Path) -> Path:
    """Return the best checkpoint that a run recorded, else its newest.

    The run may have been copied since.

    Raises UsageError if the run has no checkpoint, or its best one was removed.
    """
    from arclight.checkpoint.retention import find_recorded, recorded_best

    newest = newest_checkpoint(run)
    recorded, _ = recorded_best(newest)
    if recorded is None:
        return newest
    if place := find_recorded(recorded, run / "checkpoints"):
        return place
    raise UsageError(
        f"{run} recorded {recorded.name} as its best checkpoint, which is not there any more: name another one, such as {newest}"
    )


def step_of(checkpoint: str | Path) -> int | None:
    """Return the step at which a checkpoint was saved; None if it does not say."""
    from arclight.checkpoint.manifest import is_checkpoint, read_manifest
    from arclight.checkpoint.remote import to_path

    checkpoint = to_path(checkpoint)
    return read_manifest(checkpoint).step if is_checkpoint(checkpoint) else None


def checkpoint_note(checkpoint: Path) -> str:
    """Describe a checkpoint, and whether it is the best or the newest of its run."""
    from arclight.checkpoint.retention import recorded_best

    run = run_folder(checkpoint)
    if run is None:
        return f"checkpoint {checkpoint}"
    newest = newest_checkpoint(run)
    best, monitor = recorded_best(newest)
    if monitor and best is not None and best.name == checkpoint.name:
        return f"checkpoint {checkpoint}, the best by {monitor}"
    return f"checkpoint {checkpoint}" + (", the newest" if checkpoint.name == newest.name else "")


def load_vision_module(path: Path) -> VisionModule:
    """Load the vision model of a checkpoint or of a run's best one, and print which."""
    from arclight.vision.tasks.module import VisionModule

    checkpoint = checkpoint_of(path)
    module: VisionModule = VisionModule.load(checkpoint)
    print(checkpoint_note(checkpoint))
    return module


def trained_language(words: list[str]) -> bool:
    """Return True if the first word names a run (or a checkpoint in one) of a language model."""
    if not words or words[0].startswith("-"):
        return False
    run = run_folder(Path(words[0]))
    return run is not None and (run / "tokenizer").is_dir()


def load_language_model(path: Path) -> LanguageModel:
    """Load the language model of a run's best checkpoint, or of the checkpoint ``path``.

    Uses the run's tokenizer; standard error says which checkpoint.
    """
    from arclight.deploy.quantizing.trained import trained_by
    from arclight.text import LanguageModel, Tokenizer

    run = run_folder(path)
    assert run is not None
    checkpoint = checkpoint_of(path)
    model: LanguageModel = LanguageModel.load_from_checkpoint(checkpoint, replaced_by=trained_by(checkpoint))
    print(checkpoint_note(checkpoint), file=sys.stderr)
    model.use_tokenizer(Tokenizer.load(run / "tokenizer"))
    return model.eval()
