"""Accelerators: which devices a choice means, names for them, and what is said where there are none."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from arclight.fabric import accelerators, registry
from arclight.fabric.accelerators import (
    ACCELERATOR_REGISTRY,
    Accelerator,
    AcceleratorRegistry,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    find_usable_cuda_devices,
    resolve_accelerator,
)
from arclight.fabric.errors import MisconfigurationError, MissingDeviceError


def cuda_devices(count: int) -> Any:
    return mock.patch("arclight.fabric.accelerators.devices.num_cuda_devices", return_value=count)


class Toaster(Accelerator):
    """A user's own kind of device; it has three of them."""

    def __init__(self, slots: int = 1) -> None:
        self.slots = slots

    @staticmethod
    def name() -> str:
        return "toaster"

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def auto_device_count() -> int:
        return 3

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[Any]:
        return [torch.device("cpu")] * devices

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        (1, [0]),
        (3, [0, 1, 2]),
        ("3", [0, 1, 2]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        ([1, 3], [1, 3]),
        ((3, 0), [3, 0]),
        ("1, 3", [1, 3]),
        ("2,", [2]),
        (0, None),
        ("0", None),
        ([], None),
    ],
)
def test_forms_of_devices(devices: Any, chosen: list[int] | None) -> None:
    with cuda_devices(4):
        assert CUDAAccelerator.parse_devices(devices) == chosen


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        (0.5, TypeError, "must be an int, a string, a sequence of ints, but you passed 0.5"),
        (None, TypeError, "must be an int, a string, a sequence of ints, but you passed None"),
        (True, TypeError, "but you passed True"),
        (["0"], TypeError, "a sequence of ints, but you passed a sequence of str"),
        ([False], TypeError, "a sequence of bool"),
        (-2, MisconfigurationError, "give a count, or -1 for all"),
        ("two", MisconfigurationError, "neither a number nor numbers between commas"),
        ([0, 0], MisconfigurationError, "must be unique"),
        ([1, 9], MisconfigurationError, r"You requested gpu: \[1, 9\]\n But your machine only has: \[0, 1, 2, 3\]"),
        (5, MisconfigurationError, "But your machine only has"),
    ],
)
def test_invalid_devices_are_refused(devices: Any, error: type[Exception], message: str) -> None:
    with cuda_devices(4), pytest.raises(error, match=message):
        CUDAAccelerator.parse_devices(devices)


def test_all_devices_of_a_machine_without_any() -> None:
    with cuda_devices(0), pytest.raises(MisconfigurationError, match="GPUs requested but none are available"):
        CUDAAccelerator.parse_devices(-1)


def test_torchrun_shows_each_process_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with cuda_devices(1):
        assert CUDAAccelerator.parse_devices(4) == [0, 1, 2, 3]


def test_devices_of_the_processor_are_a_count() -> None:
    assert CPUAccelerator.get_parallel_devices("3") == [torch.device("cpu")] * 3
    for devices in ([3], -1, 0, "x", True):
        with pytest.raises(TypeError, match="should be an int > 0"):
            CPUAccelerator.parse_devices(devices)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [CPUAccelerator, CUDAAccelerator, MPSAccelerator])
def test_a_device_of_another_kind_is_refused(kind: type[Accelerator]) -> None:
    with pytest.raises(ValueError, match=f"Device should be {kind.name().upper()}, got meta"):
        kind().setup_device(torch.device("meta"))


def test_cuda_claims_its_device() -> None:
    with (
        mock.patch("torch.cuda.set_device") as claim,
        mock.patch("torch.cuda.is_available", return_value=False),
    ):
        CUDAAccelerator().setup_device(torch.device("cuda", 1))
    claim.assert_called_once_with(torch.device("cuda", 1))


def test_usable_cuda_devices() -> None:
    def occupied(value: Any, device: torch.device) -> None:
        if device.index in (0, 2):
            raise RuntimeError("all CUDA-capable devices are busy")

    with cuda_devices(4), mock.patch("arclight.fabric.accelerators.devices.torch.tensor", side_effect=occupied):
        assert find_usable_cuda_devices() == [1, 3]
        assert find_usable_cuda_devices(1) == [1]
        with pytest.raises(RuntimeError, match=r"only 2 can be used .* devices \[0, 2\] are occupied by other"):
            find_usable_cuda_devices(3)
        with pytest.raises(ValueError, match="this machine only has 4 GPUs"):
            find_usable_cuda_devices(5)
    with cuda_devices(0), pytest.raises(ValueError, match="no visible CUDA devices"):
        find_usable_cuda_devices(2)
    assert find_usable_cuda_devices(0) == []


def test_the_processor_reports_its_load() -> None:
    stats = CPUAccelerator().get_device_stats(torch.device("cpu"))
    assert set(stats) == {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent"}
    assert 0 < stats["cpu_vm_percent"] <= 100


def test_names_and_objects_choose_an_accelerator() -> None:
    mine = Toaster()
    assert resolve_accelerator(mine) is mine
    assert isinstance(resolve_accelerator(Toaster), Toaster)
    assert isinstance(resolve_accelerator("cpu"), CPUAccelerator)
    with cuda_devices(2):
        assert isinstance(resolve_accelerator("gpu"), CUDAAccelerator)
        assert isinstance(resolve_accelerator("auto"), CUDAAccelerator)
    with pytest.raises(ValueError, match=r"invalid accelerator name: `accelerator='cocofruit'`.*cpu, cuda, mps"):
        resolve_accelerator("cocofruit")


def test_a_device_that_the_machine_lacks_is_an_error_of_several_kinds() -> None:
    with (
        cuda_devices(0),
        pytest.raises(MissingDeviceError, match="`CUDAAccelerator` can not run on your system since the") as caught,
    ):
        resolve_accelerator("cuda")
    assert isinstance(caught.value, (RuntimeError, ValueError))
    assert "cpu" in str(caught.value)


def test_xla_devices_are_refused_with_what_to_use_instead() -> None:
    for name in ("tpu", "xla"):
        with pytest.raises(MissingDeviceError, match=f"accelerator='{name}': XLA devices are not supported; use"):
            resolve_accelerator(name)
    assert not accelerators.XLAAccelerator.is_available()
    with pytest.raises(NotImplementedError, match="`XLAAccelerator` is not offered: XLA devices are not supported"):
        accelerators.XLAAccelerator()


def test_a_registry_makes_what_a_name_stands_for() -> None:
    names = AcceleratorRegistry()
    names.register("toaster", Toaster, description="browns", slots=2)

    @names.register("grill", slots=4)
    class Grill(Toaster):
        pass

    assert names.available_accelerators() == {"toaster", "grill"}
    assert names["toaster"] == {
        "accelerator": Toaster,
        "accelerator_name": "toaster",
        "description": "browns",
        "init_params": {"slots": 2},
    }
    assert names.get("toaster").slots == 2
    assert type(names.get("grill")) is Grill
    with pytest.raises(ValueError, match="override=True"):
        names.register("grill", Grill)
    with pytest.raises(TypeError, match="must be text"):
        names.register(3, Grill)  # type: ignore[arg-type]
    names.remove("grill")
    with pytest.raises(KeyError, match="not a registered accelerator; there are: toaster"):
        names.get("grill")


def test_installed_packages_bring_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = mock.Mock(load=lambda: Toaster)
    entry.name = "toaster"
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "arclight.accelerators" else [])
    registry.installed.cache_clear()
    try:
        assert "toaster" in ACCELERATOR_REGISTRY.available_accelerators()
        assert isinstance(resolve_accelerator("toaster"), Toaster)
    finally:
        registry.installed.cache_clear()
