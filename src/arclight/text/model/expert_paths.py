"""Choose the path of expert layers: refuse paths that cannot run, measure for ``auto``.

`LanguageModel` and ``heads`` call `prepare_paths_for_fit` when a fit starts; `moe` and `switch_head` compute by the path that it sets.
Layers of one shape class (kind, routing, sizes, tokens up to the next power of two, dtype, device) take one path: the grouped one, unless
another takes at most 95 % of its time (`FASTER`) for forward and backward with equal loads. All ranks time a class once in a process, among
the paths that run on all of them, and take rank 0's choice, so that all round alike. Checkpoints keep choices by `ShapeClass.name`, because
another path gives other bits: names stay. A new path is added to `Path` in `moe`, with its refusals here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.extras import MissingExtraError, require
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.parallel.layers.expert_parallel import AllToAllDispatcher
from arclight.parallel.mesh import Mesh
from arclight.text.model.conditional_product import TYPES, Precision, refusal
from arclight.text.model.moe import MoE, MoEConfig, Path
from arclight.text.model.switch_head import HeadMaps, HeadOutputs, HeadValues, SwitchHeadConfig

FASTER = 0.95
"""Take another path only if its time is at most this share of the grouped path's."""
DENSE_OVER_CHOSEN = 4
"""Time the dense path only if experts <= 4 x top_k (and ep = 1)."""
_measured: dict[tuple[str, tuple[Path, ...]], Path] = {}


@dataclasses.dataclass(frozen=True)
class ShapeClass:
    """Sizes of this process's shard of an expert layer, which decide its fastest path."""

    kind: str
    config: MoEConfig | SwitchHeadConfig
    sizes: tuple[int, ...]
    """(D,) of a feed-forward part; (heads, D, head width) of experts in attention."""
    tokens: int
    paths: tuple[Path, ...]

    def name(self, device: torch.device, dtype: torch.dtype) -> str:
        """Name the class on a device, as checkpoints keep it."""
        model = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        c = self.config
        width = f" of {c.hidden}, {c.activation}" if isinstance(c, MoEConfig) else ""
        sizes = " x ".join(map(str, self.sizes))
        return f"{self.kind} {sizes}, {c.top_k} of {c.experts} experts{width}, {self.tokens} tokens, {str(dtype).removeprefix('torch.')}, {model}"

    def build(self) -> MoE | HeadMaps:
        """Make a layer of the class."""
        config: Any = self.config
        if self.kind == "moe":
            return MoE(config, self.sizes[0], 0.02, 0.02)
        heads, width, head_width = self.sizes
        if self.kind == "values":
            return HeadValues(config, heads, width, head_width, 0.02)
        return HeadOutputs(config, heads, width, head_width, (0.02, 0.02))

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Draw inputs for the layer, the first of which has a gradient."""
        widths = (
            [self.sizes[0] * self.sizes[2], self.sizes[1]]
            if self.kind == "outputs"
            else [self.sizes[-1 if self.kind == "moe" else 1]]
        )
        generator = torch.Generator().manual_seed(0)
        found = [torch.randn(1, self.tokens, width, generator=generator).to(device, dtype) for width in widths]
        found[0].requires_grad_()
        return found


def prepare_paths_for_fit(
    model: nn.Module, tokens: int, strategy: Any, dtype: torch.dtype, kept: dict[str, Path], record: Callable[[str, Any], None],
) -> dict[str, Path]:  # fmt: skip
    """Set the paths of a fit's experts, alike on all ranks of its ``strategy``.

    See `prepare_paths`. tokens: of a process's batch. record: called with a setting and the path it was measured as, or paths by shape class.
    """
    gather, send = strategy.all_gather_object, strategy.broadcast
    chosen = prepare_paths(model, tokens_of_pass(tokens, strategy), strategy.root_device, dtype, kept, gather, send)
    for setting, kinds in (("overrides.moe.path", ("moe",)), ("overrides.switch_head.path", ("values", "outputs"))):
        found = {name: path for name, path in chosen.items() if name.partition(" ")[0] in kinds}
        if found:
            record(setting, found if len(set(found.values())) > 1 else next(iter(found.values())))
    return chosen


def prepare_paths(
    model: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype, kept: dict[str, Path] | None = None,
    gather: Callable[[Any], Sequence[Any]] = lambda own: [own], send: Callable[[Any], Any] = lambda own: own,
) -> dict[str, Path]:  # fmt: skip
    """Set the path of each ``auto`` expert layer in ``model``; return choices by shape class.

    tokens: that a process runs through a layer at once. dtype: that products are computed in. kept: choices of an earlier part of the run, which
    are not measured again, unless a path does not run any more: then a warning says so. gather and send: exchange an object between
    ranks, as a strategy's ``all_gather_object`` and ``broadcast`` do; call it on all of them.

    Raises MisconfigurationError for a path that does not run here, on every rank.
    """
    layers = list(expert_layers(model))
    here = [(layer, shape) for layer in layers if (shape := shape_class(layer, tokens, device, dtype)) is not None]
    reports = gather((_refused(layers, device), [(shape.name(device, dtype), shape) for _, shape in here]))
    if (reason := next((reason for reason, _ in reports if reason is not None), None)) is not None:
        raise MisconfigurationError(reason)
    classes: dict[str, ShapeClass] = {}
    for _, found in reports:
        for name, shape in found:
            common = tuple(path for path in classes.get(name, shape).paths if path in shape.paths)
            classes[name] = dataclasses.replace(shape, paths=common)
    if not classes:
        return {}
    known = {name: path for name, path in (kept or {}).items() if name in classes}
    for name, path in known.items():
        if path not in classes[name].paths:
            rank_zero_warn(
                f"experts were multiplied by path {path!r} before the run was resumed, which does not run on all ranks any more: the "
                f"fastest of {', '.join(classes[name].paths)} rounds otherwise ({name})"
            )
    known = {name: path for name, path in known.items() if path in classes[name].paths}
    chosen: dict[str, Path] = send(
        {name: known.get(name) or measured(shape, device, dtype) for name, shape in sorted(classes.items())}
    )
    for layer, shape in here:
        set_path(layer, chosen[shape.name(device, dtype)])
    return chosen


def tokens_of_pass(tokens: int, strategy: Any) -> int:
    """Return how many of a batch's ``tokens`` on this process a layer takes at once.

    It takes parts of sequences, and micro-batches of a pipeline.
    """
    mesh = getattr(strategy, "mesh", None)
    return max(1, tokens // mesh.plan.passes) if isinstance(mesh, Mesh) else tokens


def expert_layers(model: nn.Module) -> Iterator[MoE | HeadMaps]:
    """Yield the layers of experts below ``model``, of feed-forward parts and of attention."""
    return (module for module in model.modules() if isinstance(module, MoE | HeadMaps))


def set_path(layer: MoE | HeadMaps, path: Path) -> None:
    """Set the path by which ``layer`` multiplies its experts."""
    if isinstance(layer, MoE):
        layer.experts.path = path
    else:
        layer.path = path


def _config(layer: MoE | HeadMaps) -> MoEConfig | SwitchHeadConfig:
    return layer.config if isinstance(layer, MoE) else layer.router.choice


def _refused(layers: Sequence[MoE | HeadMaps], device: torch.device) -> str | None:
    """Return a sentence on the layer whose path cannot run on this process, or None."""
    for layer in layers:
        config, setting = _config(layer), "moe.path" if isinstance(layer, MoE) else "switch_head.path"
        if config.path == "triton" and (
            reason := _triton_refusal(device, config.precision if isinstance(config, MoEConfig) else "full")
        ):
            return f"{setting}: {reason}"
        if config.path == "dense" and isinstance(layer, MoE) and isinstance(layer.dispatcher, AllToAllDispatcher):
            return 'moe.path = "dense" computes all experts on each process, and ep > 1 keeps a part of them on each: set "grouped", or ep = 1'
    return None


def _triton_refusal(device: torch.device, precision: Precision) -> str | None:
    """Return the reason why the Triton product cannot run here, or None.

    A missing package is a reason, too: no rank may raise alone.
    """
    try:
        if device.type == "cuda":
            require("triton", extra="triton")
        return refusal(device, precision)
    except MissingExtraError as error:
        return str(error)


def shape_class(
    layer: MoE | HeadMaps, tokens: int, device: torch.device, dtype: torch.dtype
) -> ShapeClass | None:  # fmt: skip
    """Return the class of a layer whose setting is ``auto``; None for others."""
    config = _config(layer)
    if config.path != "auto":
        return None
    tokens = 1 << (tokens - 1).bit_length()
    paths: list[Path] = ["grouped"]
    if device.type == "cuda" and dtype in TYPES and importlib.util.find_spec("triton") is not None:
        paths.append("triton")
    ep = layer.dispatcher.size if isinstance(layer, MoE) and isinstance(layer.dispatcher, AllToAllDispatcher) else 1
    if ep == 1 and config.experts <= DENSE_OVER_CHOSEN * config.top_k:
        paths.append("dense")
    if isinstance(layer, HeadMaps):
        pairs, out, inner = layer.experts.shape
        width, head = (inner, out) if isinstance(layer, HeadValues) else (out, inner)
        kind = "values" if isinstance(layer, HeadValues) else "outputs"
        whole: SwitchHeadConfig = dataclasses.replace(layer.router.choice, entropy_loss=0.0, expert_dropout=0.0)
        return ShapeClass(kind, whole, (pairs // config.experts, width, head), tokens, tuple(paths))
    here = config.experts // ep
    top_k = min(config.top_k, here)
    share = dataclasses.replace(
        layer.config, experts=here, top_k=top_k, hidden=layer.config.hidden // layer.experts.parts, shared=0, groups=1, top_groups=1,
        bias_rate=None, balance_loss=0.0, entropy_loss=0.0, expert_dropout=0.0, force_balance=True,
    )  # fmt: skip
    return ShapeClass("moe", share, (layer.router.weight.shape[1],), tokens * config.top_k // top_k, tuple(paths))


def measured(shape: ShapeClass, device: torch.device, dtype: torch.dtype) -> Path:
    """Return the fastest path of a shape class, timed once per process.

    It is the grouped one if others gain less than `FASTER` says.
    """
    key = (shape.name(device, dtype), shape.paths)
    if key not in _measured:
        times = timed(shape, device, dtype) if len(shape.paths) > 1 else dict.fromkeys(shape.paths, 0.0)
        best = min(times, key=times.__getitem__)
        _measured[key] = best if times[best] <= FASTER * times["grouped"] else "grouped"
    return _measured[key]


def timed(shape: ShapeClass, device: torch.device, dtype: torch.dtype, turns: int = 5) -> dict[Path, float]:
    """Return the median seconds of forward and backward by path.

    Paths take turns, after one that warms up.
    """
    times: dict[Path, list[float]] = {path: [] for path in shape.paths}
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        layer, inputs = shape.build().to(device, dtype), shape.inputs(device, dtype)
        for _ in range(turns + 1):
            for path, seconds in times.items():
                set_path(layer, path)
                started = _now(device)
                layer(*inputs).sum().backward()
                seconds.append(_now(device) - started)
                layer.zero_grad()
    return {path: statistics.median(seconds[1:]) for path, seconds in times.items()}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
