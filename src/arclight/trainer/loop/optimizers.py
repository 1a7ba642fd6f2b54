"""Turn what ``configure_optimizers`` returned into lists of optimizers and schedulers.

`session` calls `configured` before a fit; `RunState` holds the result, `step` and `schedulers` step it, and ``self.optimizers()``
returns `ManagedOptimizer` proxies. Accepted forms, fields of `LRSchedulerConfig` and error texts are Lightning 2.x's: add, do not
change.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from arclight.fabric.errors import MisconfigurationError

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy


@dataclass
class LRSchedulerConfig:
    """A learning-rate scheduler and when to step it."""

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


_FIELDS = tuple(LRSchedulerConfig.__dataclass_fields__)
_ONLY_AUTOMATIC = ("reduce_on_plateau", "monitor", "strict")


def configured(
    given: Any, training_step: Callable[..., Any], *, automatic: bool, steps_schedulers: bool
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Parse and check what ``configure_optimizers`` returned.

    ``automatic``: the trainer runs the optimizer, not ``training_step``; ``steps_schedulers``: the module steps schedulers itself.
    Warns for None and for unknown keys. Raises MisconfigurationError for what cannot be used.
    """
    if given is None:
        warnings.warn(
            "`configure_optimizers` returned `None`: this fit will run with no optimizer, only forward", stacklevel=2
        )
    if "optimizer_idx" in inspect.signature(training_step).parameters:
        raise MultipleOptimizersError(
            "Training with multiple optimizers is only supported with manual optimization. Remove the `optimizer_idx` argument from `training_step`, "
            "set self.automatic_optimization = False and take them from self.optimizers()"
        )
    optimizers, schedulers = parse_optimizers(given, manual=not automatic)
    if automatic and len(optimizers) > 1:
        raise MultipleOptimizersError(
            f"configure_optimizers returned {len(optimizers)} optimizers. Training with multiple optimizers is only supported with "
            "manual optimization: set self.automatic_optimization = False and run them in training_step, "
            "`opt1, opt2 = self.optimizers()`"
        )
    for config in schedulers:
        _check_scheduler(config, optimizers, any_step=steps_schedulers or not automatic)
    return optimizers, schedulers


class MultipleOptimizersError(MisconfigurationError, RuntimeError):
    """Raised for several optimizers if only one can be run for the module."""


def parse_optimizers(given: Any, manual: bool = False) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Parse what ``configure_optimizers`` returned into optimizers and schedulers.

    That is: an optimizer, a list of them, ``(optimizers, schedulers)``, a dict or dicts with ``optimizer``
    and ``lr_scheduler`` (a scheduler, or a dict of :class:`LRSchedulerConfig`'s fields) and
    ``monitor`` for a scheduler that watches a value, or None.
    """
    if given is None:
        return [], []
    if isinstance(given, Mapping):
        given = [given]
    pair = isinstance(given, (list, tuple)) and len(given) == 2 and isinstance(given[0], (list, tuple))
    if pair and all(isinstance(part, Optimizer) for part in given[0]):
        schedulers = given[1] if isinstance(given[1], (list, tuple)) else [given[1]]
        return list(given[0]), [_scheduler(s, None, manual) for s in schedulers]
    if isinstance(given, (list, tuple)) and given and all(isinstance(part, Mapping) for part in given):
        for part in given:
            _warn_of_unknown(part, ("optimizer", "lr_scheduler", "monitor"), "the optimizer configuration")
        with_schedule = [part for part in given if part.get("lr_scheduler") is not None]
        return (
            [_optimizer(part.get("optimizer")) for part in given],
            [_scheduler(part["lr_scheduler"], part.get("monitor"), manual) for part in with_schedule],
        )
    return [_optimizer(o) for o in (given if isinstance(given, (list, tuple)) else [given])], []


def _optimizer(value: Any) -> Optimizer:
    if not isinstance(value, Optimizer):
        raise MisconfigurationError(
            f"Unknown configuration for model optimizers: expected a torch Optimizer, got {type(value).__name__}. "
            "configure_optimizers may return an optimizer, a list of them, ([optimizers], [schedulers]), or "
            '{"optimizer": ..., "lr_scheduler": ...}'
        )
    return value


def _scheduler(value: Any, monitor: str | None, manual: bool) -> LRSchedulerConfig:
    if not isinstance(value, Mapping):
        value = {"scheduler": value, "monitor": monitor}
    elif manual and (ignored := [key for key in value if key in _ONLY_AUTOMATIC]):
        warnings.warn(
            f"The lr scheduler dict contains the key(s) {ignored}, but the keys will be ignored: in manual optimization "
            "training_step calls `lr_scheduler.step()` itself",
            RuntimeWarning,
            stacklevel=2,
        )
        value = {key: item for key, item in value.items() if key not in _ONLY_AUTOMATIC}
    _warn_of_unknown(value, _FIELDS, "the lr scheduler dict")
    if "scheduler" not in value:
        raise MisconfigurationError(
            'The lr scheduler dict must have the key "scheduler" with its item being an lr scheduler; '
            f"it has {', '.join(map(repr, value)) or 'no keys'}"
        )
    config = LRSchedulerConfig(**{"monitor": monitor} | {key: value[key] for key in value if key in _FIELDS})
    if config.interval not in ("step", "epoch"):
        raise MisconfigurationError(
            f'The "interval" key in lr scheduler dict must be "step" or "epoch" but is "{config.interval}"'
        )
    if "reduce_on_plateau" not in value:
        config.reduce_on_plateau = isinstance(config.scheduler, ReduceLROnPlateau)
    if config.reduce_on_plateau and config.monitor is None and not manual:
        raise MisconfigurationError(
            "The lr scheduler dict must include a monitor when a `ReduceLROnPlateau` scheduler is used: `configure_optimizers` "
            'must include a monitor when a `ReduceLROnPlateau` scheduler is used, {"optimizer": ..., "lr_scheduler": '
            '{"scheduler": ..., "monitor": "a logged name"}}'
        )
    if isinstance(config.scheduler, OneCycleLR) and config.interval == "epoch" and not manual:
        warnings.warn(
            "A `OneCycleLR` scheduler is using 'interval': 'epoch'. Are you sure you didn't mean 'interval': 'step'?",
            RuntimeWarning,
            stacklevel=2,
        )
    return config


def _warn_of_unknown(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := {key for key in given if key not in known}:
        warnings.warn(
            f"Found unsupported keys in {where}: {unknown}; known are {', '.join(known)}", RuntimeWarning, stacklevel=2
        )


def _check_scheduler(config: LRSchedulerConfig, optimizers: list[Optimizer], any_step: bool) -> None:
    scheduler, name = config.scheduler, type(config.scheduler).__name__
    owner = getattr(scheduler, "optimizer", None)
    if owner is not None and not any(owner is optimizer for optimizer in optimizers):
        raise MisconfigurationError(
            "Some schedulers are attached with an optimizer that wasn't returned from `configure_optimizers`: "
            f"{name} steps another one"
        )
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise MisconfigurationError(
            f"The provided lr scheduler `{name}` is invalid. It should have `state_dict` and `load_state_dict` methods "
            "defined, or a checkpoint could not hold it"
        )
    if not any_step and not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
        raise MisconfigurationError(
            f"The provided lr scheduler `{name}` doesn't follow PyTorch's LRScheduler API. You should override the "
            "`lr_scheduler_step(scheduler, metric)` hook of the module to step it"
        )


class ManagedOptimizer:
    """Proxy of ``optimizer`` that runs hooks and counts steps; ``isinstance`` sees through it.

    Everything but :meth:`step`, :meth:`unscale` and :meth:`toggle_model` is the optimizer's own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: Strategy | None = None,
        toggled: Callable[[ManagedOptimizer, bool], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Wrap ``optimizer``.

        ``strategy`` and ``toggled``, which is what `toggle_model` does: of the trainer that uses it; None outside of one.
        """
        self._optimizer, self._strategy, self._toggled = optimizer, strategy, toggled
        self.actions: tuple[Callable[[], Any], ...] = ()
        self.count: Callable[[], Any] = _nothing
        self._has_gradients: Callable[[], bool] = _always
        self._unscaled = False
        # A class of its own below both, for code that asks what kind of optimizer it has.
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def manage(
        self, actions: tuple[Callable[[], Any], ...], count: Callable[[], Any], has_gradients: Callable[[], bool] | None = None
    ) -> None:  # fmt: skip
        """Run ``actions`` between backward and update, and ``count`` after each update.

        ``has_gradients``: returns whether a batch before that of a closure without a result had a backward (default: True).
        """
        self.actions, self.count, self._has_gradients = actions, count, has_gradients or _always

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters once, with hooks and clipping before the update.

        ``closure`` runs forward and backward first, and its result is returned.

        Between backward and update run ``on_before_optimizer_step`` and, in automatic optimization, clipping.
        """
        if closure is not None and not callable(closure):
            raise MisconfigurationError(
                f"When `optimizer.step(closure)` is called, the closure should be a function, got {type(closure).__name__}"
            )
        precision = self._strategy.precision if self._strategy is not None else None
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
        if result is None and not self._has_gradients():
            return None  # nothing was scaled: all batches of the window were skipped
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
        """Unscale 16-bit gradients, once between two steps."""
        precision = self._strategy.precision if self._strategy is not None else None
        if precision is not None and precision.scaler is not None and not self._unscaled:
            self._unscaled = True
            precision.unscale_gradients(self._optimizer)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Require gradients of this optimizer's parameters only, in the block.

        sync_grad: False to leave out the all-reduce of gradients in the block, as while they accumulate.
        Raises RuntimeError outside of a Trainer.
        """
        if self._toggled is None:
            raise RuntimeError("this optimizer is not in use by a Trainer")
        with self._toggled(self, sync_grad):
            yield

    def __reduce__(self) -> tuple[Any, ...]:
        return ManagedOptimizer, (self._optimizer,)  # copies and pickles are no longer a Trainer's

    def __getattr__(self, name: str) -> Any:
        if name in ("_optimizer", "_strategy", "_toggled"):
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"Lightning{self._optimizer!r}"


def _nothing() -> None:
    return None


def _always() -> bool:
    return True
