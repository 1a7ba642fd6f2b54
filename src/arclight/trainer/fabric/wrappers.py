"""Wrap a module, an optimizer and a loader so that they know of precision and processes.

`Fabric.setup` and its like return these to users; TensorBoard's logger unwraps modules. State dicts and attributes of modules and
optimizers must stay the user's own, without prefixes; the keys of a loader's state are in checkpoints.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from arclight.data import ResumableLoader
from arclight.fabric.batches import map_tensors, move_batch
from arclight.fabric.precision import MixedPrecision, Precision
from arclight.fabric.strategies import Strategy

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class BackwardState:
    """Flag that is set while Fabric runs a backward pass."""

    by_fabric = False


class FabricModule(nn.Module):
    """Module that runs forward in the chosen precision and through the strategy's wrapper.

    All attributes, parameter names and the state dict are those of the user's module, which is ``module``. A method
    other than ``forward`` that runs layers would pass by the wrapper, so that gradients were not exchanged: such a call
    raises RuntimeError unless the method was named to :meth:`mark_forward_method`. ``training_step``,
    ``validation_step``, ``test_step`` and ``predict_step`` are marked from the start.
    """

    def __init__(self, forward_module: nn.Module, strategy: Strategy, original_module: nn.Module | None = None) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = forward_module if original_module is None else original_module
        self._strategy = strategy
        self._forward_methods = set(_STEP_METHODS)
        precision = strategy.precision
        self._precision = None if type(precision) is Precision else precision
        self._guarded = _needs_fabric_backward(strategy)
        self.__dict__["_run"] = forward_module  # a plain attribute: looked up without nn.Module's search
        self.__dict__["_wrapped"] = self._forward_module is not self._original_module
        self.__dict__["_ready"] = True

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._original_module

    @property
    def device(self) -> torch.device:
        """Device of the module's first parameter, else the strategy's."""
        first = next(self._original_module.parameters(), None)
        return self._strategy.root_device if first is None else first.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the module's first floating parameter, else torch's default."""
        floating = (p.dtype for p in self._original_module.parameters() if p.is_floating_point())
        return next(floating, torch.get_default_dtype())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._precision
        if precision is None:
            output = self._run(*args, **kwargs)
        else:
            args, kwargs = precision.convert_input((args, kwargs))
            with precision.forward_context():
                output = self._run(*args, **kwargs)
            output = precision.convert_output(output)
        return map_tensors(output, _guard) if self._guarded else output

    def mark_forward_method(self, method: MethodType | str) -> None:
        """Let calls of ``method`` pass through the processes' wrapper, as those of ``forward`` do.

        Raises TypeError for what is neither a method nor a name, AttributeError if the module has no such method.
        """
        if not isinstance(method, (MethodType, str)):
            raise TypeError(f"mark_forward_method: Expected a method or a string, not {type(method).__name__}")
        name = method if isinstance(method, str) else method.__name__
        if name == "forward":
            raise ValueError("You cannot mark the forward method itself: its calls pass through the wrapper already")
        if not isinstance(getattr(self._original_module, name, None), MethodType):
            kind = type(self._original_module).__name__
            raise AttributeError(f"mark_forward_method: `{kind}.{name}` does not exist or is not a method.")
        self._forward_methods.add(name)

    # -- the user's module under its own names ---------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._original_module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self._original_module.load_state_dict(state_dict, strict=strict, assign=assign)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._original_module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self._original_module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if own.get("_wrapped") and name in own["_forward_methods"]:
            return self._through_wrapper(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("_original_module"), name)
        return self._watched(value, name) if own["_wrapped"] and inspect.ismethod(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if "_ready" not in self.__dict__:
            super().__setattr__(name, value)
            return
        own, theirs = self._has_own(name), hasattr(self._original_module, name)
        if theirs or not own:
            setattr(self._original_module, name, value)
        if own:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._has_own(name):
            super().__delattr__(name)
        else:
            delattr(self._original_module, name)

    def _has_own(self, name: str) -> bool:
        return name in self.__dict__ or name in self._modules or hasattr(type(self), name)

    def _through_wrapper(self, name: str) -> Callable[..., Any]:
        """Return method ``name`` redirected through this module's forward."""
        original = self._original_module

        def call_forward_module(*args: Any, **kwargs: Any) -> Any:
            before = original.__dict__.get("forward")

            def restore() -> None:
                if before is None:
                    original.__dict__.pop("forward", None)
                else:
                    original.__dict__["forward"] = before

            def method_in_place_of_forward(*args: Any, **kwargs: Any) -> Any:
                restore()  # the method may call the true forward
                return getattr(original, name)(*args, **kwargs)

            original.__dict__["forward"] = method_in_place_of_forward
            try:
                return self(*args, **kwargs)
            finally:
                restore()

        return call_forward_module

    def _watched(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap ``method`` to refuse calls of layers that bypass the strategy's wrapper."""
        original = self._original_module

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            def refuse(*_: Any) -> None:
                raise RuntimeError(
                    f"You are calling the method `{type(original).__name__}.{name}()` from outside the model, and it runs "
                    "layers: gradients would not be exchanged between processes. Mark it as a forward method after "
                    f"`fabric.setup()`: `fabric_model.mark_forward_method({name!r})`."
                )

            handles = [module.register_forward_pre_hook(refuse) for module in original.modules()]
            try:
                return method(*args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()

        return watched


class FabricOptimizer:
    """Optimizer whose ``step`` goes through the strategy.

    It is an instance of the optimizer's own class too.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, callbacks: list[Any] | None = None) -> None:
        self._optimizer, self._strategy = optimizer, strategy
        self.zero_grad = optimizer.zero_grad  # not by way of this class, which would search for each attribute
        self._after_step = [c.on_after_optimizer_step for c in callbacks or [] if hasattr(c, "on_after_optimizer_step")]
        kind = optimizer.__class__
        self.__class__ = type(f"Fabric{kind.__name__}", (type(self), kind), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        options = {} if closure is None else {"closure": closure}
        output = self._strategy.optimizer_step(self._optimizer, **options)
        for hook in self._after_step:
            hook(strategy=self._strategy, optimizer=self._optimizer)
        return output

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.get_optimizer_state(self._optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


class FabricDataLoader:
    """A loader as an iterable: each pass is the next epoch, each batch arrives on ``device``.

    With a :class:`ResumableLoader` it can also resume, by ``state_dict`` and ``load_state_dict``, in the middle of an
    epoch. Of passes beside each other (``zip(loader, loader)``) each is an epoch of its own, and position and state are those of
    the newest. Other attributes are the user's loader's.
    """

    def __init__(self, dataloader: Any, device: torch.device | None = None, run_seed: int | None = None) -> None:
        """Wrap a loader. ``run_seed``: the seed of old states that name none."""
        self._resumable = dataloader if isinstance(dataloader, ResumableLoader) else None
        self._run_seed = run_seed
        self._dataloader = self._resumable.loader if self._resumable is not None else dataloader
        self._device = device
        self.epoch = self.batch = 0
        self._resumed = False
        self._newest: object = None
        """The pass whose position `epoch` and `batch` are."""

    @property
    def device(self) -> torch.device | None:
        return self._device

    def __len__(self) -> int:
        return len(self._dataloader if self._resumable is None else self._resumable)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch, self.batch, self._newest = epoch, 0, None

    def __iter__(self) -> Iterator[Any]:
        if self.batch and not self._resumed:
            self.set_epoch(self.epoch + 1)  # the pass before was left early, or goes on beside this one
        self._resumed = False
        self._newest = this = object()
        for batch in self._batches():
            if self._newest is this:
                self.batch += 1
            yield batch if self._device is None else move_batch(batch, self._device)
        if self._newest is this:
            self.set_epoch(self.epoch + 1)

    def _batches(self) -> Iterator[Any]:
        if self._resumable is not None:
            return self._resumable.batches(self.epoch, self.batch)
        for sampler in (
            getattr(self._dataloader, "sampler", None),
            getattr(getattr(self._dataloader, "batch_sampler", None), "sampler", None),
        ):
            if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
                set_epoch(self.epoch)
                break
        return iter(self._dataloader)

    def close(self) -> None:
        """End the loader's workers, also those of passes that were left.

        The next pass starts others.
        """
        if self._resumable is not None:
            self._resumable.close()
        elif hasattr(self._dataloader, "close"):
            self._dataloader.close()

    def state_dict(self) -> dict[str, Any]:
        state = self._resumable.state_dict(self.batch) if self._resumable is not None else {}
        seed = {} if self._resumable is None else {"seed": self._resumable.seed}
        return {"epoch": self.epoch, "batch": self.batch, "loader": state, **seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.batch, self._resumed, self._newest = state["epoch"], state["batch"], True, None
        if self._resumable is not None:
            former = self._resumable.seed if self._run_seed is None else self._run_seed
            self._resumable.reseed(state.get("seed", former))
            self._resumable.load_state_dict(state["loader"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataloader"], name)


def is_wrapped(obj: object) -> bool:
    """Return True if Fabric has set up ``obj``: a module, an optimizer or a loader."""
    return isinstance(uncompiled(obj)[0], (FabricModule, FabricOptimizer, FabricDataLoader))


def unwrap(obj: Any) -> Any:
    """Return what Fabric was given for ``obj``, through lists, tuples and dicts.

    Of a module it is the one that runs: the processes' wrapper, if there is one.
    """
    if isinstance(obj, Mapping):
        return {key: unwrap(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)) and not hasattr(obj, "_fields"):
        return type(obj)(map(unwrap, obj))
    bare, _ = uncompiled(obj)
    if isinstance(bare, FabricModule):
        return uncompiled(bare._forward_module)[0]
    if isinstance(obj, FabricOptimizer):
        return obj.optimizer
    return obj._dataloader if isinstance(obj, FabricDataLoader) else obj


def uncompiled(obj: Any) -> tuple[Any, Any]:
    """Return the module inside a compiled one and how it was compiled; anything else and None."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # if it is not loaded, nothing has been compiled
    if dynamo is None or not isinstance(obj, dynamo.OptimizedModule):
        return obj, None
    return obj._orig_mod, obj.dynamo_ctx


def compiled_again(module: nn.Module, how: Any) -> nn.Module:
    """Return ``module`` compiled as :func:`uncompiled` found another."""
    from torch._dynamo.eval_frame import OptimizedModule

    return OptimizedModule(module, how)


def _needs_fabric_backward(strategy: Strategy) -> bool:
    """Return True if plain ``loss.backward()`` would give wrong gradients."""
    precision = strategy.precision
    if precision.scaler is not None or getattr(type(strategy), "backward", None) is not Strategy.backward:
        return True
    steps = ("pre_backward", "backward", "post_backward")
    return not isinstance(precision, MixedPrecision) and any(
        getattr(type(precision), name, None) is not getattr(Precision, name) for name in steps
    )


def _guard(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        tensor.register_hook(_check_backward)
    return tensor


def _check_backward(gradient: torch.Tensor) -> None:
    if not BackwardState.by_fabric:
        raise RuntimeError(
            "this strategy and precision requires you to call `fabric.backward(loss)` in the place of `loss.backward()`"
        )
