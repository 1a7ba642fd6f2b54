"""Describe devices: rates, memory and links, nominally and in real programs.

``arclight plan --gpu`` names a device of `TABLE` or a TOML file with the fields of `Hardware`: these names stay. The planner and the pipeline's
cost predictions compute times from them.

Nominal rates are dense (without sparsity). Sources: NVIDIA's data sheets of A100 (2021), H100 (2022), H200 (2023), L40S (2023) and
HGX B200 (2024), AMD's of MI300X (2023). ``achieved`` and ``attention`` are fitted: those of H100 and H200 so that dense models reach the 47 to
50 % of the nominal rate that Megatron-LM and nanochat publish for bf16 (a large product alone reaches 80 % of an H200); those of
the others are estimates. Bandwidths of links are 63 to 84 % of nominal. A TOML file of one's own may replace all of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch

from arclight.parallel.op_recorder import Op


class HardwareError(ValueError):
    """A device that is not known, or whose description cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Figures of a device and its links.

    Rates in TFLOP/s, bandwidths in GB/s (10^9 bytes), memory in GiB, times in microseconds.
    """

    name: str
    memory: float
    """GiB that a program can have."""
    bf16: float
    """Nominal TFLOP/s of bfloat16 matrix products: what MFU is measured against."""
    fp32: float
    """Nominal TFLOP/s of float32 matrix products (TF32 if that is what trains)."""
    achieved: float
    """Share of the nominal rate that large matrix products reach in a training step."""
    attention: float
    """Share of the nominal rate that a fused attention reaches, forward and backward together."""
    bandwidth: float
    """GB/s between the device and its memory, nominal."""
    node: int
    """Devices that the fast links join."""
    link: float
    """GB/s that a device sends to others of its node while it receives as much."""
    network: float
    """GB/s that a device sends to other nodes."""
    link_latency: float = 2.0
    """Microseconds for a step of a collective within a node."""
    network_latency: float = 5.0
    """Microseconds for a step of a collective between nodes."""
    launch: float = 4.0
    """Microseconds until the host has the next kernel ready."""
    kind: str = "gpu"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("name", "kind") and not (math.isfinite(value) and value > 0):
                raise HardwareError(f"{field.name} of {self.name} must be a positive number, got {value!r}")
        if self.achieved > 1 or self.attention > 1:
            raise HardwareError(f"achieved and attention of {self.name} are shares of the nominal rate: at most 1")

    def seconds(self, op: Op) -> float:
        """Estimate the seconds of an operation by the roofline model.

        It is as long as it computes, moves data, or is launched, whichever is longest.
        """
        nominal = (self.bf16 if op.dtype in _SHORT else self.fp32) * 1e12
        rate = nominal * (self.attention if op.kind == "attention" else self.achieved)
        busy = max(op.flops / rate, op.bytes / (self.bandwidth * STREAMED * 1e9))
        return busy if op.fused else max(busy, self.launch * 1e-6)


STREAMED = 0.85
"""Share of the nominal bandwidth that kernels reach which only move data."""
_SHORT = (torch.bfloat16, torch.float16)

TABLE = {
    # 700 W. NVLink 4: 450 GB/s each way. One 400 Gbit/s adapter for each GPU.
    "h100": Hardware(
        name="H100 SXM 80GB", memory=79.1, bf16=989.4, fp32=494.7, achieved=0.53, attention=0.33, bandwidth=3350, node=8,
        link=360, network=42,
    ),
    # The same chip with more and faster memory.
    "h200": Hardware(
        name="H200 SXM 141GB", memory=139.8, bf16=989.4, fp32=494.7, achieved=0.57, attention=0.36, bandwidth=4800, node=8,
        link=360, network=42,
    ),
    # Power holds this one back less. NVLink 3: 300 GB/s each way. 200 Gbit/s adapters.
    "a100": Hardware(
        name="A100 SXM 80GB", memory=79.1, bf16=312, fp32=156, achieved=0.65, attention=0.45, bandwidth=2039, node=8,
        link=230, network=21,
    ),
    # HGX B200: 18 PFLOP/s dense bf16 for eight. NVLink 5: 900 GB/s each way.
    "b200": Hardware(
        name="B200 SXM 180GB", memory=178.3, bf16=2250, fp32=1125, achieved=0.53, attention=0.33, bandwidth=8000, node=8,
        link=700, network=42,
    ),
    # Infinity Fabric: 7 links of 64 GB/s each way.
    "mi300x": Hardware(
        name="MI300X 192GB", memory=191.5, bf16=1307.4, fp32=653.7, achieved=0.40, attention=0.25, bandwidth=5300, node=8,
        link=300, network=42,
    ),
    # 350 W, no NVLink: PCIe 4.0 x 16, 32 GB/s each way.
    "l40s": Hardware(
        name="L40S 48GB", memory=44.4, bf16=362, fp32=183, achieved=0.55, attention=0.35, bandwidth=864, node=8, link=20,
        network=21,
    ),
    # Two cores of a server with 256-bit vectors at about 3 GHz, over loopback: an order of magnitude, from no data sheet.
    "cpu": Hardware(
        name="CPU, 2 cores", memory=8, bf16=0.19, fp32=0.19, achieved=0.6, attention=0.3, bandwidth=20, node=1 << 20, link=2,
        network=2, link_latency=100, network_latency=100, launch=5, kind="cpu",
    ),
}  # fmt: skip


def hardware(name: str) -> Hardware:
    """Return the device ``name``, or the one that a TOML file describes.

    The file has its fields, and ``like = "h100"`` for those it leaves out. Raises HardwareError for a name that is not
    known or a field that does not fit.
    """
    if name.lower() in TABLE:
        return TABLE[name.lower()]
    if not name.endswith(".toml"):
        near = difflib.get_close_matches(name.lower(), TABLE, 1)
        advice = f"did you mean {near[0]}?" if near else f"there is {', '.join(TABLE)}, or a .toml file of your own"
        raise HardwareError(f"no figures are known of the GPU {name}; {advice}")
    path = Path(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise HardwareError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    base = dataclasses.asdict(hardware(str(table.pop("like")))) if "like" in table else {}
    fields = {field.name: field for field in dataclasses.fields(Hardware)}
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1) or sorted(fields)
            raise HardwareError(f"{name}: {key} is not a field of a device; did you mean {', '.join(near)}?")
        if isinstance(value, str) != (key in ("name", "kind")) or not isinstance(value, (str, int, float)):
            raise HardwareError(f"{name}: {key} cannot be {value!r}")
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in base | table]
    if missing and missing != ["name"]:
        raise HardwareError(
            f'{name} leaves out {", ".join(missing)}: add them, or like = "h100" for those it has in common'
        )
    return Hardware(**{"name": path.stem, **base, **table})
