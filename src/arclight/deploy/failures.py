"""Explain why a model cannot be captured or converted: operator, module and line.

`capture` and ``quantizing.qat`` give `not_captured` what torch.export raised, ``formats`` gives `not_converted` and `plain` what its exporters
raised; each returns a sentence without torch's own advice. What is read of torch's errors and frames is private to torch, so a new release may need
changes here.
"""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode, ShapeEnv

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_GENERATED = "<eval_with_key>"
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SENTENCES = re.compile(r"\n+|(?<=[.!])\s+")
_ADVICE = re.compile(
    r"TORCH_LOGS|TORCHDYNAMO_|TORCHINDUCTOR_|TORCH_COMPILE|draft_export|https?://|PyTorch|guard_or_false|mark_dynamic|torch\._check|report=True"
    r"|Suggested fixes|suggested fixes|stack trace|stack_trace|Caused by:|call raised this error|when calling torch\.export\.export|missing ONNX function"
    r"|Next steps|Exception summary|^## |^Attach the |^<class |^⬆️|^\s*File \"|Set verbose",
)
_SIZES = (2, 3, 97, 4099)
"""Sizes for which a condition on a free dimension must hold."""

DATA_DEPENDENT = (
    "takes a value out of a tensor to decide what is computed, or how large it is, and a program computes the same for every input: "
    "compute both and choose by torch.where, or let the caller decide outside of the model"
)
OTHERWISE = "write it with torch's operators alone, or move it out of the model, to where its inputs are made or its outputs read"
IN_ONNX = (
    "write it with operators that ONNX has, move it out of the model, or export the float model with format='pt2', which runs torch's "
    "own operators"
)


@dataclass(frozen=True)
class Place:
    """Name an operator, its module and the line of source that it is written in."""

    operator: str
    module: str
    """Its name in the model, "" for the model itself."""
    kind: str
    """Class of the module."""
    file: str
    line: int

    def __str__(self) -> str:
        module = f"module {self.module!r} ({self.kind})" if self.module else f"the model itself ({self.kind})"
        if not self.file:
            return f"{self.operator} in {module}"
        code = linecache.getline(self.file, self.line).strip()
        return f"{self.operator} in {module} at {self.file}:{self.line}" + (f" ({code})" if code else "")


def plain(error: object) -> str:
    """Return the words of ``error`` in one line, without colours and exporters' advice."""
    said = _SENTENCES.split(_ANSI.sub("", str(error)))
    kept = [" ".join(sentence.split()) for sentence in said if sentence.strip() and not _ADVICE.search(sentence)]
    return " ".join(kept) or type(error).__name__


def not_captured(error: Exception, model: nn.Module, again: Callable[[], object], *, sizes: str) -> str:
    """Describe what torch.export could not capture of ``model``, where, and the fix.

    ``again`` repeats the capture, to find the place of a condition on a free dimension: torch checks it at the end, where no frame of the model
    is left. ``sizes``: what to do about such a condition.
    """
    chain = list(_chain(error))
    if any(isinstance(one, ConstraintViolationError) for one in chain):
        place = _specialising(model, again)
        return f"{place or 'it'} {_violated(error)}; {sizes}"
    raised = ((frame, line) for one in chain for frame, line in traceback.walk_tb(one.__traceback__))
    place = _place(raised, model)
    if any(isinstance(one, GuardOnDataDependentSymNode) for one in chain):
        return f"{place or 'it'} {DATA_DEPENDENT}"
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    return f"{_prefix(place)}{kind}{plain(error).rstrip('.')}; {OTHERWISE}"


def not_converted(error: Exception, way_out: str) -> str:
    """Describe at which node of a graph a conversion failed, why, and the fix ``way_out``."""
    chain = list(_chain(error))
    frames = (frame for one in chain for frame, _ in traceback.walk_tb(one.__traceback__))
    nodes = [value for frame in frames for value in frame.f_locals.values() if _is_operator(value)]
    if not nodes:
        return f"{plain(error)}; {way_out}"
    return f"{_node_place(nodes[-1])} fails: {plain(chain[0]).rstrip('.')}; {way_out}"


def _violated(error: Exception) -> str:
    """Describe which dimensions that were to be free are not."""
    names = re.search(r"Constraints violated \(([^)]*)\)", str(error))
    return f"computes only for some sizes of {names[1]}, which is to be free" if names else f"fails: {plain(error)}"


def _prefix(place: Place | None) -> str:
    return "" if place is None else f"{place} fails: "


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield what led to ``error``, the first one first."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _chain(before)
    yield error


def _is_operator(value: object) -> bool:
    return isinstance(value, torch.fx.Node) and value.op == "call_function" and "stack_trace" in value.meta


def _node_place(node: torch.fx.Node) -> Place:
    """Return the place of ``node`` in the user's code, from its notes."""
    stack = node.meta.get("nn_module_stack") or {"": ("", "")}
    module, kind = list(stack.values())[-1]
    named = kind if isinstance(kind, str) else kind.__name__
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta["stack_trace"])
    own = [place for place in found if not _is_torch(place[0])] or found
    file, line = own[-1] if own else ("", 0)
    return Place(str(node.target).removesuffix(".default"), module, named.rpartition(".")[2], file, int(line))


def _is_torch(file: str) -> bool:
    return file.startswith((_TORCH, _GENERATED))


def _place(frames: Iterable[tuple[FrameType, int]], model: nn.Module) -> Place | None:
    """Find the innermost module of ``model`` among ``frames``, with its line and operator.

    Frames come outermost first.
    """
    names = {id(module): name for name, module in model.named_modules()}
    inner: nn.Module | None = None
    own: tuple[str, int] | None = None
    layer: tuple[str, int] | None = None
    function, called = "", ""
    for frame, line in frames:
        holder, file = frame.f_locals.get("self"), frame.f_code.co_filename
        if isinstance(holder, nn.Module) and id(holder) in names:
            inner = holder
        if inner is None:
            continue
        if not _is_torch(file):
            own, function, called = (file, line), "", ""
            continue
        if frame.f_code.co_name == "forward" and holder is inner:
            layer = (file, line)
        operator = frame.f_locals.get("func")
        if frame.f_code.co_name == "__torch_function__" and callable(operator):
            function = torch.overrides.resolve_name(operator) or str(operator)
        elif not called and holder is not inner:
            called = frame.f_code.co_qualname
    if inner is None:
        return None
    file, line = own or layer or ("", 0)
    return Place(function or called or "the code", names[id(inner)], type(inner).__name__, file, line)


def _specialising(model: nn.Module, again: Callable[[], object]) -> Place | None:
    """Capture again; return where the model first specialises a size, or None if unknown."""
    places: dict[tuple[str, int], Place] = {}

    def user_frame(_: Any) -> FrameType | None:
        stack = list(traceback.walk_stack(None))[::-1]
        place = _place(stack, model)
        if place is None:
            return None
        frames = [frame for frame, line in stack if (frame.f_code.co_filename, line) == (place.file, place.line)]
        if frames:
            places[place.file, place.line] = place
        return frames[-1] if frames else None

    torchs = ShapeEnv._get_user_frame
    try:
        ShapeEnv._get_user_frame = user_frame  # type: ignore[method-assign, assignment]
        again()
    except Exception as error:  # the one that is explained
        return next((places[at] for at in _conditions(error) if at in places), None)
    finally:
        ShapeEnv._get_user_frame = torchs  # type: ignore[method-assign]
    return None


def _conditions(error: Exception) -> Iterator[tuple[str, int]]:
    """Yield the places of conditions that hold for some sizes only, by torch's records."""
    for one in _chain(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            shapes = frame.f_locals.get("self")
            for guard in shapes.guards if isinstance(shapes, ShapeEnv) else ():
                at = guard.sloc.framework_loc
                if not _is_general(guard.expr) and isinstance(at, traceback.FrameSummary):
                    yield at.filename, at.lineno or 0


def _is_general(condition: Any) -> bool:
    """Return True if ``condition`` holds for all sizes of its free dimensions.

    A few of the sizes are tried.
    """
    return all(condition.xreplace(dict.fromkeys(condition.free_symbols, size)) != False for size in _SIZES)  # noqa: E712
