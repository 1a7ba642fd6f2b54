"""How long it takes, and how much memory, to find a plan for 65,536 GPUs: one process of its own, no GPU."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

MODEL, GPUS, SAMPLES, SEQUENCE = "llama3-405b", 65536, 8192, 8192


def plan_65536() -> dict[str, float]:
    """``plan_65536_seconds`` of a fresh process, imports included, ``plan_65536_cpu_seconds`` of them computed, and its peak memory ``plan_65536_gib``."""
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.planning"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    seconds = time.monotonic() - started
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "plan_65536_seconds": seconds,
        "plan_65536_cpu_seconds": found["cpu_seconds"],
        "plan_65536_gib": found["gib"],
    }


def peak() -> int:
    """Most memory that this process took, in bytes. Linux's getrusage would count what the parent had when it forked."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    from arclight.parallel.hardware import hardware
    from arclight.parallel.planning.chain import Chain
    from arclight.parallel.planning.mesh_search import Limits, search
    from arclight.text.data.data_settings import Text as Data
    from arclight.text.settings import LanguageTask
    from arclight.text.workload import workload

    device = hardware("h100")
    settings = LanguageTask(model=MODEL, data=Data(sequence_length=SEQUENCE))
    found = search(
        Chain(workload(settings, samples=SAMPLES, device=device)), Limits(GPUS, 0.95 * device.memory * 2**30)
    )
    best = found.best[0]
    print(
        json.dumps(
            {
                "gib": peak() / 2**30,
                "cpu_seconds": time.process_time(),
                "processes": best.plan.world_size,
                "considered": found.considered,
                "mfu": best.mfu,
            }
        )
    )


if __name__ == "__main__":
    main()
