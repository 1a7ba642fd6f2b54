"""Throughput and device statistics as rows of the loggers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from arclight.trainer.callbacks import DeviceStatsMonitor, ThroughputMonitor
from arclight.trainer.loggers.logger import DummyLogger


class Rows(DummyLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, dict(metrics)))

    def named(self, start: str) -> list[tuple[int, dict[str, Any]]]:
        return [(step, row) for step, row in self.rows if any(name.startswith(start) for name in row)]


def test_rows_of_a_fit_leave_validation_out(fit: Any) -> None:
    """Training batches end at 1, 2, 10, 11: seven seconds lie between, five of them validation."""
    logger = Rows()
    monitor = ThroughputMonitor(lambda batch: len(batch[0]), lambda batch: 6, window_size=2, separator="|")
    times = [0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 9.0, 10.0, 11.0, 13.0, 16.0]
    with mock.patch("time.perf_counter", side_effect=times), pytest.warns(UserWarning, match="`flops_per_batch`"):
        fit({"val/score": [1.0, 1.0]}, monitor, batches=2, logger=logger, log_every_n_steps=1)
    train = logger.named("train|time")
    assert [(step, row["train|time"], row["epoch"]) for step, row in train] == [
        (1, 1, 0),
        (2, 2, 0),
        (3, 3, 1),
        (4, 4, 1),
    ]
    assert train[-1][1]["train|device|samples_per_sec"] == 1.0
    assert train[-1][1]["train|device|items_per_sec"] == 6.0
    assert train[-1][1]["train|lengths"] == 24
    validation = logger.named("validate|time")
    assert [(step, row["validate|time"], row["validate|batches"]) for step, row in validation] == [
        (1, 2, 1), (2, 5, 2), (3, 2, 1), (4, 5, 2),
    ]  # fmt: skip


def test_whole_windows_are_timed_and_peaks_compared(fit: Any, scripted: Any) -> None:
    logger, module = Rows(), scripted({"val/score": [1.0]})
    module.flops_per_batch = 30
    monitor = ThroughputMonitor(lambda batch: 1, window_size=2, using_sparse_model=False)
    with mock.patch("arclight.trainer.callbacks.monitoring.throughput_monitor.get_available_flops", return_value=60):
        fit(module, monitor, batches=5, max_epochs=1, logger=logger, log_every_n_steps=1, accumulate_grad_batches=2)
    rows = logger.named("train/time")
    assert [(step, row["train/batches"]) for step, row in rows][:2] == [(1, 2), (2, 4)]
    for _, row in rows:
        assert row["train/device/mfu"] == pytest.approx(row["train/device/flops_per_sec"] / 60)


def test_a_second_evaluation_goes_on_counting(make_trainer: Any, scripted: Any, make_rows: Any) -> None:
    logger = Rows()
    trainer = make_trainer(ThroughputMonitor(lambda batch: 3), logger=logger, log_every_n_steps=2)
    module = scripted()
    module.flops_per_batch = 1
    for _ in range(2):
        trainer.validate(module, make_rows(4), verbose=False)
    rows = logger.named("validate/time")
    assert [(step, row["validate/samples"]) for step, row in rows] == [(2, 6), (4, 12), (6, 18), (8, 24)]
    times = [row["validate/time"] for _, row in rows]
    assert times == sorted(times)


def test_device_statistics_around_logged_batches(fit: Any, make_rows: Any) -> None:
    pytest.importorskip("psutil")
    logger = Rows()
    trainer = fit({"val/score": [1.0]}, DeviceStatsMonitor(), logger=logger, log_every_n_steps=2)
    names = [name for _, row in logger.rows for name in row if name.startswith("DeviceStatsMonitor")]
    assert names.count("DeviceStatsMonitor.on_train_batch_start/cpu_percent") == 2, "the second and the fourth batch"
    assert names.count("DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent") == 2
    assert names.count("DeviceStatsMonitor.on_validation_batch_end/cpu_swap_percent") == 1
    assert [step for step, _ in logger.named("DeviceStatsMonitor.on_train_batch_end")] == [2, 4]
    logger.rows.clear()
    trainer.test(dataloaders=make_rows(2), verbose=False)
    assert logger.named("DeviceStatsMonitor.on_test_batch_start/cpu_percent")


def test_no_rows_of_steps_are_wanted(fit: Any, scripted: Any) -> None:
    logger, module = Rows(), scripted({"val/score": [1.0]})
    module.flops_per_batch = 30
    trainer = fit(
        module,
        ThroughputMonitor(lambda batch: 1),
        DeviceStatsMonitor(),
        logger=logger,
        log_every_n_steps=0,
        max_epochs=1,
    )
    assert trainer.global_step
    assert not logger.named("train/") + logger.named("validate/") + logger.named("DeviceStatsMonitor")


def test_device_statistics_that_are_wanted(fit: Any) -> None:
    pytest.importorskip("psutil")
    logger = Rows()
    with pytest.warns(UserWarning, match=r"filter_keys contains keys not found.*\['cpu_warmth'\]"):
        fit(
            {"val/score": [1.0]},
            DeviceStatsMonitor(filter_keys={"cpu_percent", "cpu_warmth"}),
            logger=logger,
            log_every_n_steps=1,
        )
    names = {name.rpartition("/")[2] for _, row in logger.named("DeviceStatsMonitor") for name in row}
    assert names == {"cpu_percent"}
    logger.rows.clear()
    fit({"val/score": [1.0]}, DeviceStatsMonitor(cpu_stats=False), logger=logger, log_every_n_steps=1)
    assert not logger.named("DeviceStatsMonitor")
    with pytest.raises(ValueError, match="Cannot use `DeviceStatsMonitor`"):
        fit({"val/score": [1.0]}, DeviceStatsMonitor(), logger=False)
