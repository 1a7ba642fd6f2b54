"""Compare the program of a model of keypoints with the model: numbers, results and scores."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arclight.deploy import Program
from arclight.vision.tasks.deployment import evaluate_program, export_module


def check_keypoint_program(module: Any, images: Any, file: Path, count: int) -> None:
    """Export ``module`` to ``file``: the program finds what it finds, ``count`` keypoints of each box, and scores on ``images``."""
    export_module(module, file, images.calibration_dataset())
    program = Program.load(file)
    batch = torch.rand(2, 3, 64, 64)
    own = module.output_parts(module.model.eval()(batch).detach())
    assert own.keys() == {"boxes", "scores", "keypoints", "visible"}
    for name, part in module.output_parts(torch.as_tensor(program(batch))).items():
        torch.testing.assert_close(part, own[name], atol=1e-3, rtol=1e-4)
    (found,) = program.predict([np.full((48, 80, 3), 90, np.uint8)])
    assert found.keypoints is not None
    assert found.keypoints.shape == (len(found), count, 3)
    scores = evaluate_program(program, images.open("val"))
    assert scores.images == len(images.open("val"))
    assert math.isfinite(scores.keypoints.map50)
