"""Whether optional packages are there, under the names that Lightning's users ask by. Looking does not import them."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def _is_there(package: str) -> bool:
    return package in sys.modules or find_spec(package) is not None


_COMET_AVAILABLE = _is_there("comet_ml")
_MLFLOW_AVAILABLE = _MLFLOW_SYNCHRONOUS_AVAILABLE = _is_there("mlflow")
_TENSORBOARD_AVAILABLE = _is_there("tensorboard")
_TENSORBOARDX_AVAILABLE = _is_there("tensorboardX")
_WANDB_AVAILABLE = _is_there("wandb")
