"""Check ``monitor=`` and ``mode=`` of callbacks, and describe a value that is not logged.

`EarlyStopping`, `ModelCheckpoint` and `MetricReport` raise `MissingMetricError` with these words when ``monitor=`` names nothing that was
logged. Words may change; the class is public in ``arclight.trainer.callbacks``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from arclight.trainer.data.limits import ValidationSchedule


class MissingMetricError(MisconfigurationError, RuntimeError):
    """A callback watches a value that is not logged."""

    def __init__(self, who: str, monitor: str, logged: Iterable[str]) -> None:
        super().__init__(missing_metric(who, monitor, logged))


def missing_metric(who: str, monitor: str, logged: Iterable[str], advice: str = "") -> str:
    """Describe a missing metric: the logged names, the nearest one, and what to do."""
    names = sorted(logged)
    near = difflib.get_close_matches(monitor, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"`{who}(monitor={monitor!r})` could not find the monitored key: no such value is logged; {hint}"
        f"logged: {', '.join(names) or 'nothing'}. {advice or f'Call self.log({monitor!r}, value) in the module, or monitor one of these'}"
    )


def check_mode(mode: str) -> None:
    """Raise MisconfigurationError for a mode that is neither min nor max."""
    if mode not in ("min", "max"):
        raise MisconfigurationError(f"`mode` can be min (lower is better) or max, but got {mode}")


def warn_of_no_validation(
    schedule: ValidationSchedule, monitor: str | None, values: Iterable[str], after_validation: bool
) -> None:
    """Warn if a fit ended without the validation that ranks or triggers checkpoints."""
    rhythm = f"check_val_every_n_epoch={schedule.every_n_epochs} and val_check_interval={schedule.interval}"
    if monitor is not None and monitor not in values:
        advice = f"Train for longer or validate more often: {rhythm} were not reached"
        rank_zero_warn(f"validation never ran, and {missing_metric('ModelCheckpoint', monitor, values, advice)}")
    elif after_validation:
        rank_zero_warn(
            "ModelCheckpoint saves after validation here, and validation never ran, so it saved nothing: "
            f"{rhythm} were not reached; or give it save_on_train_epoch_end=True"
        )
