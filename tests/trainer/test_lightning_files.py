"""Progress in checkpoints that Lightning 2.6 wrote, with the counters that it put there."""

from __future__ import annotations

from typing import Any

import pytest

from arclight.trainer.checkpoint.state import lightning_progress, written_by_lightning
from arclight.trainer.loop.progress import Progress


def counters(ready: int, started: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "started": started, "processed": processed, "completed": completed}


def checkpoint(
    *, step: int, batches: dict[str, int], seen: int, last: bool, epochs: dict[str, int], validated: bool = False
) -> dict[str, Any]:
    return {
        "epoch": epochs["completed"],
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "optimizer_states": [{}],
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.batch_progress": {
                    "total": dict.fromkeys(batches, seen), "current": batches, "is_last_batch": last,
                },
                "epoch_loop.val_loop.batch_progress": {"is_last_batch": validated},
                "epoch_progress": {"total": epochs, "current": epochs},
            }
        },
    }  # fmt: skip


AT_EPOCH_END = checkpoint(
    step=8, batches=counters(8, 8, 8, 8), seen=16, last=True, epochs=counters(2, 2, 2, 1), validated=True
)
IN_BATCH = checkpoint(
    step=6, batches=counters(4, 4, 4, 3), seen=12, last=False, epochs=counters(2, 2, 1, 1), validated=True
)
IN_VALIDATION = checkpoint(
    step=6, batches=counters(4, 4, 4, 4), seen=12, last=False, epochs=counters(2, 2, 1, 1), validated=True
)
IN_LAST_VALIDATION = checkpoint(
    step=8, batches=counters(8, 8, 8, 8), seen=16, last=True, epochs=counters(2, 2, 1, 1), validated=True
)


@pytest.mark.parametrize(
    ("saved", "position"),
    [
        (AT_EPOCH_END, Progress(epoch=1, batch=8, global_step=8, batches=16, validated_at=8, ended=True)),
        (IN_BATCH, Progress(epoch=1, batch=4, global_step=6, batches=12)),
        (IN_VALIDATION, Progress(epoch=1, batch=4, global_step=6, batches=12, validated_at=4)),
        (IN_LAST_VALIDATION, Progress(epoch=1, batch=8, global_step=8, batches=16, validated_at=8, ended=True)),
        ({"epoch": 3, "global_step": 40, "pytorch-lightning_version": "1.4.0"}, Progress(3, 0, 40, 40)),
    ],
    ids=["epoch end", "batch end", "validation end", "last validation end", "1.x"],
)
def test_the_position_is_read_from_the_counters(saved: dict[str, Any], position: Progress) -> None:
    assert written_by_lightning(saved)
    assert lightning_progress(saved) == position


def test_an_epoch_saved_at_its_end_is_not_begun_again() -> None:
    progress = Progress()
    progress.load_state_dict(lightning_progress(AT_EPOCH_END).state_dict())
    assert (progress.epoch, progress.batch, progress.ended) == (2, 0, False)


def test_steps_of_several_optimizers_count_once_where_batches_are_counted() -> None:
    saved = AT_EPOCH_END | {"optimizer_states": [{}, {}]}
    assert lightning_progress(saved).global_step == 8
    assert lightning_progress(saved, count_optimizer_steps=False).global_step == 4


def test_our_own_files_are_distinguished() -> None:
    assert not written_by_lightning({"pytorch-lightning_version": "2.6.6", "loops": {"progress": {}}})
    assert not written_by_lightning({"state_dict": {}})
