"""Average weights during training (EMA and others), and evaluate and save with the average.

Users pass `EMAWeightAveraging`, a recipe's ``[ema]`` makes it; SWA derives from the base. In checkpoints the model's entry is what is
trained and the average (``ema``) is beside it: that layout stays, as ``load_from_checkpoint`` takes the average.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel

from arclight._intervals import NonNegativeFloat, NonNegativeInt, PositiveInt, check
from arclight.fabric.distributed.dtensor import local_tensors
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from torch import nn

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

Averages = dict[str, torch.Tensor]
AverageFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
AverageListsFunction = Callable[[list[torch.Tensor], list[torch.Tensor], torch.Tensor], None]


class WeightAveraging(Callback):
    """Evaluate with an average of the weights; here the plain mean of all updates (SWA).

    * Subclasses say when to update (:meth:`should_update`) and how much of the new weights to take (:meth:`share`), or
      ``avg_fn(average, weight, n_averaged)`` gives the new average of one tensor, or ``multi_avg_fn(averages, weights,
      n_averaged)`` changes a list of them in place, as for ``torch.optim.swa_utils.AveragedModel``.
    * The first update copies the weights; before it there is no average, and evaluation uses the model itself.
    * Validation during fit uses the average. It is put in place when evaluation starts and taken out when it ends
      or fails, so the model that trains and the model that is saved are never the average.
    * In a checkpoint the average is an entry of its own, ``ema``, under the model's own parameter names. A second
      averaging callback needs another ``entry``; the first of them is the one that is evaluated.
    * When training ends the average becomes the model's weights; what is saved after that still has both.

    Averages are at least float32, whatever the model's type: in bfloat16 a share of 0.001 would be rounded away.
    With ``use_buffers`` floating-point buffers (running statistics) are averaged and others copied; without it
    the average keeps to parameters and evaluation uses the model's own buffers. ``device``: where the average lives
    (default: with the model).
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        *,
        avg_fn: AverageFunction | None = None,
        multi_avg_fn: AverageListsFunction | None = None,
        entry: str = "ema",
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise MisconfigurationError(f"{type(self).__name__}: give one of avg_fn and multi_avg_fn, not both")
        for name, function in (("avg_fn", avg_fn), ("multi_avg_fn", multi_avg_fn)):
            if function is not None and not callable(function):
                raise MisconfigurationError(f"The `{name}` should be callable, got {function!r}")
        self.device, self.use_buffers, self.entry = device, use_buffers, entry
        self.avg_fn, self.multi_avg_fn = avg_fn, multi_avg_fn
        self.updates = 0
        self._last_step: int | None = None
        self._averages: Averages = {}
        self._owners: dict[str, dict[str, Any]] = {}
        self._module: Module | None = None
        self._backup: list[torch.Tensor] | None = None
        self._fitting, self._leads = False, True

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True to update after step ``step_idx`` or at the end of epoch ``epoch_idx``.

        Both count from 0.
        """
        return step_idx is not None

    def share(self, update: int) -> float:
        """Return the weight of the model in update number ``update`` (from 1), in [0, 1]."""
        return 1 / update

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        return type(self).__qualname__ if self.entry == "ema" else self._generate_state_key(entry=self.entry)

    @property
    def n_averaged(self) -> int:
        """Updates so far."""
        return self.updates

    @property
    def average_model(self) -> AveragedModel | None:
        """Copy of the newest fit's module with averaged weights, made at each call; or None."""
        if self._module is None:
            return None
        model = AveragedModel(copy.deepcopy(self._module), use_buffers=self.use_buffers)
        model.n_averaged.fill_(self.updates)
        model.module.load_state_dict(self._averages, strict=False)
        return model

    _average_model = average_model
    """The name that subclasses written for Lightning look for."""

    def averages(self) -> dict[str, Averages]:
        """Return checkpoint entries: averaged tensors by the model's parameter names.

        There are none before the first update.

        While the average is in the model's place, also ``state_dict``: what is saved as the model is always the model.
        """
        entries = {self.entry: dict(self._averages)} if self._averages else {}
        if self._backup is not None and self._module is not None:
            trained = dict(zip(self._owners, self._backup, strict=True))
            entries["state_dict"] = {**self._module.state_dict(), **trained}
        return entries

    def load_averages(self, entries: dict[str, Any]) -> None:
        """Restore the averages of :meth:`averages` from a checkpoint's entries."""
        saved = entries.get(self.entry) or {}
        self._averages = {name: tensor.detach().clone().to(self.device) for name, tensor in saved.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates = state_dict.get("updates", self.updates)
        self._last_step = state_dict.get("last_step", state_dict.get("latest_update_step"))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Convert the average of a Lightning checkpoint to our layout.

        Lightning saves the average as the model, and the model as ``current_model_state``.
        """
        if "current_model_state" in checkpoint and self._leads:
            names = tensor_owners(pl_module, self.use_buffers)
            average, checkpoint["state_dict"] = checkpoint["state_dict"], checkpoint.pop("current_model_state")
            checkpoint[self.entry] = {name: tensor for name, tensor in average.items() if name in names}
            self.updates = int(checkpoint.pop("averaging_state", {}).get("n_averaged", 0))

    # -- updates ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Reset the average for a new fit; a resume loads the saved one after this."""
        if stage != "fit":
            return
        others = [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]
        if len({other.entry for other in others}) < len(others):
            raise MisconfigurationError(
                f"{len(others)} averaging callbacks would save under one name {self.entry!r}: give each its own, "
                f"as in {type(self).__name__}(..., entry='second'); the first is the one that validation uses"
            )
        self._leads = not others or others[0] is self
        self._averages, self.updates, self._last_step = {}, 0, None
        self._module, self._owners, self._backup, self._fitting = pl_module, {}, None, True

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._owners = tensor_owners(pl_module, self.use_buffers)
        if self._last_step is None:
            self._last_step = trainer.progress.global_step
        if not self._averages:
            return
        # a pipeline's stage has a part of them
        self._averages = trainer.strategy.own_weights(pl_module, self._averages)
        for name, tensor in self._named_tensors():
            # those that are copied: the model may have more of them than when the average was saved
            if not _is_averaged(tensor):
                self._averages.setdefault(name, tensor.detach().clone())
        if unknown := self._averages.keys() ^ self._owners.keys():
            some = ", ".join(sorted(unknown)[:5])
            raise ValueError(f"the saved average and {type(pl_module).__name__} differ: only one of them has {some}")
        self._averages = {
            name: trainer.strategy.share_of(self._averages[name], tensor).to(
                self.device if self.device is not None else tensor.device
            )
            for name, tensor in self._named_tensors()
        }

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._update_if(trainer, step_idx=trainer.progress.global_step - 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._update_if(trainer, epoch_idx=trainer.current_epoch)

    def _update_if(self, trainer: Trainer, **index: int) -> None:
        step = trainer.progress.global_step
        if step != self._last_step and self.should_update(**index):
            self._last_step = step
            self._update()

    @torch.no_grad()
    def _update(self) -> None:
        self.updates += 1
        if not self._averages:
            self._averages = {name: averaged_copy(tensor, self.device) for name, tensor in self._named_tensors()}
            return
        floats: list[tuple[torch.Tensor, torch.Tensor]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (_, tensor), average in zip(self._named_tensors(), self._averages.values(), strict=True):
            (floats if _is_averaged(average) else copies).append((average, tensor))
        if floats:
            tensors = [t if t.dtype == a.dtype and t.device == a.device else t.to(a) for a, t in floats]
            self._mix(local_tensors(average for average, _ in floats), local_tensors(tensors))
        if copies:
            torch._foreach_copy_(
                local_tensors(average for average, _ in copies), local_tensors(tensor for _, tensor in copies)
            )

    def _mix(self, averages: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        """Change ``averages`` in place by one update with ``tensors``."""
        before = torch.tensor(self.updates - 1, device=averages[0].device)
        if self.multi_avg_fn is not None:
            self.multi_avg_fn(averages, tensors, before)
        elif self.avg_fn is not None:
            torch._foreach_copy_(averages, [self.avg_fn(a, t, before) for a, t in zip(averages, tensors, strict=True)])
        else:
            torch._foreach_lerp_(averages, tensors, self.share(self.updates))

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        # Looked up each time: a module may replace its buffers' tensors, and .to() replaces them all.
        return [(name, owner[name.rpartition(".")[2]]) for name, owner in self._owners.items()]

    # -- evaluation ------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        if self._fitting:
            self._swap_models(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._fitting:
            self._swap_models(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        if self._backup is not None:
            self._swap_models(pl_module)
        self._fitting = False

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Copy the average to the weights; later checkpoints of this fit keep the trained ones."""
        self._copy_average_to_current(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._backup = None

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._fitting, self._backup = False, None

    def _swap_models(self, pl_module: Module) -> None:
        """Swap the model for its average, or restore the model."""
        if self._backup is None:
            self._put_in()
            return
        with torch.inference_mode(False), torch.no_grad():
            torch._foreach_copy_(
                local_tensors(tensor for _, tensor in self._named_tensors()), local_tensors(self._backup)
            )
        self._backup = None

    def _copy_average_to_current(self, pl_module: Module) -> None:
        if self._backup is None:
            self._put_in()

    def _put_in(self) -> None:
        if self._averages and self._owners and self._leads:
            tensors = [tensor for _, tensor in self._named_tensors()]
            with torch.inference_mode(False), torch.no_grad():
                self._backup = [tensor.clone() for tensor in tensors]
                torch._foreach_copy_(local_tensors(tensors), local_tensors(self._averages.values()))


class EMAWeightAveraging(WeightAveraging):
    """Keep an exponential moving average (EMA) of the weights.

    After each update, average = decay_k * average + (1 - decay_k) * weights.

    decay_k = decay * (1 - exp(-k / ramp_steps)) at update k, so that early averages follow the weights quickly
    (``ramp_steps=0``: decay from the start). Updates come every ``update_every_n_steps`` optimizer steps (0: none),
    and every ``update_every_n_epochs`` epochs if that is given, from ``update_starting_at_step`` or
    ``update_starting_at_epoch`` on.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        update_every_n_epochs: int | None = None,
        ramp_steps: float = 0,
        entry: str = "ema",
    ) -> None:
        super().__init__(device, use_buffers, entry=entry)
        if not 0 <= decay < 1:
            raise MisconfigurationError(f"EMAWeightAveraging(decay={decay}): decay must be in [0, 1)")
        if ramp_steps < 0 or update_every_n_steps < 0:
            raise MisconfigurationError(
                f"EMAWeightAveraging(ramp_steps={ramp_steps}, update_every_n_steps={update_every_n_steps}): "
                "neither may be negative",
            )
        check("ramp_steps", ramp_steps, NonNegativeFloat)
        check("update_starting_at_step", update_starting_at_step, NonNegativeInt | None)
        check("update_starting_at_epoch", update_starting_at_epoch, NonNegativeInt | None)
        check("update_every_n_epochs", update_every_n_epochs, PositiveInt | None)
        self.decay, self.ramp_steps = decay, ramp_steps
        self.update_every_n_steps, self.update_every_n_epochs = update_every_n_steps, update_every_n_epochs
        self.update_starting_at_step, self.update_starting_at_epoch = update_starting_at_step, update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            started = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            return started and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        if epoch_idx is not None:
            if self.update_starting_at_epoch is None and self.update_every_n_epochs is None:
                return False
            return (
                epoch_idx >= (self.update_starting_at_epoch or 0) and epoch_idx % (self.update_every_n_epochs or 1) == 0
            )
        return False

    def share(self, update: int) -> float:
        ramp = 1 - math.exp(-update / self.ramp_steps) if self.ramp_steps else 1.0
        return 1 - self.decay * ramp


def tensor_owners(module: nn.Module, buffers: bool) -> dict[str, dict[str, Any]]:
    """Map each tensor of ``module.state_dict()`` to the dict that holds it in its submodule."""
    saved = module.state_dict().keys()
    owners: dict[str, dict[str, Any]] = {}
    for prefix, submodule in module.named_modules(remove_duplicate=False):  # tied modules are saved under each name
        for holder in (submodule._parameters, submodule._buffers)[: 2 if buffers else 1]:
            for name, tensor in holder.items():
                full = f"{prefix}.{name}" if prefix else name
                if tensor is not None and full in saved:
                    owners[full] = holder
    return owners


def _is_averaged(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that an average is taken of; others are copied."""
    return tensor.is_floating_point() or tensor.is_complex()


def averaged_copy(tensor: torch.Tensor, device: torch.device | str | int | None) -> torch.Tensor:
    """Copy a tensor to average in, floating-point ones in at least float32."""
    half = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.detach().to(device=device, dtype=torch.float32 if half else tensor.dtype, copy=True)
