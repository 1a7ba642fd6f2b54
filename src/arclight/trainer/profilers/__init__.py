"""Profile where the time of a run goes. A user's own is a subclass of ``Profiler``.

In: the functions of a run; out: a report. Open ``profiler`` first, the base. ``simple`` measures actions, ``advanced`` uses cProfile, ``pytorch``
torch.profiler; ``profiling`` wraps a run's functions.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.trainer.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from arclight.trainer.profilers.profiler import PassThroughProfiler as PassThroughProfiler
    from arclight.trainer.profilers.profiler import Profiler as Profiler
    from arclight.trainer.profilers.profiler import resolve_profiler as resolve_profiler
    from arclight.trainer.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
    from arclight.trainer.profilers.simple import SimpleProfiler as SimpleProfiler

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "AdvancedProfiler": "arclight.trainer.profilers.advanced",
        "PassThroughProfiler": "arclight.trainer.profilers.profiler",
        "Profiler": "arclight.trainer.profilers.profiler",
        "PyTorchProfiler": "arclight.trainer.profilers.pytorch",
        "SimpleProfiler": "arclight.trainer.profilers.simple",
        "resolve_profiler": "arclight.trainer.profilers.profiler",
    },
)
