"""The table at the end of docs/migrate-from-lightning.md: run this file to write it anew from the code.

It names what a user of Lightning looks for, and where that is imported from here.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

import arclight as al
from arclight.compat.lightning.names import NAMES, REFUSED
from arclight.fabric.strategies import STRATEGY_REGISTRY

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDE = REPOSITORY / "docs" / "migrate-from-lightning.md"
BEGIN = "<!-- The rest of this page is written by tests/compat/guide_table.py -->"
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


def _classes() -> Iterator[Row]:
    rows: dict[tuple[str, str], str] = {}
    for path in sorted(NAMES, key=lambda path: (path.count("."), path.startswith("fabric"), path)):
        for name, target in NAMES[path].items():
            if not name.startswith("_"):
                rows.setdefault((name, target), path)
    for (name, target), path in sorted(rows.items(), key=lambda row: (row[1].split(".")[:2], row[0])):
        home, _, own = target.partition(":")
        section = ".".join(["lightning", *path.split(".")[:2]]) if path else "lightning"
        place = ".".join(filter(None, ("lightning", path)))
        # what exists for these users only is imported from the path that they know
        ours = f"arclight.compat.{place}.{name}" if home.startswith("arclight.compat") else public_path(home, own)
        yield Row(section, name, place, ours)


def _of_class(section: str, kind: type, ours: str, *without: type) -> Iterator[Row]:
    for name in _members(kind, *without):
        yield Row(section, name, section.split(maxsplit=1)[0], f"{ours}.{name}")


def rows() -> list[Row]:
    """List every name of the table, in its order."""
    found = [Row("Trainer's flags", flag, "Trainer", "arclight.Trainer") for flag in flags()]
    found += [Row("Trainer's members", name, "Trainer", f"arclight.Trainer.{name}") for name in _MEMBERS.split()]
    found += _of_class("LightningModule's members", al.Module, "arclight.Module", torch.nn.Module)
    found += _of_class("LightningDataModule's members", al.DataModule, "arclight.DataModule")
    found += _of_class("Callback's hooks", al.Callback, "arclight.Callback")
    found += _of_class("Fabric's methods", al.Fabric, "arclight.Fabric")
    both = "arclight.Trainer, arclight.Fabric"
    found += [Row("Names of strategies", n, "strategy=", both) for n in STRATEGY_REGISTRY.available_strategies()]
    found += [Row("Names of precisions", name, "precision=", both) for name in _PRECISIONS.split()]
    return [*found, *_classes()]


def flags() -> list[str]:
    """The arguments of the Trainer that Lightning's has, too."""
    ours_only = {"run_name", "run_folder", "unknown", "self"}
    return [name for name in inspect.signature(al.Trainer.__init__).parameters if name not in ours_only]


def refused() -> list[tuple[str, str]]:
    """(name, reason) of what is not offered, once each."""
    return sorted({pair for names in REFUSED.values() for pair in names.items()})


def render() -> str:
    """Return the table as Markdown: one list for what has one name on one class, one row for a module's names."""
    sections: dict[str, list[Row]] = {}
    for row in rows():
        sections.setdefault(row.section, []).append(row)
    lines: list[str] = []
    for section, found in sections.items():
        lines += ["", f"### {section}", ""]
        if section.startswith("lightning"):
            lines += ["| where | Lightning | Arclight |", "|---|---|---|", *_grouped(found)]
        else:
            lines += textwrap.wrap(", ".join(f"`{row.name}`" for row in found), 120, break_on_hyphens=False)
    lines += ["", "### Not offered", "", "| Lightning | why, and what instead |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in refused()]
    return "\n".join(lines) + "\n"


def _grouped(found: list[Row]) -> list[str]:
    """Return a row of the table for each pair of modules; a name that is ours differently is shown with ours."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for row in found:
        home, _, own = row.ours.rpartition(".")
        pairs.setdefault((row.place, home), []).append(
            f"`{row.name}`" if own == row.name else f"`{row.name}` (`{own}`)"
        )
    return [f"| `{place}` | {', '.join(names)} | `{home}` |" for (place, home), names in pairs.items()]


if __name__ == "__main__":
    head = GUIDE.read_text(encoding="utf-8").partition(BEGIN)[0]
    GUIDE.write_text(f"{head}{BEGIN}\n{render()}", encoding="utf-8")
