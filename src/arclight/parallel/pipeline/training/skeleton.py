"""A module as it was before its process let go of other stages' parts, so that further steps of it can be observed and cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MEMBERS = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class Skeleton:
    """All parts of ``module``; those of other stages keep their shapes and lose their memory (:meth:`let_go`)."""

    def __init__(self, module: nn.Module) -> None:
        """Taken while ``module`` still has all parts."""
        self.module = module
        self._tree = dict(module.named_modules(remove_duplicate=False))
        self._whole = {name: module.__dict__[name] for name in _MEMBERS}

    def let_go(self) -> None:
        """Take the memory from all parameters and buffers but those that the module has now."""
        held = {id(x) for x in (*self.module.parameters(), *self.module.buffers())}
        made: dict[int, Tensor] = {}
        with self.whole():
            for part in self.module.modules():
                for members in (part._parameters, part._buffers):
                    for name, tensor in members.items():
                        if tensor is not None and id(tensor) not in held and not tensor.is_meta:
                            members[name] = made.setdefault(id(tensor), _nowhere(tensor))  # type: ignore[assignment]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """In here the module has all of its parts."""
        now = {name: self.module.__dict__[name] for name in _MEMBERS}
        if now["_modules"] is self._whole["_modules"]:
            yield
            return
        self._catch_up()
        self.module.__dict__.update(self._whole)
        try:
            yield
        finally:
            self.module.__dict__.update(now)

    def _catch_up(self) -> None:
        """Parts that the process has may hold other tensors by now: those that were loaded, spread or given memory."""
        for path, part in self.module.named_modules(remove_duplicate=False):
            whole = self._whole if not path else vars(self._tree[path]) if path in self._tree else None
            if whole is None or whole["_parameters"] is part._parameters:
                continue
            for name in ("_parameters", "_buffers"):
                members: dict[str, Any] = getattr(part, name)
                whole[name].update({key: value for key, value in members.items() if value is not None})


def _nowhere(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
