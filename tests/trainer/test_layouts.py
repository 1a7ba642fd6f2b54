"""Checkpoints of every layout that was ever written resume, and so do those of versions that know more or fewer fields.

``python tests/trainer/test_layouts.py`` writes ``layouts/<n>.json`` for the layout of the version that runs it: once for each, never again.
"""

from __future__ import annotations

import base64
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import arclight as al
from arclight.checkpoint import CheckpointError
from arclight.trainer.callback import Checkpoint
from arclight.trainer.callbacks import LossGuard
from arclight.trainer.checkpoint.state import LAYOUT

LAYOUTS = Path(__file__).parent / "layouts"
BATCH = 13
"""The batch after which the state was taken: in the second epoch, within an accumulation window."""


class Line(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.line(batch) + torch.rand(())).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.line(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


class Capture(Checkpoint):
    state: dict[str, Any]

    def on_train_batch_end(self, trainer: al.Trainer, *_: Any) -> None:
        if trainer.progress.batches == BATCH:
            self.state = copy.deepcopy(trainer.capture())


def fit(root: Path, *callbacks: al.Callback, ckpt_path: Any = None) -> dict[str, Any]:
    """Train to the end; what a user sees there."""
    torch.manual_seed(0)
    rows = torch.randn(30, 3, dtype=torch.float64)
    al.seed_everything(1, verbose=False)
    model = Line()
    trainer = al.Trainer(
        max_epochs=3, accelerator="cpu", accumulate_grad_batches=2, default_root_dir=root, run_name="run", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[al.EarlyStopping("val", patience=5), LossGuard(warmup=2, window=3), al.ModelCheckpoint(monitor="val"), *callbacks],
    )  # fmt: skip
    trainer.fit(model, DataLoader(rows, 3, shuffle=True), DataLoader(rows, 10), ckpt_path=ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return {"weights": model.state_dict(), "metrics": metrics, "step": trainer.global_step, "rate": rate}


def to_json(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        array = np.asarray(value)
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        data = base64.b64encode(array.tobytes()).decode()
        return {"is": kind, "dtype": str(array.dtype), "shape": list(array.shape), "data": data}
    if isinstance(value, dict):
        return {"is": "dict", "items": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"is": "tuple", "items": [to_json(item) for item in value]}
    return [to_json(item) for item in value] if isinstance(value, list) else value


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value["is"] in ("tensor", "array"):
        array = np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"]).copy()
        return torch.from_numpy(array) if value["is"] == "tensor" else array
    if value["is"] == "dict":
        return {from_json(key): from_json(item) for key, item in value["items"]}
    return tuple(from_json(item) for item in value["items"])


def read(layout: int) -> dict[str, Any]:
    content: dict[str, Any] = from_json(json.loads((LAYOUTS / f"{layout}.json").read_text()))
    return content


def check(end: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (end["step"], end["rate"]) == (expected["step"], expected["rate"])
    assert end["metrics"] == pytest.approx(expected["metrics"])
    torch.testing.assert_close(end["weights"], expected["weights"])


def test_there_is_a_checkpoint_of_every_layout() -> None:
    assert sorted(path.stem for path in LAYOUTS.iterdir()) == [str(number) for number in range(LAYOUT + 1)]
    assert read(LAYOUT)["state"]["loops"]["layout"] == LAYOUT


@pytest.mark.parametrize("layout", range(LAYOUT + 1))
def test_a_checkpoint_of_each_layout_resumes_to_the_same_end(tmp_path: Path, layout: int) -> None:
    saved = read(layout)
    assert saved["state"]["loops"]["window"][0]["count"] == 1
    check(fit(tmp_path, ckpt_path=saved["state"]), saved["end"])


def lost(kept: Any, written: Any, where: str) -> list[str]:
    """Names of fields that are in a kept state and no longer written."""
    if isinstance(kept, dict):
        gone = [f"{where}.{name}" for name in kept if name not in written]
        return gone + [
            n for name in kept if name in written for n in lost(kept[name], written[name], f"{where}.{name}")
        ]
    if isinstance(kept, list) and kept and isinstance(kept[0], dict):
        return lost(kept[0], written[0], where)
    return []


def test_removing_a_field_needs_another_layout_number(tmp_path: Path) -> None:
    capture = Capture()
    fit(tmp_path, capture)
    kept, written = read(LAYOUT)["state"], capture.state
    for state in (kept, written):  # names of files differ
        for callback in state["callbacks"].values():
            callback.pop("best_k_models", None)
    assert not lost(kept["loops"], written["loops"], "loops")
    assert not lost(kept["callbacks"], written["callbacks"], "callbacks")
    assert lost({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}, "x") == ["x.a.c"]


def grown(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a state that have fields."""
    loops = state["loops"]
    yield from (loops, loops["progress"], loops["window"][0], loops["data"], loops["precision"])
    for table in loops["logged"][0].values():
        for entry in table.values():
            yield from (entry, entry["settings"])
    for callback in state["callbacks"].values():
        yield callback
        yield from callback.get("events", ())


def test_fields_that_a_later_version_added_are_named_and_left_out(tmp_path: Path) -> None:
    saved = read(LAYOUT)
    guard = next(state for key, state in saved["state"]["callbacks"].items() if "LossGuard" in key)
    guard["events"] = [{"step": 1, "batches": [[0, 1]], "loss": 2.0, "grad_norm": 3.0, "samples": [], "action": "skip"}]
    for part in grown(saved["state"]):
        part["of_a_later_version"] = 1
    with pytest.warns(UserWarning, match="does not know: of_a_later_version") as told:
        check(fit(tmp_path, ckpt_path=saved["state"]), saved["end"])
    named = " ".join(str(warning.message) for warning in told)
    assert all(f"checkpoint's {what} has" in named for what in ("progress", "logged value 'loss'", "LossGuard event"))


def test_fields_that_an_earlier_version_lacked_have_defaults(tmp_path: Path) -> None:
    saved = read(LAYOUT)
    loops = saved["state"]["loops"]
    for name in ("samples", "tokens", "validated_at", "ended"):
        del loops["progress"][name]
    for table in loops["logged"][0].values():
        for entry in table.values():
            for name in [name for name in entry["settings"] if name not in ("on_step", "on_epoch", "reduce")]:
                del entry["settings"][name]
    for name in ("metrics", "layout"):
        del loops[name]
    for name in ("shares", "seeds"):
        del loops["data"][name]
    check(fit(tmp_path, ckpt_path=saved["state"]), saved["end"])


@pytest.mark.parametrize("name", ["epoch", "batch", "global_step"])
def test_a_position_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    state = read(LAYOUT)["state"]
    del state["loops"]["progress"][name]
    with pytest.raises(CheckpointError, match=f"progress lacks {name}"):
        fit(tmp_path, ckpt_path=state)


def test_a_layout_of_a_later_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    state = read(LAYOUT)["state"]
    state["loops"]["layout"] = LAYOUT + 1
    with pytest.raises(
        CheckpointError, match=f"layout {LAYOUT + 1}, this version reads up to {LAYOUT}: update arclight"
    ):
        fit(tmp_path, ckpt_path=state)


if __name__ == "__main__":
    capture = Capture()
    end = fit(Path(sys.argv[1]), capture)
    number = capture.state["loops"].get("layout", 0)
    LAYOUTS.mkdir(exist_ok=True)
    with (LAYOUTS / f"{number}.json").open("x") as file:
        json.dump(to_json({"state": capture.state, "end": end}), file)
