"""Shares that lie on the host, beside numbers that lie on a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from arclight.fabric.distributed.sharding import scale_tensors, scale_to_norm
from arclight.parallel.model.parallelize import _is_on


def test_gradients_on_the_host_are_clipped_by_a_norm_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def mul(parts: list[torch.Tensor], factor: torch.Tensor) -> None:
        seen.append((factor.device.type, {part.device.type for part in parts}))

    monkeypatch.setattr(torch, "_foreach_mul_", mul)  # the real one refuses two devices, which fakes do not show
    with FakeTensorMode():
        total = torch.empty((), device="cuda")
        scale_to_norm([nn.Parameter(torch.empty(3)), torch.empty(2)], total, 1.0, False)
        scale_to_norm([torch.empty(3, device="cuda")], total, 1.0, False)
        scale_tensors([torch.empty(3)], 2.0 * total)
    assert seen == [("cpu", {"cpu"}), ("cuda", {"cuda"}), ("cpu", {"cpu"})]


def test_multiplying_takes_numbers_too() -> None:
    parts = [torch.ones(2), torch.ones(3)]
    scale_tensors(parts, 2.0)
    scale_tensors(parts, torch.tensor(3.0))
    assert [part.tolist() for part in parts] == [[6.0, 6.0], [6.0, 6.0, 6.0]]


def test_a_device_with_a_number_is_another_than_its_neighbour() -> None:
    with FakeTensorMode():
        there = torch.empty(1, device="cuda:0")
        assert _is_on(there, torch.device("cuda"))
        assert _is_on(there, torch.device("cuda:0"))
        assert not _is_on(there, torch.device("cuda:1"))
        assert not _is_on(there, torch.device("cpu"))
