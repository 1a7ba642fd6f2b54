"""The table at the end of docs/migrate-from-lightning.md: run this file to write it anew from the code.

A row names what a user of Lightning looks for, where it is imported from here, and one test file that uses it. A row that is
still true keeps its test file, so that the page changes only where the code did.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

import arclight as al
from arclight.compat.lightning.names import NAMES
from arclight.compat.lightning.refused import REFUSED
from arclight.fabric.strategies import STRATEGY_REGISTRY

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDE = REPOSITORY / "docs" / "migrate-from-lightning.md"
BEGIN = "<!-- The rest of this page is written by tests/compat/guide_table.py -->"
EVERY_NAME = "tests/compat/test_names.py"
"""Fetches every name of the table and compares it with ours, without spelling them."""

_NOT_USES = ("tests/compat/test_guide.py", "tests/compat/guide_table.py", "tests/house/test_house.py", EVERY_NAME)

_PRECISIONS = (
    "64-true 64 32-true 32 16-mixed 16 bf16-mixed bf16 16-true bf16-true transformer-engine transformer-engine-float16"
)

_MEMBERS = """
fit validate test predict save_checkpoint init_module print accelerator strategy precision_plugin global_rank local_rank
node_rank world_size num_nodes device_ids num_devices lightning_module model optimizers lr_scheduler_configs precision
scaler log_dir is_global_zero distributed_sampler_kwargs enable_validation default_root_dir early_stopping_callback
early_stopping_callbacks checkpoint_callback checkpoint_callbacks progress_bar_callback ckpt_path interrupted training
testing predicting validating evaluating sanity_checking received_sigterm global_step current_epoch max_epochs min_epochs
max_steps min_steps is_last_batch train_dataloader val_dataloaders test_dataloaders predict_dataloaders
num_training_batches num_sanity_val_batches num_val_batches num_test_batches num_predict_batches logger loggers
callback_metrics logged_metrics progress_bar_metrics estimated_stepping_batches should_stop state callbacks datamodule
fit_loop validate_loop test_loop predict_loop
"""
"""What scripts read of a Trainer. Its flags are taken from its signature; hooks and methods from the classes."""


class Row(NamedTuple):
    section: str
    name: str
    place: str
    """Where Lightning's users find it, or what it belongs to."""
    ours: str
    uses: str
    """A regular expression for a line of a test that uses it."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.section, self.name, self.place


def _members(kind: type, *without: type) -> list[str]:
    """Public methods and properties that a class, or one of ours below it, defines."""
    not_ours = {name for other in (object, *without) for name in dir(other)}
    return sorted(
        name
        for name in dir(kind)
        if not name.startswith("_")
        and name not in not_ours
        and (
            callable(inspect.getattr_static(kind, name))
            or isinstance(inspect.getattr_static(kind, name), (property, staticmethod, classmethod))
        )
    )


@cache
def public_path(home: str, name: str) -> str:
    """The shortest of our packages that promises ``name``, else the module that holds it."""
    parts = home.split(".")
    wanted = getattr(importlib.import_module(home), name)
    for count in range(1, len(parts)):
        package = importlib.import_module(".".join(parts[:count]))
        if name in getattr(package, "__all__", []) and getattr(package, name) is wanted:
            return f"{package.__name__}.{name}"
    return f"{home}.{name}"


def _word(name: str) -> str:
    """Uses of a name: a class anywhere, a function where it is called, imported, or looked up."""
    word = re.escape(name)
    if name[0].isupper() or name.startswith("on_"):
        return rf"\b{word}\b"
    return rf"\b{word}\(|\.{word}\b|[\"']{word}[\"']|\b{word}=|^ *(from|import) .*\b{word}\b|^ +{word},$"


def _classes() -> Iterator[Row]:
    rows: dict[tuple[str, str], str] = {}
    for path in sorted(NAMES, key=lambda path: (path.count("."), path.startswith("fabric"), path)):
        for name, target in NAMES[path].items():
            if not name.startswith("_"):
                rows.setdefault((name, target), path)
    for (name, target), path in sorted(rows.items(), key=lambda row: (row[1].split(".")[:2], row[0])):
        home, _, own = target.partition(":")
        section = ".".join(["lightning", *path.split(".")[:2]]) if path else "lightning"
        uses = _word(name) + ("" if own == name else f"|{_word(own)}")
        place = ".".join(filter(None, ("lightning", path)))
        # what exists for these users only is imported from the path that they know
        ours = f"arclight.compat.{place}.{name}" if home.startswith("arclight.compat") else public_path(home, own)
        yield Row(section, name, place, ours, uses)


def _of_class(section: str, kind: type, ours: str, *without: type) -> Iterator[Row]:
    for name in _members(kind, *without):
        yield Row(section, name, section.split(maxsplit=1)[0], f"{ours}.{name}", _word(name))


def rows() -> list[Row]:
    """Every row of the table, in its order."""
    found = [
        Row("Trainer's flags", flag, "Trainer", "arclight.Trainer", rf"\b{flag}=|[\"']{flag}[\"']") for flag in flags()
    ]
    found += [
        Row("Trainer's members", name, "Trainer", f"arclight.Trainer.{name}", _word(name)) for name in _MEMBERS.split()
    ]
    found += _of_class("LightningModule's members", al.Module, "arclight.Module", torch.nn.Module)
    found += _of_class("LightningDataModule's members", al.DataModule, "arclight.DataModule")
    found += _of_class("Callback's hooks", al.Callback, "arclight.Callback")
    found += _of_class("Fabric's methods", al.Fabric, "arclight.Fabric")
    for name in STRATEGY_REGISTRY.available_strategies():
        found.append(
            Row("Names of strategies", name, "strategy=", "arclight.Trainer, arclight.Fabric", rf"[\"']{name}[\"']")
        )
    for name in _PRECISIONS.split():
        uses = rf"[\"']{name}[\"']" + (rf"|precision=[\"']?{name}\b|\b{name}, |, {name}\b" if name.isdigit() else "")
        found.append(Row("Names of precisions", name, "precision=", "arclight.Trainer, arclight.Fabric", uses))
    return [*found, *_classes()]


def flags() -> list[str]:
    """The arguments of the Trainer that Lightning's has, too."""
    ours_only = {"run_name", "run_folder", "unknown", "self"}
    return [name for name in inspect.signature(al.Trainer.__init__).parameters if name not in ours_only]


@cache
def texts() -> dict[str, str]:
    """The text of every file of tests that may be named."""
    paths = sorted((REPOSITORY / "tests").rglob("*.py"))
    found = {path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {path: text for path, text in found.items() if path not in _NOT_USES}


def _cover(row: Row, named: str | None) -> str:
    """``named`` if it still uses the row's name, else the test file that does most."""
    if named in texts() and re.search(row.uses, texts()[named], re.MULTILINE):
        return named
    tests = [path for path in texts() if Path(path).name.startswith("test_") or "/examples/" in path]
    spellings = (row.name, row.ours.rpartition(".")[2])
    mentions = [path for path in tests if any(spelling in texts()[path] for spelling in spellings)]
    uses = Counter({path: len(re.findall(row.uses, texts()[path], re.MULTILINE)) for path in mentions})
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", row.name).lower()
    best = max(tests, key=lambda path: (bool(uses[path]) and Path(path).stem == f"test_{snake}", uses[path]))
    return best if uses[best] else EVERY_NAME


def refused() -> list[tuple[str, str]]:
    """(name, reason) of what is not offered, once each."""
    return sorted({pair for names in REFUSED.values() for pair in names.items()})


def written() -> dict[tuple[str, str, str], tuple[str, str]]:
    """What the page says now: (section, name, place) -> (our path, test file)."""
    found, section = {}, ""
    for line in GUIDE.read_text(encoding="utf-8").partition(BEGIN)[2].splitlines():
        if line.startswith("### "):
            section = line.removeprefix("### ").replace("`", "")
        elif line.startswith("| `"):
            cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
            if len(cells) == 4:
                found[section, cells[0], cells[1]] = (cells[2], cells[3])
    return found


def render() -> str:
    """The table as Markdown."""
    before, lines, section = written() if GUIDE.exists() else {}, [], ""
    for row in rows():
        if row.section != section:
            section = row.section
            lines += ["", f"### {section}", "", "| Lightning | where | Arclight | test |", "|---|---|---|---|"]
        cover = _cover(row, before.get(row.key, ("", None))[1])
        lines.append(f"| `{row.name}` | `{row.place}` | `{row.ours}` | `{cover}` |")
    lines += ["", "### Not offered", "", "| Lightning | why, and what instead |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in refused()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    head = GUIDE.read_text(encoding="utf-8").partition(BEGIN)[0]
    GUIDE.write_text(f"{head}{BEGIN}\n{render()}", encoding="utf-8")
