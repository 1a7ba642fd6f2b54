"""Describe the operation, module and line that a process' main thread is waiting in.

`watchdog` reports the location and stack of each rank. `RankMissingError` is raised by `watchdog`, `rendezvous` and the pipeline's failure
store and recognised by `launchers`; ``deploy.quantizing.qat`` also asks `is_collective_error`. The words are free.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_FAILURE = re.compile(r"timed? ?out|timeout|connection|peer|gloo|nccl|socket", re.IGNORECASE)
_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}", "<")
"""Paths whose files are not the user's code. A user's checkout may lie in a folder called arclight, too."""


class RankMissingError(RuntimeError):
    """Raised if ranks waited in vain for others; names both, and where they were."""


def is_collective_error(error: BaseException) -> bool:
    """Return True if ``error`` is what a collective raises when other ranks do not enter it."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (type(error) is RuntimeError and _FAILURE.search(str(error)) is not None)


def main_thread_stack() -> str:
    """Return the stack of this process's main thread, as a traceback prints it."""
    frame = _main_frame()
    return "".join(traceback.format_stack(frame)) if frame is not None else "  (it has ended)\n"


def main_thread_location() -> str:
    """Return the location of the main thread in a few words.

    As in ``all_reduce, in blocks.1.linear (Linear), train.py:30 training_step``.
    """
    frame = _main_frame()
    operation, called, line = "", "", ""
    modules: list[Any] = []
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/torch/distributed/" in file and not name.startswith("_") and name not in ("wrapper", "wait"):
            called = called or name
            if file.endswith("distributed_c10d.py"):
                operation = operation or name
        elif not line and not file.startswith(_LIBRARIES):
            line = f"{file.rpartition('/')[2]}:{frame.f_lineno} {name}"
        if (module := _module_of(frame)) is not None:
            modules.append(module)
        frame = frame.f_back
    parts = [operation or called, f"in {_name(modules)}" if modules else "", line]
    return ", ".join(part for part in parts if part) or "an unknown place"


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _module_of(frame: FrameType) -> Any:
    """Return the module whose method a frame is."""
    nn: Any = sys.modules.get("torch.nn")
    count = frame.f_code.co_argcount
    if nn is None or not count:
        return None
    owner = frame.f_locals.get(frame.f_code.co_varnames[0])
    return owner if isinstance(owner, nn.Module) else None


def _name(modules: list[Any]) -> str:
    """Return the innermost module by its name in the outermost, and its class."""
    inner, outer = modules[0], modules[-1]
    names = [name for name, module in outer.named_modules() if module is inner and name]
    return f"{names[0].removeprefix('module.')} ({type(inner).__name__})" if names else type(inner).__name__
