"""Detect checkpoints that were trained with rounding, and rebuild the callbacks that did it.

``cli`` calls `trained_by` and ``vision`` `callbacks_of` before they load weights: ``Module.load_from_checkpoint(path, replaced_by=trained_by(path))``
gives the module with its rounded layers, for ``convert(module.model, example_inputs=...)``. The callback, and so torchao, is imported only for a
checkpoint that needs it. Keys of callbacks' states are in checkpoints: `CALLBACK` must stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight import checkpoint as checkpoints
from arclight.checkpoint.remote import to_path
from arclight.trainer.checkpoint.loading import read

if TYPE_CHECKING:
    from arclight.deploy.quantizing.callback import QuantizationAwareTraining

CALLBACK = "QuantizationAwareTraining"
"""Prefix of the keys under which checkpoints hold the states of `QuantizationAwareTraining`."""


def trained_by(path: str | Path) -> list[QuantizationAwareTraining]:
    """Return the callbacks that trained the weights of a checkpoint with rounding.

    The list is empty for float weights, for a checkpoint of weights alone, and for one whose callbacks' states do not say what was trained.
    """
    place = to_path(path)
    if not place.is_dir():
        return callbacks_of(read(path).get("callbacks", {}))
    if "callbacks" not in checkpoints.inspect(place).entries:
        return []
    return callbacks_of(checkpoints.load(place, only=["callbacks"])["callbacks"])


def callbacks_of(states: Mapping[str, Any]) -> list[QuantizationAwareTraining]:
    """Return the callbacks of quantization-aware training among a checkpoint's states."""
    found = [state for key, state in states.items() if key.startswith(CALLBACK) and "recipe" in state]
    if not found:  # states of earlier versions do not say what was trained
        return []
    from arclight.deploy.quantizing.callback import QuantizationAwareTraining

    return [QuantizationAwareTraining.of(state) for state in found]
