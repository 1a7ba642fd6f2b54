"""Rates and peaks, against numbers worked out by hand."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
from torch import nn

import arclight as al
from arclight.trainer.throughput import Throughput, ThroughputMonitor, get_available_flops, measure_flops


def test_rates_over_a_moving_window() -> None:
    throughput = Throughput(available_flops=200.0, world_size=2, window_size=3, using_sparse_model=False)
    for step in range(1, 5):
        throughput.update(time=0.5 * step, batches=step, samples=4 * step, lengths=40 * step, flops=10)
        if step < 3:
            assert not [name for name in throughput.compute() if name.endswith("per_sec")], "the window is not full"
    assert throughput.compute() == {
        "time": 2.0, "batches": 4, "samples": 16, "lengths": 160,
        "device/batches_per_sec": 2.0, "batches_per_sec": 4.0, "device/samples_per_sec": 8.0, "samples_per_sec": 16.0,
        "device/items_per_sec": 80.0, "items_per_sec": 160.0, "device/flops_per_sec": 20.0, "flops_per_sec": 40.0,
        "device/mfu": 0.1,
    }  # fmt: skip
    throughput.reset()
    throughput.update(time=0.1, batches=1, samples=1)
    assert throughput.compute() == {"time": 0.1, "batches": 1, "samples": 1}


def test_numbers_that_cannot_be_are_refused() -> None:
    throughput = Throughput()
    throughput.update(time=1.0, batches=1, samples=1)
    with pytest.raises(ValueError, match=r"to increase, last: 1\.0, current: 1\.0"):
        throughput.update(time=1.0, batches=2, samples=2)
    with pytest.raises(ValueError, match=r"samples .1. to be greater or equal than batches"):
        Throughput().update(time=0, batches=2, samples=1)
    with pytest.raises(ValueError, match=r"lengths .1. to be greater or equal than samples"):
        Throughput().update(time=0, batches=2, samples=2, lengths=1)
    with pytest.raises(RuntimeError, match="same number of samples"):
        throughput.update(time=2.0, batches=2, samples=2, lengths=2)


def test_sparse_models_have_another_peak() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Throughput(100.0, using_sparse_model=True).available_flops == 200.0
        assert Throughput(100.0, using_sparse_model=False).available_flops == 100.0
        assert Throughput().available_flops is None
    with pytest.warns(UserWarning, match="dense model"):
        Throughput(100.0)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.5e12),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989.5e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA A100-SXM4-40GB", torch.float64, 9.7e12),
        ("NVIDIA RTX A6000", torch.bfloat16, 38.7e12),
        ("Tesla V100-PCIE-32GB", torch.float16, 112e12),
        ("NVIDIA L4", torch.float16, 121e12),
        ("NVIDIA GeForce RTX 3080 Ti", torch.float32, 34.1e12),
    ],
)
def test_peaks_by_the_names_that_drivers_give(name: str, dtype: torch.dtype, peak: float) -> None:
    with mock.patch("torch.cuda.get_device_name", return_value=name):
        assert get_available_flops(torch.device("cuda"), dtype) == peak


def test_tf32_counts_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100 80GB PCIe")
    for allowed, peak in (("highest", 19.5e12), ("high", 156e12)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda allowed=allowed: allowed)
        assert get_available_flops(torch.device("cuda"), torch.float32) == peak


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 3070 Ti", "CocoNut"])
def test_an_unknown_chip_is_reported(name: str) -> None:
    with (
        mock.patch("torch.cuda.get_device_name", return_value=name),
        pytest.warns(UserWarning, match=f"not found for '{name}'"),
    ):
        assert get_available_flops(torch.device("cuda"), torch.bfloat16) is None
    with (
        mock.patch("torch.cuda.get_device_name", return_value="Tesla T4"),
        pytest.warns(UserWarning, match="does not support torch.bfloat16"),
    ):
        assert get_available_flops(torch.device("cuda"), torch.bfloat16) is None
    assert get_available_flops(torch.device("cpu"), torch.float32) is None


def test_operations_are_counted_without_computing() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(32, 8), torch.randn(4, 32)
    forward = measure_flops(model, lambda: model(x))
    assert forward == 2 * 4 * 32 * 8
    assert measure_flops(model, lambda: model(x), torch.sum) == 2 * forward, "the input needs no gradient"


def test_a_fabric_logs_its_own_rows() -> None:
    logger = mock.Mock()
    monitor = ThroughputMonitor(al.Fabric(devices=1, accelerator="cpu", loggers=logger), window_size=2, separator="|")
    for step in (1, 2):
        monitor.update(time=float(step), batches=step, samples=3 * step)
        monitor.compute_and_log(step=None if step == 1 else 7)
    assert monitor.step == 7
    rows = [(call.kwargs["step"], call.kwargs["metrics"]) for call in logger.log_metrics.mock_calls]
    assert [step for step, _ in rows] == [0, 7]
    assert rows[1][1]["device|samples_per_sec"] == 3.0
