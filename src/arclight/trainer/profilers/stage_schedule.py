"""One torch profiler for several kinds of steps: each kind goes through the schedule by itself."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerAction

STAGES = ("training_step", "validation_step", "test_step", "predict_step")

_FORWARD = {
    (ProfilerAction.RECORD, ProfilerAction.WARMUP): ProfilerAction.RECORD,
    (ProfilerAction.RECORD, ProfilerAction.NONE): ProfilerAction.RECORD_AND_SAVE,
    (ProfilerAction.WARMUP, ProfilerAction.NONE): ProfilerAction.WARMUP,
}
"""What torch cannot do because another kind's trace is under way, and what is done instead."""


class StageSchedule:
    """``schedule`` asked with the number of steps of the kind that is running, until its trace is complete.

    Before the first step nothing is recorded; validation before training (the sanity check) counts as no step.
    """

    def __init__(self, schedule: Callable[[int], ProfilerAction]) -> None:
        self.schedule = schedule
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.steps = dict.fromkeys(STAGES, 0)
        self.finished: set[str] = set()
        self.stage: str | None = None
        self._fitting = False
        self._before = ProfilerAction.NONE

    def enter(self, action_name: str, fitting: bool) -> None:
        """A step has been run: the action name ends with its kind."""
        self.stage = next(stage for stage in STAGES if action_name.endswith(stage))
        self._fitting = fitting

    @property
    def step(self) -> int:
        """Steps so far of the kind that is running."""
        return self.steps[self.stage] if self.stage is not None else 0

    def __call__(self, _: int) -> ProfilerAction:
        """What the profiler is to do from here on; its own count is of all kinds together, and means nothing here."""
        action = ProfilerAction.NONE
        if self.stage is not None and self.stage not in self.finished:
            if not (self._fitting and self.stage == "validation_step" and not self.steps["training_step"]):
                self.steps[self.stage] += 1
            action = self.schedule(self.step)
            if action is ProfilerAction.RECORD_AND_SAVE:
                self.finished.add(self.stage)
        self._before = _FORWARD.get((self._before, action), action)
        return self._before
