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
from arclight.vision.tasks.measuring import BatchSizeError, fitting_batch_size, largest_batch, memory_line
from arclight.vision.tasks.settings import DetectionTask


def found(budget_gib: float | None, images: int = 1000, side: int = 64) -> int:
    torch.manual_seed(0)
    return fitting_batch_size(build_model("yolov5n", 2), side, nullcontext, budget_gib, images)


def kept_bytes(count: int, side: int = 64) -> int:
    """Count the bytes that the graph of a forward pass saves, from the graph's own nodes."""
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


# -- a GPU's memory, by a meter that is given ------------------------------------------------------------------------

MIB = 2**20


class Device:
    """A device on which a step over n images takes ``taken(n)`` bytes, and that has ``size`` of them."""

    tried, most, share, tries_out = (2, 4, 8, 16), 64, 0.5, True

    def __init__(self, taken: Callable[[int], int], size: int) -> None:
        self.taken, self.size = taken, size
        self.runs: list[int] = []

    def free(self) -> int:
        return self.size

    def step_bytes(self, step: Callable[[], torch.Tensor]) -> int:
        raise AssertionError("this device measures numbers alone")

    def measure(self, count: int) -> int:
        self.runs.append(count)
        if self.taken(count) > self.size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return self.taken(count)


def largest(device: Device, budget: int, images: int = 1000) -> int:
    return largest_batch(device.measure, device, budget, images, "of 640 pixels")


def test_a_line_has_no_point_above_it() -> None:
    assert memory_line({2: 70, 4: 90}) == (50, 10)
    assert memory_line({2: 20}) == (0, 10)
    fixed, each = memory_line({2: 300, 4: 310, 8: 400, 16: 700})
    assert all(fixed + each * size >= taken for size, taken in {2: 300, 4: 310, 8: 400, 16: 700}.items())
    assert each == pytest.approx(29.4, abs=1)
    assert memory_line({2: 90, 4: 80})[1] == 1  # noise, not a step that shrinks


def test_the_size_from_the_line_is_tried_out() -> None:
    device = Device(lambda n: 100 * MIB + 50 * MIB * n, 10_000 * MIB)
    assert largest(device, 2_000 * MIB) == 32
    assert device.runs == [2, 4, 8, 16, 32]
    device.runs.clear()
    assert largest(device, 10_000 * MIB) == 64
    assert largest(device, 10_000 * MIB, images=40) == 32
    assert largest(device, 600 * MIB) == 8


def test_a_size_that_runs_out_of_memory_is_halved() -> None:
    device = Device(lambda n: 50 * MIB * n * (3 if n > 16 else 1), 2_500 * MIB)  # a workspace that comes with size
    assert largest(device, 2_500 * MIB) == 16
    assert device.runs == [2, 4, 8, 16, 32]
    assert (
        largest(Device(lambda n: 50 * MIB * n * (2 if n > 16 else 1), 9_000 * MIB), 2_000 * MIB) == 16
    )  # beyond the budget


def test_a_small_device_ends_the_measuring_early() -> None:
    device = Device(lambda n: 100 * MIB * n, 700 * MIB)
    assert largest(device, 700 * MIB) == 4
    assert device.runs == [2, 4, 8]
    assert largest(Device(lambda n: 100 * MIB * n, 150 * MIB), 150 * MIB) == 1
    with pytest.raises(BatchSizeError, match=r"one image of 640 pixels runs out of memory, and there are 0\.05"):
        largest(Device(lambda n: 100 * MIB * n, 50 * MIB), 50 * MIB)
    with pytest.raises(BatchSizeError, match=r"takes 0\.10 GiB, and there are 0\.05"):
        largest(Device(lambda n: 100 * MIB * n, 900 * MIB), 50 * MIB)


def test_sizes_beyond_the_budget_or_the_data_set_are_not_measured() -> None:
    device = Device(lambda n: 100 * MIB + 50 * MIB * n, 10_000 * MIB)
    assert largest(device, 320 * MIB) == 4
    assert device.runs == [2, 4, 8]
    device.runs.clear()
    assert largest(device, 9_000 * MIB, images=5) == 4
    assert largest(device, 9_000 * MIB, images=1) == 1
    assert device.runs == [2, 4, 2, 1]
    device.runs.clear()
    assert largest(device, 160 * MIB) == 1
    with pytest.raises(BatchSizeError, match=r"takes 0\.15 GiB, and there are 0\.14"):
        largest(device, 140 * MIB)  # half of what two take would fit
    assert device.runs == [2, 1, 2, 1]


def test_one_image_is_measured_where_the_first_batch_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where sizes are not tried out otherwise: half of what two take is less than one takes."""
    monkeypatch.setattr(Device, "tries_out", False)
    device = Device(lambda n: 100 * MIB + 50 * MIB * n, 10_000 * MIB)
    assert largest(device, 160 * MIB) == 1
    assert device.runs == [2, 1]
    for images in (1, 100):
        with pytest.raises(BatchSizeError, match=r"takes 0\.15 GiB, and there are 0\.14"):
            largest(device, 140 * MIB, images=images)
    assert largest(device, 200 * MIB, images=2) == 2


def test_other_errors_of_a_step_are_no_lack_of_memory() -> None:
    def broken(count: int) -> int:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")

    with pytest.raises(RuntimeError, match="EXECUTION_FAILED"):
        largest_batch(broken, Device(lambda n: n, 1), 1, 1, "")


def test_a_step_that_runs_out_of_memory_halfway_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = build_model("yolov5n", 2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    class Full(Device):
        def step_bytes(self, step: Callable[[], torch.Tensor]) -> int:
            step().backward()
            self.runs.append(len(self.runs))
            if len(self.runs) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return 40 * MIB * len(self.runs)

    device = Full(lambda n: n, 400 * MIB)
    assert (
        fitting_batch_size(model, 32, nullcontext, None, 100, meter=device) == 4
    )  # half of 400 MiB, less three times the weights
    assert len(device.runs) == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    device.runs.clear()
    with pytest.raises(BatchSizeError, match=r"takes 0\.02 GiB, and there are 0\.0"):
        fitting_batch_size(model, 32, nullcontext, None, 100, share=0.06, meter=device)


def test_two_limits_of_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_memory_gib and batch_memory_share both say"):
        DetectionTask(data=Path("data.yaml"), batch_memory_gib=1.0, batch_memory_share=0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_trains_with_the_batch_that_was_measured_on_it() -> None:
    """Half of what is free bounds the peak of real steps, and twice the batch would go beyond it, or is more than 64."""
    torch.manual_seed(0)
    model = build_model("yolov5s", 2).cuda().train()
    free, _ = torch.cuda.mem_get_info()
    budget_gib = min(0.5 * free / 2**30, 3.0)
    size = fitting_batch_size(model, 320, nullcontext, budget_gib, 1000)

    def peak(count: int) -> float:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = model.raw(torch.rand(count, 3, 320, 320, device="cuda"))
        sum(part.square().mean() for part in output).backward()
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        model.zero_grad(set_to_none=True)
        return taken / 2**30

    assert peak(size) <= 1.05 * budget_gib
    assert size == 64 or peak(2 * size) > 0.9 * budget_gib


def test_sites_of_a_federation_need_a_number() -> None:
    with pytest.raises(ValueError, match='batch_size = "auto" would give each site its own'):
        DetectionTask(data=Path("data.yaml"), batch_size="auto").site(0, 2)
