"""Report this machine's devices, threads, disk, packages and problems: ``arclight doctor``.

`command` calls `doctor`. Each section is a function that returns a table of facts; `advice` turns facts into remarks. A new section needs a
line in `doctor`. Keys of ``--json`` are public and stay.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from arclight._installed import distribution, pip_install
from arclight.cli.arguments import Parser
from arclight.cli.style import console_of

INSTRUCTIONS = {
    "AVX2": "avx2",
    "AVX-512": "avx512f",
    "VNNI": "avx512_vnni avx_vnni",
    "BF16": "avx512_bf16",
    "AMX BF16": "amx_bf16",
    "AMX INT8": "amx_int8",
}
"""Instruction sets that matter for speed, with their names in Linux's /proc/cpuinfo."""


def doctor(arguments: list[str]) -> None:
    parser = Parser(
        prog="arclight doctor",
        description="Report devices, threads and packages of this machine, and what would be slow.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    facts = {
        "software": software(),
        "cpu": cpu(),
        "accelerators": accelerators(),
        "room": memory_and_disk(Path()),
        "extras": extras(),
    }
    remarks = advice(facts)
    if options.json:
        print(json.dumps({**facts, "remarks": remarks}, indent=2))
        return

    console = console_of()
    for topic, table in facts.items():
        console.print(grid(topic, table))
    console.print("[bold]remarks[/bold]" if remarks else "Nothing here makes Arclight slow.")
    for remark in remarks:
        console.print(f"  - {remark}", highlight=False, markup=False)


def grid(topic: str, table: dict[str, Any]) -> Any:
    from rich.table import Table

    shown = Table(
        title=topic,
        title_style="bold",
        title_justify="left",
        box=None,
        show_header=False,
        padding=(0, 1, 0, 2),
        min_width=len(topic),
    )
    for name, value in (table or {"none": ""}).items():
        text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
        shown.add_row(name, text)
    return shown


def software() -> dict[str, Any]:
    import torch

    import arclight

    return {
        "arclight": arclight.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none",
        "system": platform.platform(),
    }


def cpu() -> dict[str, Any]:
    import torch

    flags = cpu_flags()
    return {
        "model": cpu_model(),
        "cores": os.cpu_count(),
        "usable cores": usable_cores(),
        "torch's threads": torch.get_num_threads(),
        "torch's kernels": torch.backends.cpu.get_cpu_capability(),
        "instruction sets": [name for name, linux in INSTRUCTIONS.items() if flags & set(linux.split())],
    }


def cpu_flags() -> set[str]:
    """Return the CPU's flags as Linux names them; empty on other systems."""
    return set(cpu_line("flags").split())


def cpu_model() -> str:
    return cpu_line("model name") or platform.processor() or platform.machine()


def cpu_line(name: str) -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(rf"^{name}\s*:(.*)$", info.read_text(encoding="utf-8"), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else ""


def usable_cores() -> float:
    """Count the cores that this process may use, within its affinity and container quota."""
    from arclight.fabric.launchers import available_cores

    bound = available_cores()
    quota = Path("/sys/fs/cgroup/cpu.max")
    limit, _, period = quota.read_text(encoding="utf-8").partition(" ") if quota.exists() else ("max", "", "")
    return float(bound) if limit == "max" else min(bound, round(int(limit) / int(period), 2))


def accelerators() -> dict[str, Any]:
    """Return the GPUs that torch can use: name to description."""
    import torch

    found = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return found


def memory_and_disk(folder: Path) -> dict[str, Any]:
    """Return memory, free shared memory, and free disk space of ``folder``, in GiB."""
    facts = {"disk free GiB": round(shutil.disk_usage(folder).free / 2**30, 1)}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory GiB"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    if Path("/dev/shm").is_dir():  # noqa: S108  (looked at, not written to)
        facts["shared memory GiB"] = round(shutil.disk_usage("/dev/shm").free / 2**30, 2)  # noqa: S108
    return facts


def extras() -> dict[str, Any]:
    """Return the packages of each extra, with their versions or MISSING."""
    found: dict[str, list[str]] = {}
    for requirement in requirements():
        package = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if package and extra and extra[1] != "dev":
            found.setdefault(extra[1], []).append(f"{package[0]} {version(package[0]) or 'MISSING'}")
    return dict(found)


def requirements() -> list[str]:
    """List the installed distribution's requirements; empty when run from its sources."""
    try:
        return importlib.metadata.requires(distribution()) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def advice(facts: dict[str, Any]) -> list[str]:
    """Return advice on what is slow or impossible on this machine, one sentence each."""
    cpu, room = facts["cpu"], facts["room"]
    has = set(cpu["instruction sets"])
    remarks = []
    if not facts["accelerators"]:
        remarks.append("No GPU that torch can use: training runs on the CPU.")
        if shutil.which("nvidia-smi") and facts["software"]["torch's CUDA"] == "none":
            remarks.append(
                "There is an NVIDIA driver, but this torch was built without CUDA: install a CUDA build of torch."
            )
        if not has & {"BF16", "AMX BF16"}:
            remarks.append("This CPU does not compute in bfloat16: precision bf16-mixed will be slower than 32-true.")
    if platform.machine() in ("x86_64", "AMD64") and not has & {"VNNI", "AMX INT8"}:
        remarks.append(
            "This CPU has no int8 dot product (VNNI): int8 programs will be small, but hardly faster than fp32."
        )
    threads, cores = cpu["torch's threads"], cpu["usable cores"]
    if threads < int(cores):
        reason = "OMP_NUM_THREADS is set" if "OMP_NUM_THREADS" in os.environ else "it counts physical cores"
        remarks.append(f"torch uses {threads} of {cores:g} cores ({reason}).")
    if threads > cores:
        remarks.append(f"torch uses {threads} threads on {cores:g} usable cores: set OMP_NUM_THREADS to fewer.")
    if room.get("shared memory GiB", 1.0) < 0.25:
        remarks.append(
            "Little shared memory (/dev/shm): loader processes may fail; give the container more, or workers = 0."
        )
    if room["disk free GiB"] < 2:
        remarks.append("Less than 2 GiB of disk free here: checkpoints may not fit.")
    for extra in ("vision", "deploy", "serve"):
        missing = [name.split()[0] for name in facts["extras"].get(extra, []) if name.endswith("MISSING")]
        if missing:
            remarks.append(f"{', '.join(missing)} not installed: {pip_install(extra)}")
    return remarks
