"""batch_size = "auto": measured, within a budget, and part of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from arclight.trainer import Callback, Trainer
from arclight.vision import Detector, build_model
from arclight.vision.tasks.detection import DetectionData
from arclight.vision.tasks.measuring import BatchSizeError, fitting_batch_size
from arclight.vision.tasks.settings import DetectionTask


def found(budget_gib: float | None, images: int = 1000, side: int = 64) -> int:
    torch.manual_seed(0)
    return fitting_batch_size(build_model("yolov5n", 2), side, nullcontext, budget_gib, images)


def kept_bytes(count: int, side: int = 64) -> int:
    """What the graph of a forward pass holds, read from the graph's own nodes."""
    torch.manual_seed(0)
    model = build_model("yolov5n", 2).train()
    weights = {value.data_ptr() for value in model.state_dict().values()}
    output = sum(part.square().mean() for part in model.raw(torch.rand(count, 3, side, side)))
    storages: dict[int, int] = {}
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(value, torch.Tensor) and value.data_ptr() not in weights:
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(storages.values())


def test_the_batch_is_the_largest_power_of_two_whose_step_fits() -> None:
    """A step takes at most twice what the graph keeps."""
    each = kept_bytes(8) / 8
    for size in (2, 4, 8):
        assert found(2 * each * size * 1.1 / 2**30) == size
        assert found(2 * each * size * 0.9 / 2**30) == size // 2


def test_the_batch_has_bounds() -> None:
    assert found(1000.0) == 16
    assert found(1000.0, images=11) == 8
    assert 1 <= found(None) <= 16
    with pytest.raises(
        BatchSizeError, match=r"a step with one image of 64 pixels takes 0.0\d GiB, and there are 0.00: use a smaller"
    ):
        found(1e-6)


def test_measuring_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = build_model("yolov5n", 2).train()
    model.model[3].eval()
    before, stream = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    fitting_batch_size(model, 64, nullcontext, 1.0, 100)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [model.model[2].training, model.model[3].training] == [True, False]


def test_a_run_trains_with_what_was_measured_and_goes_on_with_it(
    write_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    write_dataset(tmp_path, 4, "val")
    yaml = write_dataset(tmp_path, 20)
    seen: list[int] = []

    class Count(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, number: int) -> None:
            seen.append(len(batch["images"]))

    def fit(gib: float, steps: int, resume: Path | None = None) -> Trainer:
        task = DetectionTask(
            data=yaml, image_size=64, batch_size="auto", batch_memory_gib=gib, workers=0, memory_format="contiguous", cache_labels=False,
        )  # fmt: skip
        trainer = Trainer(
            accelerator="cpu", max_steps=steps, limit_val_batches=0, callbacks=[Count()], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Detector(task, ["code", "text"]), datamodule=DetectionData(task), ckpt_path=resume)
        return trainer

    four = 2 * kept_bytes(8) / 8 * 4.5 / 2**30
    fit(four, 2).save_checkpoint(tmp_path / "half.ckpt")
    assert seen == [4, 4]
    fit(100.0, 3, tmp_path / "half.ckpt")  # with more memory, too
    assert seen == [4, 4, 4]


def test_sites_of_a_federation_need_a_number() -> None:
    with pytest.raises(ValueError, match='batch_size = "auto" would give each site its own'):
        DetectionTask(data=Path("data.yaml"), batch_size="auto").site(0, 2)
