"""Whether optional packages are there, under the names that Lightning's users ask by. Looking does not import them."""

from __future__ import annotations

from importlib.util import find_spec

_COMET_AVAILABLE = find_spec("comet_ml") is not None
_MLFLOW_AVAILABLE = _MLFLOW_SYNCHRONOUS_AVAILABLE = find_spec("mlflow") is not None
_TENSORBOARD_AVAILABLE = find_spec("tensorboard") is not None
_TENSORBOARDX_AVAILABLE = find_spec("tensorboardX") is not None
_WANDB_AVAILABLE = find_spec("wandb") is not None
