"""Start from weights that exist already: a checkpoint, a safetensors file, or a foreign file of plain tensors."""

from __future__ import annotations

import logging
from pathlib import Path

from arclight import checkpoint as checkpoints
from arclight.vision.yolo import Yolo

_LOG = logging.getLogger("arclight")


def load_pretrained(model: Yolo, path: Path | str) -> int:
    """Copy into ``model`` every tensor of ``path`` that fits by name and shape; the number of those.

    A head trained for other classes does not fit and is left as initialised. A checkpoint's averaged weights
    are preferred to its trained ones. Raises CheckpointError when nothing fits or the file cannot be read safely.
    """
    weights = {name.removeprefix("model."): tensor for name, tensor in checkpoints.load_weights(path).items()}
    own = model.state_dict()
    prefix = "" if any(name in own for name in weights) else "model."
    fitting = {
        prefix + name: tensor
        for name, tensor in weights.items()
        if prefix + name in own and own[prefix + name].shape == tensor.shape
    }
    if not fitting:
        raise checkpoints.CheckpointError(
            f"{path}: none of its {len(weights)} tensors fits this model; was it made with another architecture?"
        )
    model.load_state_dict({**own, **{name: tensor.to(own[name].dtype) for name, tensor in fitting.items()}})
    missing = [name for name in own if name not in fitting]
    if missing:
        _LOG.warning(
            "%s: %d of %d tensors fit; the rest start fresh (%s ...)", path, len(fitting), len(own), missing[0]
        )
    return len(fitting)
