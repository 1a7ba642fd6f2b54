"""Describe a stage without taking any of the model's own names.

`StageModule` and `TracedStage` derive from `NamePreservingStage`; `pipe` and `forecast` read their `StageInfo`. Names in a stage's state are
those of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from arclight.parallel.pipeline.call_graph import Value


@dataclass(frozen=True)
class StageInfo:
    """Number, inputs and outputs of a stage, whatever the model calls its own modules."""

    number: int
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]


class NamePreservingStage(nn.Module):
    """A stage, whose modules, parameters and buffers have their names in the model, any names.

    If the model has attributes called ``number``, ``receives``, ``sends`` or ``parts``, these names are the model's;
    :func:`stage_info_of` gives the stage's own.
    """

    number: int
    receives: tuple[Value, ...]
    """Values that it receives, besides the arguments of the model."""
    sends: tuple[Value, ...]
    """Values that it sends, unless it is the last stage."""
    parts: dict[str, nn.Module]
    """The modules that it calls, by path. Modules above them are never called themselves."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self._stage_info = info

    def _parts(self) -> dict[str, nn.Module]:
        return {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            known = self.__dict__.get("_stage_info")
            if known is None or name not in ("number", "receives", "sends", "parts"):
                raise
            return self._parts() if name == "parts" else getattr(known, name)


def stage_info_of(stage: NamePreservingStage) -> StageInfo:
    """Return the description of ``stage``, also for models that use its names."""
    return stage._stage_info
