"""The optimizer as a module sees it: its ``step`` takes care of hooks, loss scaling and counting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from arclight.fabric.errors import MisconfigurationError

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


class ManagedOptimizer:
    """Stands for ``optimizer``; everything but :meth:`step` is the optimizer's own, and ``isinstance`` says so."""

    def __init__(self, optimizer: Optimizer, trainer: Trainer | None = None) -> None:
        self._optimizer, self._trainer = optimizer, trainer
        self.actions: tuple[Callable[[], Any], ...] = ()
        self.count: Callable[[], Any] = _nothing
        self._unscaled = False
        # A class of its own below both, for code that asks what kind of optimizer it has.
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters once. ``closure``, where given, runs forward and backward first and its result is returned.

        Between backward and update run ``on_before_optimizer_step`` and, in automatic optimization, clipping.
        """
        if closure is not None and not callable(closure):
            raise MisconfigurationError(
                f"When `optimizer.step(closure)` is called, the closure should be a function, got {type(closure).__name__}"
            )
        precision = self._trainer.precision_plugin if self._trainer is not None else None
        scaled = precision is not None and precision.scaler is not None
        result = self._scaled(precision, closure, kwargs) if scaled else self._plain(closure, kwargs)
        self.count()
        return result

    def _plain(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        def run() -> Any:
            result = closure() if closure is not None else None
            for action in self.actions:
                action()
            return result

        return self._optimizer.step(closure=run, **kwargs)

    def _scaled(self, precision: Any, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        result = closure() if closure is not None else None
        if result is None and self._trainer is not None and self._trainer.lightning_module.automatic_optimization:
            return None  # nothing was scaled: the batch was skipped
        self.unscale()
        for action in self.actions:
            action()
        self._unscaled = False
        precision.optimizer_step(self._optimizer, **kwargs)
        return result

    # Found on the optimizer's class otherwise, whose versions read attributes that only the real one has.

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._optimizer.add_param_group(param_group)

    def unscale(self) -> None:
        """Take the scale out of 16-bit gradients, once between two steps."""
        precision = self._trainer.precision_plugin if self._trainer is not None else None
        if precision is not None and precision.scaler is not None and not self._unscaled:
            self._unscaled = True
            precision.unscale_gradients(self._optimizer)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Only this optimizer's parameters require gradients; without ``sync_grad`` ranks do not exchange them."""
        if self._trainer is None:
            raise RuntimeError("this optimizer is not in use by a Trainer")
        module = self._trainer.lightning_module
        synced = self._trainer.strategy.no_backward_sync(self._trainer.step_module or module, not sync_grad)
        with synced if not sync_grad else nullcontext():
            module.toggle_optimizer(self)
            try:
                yield
            finally:
                module.untoggle_optimizer(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ManagedOptimizer, (self._optimizer,)  # copies and pickles are no longer a Trainer's

    def __getattr__(self, name: str) -> Any:
        if name in ("_optimizer", "_trainer"):
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"Lightning{self._optimizer!r}"


def _nothing() -> None:
    return None
