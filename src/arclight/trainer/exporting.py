"""A module as a file for other programs. ``arclight.deploy`` does more: it checks, optimizes and quantizes what it writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from arclight.fabric.extras import require

if TYPE_CHECKING:
    from arclight.trainer.module import Module


class ExportMixin:
    """What a Module has for other programs."""

    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **options: Any) -> Any:
        """Write the module as ONNX to a path or binary file (None: nowhere), and give the ``torch.onnx.ONNXProgram``.

        ``input_sample``: what ``forward`` takes, a tuple or dict of several (default ``example_input_array``);
        ``options`` go to ``torch.onnx.export``. Raises ValueError without a sample, MissingExtraError without onnx.
        """
        return _export(self, file_path, input_sample, options)  # type: ignore[arg-type]

    def to_torchscript(self, *args: Any, **options: Any) -> Any:
        """Not offered: torch itself has left TorchScript for ``torch.export``."""
        raise NotImplementedError(
            "`to_torchscript` is not offered: TorchScript is no longer developed. Use to_onnx(), torch.export.export() or "
            "arclight.deploy.export(), which torch 2 runs everywhere that TorchScript did"
        )


def _export(module: Module, target: str | Path | IO[bytes] | None, input_sample: Any, options: dict[str, Any]) -> Any:
    require("onnx", extra="deploy")
    if options.get("dynamo", True):
        require("onnxscript", extra="deploy")
    if input_sample is None:
        input_sample = module.example_input_array
    if input_sample is None:
        raise ValueError(
            "Could not export to ONNX since neither `input_sample` nor `model.example_input_array` attribute is set."
        )
    sample = module.transfer_batch_to_device(module.on_before_batch_transfer(input_sample, 0), module.device, 0)
    sample = module.on_after_batch_transfer(sample, 0)
    positional, named = _arguments(sample)
    modes = {part: part.training for part in module.modules()}
    try:
        with torch.no_grad():
            if target is None or isinstance(target, (str, Path)):
                path = str(target) if target is not None else None
                return torch.onnx.export(module, positional, path, kwargs=named, **options)
            program = torch.onnx.export(module, positional, None, kwargs=named, **options | {"dynamo": True})
            target.write(program.model_proto.SerializeToString())  # type: ignore[union-attr]
            return program
    finally:
        for part, training in modes.items():
            part.training = training


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """What ``forward`` is called with: a tuple's items, a dict's by name, or the sample itself."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, tuple) else (sample,)), None
