"""Start a script that uses Fabric in several processes, unchanged: ``arclight run``.

`command` calls `run`. It sets the environment variables from which `arclight.Fabric` takes arguments that the script leaves at their defaults
(``trainer.fabric.fabric``), under Lightning's names (``LT_*``), and starts torch's launcher. Names of flags and variables must stay.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from arclight.cli.arguments import Parser, UsageError

_SPAWNING = ("spawn", "fork", "notebook")


def run(arguments: list[str]) -> None:
    """Set the variables of :class:`arclight.Fabric` (``LT_*``) and start torch's launcher."""
    options = _parser().parse_args(arguments)
    if not Path(options.script).is_file():
        raise UsageError(f"{options.script} is not a file")
    if options.strategy is not None and any(word in options.strategy for word in _SPAWNING):
        raise UsageError(
            f"--strategy {options.strategy} starts its processes itself: run the script with python, or choose ddp"
        )
    processes = _local_processes(options.accelerator or "auto", options.devices)
    chosen = {
        "LT_CLI_USED": "1", "LT_ACCELERATOR": options.accelerator, "LT_STRATEGY": options.strategy,
        "LT_DEVICES": options.devices, "LT_NUM_NODES": str(options.num_nodes), "LT_PRECISION": options.precision,
    }  # fmt: skip
    os.environ.update({name: value for name, value in chosen.items() if value is not None})
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))

    from torch.distributed import run as torchrun

    torchrun.main([
        f"--nproc_per_node={processes}", f"--nnodes={options.num_nodes}", f"--node_rank={options.node_rank}",
        f"--master_addr={options.main_address}", f"--master_port={options.main_port or _port(options.num_nodes)}",
        options.script, *options.script_args,
    ])  # fmt: skip


def _parser() -> Parser:
    parser = Parser(
        prog="arclight run",
        usage="arclight run [options] script.py [the script's own arguments]",
        description="Launch a script that uses Fabric in several processes. Options that are not given are left to the script.",
    )
    parser.add_argument("--accelerator", help="cpu, cuda, gpu, mps or auto")
    parser.add_argument("--strategy", help="ddp, fsdp, ...")
    parser.add_argument(
        "--devices", default="1", help="number or indices (0,3) of devices per node, or auto (default 1)"
    )
    parser.add_argument("--num-nodes", "--num_nodes", type=int, default=1, help="number of nodes (default 1)")
    parser.add_argument("--node-rank", "--node_rank", type=int, default=0, help="rank of this node (default 0)")
    parser.add_argument(
        "--main-address", "--main_address", default="127.0.0.1", help="address of node 0 (default loopback)"
    )
    parser.add_argument(
        "--main-port", "--main_port", type=int, help="port of node 0 (default 29400; any free one for a single node)"
    )
    parser.add_argument("--precision", help="32-true, 16-mixed, bf16-mixed, ...")
    parser.add_argument("script", help="script to run")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _local_processes(accelerator: str, devices: str) -> int:
    """Count the processes on this node, one for each device."""
    from arclight.fabric.accelerators import resolve_accelerator

    kind = resolve_accelerator(accelerator)
    try:
        chosen = kind.auto_device_count() if devices in ("auto", "-1") else kind.parse_devices(devices)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--devices {devices}: {error}") from error
    return chosen if isinstance(chosen, int) else len(chosen or [])


def _port(num_nodes: int) -> int:
    from arclight.fabric.environments import find_free_network_port

    return find_free_network_port() if num_nodes == 1 else 29400
