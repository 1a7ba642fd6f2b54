"""Summarise a model: layers, parameters, input and output sizes, modes and FLOPs.

The callback `ModelSummary` (``callbacks.monitoring.model_summary``) prints it before a fit; ``compat`` offers `summarize`. Names and
columns are Lightning's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils.flop_counter import FlopCounterMode

from arclight.fabric.batches import move_batch
from arclight.fabric.modules import evaluating
from arclight.fabric.rank_zero import rank_zero_warn

UNKNOWN_SIZE = "?"
NOT_APPLICABLE = "n/a"
LEFTOVER_PARAMS_NAME = "other params"
PARAMETER_NUM_UNITS = [" ", "K", "M", "B", "T"]

Size = str | list[Any]


class LayerSummary:
    """One layer. Its sizes are seen at the first forward after this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._in_size: Size | None = None
        self._out_size: Size | None = None
        self._hook_handle: Any = None
        if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            self._hook_handle = module.register_forward_hook(self._record_sizes, with_kwargs=True)

    def _record_sizes(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any
    ) -> None:
        given = (*arguments, *options.values())
        self._in_size = parse_batch_shape(given[0] if len(given) == 1 else given)
        self._out_size = parse_batch_shape(output)
        self.detach_hook()  # a layer used again would report its last call

    def detach_hook(self) -> None:
        """Remove the forward hook."""
        if self._hook_handle is not None:
            self._hook_handle.remove()

    def __del__(self) -> None:
        self.detach_hook()

    @property
    def in_size(self) -> Size:
        """Shape of the input, a list of shapes for several; ``?`` if unknown."""
        return self._in_size or UNKNOWN_SIZE

    @property
    def out_size(self) -> Size:
        return self._out_size or UNKNOWN_SIZE

    @property
    def layer_type(self) -> str:
        return type(self._module).__name__

    @property
    def num_parameters(self) -> int:
        """Parameters in all, whatever the number of devices that share them."""
        return sum(_count(parameter) for parameter in self._module.parameters())

    @property
    def local_parameters(self) -> int:
        """Parameters that this process holds."""
        return sum(_local_count(parameter) for parameter in self._module.parameters())

    @property
    def training(self) -> bool:
        return self._module.training


class ModelSummary:
    """All layers of ``model`` down to ``max_depth`` levels (-1: every one, 0: none).

    If the model has an ``example_input_array`` it is run once on that (in evaluation mode, without gradients): a
    tensor, a tuple of arguments or a dict of named ones. That gives sizes and operations and fills in lazy parameters.
    ``str(summary)`` is the table.
    """

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ValueError(f"`max_depth` can be -1, 0 or > 0, got {max_depth}")
        self._model, self._max_depth = model, max_depth
        self._example = getattr(model, "example_input_array", None)
        self._flop_counter = FlopCounterMode(display=False, depth=max_depth + 1)
        self._layer_summary = self.summarize()

    def summarize(self) -> dict[str, LayerSummary]:
        """Return every shown layer by its name."""
        summary = {name: LayerSummary(module) for name, module in self.named_modules}
        try:
            if self._example is not None:
                self._forward_example_input()
        finally:
            for layer in summary.values():
                layer.detach_hook()
        return summary

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """Submodules that are shown, in order of definition."""
        depth = self._max_depth
        return [(n, m) for n, m in self._model.named_modules() if n and (depth == -1 or n.count(".") < depth)]

    def _forward_example_input(self) -> None:
        model, batch = self._model, self._example
        trainer = getattr(model, "_trainer", None)
        if hasattr(model, "transfer_batch_to_device"):
            batch = model.on_before_batch_transfer(batch, 0)  # type: ignore[operator]
            batch = model.transfer_batch_to_device(batch, _device(model), 0)  # type: ignore[operator]
            batch = model.on_after_batch_transfer(batch, 0)  # type: ignore[operator]
        else:
            batch = move_batch(batch, _device(model))
        precision = trainer.precision_plugin.forward_context() if trainer is not None else nullcontext()
        with evaluating(model), torch.no_grad(), precision, self._flop_counter:
            if isinstance(batch, (list, tuple)):
                model(*batch)
            elif isinstance(batch, Mapping):
                model(**batch)
            else:
                model(batch)

    # -- columns ---------------------------------------------------------------------------------------------------

    @property
    def layer_names(self) -> list[str]:
        return list(self._layer_summary)

    @property
    def layer_types(self) -> list[str]:
        return [layer.layer_type for layer in self._layer_summary.values()]

    @property
    def in_sizes(self) -> list[Size]:
        return [layer.in_size for layer in self._layer_summary.values()]

    @property
    def out_sizes(self) -> list[Size]:
        return [layer.out_size for layer in self._layer_summary.values()]

    @property
    def param_nums(self) -> list[int]:
        return [layer.num_parameters for layer in self._layer_summary.values()]

    @property
    def training_modes(self) -> list[bool]:
        return [layer.training for layer in self._layer_summary.values()]

    @property
    def flop_counts(self) -> dict[str, dict[Any, int]]:
        """Operations by layer and kind, for the example input; empty without one."""
        counts, root = self._flop_counter.get_flop_counts(), type(self._model).__name__
        return {name: counts.get(f"{root}.{name}", {}) for name in self.layer_names}

    # -- totals ----------------------------------------------------------------------------------------------------

    @property
    def total_parameters(self) -> int:
        return sum(_count(parameter) for parameter in self._model.parameters())

    @property
    def trainable_parameters(self) -> int:
        return sum(_count(parameter) for parameter in self._model.parameters() if parameter.requires_grad)

    @property
    def total_layer_params(self) -> int:
        """Parameters of the shown layers, those of nested ones counted at each level."""
        return sum(self.param_nums)

    @property
    def total_training_modes(self) -> dict[str, int]:
        """Count submodules, at any depth, in training and in evaluation mode."""
        modes = [module.training for name, module in self._model.named_modules() if name]
        return {"train": modes.count(True), "eval": modes.count(False)}

    @property
    def model_size(self) -> float:
        """Megabytes of the parameters in the types that they have."""
        return sum(_count(p) * p.dtype.itemsize for p in self._model.parameters()) * 1e-6

    @property
    def total_flops(self) -> int:
        """Operations of a forward of the example input; 0 without one."""
        return int(self._flop_counter.get_total_flops())

    # -- the table -------------------------------------------------------------------------------------------------

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        """Return headings and cells of the columns."""
        layers = list(self._layer_summary.values())
        columns: dict[str, list[str]] = {
            " ": [str(number) for number in range(len(layers))],
            "Name": self.layer_names,
            "Type": self.layer_types,
            "Params": [get_human_readable_count(count) for count in self.param_nums],
        }
        if any(isinstance(parameter, DTensor) for parameter in self._model.parameters()):
            columns["Params per Device"] = [get_human_readable_count(layer.local_parameters) for layer in layers]
        columns["Mode"] = ["train" if training else "eval" for training in self.training_modes]
        columns["FLOPs"] = [get_human_readable_count(sum(counts.values())) for counts in self.flop_counts.values()]
        if self._example is not None:
            columns["In sizes"] = [str(size) for size in self.in_sizes]
            columns["Out sizes"] = [str(size) for size in self.out_sizes]
        self._add_own_parameters(columns)
        return list(columns.items())

    def _add_own_parameters(self, columns: dict[str, list[str]]) -> None:
        """Add a last row for the parameters that the model holds itself and no layer of it does."""
        own = self.total_parameters - sum(_count(p) for p in _parameters_within(self._model))
        if own <= 0 or not self._max_depth:
            return
        cells = {" ": " ", "Name": LEFTOVER_PARAMS_NAME, "Params": get_human_readable_count(own)}
        for heading, column in columns.items():
            column.append(cells.get(heading, NOT_APPLICABLE))

    def __str__(self) -> str:
        return format_table(
            self._get_summary_data(),
            self.total_parameters,
            self.trainable_parameters,
            self.model_size,
            self.total_training_modes,
            self.total_flops,
        )

    __repr__ = __str__


def summarize(module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """Return a :class:`ModelSummary` of ``module``."""
    return ModelSummary(module, max_depth)


def format_table(
    columns: list[tuple[str, list[str]]],
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
) -> str:
    """Return the columns as text, and below them the totals."""
    widths = [max(map(len, [heading, *cells])) for heading, cells in columns]
    numeric = {"Params", "Params per Device", "FLOPs"}

    def line(cells: list[str]) -> str:
        aligned = zip(columns, cells, widths, strict=True)
        return "  ".join(
            cell.rjust(width) if heading in numeric else cell.ljust(width) for (heading, _), cell, width in aligned
        ).rstrip()

    rows = [line([cells[number] for _, cells in columns]) for number in range(len(columns[0][1]))]
    head = line([heading for heading, _ in columns])
    rule = "-" * max(map(len, [head, *rows]))
    totals = total_lines(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
    return "\n".join([head, rule, *rows, rule, *(f"{number:<10}{label}" for label, number in totals)])


def total_lines(
    total: int, trainable: int, model_size: float, modes: dict[str, int], flops: int
) -> list[tuple[str, str]]:
    """Return names and values of the totals."""
    return [
        ("Trainable params", get_human_readable_count(trainable)),
        ("Non-trainable params", get_human_readable_count(total - trainable)),
        ("Total params", get_human_readable_count(total)),
        ("Total estimated model params size (MB)", get_formatted_model_size(model_size)),
        ("Modules in train mode", str(modes["train"])),
        ("Modules in eval mode", str(modes["eval"])),
        ("Total FLOPs", get_human_readable_count(flops)),
    ]


def parse_batch_shape(batch: Any) -> Size:
    """Return the shape of a tensor, shapes of a list or tuple, or ``?`` for anything else."""
    if hasattr(batch, "shape"):
        return list(batch.shape)
    if isinstance(batch, (list, tuple)):
        return [parse_batch_shape(part) for part in batch]
    return UNKNOWN_SIZE


def get_formatted_model_size(total_model_size: float) -> str:
    return f"{total_model_size:,.3f}"


def get_human_readable_count(number: int) -> str:
    """Return ``number`` as 123, 1.2 K, 45.0 M, 400 T: the unit takes a place of its own."""
    assert number >= 0, f"a count cannot be negative: {number}"
    digits = math.floor(math.log10(number)) + 1 if number else 1
    unit = min(math.ceil(digits / 3), len(PARAMETER_NUM_UNITS)) - 1
    scaled = number / 1000**unit
    text = f"{int(scaled):,d}" if unit == 0 or scaled >= 100 else f"{scaled:,.1f}"
    return f"{text} {PARAMETER_NUM_UNITS[unit]}"


# -- counting ------------------------------------------------------------------------------------------------------


def _count(parameter: torch.Tensor) -> int:
    if isinstance(parameter, UninitializedParameter) and not isinstance(parameter, DTensor):
        _warn_of_uninitialized()
        return 0
    return parameter.numel()


@cache
def _warn_of_uninitialized() -> None:
    """Warn once of uninitialised parameters, though every count meets them."""
    rank_zero_warn(
        "The total number of parameters detected may be inaccurate because the model contains an instance of "
        "`UninitializedParameter`; set `self.example_input_array` in your LightningModule to get it right"
    )


def _local_count(parameter: torch.Tensor) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else _count(parameter)


def _parameters_within(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of the model's children, each once."""
    return list({id(p): p for child in model.children() for p in child.parameters()}.values())


def _device(model: nn.Module) -> torch.device:
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device
