"""Profile the operators of each action with torch.profiler.

``Trainer(profiler="pytorch")`` makes one, or users do. Arguments, and the labels of a trace (``[pl]...``), are Lightning's.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.profiler import EventList, record_function
from torch.profiler import ProfilerAction, ProfilerActivity, tensorboard_trace_handler

from arclight._intervals import NonNegativeInt, check
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.warnings import WarningCache
from arclight.trainer.profilers.profiler import Profiler

STAGES = ("training_step", "validation_step", "test_step", "predict_step")

_REACHABLE_ACTIONS = {
    (ProfilerAction.RECORD, ProfilerAction.WARMUP): ProfilerAction.RECORD,
    (ProfilerAction.RECORD, ProfilerAction.NONE): ProfilerAction.RECORD_AND_SAVE,
    (ProfilerAction.WARMUP, ProfilerAction.NONE): ProfilerAction.WARMUP,
}
"""The action in place of the next one, by (previous, next), where torch.profiler refuses that order; steps of two kinds alternate."""


class StageSchedule:
    """Schedule that counts the steps of one kind (training, validation, ...) at a time.

    ``schedule`` is called with that count, until the kind's trace is complete.

    torch.profiler calls this object after every step with its own count, of all kinds together. Before the first step nothing is recorded;
    steps of the sanity check are not counted.
    """

    def __init__(self, schedule: Callable[[int], ProfilerAction]) -> None:
        self.schedule = schedule
        self.reset()

    def reset(self) -> None:
        """Reset all steps."""
        self.steps = dict.fromkeys(STAGES, 0)
        self.finished: set[str] = set()
        self.stage: str | None = None
        self._fitting = False
        self._previous = ProfilerAction.NONE

    def count_step(self, action_name: str, fitting: bool) -> None:
        """Count the step that has ended, by the kind that its action name ends with."""
        self.stage = next(stage for stage in STAGES if action_name.endswith(stage))
        self._fitting = fitting

    @property
    def step(self) -> int:
        """Steps so far of the kind that is running."""
        return self.steps[self.stage] if self.stage is not None else 0

    def __call__(self, _: int) -> ProfilerAction:
        """Return the profiler's next action; its own step count, of all kinds together, is ignored."""
        action = ProfilerAction.NONE
        if self.stage is not None and self.stage not in self.finished:
            if not (self._fitting and self.stage == "validation_step" and not self.steps["training_step"]):
                self.steps[self.stage] += 1
            action = self.schedule(self.step)
            if action is ProfilerAction.RECORD_AND_SAVE:
                self.finished.add(self.stage)
        self._previous = _REACHABLE_ACTIONS.get((self._previous, action), action)
        return self._previous


warning_cache = WarningCache()

_OWN_KWARGS = {"export_to_flame_graph": False, "metric": "self_cpu_time_total", "enabled": True}
"""Accepted beside the arguments of ``torch.profiler.profile``."""
_NEEDED_STEPS = 5
"""Steps until the default schedule has a trace."""


class RegisterRecordFunction:
    """Context in which a trace shows the forward of each of ``model``'s modules by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._records: dict[str, list[Any]] = {}

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            if name:
                label = f"[pl][module]{type(module).__module__}.{type(module).__name__}: {name}"
                self._handles.append(module.register_forward_pre_hook(self._begin(label)))
                self._handles.append(module.register_forward_hook(self._end(label), always_call=True))

    def _begin(self, label: str) -> Callable[..., None]:
        def before(*_: Any) -> None:
            record = record_function(label)
            record.__enter__()
            self._records.setdefault(label, []).append(record)

        return before

    def _end(self, label: str) -> Callable[..., None]:
        def after(*_: Any) -> None:
            if self._records.get(label):
                self._records[label].pop().__exit__(None, None, None)

        return after

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class PyTorchProfiler(Profiler):
    """Profile with torch's own profiler: operators on CPU and GPU.

    The run's actions and modules are labels.

    ``schedule`` (default: of each five steps of a stage skip one, warm up one, record three, once) is asked by the
    number of a stage's steps; None records everything. ``export_to_chrome`` writes a trace that Chrome,
    Perfetto and TensorBoard show, ``export_to_flame_graph`` stacks of ``metric``, into ``dirpath``. ``emit_nvtx`` marks
    ranges for NVIDIA's tools and reports nothing itself. The report has ``row_limit`` rows (-1: all) in order of
    ``sort_by_key``, with ``table_kwargs`` for its layout; ``group_by_input_shapes`` with ``record_shapes=True`` tells
    shapes apart. Further arguments are those of ``torch.profiler.profile``.
    Raises MisconfigurationError for an unknown sort key or a schedule that is none, KeyError for an unknown
    argument of the table, TypeError for any other unknown argument.
    """

    STEP_FUNCTIONS = {"training_step", "validation_step", "test_step", "predict_step"}
    AVAILABLE_SORT_KEYS = {
        "cpu_time",
        "cuda_time",
        "cpu_time_total",
        "cuda_time_total",
        "cpu_memory_usage",
        "cuda_memory_usage",
        "self_cpu_memory_usage",
        "self_cuda_memory_usage",
        "count",
    }

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        _check_kwargs(profiler_kwargs)
        check("row_limit", row_limit, NonNegativeInt | Literal[-1])
        self._group_by_input_shapes = group_by_input_shapes and profiler_kwargs.get("record_shapes", False)
        self._emit_nvtx, self._export_to_chrome, self._row_limit = emit_nvtx, export_to_chrome, row_limit
        self._record_module_names = record_module_names
        self._settings = {**_OWN_KWARGS, **{k: v for k, v in profiler_kwargs.items() if k in _OWN_KWARGS}}
        self._profiler_kwargs = {k: v for k, v in profiler_kwargs.items() if k not in _OWN_KWARGS}
        self._profiler_kwargs["activities"] = list(profiler_kwargs.get("activities") or _activities())
        if self._settings["export_to_flame_graph"]:
            self._profiler_kwargs["with_stack"] = True
        self._given_schedule = _checked_schedule(profiler_kwargs.get("schedule", default_schedule))
        self._schedule = StageSchedule(self._given_schedule) if self._given_schedule is not None else None
        self._sort_by_key = sort_by_key or _default_sort_by_key(self._profiler_kwargs["activities"])
        if self._sort_by_key not in self.AVAILABLE_SORT_KEYS:
            raise MisconfigurationError(
                f"Found sort_by_key: {self._sort_by_key}. Should be within {sorted(self.AVAILABLE_SORT_KEYS)}."
            )
        self._table_kwargs = _checked_table(table_kwargs or {})
        self.profiler: Any = None
        self.function_events: EventList | None = None
        self._register: RegisterRecordFunction | None = None
        self._cuda_profiler: Any = None
        self._recording_map: dict[str, Any] = {}
        self._last_step = ""

    # -- recording -------------------------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        if self.profiler is None and self._settings["enabled"]:
            self._begin()
        if self._lightning_module is not None and self._register is None and self._record_module_names:
            self._register = RegisterRecordFunction(self._lightning_module)
            self._register.__enter__()
        if self.profiler is not None and action_name not in self._recording_map:
            record = record_function(f"[pl][profile]{action_name}")
            record.__enter__()
            self._recording_map[action_name] = record

    def stop(self, action_name: str) -> None:
        record = self._recording_map.pop(action_name, None)
        if record is not None:
            record.__exit__(None, None, None)
        is_step = any(action_name.endswith(step) for step in self.STEP_FUNCTIONS)
        if is_step and self.profiler is not None and not self._emit_nvtx:
            self._last_step = action_name
            self._step(action_name)

    def _begin(self) -> None:
        if torch._C._autograd._profiler_enabled():  # another profiler, that nobody ended
            torch._C._autograd._disable_profiler()
        if self._emit_nvtx:
            self._cuda_profiler = torch.cuda.profiler.profile()
            self._cuda_profiler.__enter__()
            self.profiler = torch.autograd.profiler.emit_nvtx()
        else:
            arguments = {
                "on_trace_ready": self._export,
                "acc_events": True,
                **self._profiler_kwargs,
                "schedule": self._schedule,
            }
            self.profiler = torch.profiler.profile(**arguments)
        self.profiler.__enter__()

    def _step(self, action_name: str) -> None:
        if self._schedule is not None:
            self._schedule.count_step(action_name, fitting=self._stage == "fit")
            if self._given_schedule is default_schedule and self._steps_to_come(action_name) < _NEEDED_STEPS:
                warning_cache.warn(
                    "PyTorchProfiler: not enough steps to properly record traces by the default schedule; every step is recorded instead"
                )
                self._schedule = None
                self.profiler.schedule = _always
        if self._schedule is not None:
            self.profiler.step_num = self._schedule.step
        self.profiler.step()

    def _steps_to_come(self, action_name: str) -> float:
        """Count the steps to come of the kind of ``action_name``; infinity without a trainer."""
        if self._lightning_module is None:
            return float("inf")
        trainer = self._lightning_module.trainer
        if action_name.endswith("training_step"):
            return float(trainer.num_training_batches)
        if action_name.endswith("validation_step") and self._stage == "fit":
            return float(sum(trainer.num_val_batches) + sum(trainer.num_sanity_val_batches))
        return float(sum(trainer.num_eval_batches))

    def _export(self, profiler: Any) -> None:
        if self.dirpath is None:
            rank_zero_warn("The PyTorchProfiler failed to export trace as `dirpath` is None")
            return
        name = self._prepare_filename(self._last_step or None, extension="")
        Path(self.dirpath).mkdir(parents=True, exist_ok=True)
        if self._export_to_chrome:
            tensorboard_trace_handler(str(self.dirpath), name)(profiler)
        if self._settings["export_to_flame_graph"]:
            profiler.export_stacks(str(Path(self.dirpath) / f"{name}.stack"), metric=self._settings["metric"])

    # -- the report ------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        self._end()
        if not self.function_events:
            return ""
        averages = self.function_events.key_averages(group_by_input_shapes=self._group_by_input_shapes)
        sort_by = self._sort_by_key.replace("cuda", "device")  # torch's name for any accelerator
        table = averages.table(sort_by=sort_by, row_limit=self._row_limit, **self._table_kwargs)
        return self._titled("Profiler Report", [("records", table)])

    def _end(self) -> None:
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)
            recorded = getattr(profiler, "profiler", None) is not None  # the schedule may never have come so far
            self.function_events = profiler.events() if recorded else None
        if self._cuda_profiler is not None:
            self._cuda_profiler.__exit__(None, None, None)
            self._cuda_profiler = None
        if self._schedule is not None:
            self._schedule.reset()
        if self._register is not None:
            self._register.__exit__()
            self._register = None

    def teardown(self, stage: str | None) -> None:
        for record in self._recording_map.values():  # actions that an error left open
            record.__exit__(None, None, None)
        self._recording_map.clear()
        self._end()
        super().teardown(stage)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the recording in this process."""
        return {**self.__dict__, "profiler": None, "_register": None, "_cuda_profiler": None, "_recording_map": {}, "_lightning_module": None}  # fmt: skip


def _always(step: int) -> ProfilerAction:
    return ProfilerAction.RECORD


_SKIP_WARM_UP_RECORD = torch.profiler.schedule(wait=1, warmup=1, active=3)


def default_schedule(step: int) -> ProfilerAction:
    """Skip one step, warm up for one, record three: little enough to leave on."""
    return _SKIP_WARM_UP_RECORD(step)  # type: ignore[no-any-return]


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


def _default_sort_by_key(activities: list[ProfilerActivity]) -> str:
    return f"{'cuda' if ProfilerActivity.CUDA in activities else 'cpu'}_time_total"


def _checked_schedule(schedule: Any) -> Callable[[int], ProfilerAction] | None:
    if schedule is None:
        return None
    if not callable(schedule):
        raise MisconfigurationError(f"Schedule should be a callable. Found: {schedule}")
    if not isinstance(action := schedule(0), ProfilerAction):
        raise MisconfigurationError(f"Schedule should return a `torch.profiler.ProfilerAction`. Found: {action}")
    return schedule  # type: ignore[no-any-return]


def _check_kwargs(given: dict[str, Any]) -> None:
    known = [*inspect.signature(torch.profiler.profile.__init__).parameters][1:] + [*_OWN_KWARGS]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *inspect.signature(PyTorchProfiler).parameters], 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; torch.profiler.profile takes {', '.join(known)}"
            raise TypeError(f"PyTorchProfiler has no argument {name!r}{hint}")


def _checked_table(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the report's table."""
    own = {"sort_by", "row_limit"}
    known = {*inspect.signature(EventList.table).parameters} - own - {"self"}
    for name in given:
        if name in own:
            raise KeyError(
                f"Found invalid table_kwargs key: {name}. This is already a positional argument of the Profiler."
            )
        if name not in known:
            raise KeyError(f"Found invalid table_kwargs key: {name}. Should be within {sorted(known)}.")
    return given
