"""The loop against a loop written by hand, the order of hooks, and limits."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import arclight as al
from arclight.fabric.precision import names
from arclight.trainer import NonFiniteLossError
from arclight.trainer.loggers import CSVLogger
from arclight.trainer.loggers.params import flatten_dict


class Mlp(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.scale = 1.0

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * self.scale

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(count: int = 8, sizes: tuple[int, ...] = (4,)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(sizes[i % len(sizes)], 6, generator=generator),
            torch.randint(0, 3, (sizes[i % len(sizes)],), generator=generator),
        )
        for i in range(count)
    ]


def trainer(**settings: Any) -> al.Trainer:
    return al.Trainer(
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1, **settings}
    )


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def test_equals_a_loop_written_by_hand_bit_for_bit() -> None:
    torch.manual_seed(1)
    ours, data = Mlp(), batches()
    hand = copy.deepcopy(ours)
    optimizer = hand.configure_optimizers()
    for _ in range(2):
        for batch in data:
            optimizer.zero_grad()
            hand.loss(batch).backward()
            nn.utils.clip_grad_norm_(hand.parameters(), 0.5)
            optimizer.step()
    trainer(max_epochs=2, gradient_clip_val=0.5).fit(ours, data)
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(hand), strict=True))


@pytest.mark.parametrize("sizes", [(4,), (4, 2, 5)])
def test_an_accumulation_window_equals_one_large_batch(sizes: tuple[int, ...]) -> None:
    """Also with uneven batches and a last window that is shorter: every sample counts once."""
    torch.manual_seed(1)
    ours, data = Mlp().double(), [(x.double(), y) for x, y in batches(8, sizes)]
    hand = copy.deepcopy(ours)
    optimizer = hand.configure_optimizers()
    for start in range(0, 8, 3):
        window = data[start : start + 3]
        optimizer.zero_grad()
        hand.loss((torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))).backward()
        optimizer.step()
    runner = trainer(accumulate_grad_batches=3)
    runner.fit(ours, data)
    assert runner.global_step == 3
    for a, b in zip(weights(ours), weights(hand), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_checkpoint_inside_an_accumulation_window_resumes_exactly(tmp_path: Any) -> None:
    """The gradients that wait for the window's other batches are part of the state."""

    class SaveAfterFourBatches(al.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.progress.batches == 4:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    def run(**more: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = Mlp()
        trainer(max_epochs=2, accumulate_grad_batches=3, callbacks=[SaveAfterFourBatches()]).fit(
            model, batches(), **more
        )
        return weights(model)

    whole = run()
    resumed = run(ckpt_path=tmp_path / "inside.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_order_of_hooks() -> None:
    calls: list[str] = []

    class Watched(Mlp):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            calls.append("training_step")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            calls.append("validation_step")

    names = [
        "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_after_backward",
        "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_validation_start", "on_validation_epoch_start",
        "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end",
        "on_fit_end", "teardown",
    ]  # fmt: skip

    def recorder(name: str) -> Any:
        return lambda self, *args, **kwargs: calls.append(name)

    watcher = type("Watcher", (al.Callback,), {name: recorder(name) for name in names})()
    trainer(callbacks=[watcher]).fit(Watched(), batches(1), batches(1))
    assert calls == [
        "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "training_step", "on_before_backward",
        "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_validation_start",
        "on_validation_epoch_start", "on_validation_batch_start", "validation_step", "on_validation_batch_end", "on_validation_epoch_end",
        "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown",
    ]  # fmt: skip


def test_limits() -> None:
    by_steps = trainer(max_epochs=10, max_steps=11)
    by_steps.fit(Mlp(), batches())
    assert (by_steps.global_step, by_steps.current_epoch) == (11, 1)
    by_batches = trainer(max_epochs=2, limit_train_batches=3)
    by_batches.fit(Mlp(), batches())
    assert by_batches.global_step == 6
    by_share = trainer(limit_train_batches=0.5)
    by_share.fit(Mlp(), batches())
    assert by_share.global_step == 4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [8, 16]),
        ({"val_check_interval": 3}, [3, 6, 11, 14]),
        ({"val_check_interval": 0.5}, [4, 8, 12, 16]),
        ({"check_val_every_n_epoch": 2}, [16]),
    ],
)
def test_validation_runs_at_the_configured_steps(settings: dict[str, Any], expected: list[int]) -> None:
    seen: list[int] = []

    class Watched(Mlp):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.global_step)

    trainer(max_epochs=2, **settings).fit(Watched(), batches(), batches(1))
    assert seen == expected


def test_logged_values_count_every_sample_once() -> None:
    class Logging(Mlp):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/mean", batch[0].mean())
            self.log("val/max", batch[0].max(), reduce_fx="max")

    data = batches(5, (4, 1, 7))
    results = trainer().validate(Logging(), data, verbose=False)[0]
    rows = torch.cat([x for x, _ in data]).double()
    assert results["val/mean"] == pytest.approx(float(rows.mean()), abs=1e-6)
    assert results["val/max"] == pytest.approx(float(rows.max()), abs=1e-6)


def test_evaluation_leaves_every_submodule_in_its_mode() -> None:
    class Validated(Mlp):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    model = Validated()
    model.train()
    model.net[1].eval()
    trainer().validate(model, batches(1), verbose=False)
    assert model.training
    assert not model.net[1].training
    assert model.net[0].training


def test_a_nan_loss_stops_the_run_and_names_its_place() -> None:
    class Diverging(Mlp):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch) * (float("nan") if batch_idx == 2 else 1.0)

    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 3 \(epoch 0, batch 2"):
        trainer(log_every_n_steps=1).fit(Diverging(), batches())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"max_epoch": 3}, "Trainer has no argument 'max_epoch'.*did you mean 'max_epochs'?"),
        ({"precision": "fp12"}, "precision='fp12' is not known"),
        ({"accelerator": "abacus"}, "invalid accelerator name: .accelerator='abacus'"),
        ({"strategy": "dpp"}, "invalid strategy name: .strategy='dpp'"),
        ({"limit_train_batches": 1.5}, r"has to be in \[0.0, 1.0\] or an int"),
    ],
)
def test_wrong_arguments_are_named(argument: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        trainer(**argument).fit(Mlp(), batches())


def test_wrong_outputs_are_named() -> None:
    class Vector(Mlp):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0])

    with pytest.raises(TypeError, match=r"must return a scalar tensor.*shape \(4, 3\)"):
        trainer(accumulate_grad_batches=2).fit(Vector(), batches())


def test_predict_returns_every_output() -> None:
    model, data = Mlp(), [x for x, _ in batches(3)]
    model.forward = model.net.forward  # type: ignore[method-assign]
    outputs = trainer().predict(model, data)
    expected = [model.net(x) for x in data]
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_manual_optimization() -> None:
    class Two(Mlp):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            for optimizer in (first, second):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.net[0].parameters(), lr=0.1),
                torch.optim.SGD(self.net[2].parameters(), lr=0.1),
            ]

    model = Two()
    before = weights(model)
    runner = trainer()
    runner.fit(model, batches())
    assert runner.global_step == 8
    assert all(not torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


# -- what a step costs ---------------------------------------------------------------------------------------------


class Deep(Mlp):
    """The benchmark's model: 102 Python calls a step in a loop written by hand."""

    def __init__(self, logs: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        self.names = [f"value{i}" for i in range(logs)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        for name in self.names:
            self.log(name, loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def calls_per_step(run: Any) -> float:
    """Python-level calls of one more step: the slope between two run lengths."""

    def count(steps: int) -> int:
        calls = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(profile)
        try:
            run(steps)
        finally:
            sys.setprofile(None)
        return calls

    run(5)
    return (count(60) - count(20)) / 40


@pytest.mark.parametrize(("logs", "ratio"), [(0, 1.12), (1, 1.16), (10, 1.4)])
def test_python_calls_per_step(logs: int, ratio: float) -> None:
    data = batches(60)

    def raw(steps: int) -> None:
        model = Deep()
        optimizer = model.configure_optimizers()
        for batch in data[:steps]:
            loss = nn.functional.cross_entropy(model.net(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def ours(steps: int) -> None:
        trainer().fit(Deep(logs), data[:steps])

    assert calls_per_step(ours) <= ratio * calls_per_step(raw)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_clip_value_of_zero_clips_nothing(algorithm: str, accumulate: int) -> None:
    clipped, plain = Mlp(), Mlp()
    plain.load_state_dict(clipped.state_dict())
    setting = {"max_epochs": 1, "accumulate_grad_batches": accumulate}
    trainer(gradient_clip_val=0, gradient_clip_algorithm=algorithm, **setting).fit(clipped, batches())
    trainer(**setting).fit(plain, batches())
    assert all(torch.equal(a, b) for a, b in zip(clipped.parameters(), plain.parameters(), strict=True))


class AsksForTheLastBatch(Mlp):
    """Notes ``trainer.is_last_batch`` wherever a batch is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, bool]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("start", batch_idx, self.trainer.is_last_batch))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(("step", batch_idx, self.trainer.is_last_batch))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("end", batch_idx, self.trainer.is_last_batch))


@pytest.mark.parametrize("limit", [None, 3])
def test_the_last_batch_is_known_in_its_step(limit: int | None) -> None:
    module, total = AsksForTheLastBatch(), limit or 8
    trainer(max_epochs=2, limit_train_batches=limit).fit(module, batches())
    epoch = [(where, index, index + 1 == total) for index in range(total) for where in ("start", "step", "end")]
    assert module.seen == epoch * 2


class Stream(IterableDataset[Any]):
    """Batches whose number is not known."""

    def __iter__(self) -> Any:
        return iter(batches())


def test_a_stream_is_not_asked_for_a_batch_beyond_max_steps() -> None:
    """It may be a live one, that another process of the run has ended, or that takes long."""

    class Live(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from batches()[:4]
            raise AssertionError("the fifth batch was asked for")

    run = trainer(max_epochs=-1, max_steps=4)
    run.fit(Mlp(), DataLoader(Live(), batch_size=None))
    assert run.global_step == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_the_last_batch_of_a_stream_is_known_in_its_step(workers: int, tmp_path: Path) -> None:
    module, saver = AsksForTheLastBatch(), al.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    stream = DataLoader(Stream(), batch_size=None, num_workers=workers)
    trainer(max_epochs=2, callbacks=[saver], enable_checkpointing=True).fit(module, stream)
    epoch = [(where, index, index == 7) for index in range(8) for where in ("start", "step", "end")]
    assert module.seen == epoch * 2
    resumed = AsksForTheLastBatch()
    trainer(max_epochs=2).fit(resumed, stream, ckpt_path=next(tmp_path.glob("*step=6*")))
    assert resumed.seen == module.seen[18:]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), resumed.parameters(), strict=True))


def test_a_schedule_stepped_by_hand_at_the_last_batch() -> None:
    class ByHand(Mlp):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    fitted = trainer(max_epochs=3, gradient_clip_val=0.0)  # no clipping: nothing to refuse by hand
    fitted.fit(ByHand(), batches())
    assert fitted.optimizers[0].param_groups[0]["lr"] == 0.125


def test_ranks_train_in_the_precision_that_rank_zero_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "faster_precision", lambda device: "32-true")
    made = trainer(precision="auto", accelerator="cpu")
    # rank 0 has measured otherwise
    monkeypatch.setattr(made.strategy, "broadcast", lambda own: "bf16-mixed" if own == "32-true" else own)
    made.fit(Mlp(), batches())
    assert made.precision == "bf16-mixed"
    assert made.measured == {"precision": "bf16-mixed"}


def test_loggers_get_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "faster_precision", lambda device: "32-true")
    for precision, found in (("auto", {"measured/precision": "32-true"}), ("32-true", {})):
        logger = CSVLogger(tmp_path / precision)
        logged: dict[str, Any] = {}
        monkeypatch.setattr(logger, "log_hyperparams", logged.update)
        trainer(precision=precision, accelerator="cpu", logger=logger).fit(Mlp(), batches())
        assert flatten_dict(logged) == found
