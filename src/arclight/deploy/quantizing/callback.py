"""Turn a run of any Module into quantization-aware training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arclight._intervals import NonNegativeInt, check
from arclight.deploy.quantizing.ptq import QuantizedModel, chosen_target, for_processor
from arclight.deploy.quantizing.qat import RANGES, WEIGHT_BITS, PreparedModel, inputs_on
from arclight.deploy.settings import Int8, Quantization, Target
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.strategies.base import Strategy
from arclight.fabric.strategies.ddp import DDPStrategy
from arclight.fabric.strategies.fsdp import FSDPStrategy
from arclight.fabric.strategies.sharded import ShardedStrategy
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class QuantizationAwareTraining(Callback):
    """Callback for quantization-aware training; evaluation runs the converted int8 model.

    It trains ``pl_module.<attribute>`` with rounded weights and activations.
    ``recipe`` and ``target``: as in `prepare_qat`.
    ``attribute``: the submodule that is trained and deployed; it must be there when the callback's ``setup`` is called.
    ``example_inputs``: its positional inputs, by default the Module's ``example_input_array``; ranges start from theirs.
    From step ``freeze_observers_at`` on, ranges of activations stay as they are, and from ``freeze_batch_norm_at`` on batch
    norms use their running statistics, as the program will; None never. Every metric of validation, test and prediction is of
    the converted model. After the fit ``convert(pl_module.model)`` gives that model for ``export``.

    A checkpoint has the weights under their names, with ranges and ``weight_bits`` beside them; a resumed run has the bits of one that was
    never stopped. Ranges are those of the batches of all ranks, which have to call the model as often as each other, and running
    statistics of batch norms, taken of each rank's batch, are averaged after every backward. FSDP gathers the whole model at once, as its
    graph reads the weights of all layers; ``convert`` is then called by every rank. Raises MisconfigurationError under strategies that
    cut layers, and for activations that are to be recomputed.
    """

    def __init__(
        self,
        recipe: Quantization | None = None,
        *,
        target: Target | None = None,
        attribute: str = "model",
        example_inputs: Tensor | Sequence[Tensor] | None = None,
        freeze_observers_at: int | None = None,
        freeze_batch_norm_at: int | None = None,
    ) -> None:
        check("freeze_observers_at", freeze_observers_at, NonNegativeInt | None)
        check("freeze_batch_norm_at", freeze_batch_norm_at, NonNegativeInt | None)
        self.recipe = recipe or Int8()
        self.target = chosen_target(self.recipe, target)
        self.attribute, self.example_inputs = attribute, example_inputs
        self.freeze_observers_at, self.freeze_batch_norm_at = freeze_observers_at, freeze_batch_norm_at
        self._frozen: tuple[bool, bool] | None = None
        self._warned = False

    def prepared(self, pl_module: Module) -> PreparedModel:
        """Return the model that is trained; MisconfigurationError where no run has prepared it."""
        model = getattr(pl_module, self.attribute)
        if not isinstance(model, PreparedModel):
            raise MisconfigurationError(
                f"{type(pl_module).__name__}.{self.attribute} is a {type(model).__name__}, which this callback has not "
                "prepared: it is replaced in setup and must stay in its place"
            )
        return model

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        _check_strategy(trainer.strategy)
        if stage == "fit" and isinstance(getattr(pl_module, self.attribute, None), QuantizedModel):
            raise MisconfigurationError(
                f"{type(pl_module).__name__}.{self.attribute} is a QuantizedModel, which has no gradients: put the model that "
                "was trained back in its place"
            )
        self._prepare(pl_module, trainer.strategy.broadcast)  # ranks may have unlike processors

    def replace_layers(self, pl_module: Module) -> None:
        self._prepare(pl_module, lambda recipe: recipe)

    def _prepare(self, pl_module: Module, agreed: Callable[[Quantization], Quantization]) -> None:
        """Replace the module's model by a prepared one, unless that is there already.

        One of a stage before, or what is deployed, stays.
        agreed: gives the recipe that all ranks take, of this one's.
        """
        model = getattr(pl_module, self.attribute, None)
        if isinstance(model, PreparedModel | QuantizedModel):
            return
        if not isinstance(model, nn.Module):
            raise MisconfigurationError(
                f"{type(pl_module).__name__} has no submodule {self.attribute!r} when setup is called, so there is nothing to "
                "prepare: build it in __init__, or name another with QuantizationAwareTraining(attribute=...)"
            )
        example = self.example_inputs if self.example_inputs is not None else pl_module.example_input_array
        if example is None:
            raise MisconfigurationError(
                "QuantizationAwareTraining captures the model on example inputs: give example_inputs=, or set "
                f"{type(pl_module).__name__}.example_input_array"
            )
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise MisconfigurationError(
                f"{type(pl_module).__name__}.{self.attribute} has no values yet (it is on the meta device), and the first ranges are taken "
                "from what it computes: build it with values, say with trainer.init_module(empty_init=False)"
            )
        inputs, settled = inputs_on(model, example), agreed(for_processor(self.recipe, self.target))
        setattr(pl_module, self.attribute, PreparedModel(model, inputs, self.recipe, self.target, settled=settled))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Move weight bits of an older checkpoint from the callback's state to the ranges."""
        other = self._generate_state_key(attribute=self.attribute)
        state = checkpoint.get("callbacks", {}).pop(self.state_key if self.attribute == "model" else other, {})
        if (reduced := state.get("reduce_range")) is not None:
            bits = torch.tensor(7 if reduced else 8)
            checkpoint["state_dict"].setdefault(f"{self.attribute}.{RANGES}.{WEIGHT_BITS}", bits)

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._frozen, self._warned = None, False
        self.prepared(pl_module).synchronize(trainer.world_size > 1)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self.prepared(pl_module).synchronize(False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        frozen = (
            _reached(trainer.global_step, self.freeze_observers_at),
            _reached(trainer.global_step, self.freeze_batch_norm_at),
        )
        if frozen != self._frozen:
            self._frozen = frozen
            prepared = self.prepared(pl_module)
            prepared.observe(not frozen[0])
            prepared.freeze_batch_norm(frozen[1])

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None:
        """Average running statistics, before other callbacks average weights."""
        statistics = self.prepared(pl_module).running_statistics()
        if trainer.world_size == 1 or not statistics or self._frozen is None or self._frozen[1]:
            return
        averaged = trainer.strategy.all_reduce(torch.cat([value.flatten() for value in statistics]), reduce_op="mean")
        for value, mean in zip(statistics, averaged.split([value.numel() for value in statistics])):
            value.copy_(mean.view_as(value))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.prepared(pl_module).called and not self._warned:
            self._warned = True
            trainer.warn(
                f"{type(pl_module).__name__}.{self.attribute} was not called in training_step, so nothing is rounded: its methods and "
                f"submodules compute in float32; call self.{self.attribute}(...) itself"
            )

    # -- metrics of the converted model ------------------------------------------------------------------------------

    def _evaluate_int8(self, pl_module: Module, enabled: bool) -> None:
        model = getattr(pl_module, self.attribute, None)
        if isinstance(model, PreparedModel):  # not where a converted one is scored, or setup has failed
            model.evaluate_int8(enabled)

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._evaluate_int8(pl_module, True)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._evaluate_int8(pl_module, False)

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._evaluate_int8(pl_module, True)

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._evaluate_int8(pl_module, False)

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._evaluate_int8(pl_module, True)

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._evaluate_int8(pl_module, False)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        self._evaluate_int8(pl_module, False)
        model = getattr(pl_module, self.attribute, None)
        if isinstance(model, PreparedModel):
            model.synchronize(False)


def _check_strategy(strategy: Strategy) -> None:
    """Raise MisconfigurationError for a strategy that a graph cannot be trained under."""
    if isinstance(strategy, ShardedStrategy) and not isinstance(strategy, FSDPStrategy):
        raise MisconfigurationError(
            f"QuantizationAwareTraining does not work with {type(strategy).__name__}: its graph reads the weights of layers itself, and "
            "that cuts layers or gathers them one by one; train with strategy='fsdp', 'ddp' or on one device"
        )
    if isinstance(strategy, FSDPStrategy) and strategy.activation_checkpointing_policy is not None:
        raise MisconfigurationError(
            "QuantizationAwareTraining does not work with activation_checkpointing_policy: its graph calls no submodules whose activations "
            "could be recomputed; leave it out"
        )
    if isinstance(strategy, DDPStrategy) and strategy.layer_sync is not None:
        raise MisconfigurationError(
            "QuantizationAwareTraining does not work with sync_batchnorm=True: batch norms are operators of its graph, which "
            "exchange nothing between ranks; train with sync_batchnorm=False"
        )


def _reached(step: int, limit: int | None) -> bool:
    return limit is not None and step >= limit
