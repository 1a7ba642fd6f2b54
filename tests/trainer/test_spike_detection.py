"""Spike detection: a loss spike, NaN or infinity ends the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import arclight as al
from arclight.trainer.callbacks import SpikeDetection, loss_guard
from arclight.trainer.callbacks.loss_guard import TrainingSpikeException


def run(detection: loss_guard.FabricSpikeDetection, losses: list[float]) -> int | None:
    """Number of the batch that is found to be a spike."""
    fabric = al.Fabric(accelerator="cpu", devices=1)
    try:
        for number, loss in enumerate(losses):
            detection.on_train_batch_end(fabric, torch.tensor(loss), None, number)
    except TrainingSpikeException as error:
        return error.batch_idx
    return None


@pytest.mark.parametrize(
    ("options", "losses", "found"),
    [
        ({}, [1.0, 0.5, 0.4, 3.0, 0.3], 3),
        ({}, [9.0, 1.0, 0.9, 0.8], None),
        ({"rtol": None, "atol": 0.5}, [1.0, 1.2, 1.8], 2),
        ({"rtol": 2.0, "atol": 10.0}, [1.0, 1.0, 5.0], None),
        ({"warmup": 3}, [1.0, 9.0, 1.0, 9.0], None),
        ({"window": 1}, [1.0, 2.5, 6.0, 20.0], 3),
        ({"mode": "max"}, [1.0, 1.1, -2.0], 2),
        ({}, [1.0, math.nan], 1),
        ({}, [1.0, -math.inf], 1),
        ({"finite_only": False}, [1.0, math.nan, 1.0], None),
        ({"finite_only": False}, [1.0, math.inf], 1),
    ],
)
def test_detected_spikes(tmp_path: Path, options: Any, losses: list[float], found: int | None) -> None:
    assert run(loss_guard.FabricSpikeDetection(exclude_batches_path=tmp_path, **options), losses) == found
    assert (tmp_path / "skip_batches.json").exists() == (found is not None)


def test_skipped_batches_accumulate_and_the_window_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "inner" / "leave_out.json"
    first = loss_guard.FabricSpikeDetection(window=2, exclude_batches_path=path)
    assert run(first, [1.0, 1.0, 7.0]) == 2
    second = loss_guard.FabricSpikeDetection()
    second.load_state_dict(first.state_dict())
    assert run(second, [0.9, 7.0]) == 1
    assert json.loads(path.read_text()) == [1, 2, 0, 1]
    assert list(second.running) == pytest.approx([1.0, 0.9]), "two losses fit into the window"
    with pytest.raises(ValueError, match="min or max, found mean"):
        loss_guard.FabricSpikeDetection(mode="mean")  # type: ignore[arg-type]


def test_a_spike_ends_the_fit(fit: Any, scripted: Any, tmp_path: Path) -> None:
    class Jumps(scripted):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(batch, batch_idx)
            return loss * 0 + (50.0 if batch_idx == 2 else 1.0)

    with pytest.raises(TrainingSpikeException, match="in batch 2"):
        fit(Jumps(), SpikeDetection(), max_epochs=1)
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [1, 2]
