"""Trains a small model; run in processes of its own by test_resume, which kills some of them.

usage: resume_script.py ROOT [--resume] [--workers N] [--accumulate N] [--die-at-step N] [--devices N] [--combined] [--die-in-validation BATCH]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from models import Classifier, CombinedData, NoisyData

import arclight as al


class DieAtStep(al.Callback):
    def __init__(self, step: int | None, validation_batch: int | None = None) -> None:
        self.step, self.validation_batch = step, validation_batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_batch_end(self, *arguments: Any, **options: Any) -> None:
        if self.validation_batch is not None:
            self.validation_batch -= 1
            if not self.validation_batch:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--die-at-step", type=int)
    parser.add_argument("--die-in-validation", type=int)
    parser.add_argument("--combined", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    al.seed_everything(11)
    callbacks = [
        al.EMAWeightAveraging(decay=0.9),
        al.LearningRateMonitor(),
        al.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1),
    ]
    if options.die_at_step or options.die_in_validation:
        callbacks.insert(0, DieAtStep(options.die_at_step, options.die_in_validation))
    trainer = al.Trainer(
        max_epochs=3,
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=callbacks,
        enable_progress_bar=False,
        default_root_dir=options.root,
        run_name="run",
    )
    data = (CombinedData if options.combined else NoisyData)(count=40 * options.devices, workers=options.workers)
    trainer.fit(Classifier(), datamodule=data, ckpt_path="last" if options.resume else None)
    trainer.save_checkpoint(options.root / "end.ckpt")


if __name__ == "__main__":
    main()
