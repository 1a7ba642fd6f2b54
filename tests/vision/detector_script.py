"""Trains a small detector from a data set of drawn scenes; run in processes of its own by test_detector.

usage: detector_script.py DATA_YAML ROOT [--resume] [--die-at-step N]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import arclight as al
from arclight.vision.data.augment_settings import Augment
from arclight.vision.tasks.settings import DetectionTask


class DieAtStep(al.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    data, root, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    al.seed_everything(3)
    settings = DetectionTask(
        data=Path(data),
        image_size=64,
        batch_size=4,
        workers=2,
        memory_format="channels_last",
        augment=Augment(mixup=0.3, degrees=5, close_mosaic=0.5),
    )
    module, datamodule = settings.build()
    callbacks: list[Any] = [al.EMAWeightAveraging(decay=0.99), al.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)]
    if "--die-at-step" in flags:
        callbacks.insert(0, DieAtStep(int(flags[flags.index("--die-at-step") + 1])))
    trainer = al.Trainer(
        max_epochs=2,
        log_every_n_steps=1,
        gradient_clip_val=10.0,
        callbacks=callbacks,
        enable_progress_bar=False,
        default_root_dir=root,
        run_name="run",
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path="last" if "--resume" in flags else None)
    trainer.save_checkpoint(Path(root) / "end.ckpt")


if __name__ == "__main__":
    main()
