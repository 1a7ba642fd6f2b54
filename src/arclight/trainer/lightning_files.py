"""Where a fit stands in a checkpoint that Lightning wrote, in our terms.

Lightning keeps four counters (ready, started, processed, completed) for each of its loops, and how far training has come
is in their differences: an epoch that is processed and not completed was saved at its end, a batch that is processed and
not completed was saved by a callback of that very batch. Both are done as far as training goes.
"""

from __future__ import annotations

import math
from typing import Any

from arclight.trainer.progress import Progress

_WRITTEN_BY = ("pytorch-lightning_version", "lightning_version")
_BATCHES, _EPOCHS = "epoch_loop.batch_progress", "epoch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"


def is_lightnings(checkpoint: dict[str, Any]) -> bool:
    """Whether Lightning wrote it, or something that has its layout."""
    return any(key in checkpoint for key in _WRITTEN_BY) and "progress" not in checkpoint.get("loops", {})


def progress_of(checkpoint: dict[str, Any], *, count_optimizer_steps: bool = True) -> Progress:
    """How far training had come when the checkpoint was saved.

    ``count_optimizer_steps``: ``global_step`` counts every optimizer's steps, as Lightning's does; else the batches in
    which any of them stepped. A file of Lightning 1.x, which has no counters, continues at the start of an epoch.
    """
    steps = int(checkpoint.get("global_step", 0))
    if not count_optimizer_steps:
        steps = math.ceil(steps / max(1, len(checkpoint.get("optimizer_states", []))))
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    if _BATCHES not in fit or _EPOCHS not in fit:
        return Progress(epoch=int(checkpoint.get("epoch", 0)), global_step=steps, batches=steps)
    batches, epochs = fit[_BATCHES], fit[_EPOCHS]["current"]
    done = int(batches["current"]["processed"])
    validated = fit.get(_VALIDATION, {}).get("is_last_batch", False) and batches["current"]["completed"] == done
    at_end = bool(batches["is_last_batch"])
    return Progress(
        epoch=int(epochs["completed"]),
        batch=done,
        global_step=steps,
        batches=int(batches["total"]["processed"]),
        validated_at=done if validated else -1,
        ended=epochs["processed"] > epochs["completed"] or (at_end and validated),
    )
