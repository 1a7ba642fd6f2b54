"""Turn a run of any Module into quantization-aware training.

The table ``[qat]`` (`training_settings`) and users make a `QuantizationAwareTraining`, `trained` rebuilds it from a checkpoint; the trainer calls its
hooks, and `replace_layers` before weights are loaded. Its state key, the fields of its state and the kinds of recipes are in checkpoints: they must
stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from arclight._intervals import NonNegativeInt, check, kind_of
from arclight.deploy.deployment import configured_example, trained_recipe
from arclight.deploy.errors import QuantizeError
from arclight.deploy.quantizing.ptq import QuantizedModel, chosen_target, for_processor
from arclight.deploy.quantizing.qat import RANGES, WEIGHT_BITS, PreparedModel, inputs_on, with_fake_quantization
from arclight.deploy.quantizing.rounded_linear import trained_linears
from arclight.deploy.settings import BFloat16, Int8, Quantization, Target, check_plan
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.seeding import isolate_rng
from arclight.fabric.strategies.base import Strategy
from arclight.fabric.strategies.ddp import DDPStrategy
from arclight.fabric.strategies.fsdp import FSDPStrategy
from arclight.fabric.strategies.sharded import ShardedStrategy
from arclight.parallel.strategy import PlanStrategy
from arclight.trainer.callback import NEEDED, Callback
from arclight.trainer.loop.hooks import overridden
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


class QuantizationAwareTraining(Callback):
    """Train ``pl_module.<attribute>`` with rounded weights and activations.

    Validation, test and prediction compute as the program will. ``recipe`` and ``target``: as in `prepare_qat`; the table ``[qat]`` of a recipe
    builds this callback.
    ``attribute``: the submodule that is trained and deployed; it must be there when the callback's ``setup`` is called, or for recipes
    without ranges after ``configure_model``.
    ``example_inputs``: its positional inputs, by default the Module's ``example_input_array``, else those of its ``configure_example`` or of the first
    batch; the first ranges are taken from them.
    From optimizer step ``freeze_observers_at`` on, ranges of activations stay as they are, and from ``freeze_batch_norm_at`` on batch
    norms use their running statistics, as the program will; None: never. Every metric of validation, test and prediction is of
    the converted model. After the fit ``convert(pl_module.model)`` gives that model for ``export``.

    A checkpoint has the weights under their names, with ranges and ``weight_bits`` beside them, and says what they were trained for; a resumed run has
    the bits of one that was never stopped, and one that would round otherwise is refused. Ranges are those of the batches of all ranks, which have
    to call the model as often as each other, and running statistics of batch norms, taken of each rank's batch, are averaged after every backward. FSDP
    gathers a model with ranges at once, as its graph reads the weights of all layers; ``convert`` is then called by every rank. Raises
    MisconfigurationError under strategies that cut layers, and for activations of a graph that are to be recomputed.
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
        if isinstance(self.recipe, BFloat16):
            raise QuantizeError(
                "BFloat16 needs no training with rounding: train as usual, and quantize the trained model, or train in precision='bf16-mixed'"
            )
        self.target = chosen_target(self.recipe, target)
        self.attribute, self.example_inputs = attribute, example_inputs
        self.freeze_observers_at, self.freeze_batch_norm_at = freeze_observers_at, freeze_batch_norm_at
        self._settled: Quantization | None = None
        self._shapes: list[dict[str, Any]] = []
        self._frozen: tuple[bool, bool] | None = None
        self._warned = False

    @property
    def has_ranges(self) -> bool:
        """Return True if ranges of activations are trained, in a captured graph.

        Otherwise `RoundedLinear` layers round by themselves.
        """
        return self.recipe.needs_calibration

    def prepared(self, pl_module: Module) -> PreparedModel:
        """Return the model that is trained; MisconfigurationError if no run has prepared it."""
        model = getattr(pl_module, self.attribute)
        if not isinstance(model, PreparedModel):
            raise MisconfigurationError(
                f"{type(pl_module).__name__}.{self.attribute} is a {type(model).__name__}, which this callback has not "
                "prepared: it is replaced in setup and must stay in its place"
            )
        return model

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        _check_strategy(trainer.strategy, self.recipe)
        model = getattr(pl_module, self.attribute, None)
        if stage == "fit" and isinstance(model, QuantizedModel):
            raise MisconfigurationError(
                f"{type(pl_module).__name__}.{self.attribute} is a QuantizedModel, which has no gradients: put the model that "
                "was trained back in its place"
            )
        settled: Quantization = trainer.strategy.broadcast(
            for_processor(self.recipe, self.target)
        )  # ranks may have different processors
        self._settled = settled
        if isinstance(model, nn.Module) or not overridden(pl_module, "configure_model", Module):
            self.replace_layers(pl_module)

    def replace_layers(self, pl_module: Module) -> None:
        """Replace the module's model by a prepared one, unless it is prepared or deployed already.

        Raises MisconfigurationError if a model that is prepared rounds otherwise.
        """
        model = getattr(pl_module, self.attribute, None)
        if isinstance(model, QuantizedModel):
            return
        if not isinstance(model, nn.Module):
            raise MisconfigurationError(
                f"{type(pl_module).__name__} has no submodule {self.attribute!r} when setup is called, so there is nothing to prepare: build it in "
                "__init__ or configure_model, or name another with QuantizationAwareTraining(attribute=...), which is attribute of [qat]"
            )
        settled = self._settled or for_processor(self.recipe, self.target)
        if (before := trained_recipe(model)) is not None:
            self._check_rounds_alike(pl_module, settled, *before)
            return
        if not self.has_ranges:
            rounded = with_fake_quantization(model, None, self.recipe, self.target, settled=settled)
            setattr(pl_module, self.attribute, rounded)
            return
        example = self._example(pl_module)
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise MisconfigurationError(
                f"{type(pl_module).__name__}.{self.attribute} has no values yet (it is on the meta device), and the first ranges are taken "
                "from what it computes: build it with values, say with trainer.init_module(empty_init=False)"
            )
        inputs = inputs_on(model, example)
        self._shapes = [
            {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")} for value in inputs
        ]
        setattr(
            pl_module, self.attribute, with_fake_quantization(model, inputs, self.recipe, self.target, settled=settled)
        )

    def _check_rounds_alike(
        self, pl_module: Module, settled: Quantization, recipe: Quantization, target: Target
    ) -> None:  # fmt: skip
        """Raise MisconfigurationError unless ``recipe`` for ``target`` rounds as this callback."""
        here, there = {**_described(settled), "target": self.target}, {**_described(recipe), "target": target}
        if told := _differing(there, here, _NOT_TRAINED):
            raise MisconfigurationError(
                f"{type(pl_module).__name__}.{self.attribute} rounds already, as a run before has left it, and otherwise: {told}; give "
                "QuantizationAwareTraining what that run had, or a module in float"
            )

    def _example(self, pl_module: Module) -> Any:
        """Return example inputs: given ones, else those of module or data; equal on all ranks."""
        if self.example_inputs is not None:
            return self.example_inputs
        if pl_module.example_input_array is not None:
            return pl_module.example_input_array
        trainer, network = pl_module._trainer, getattr(pl_module, self.attribute)
        data, stage = (None, None) if trainer is None else (trainer.datamodule, trainer.state.fn)
        with isolate_rng():  # a resumed run draws what the one before did
            found = configured_example(pl_module, network, data, "fit" if stage is None else stage.value)
        if found is None:
            raise MisconfigurationError(
                "QuantizationAwareTraining captures the model on example inputs: give example_inputs=, or set "
                f"{type(pl_module).__name__}.example_input_array"
            )
        return (
            trainer.strategy.broadcast(found) if trainer is not None and torch.distributed.is_initialized() else found
        )

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        name = type(self).__qualname__
        return name if self.attribute == "model" else self._generate_state_key(attribute=self.attribute)

    def state_dict(self) -> dict[str, Any]:
        """Return what the weights are trained for, once a run has prepared the model."""
        if self._settled is None:
            return {}
        named = {name: getattr(self, name) for name in ("target", "attribute", *_STEPS)}
        described, name = _described(self._settled), self.attribute
        needed = (
            f"the checkpoint was trained with {name} rounded to {described['kind']}, and this run would compute in float: give the [qat] that it was begun "
            f"with (kind = {described['kind']!r}), in Python QuantizationAwareTraining"
        )
        return {"recipe": described, **named, "example": self._shapes, NEEDED: needed}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> QuantizationAwareTraining:
        """Rebuild the callback of ``state`` for a module that is loaded, with zeros as inputs."""
        example = [torch.zeros(one["shape"], dtype=getattr(torch, one["dtype"])) for one in state["example"]]
        made = cls(
            _recipe_of(state["recipe"]), target=state["target"], attribute=state["attribute"], example_inputs=example or None,
            freeze_observers_at=state["freeze_observers_at"], freeze_batch_norm_at=state["freeze_batch_norm_at"],
        )  # fmt: skip
        made._settled = made.recipe
        return made

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Raise MisconfigurationError for weights trained with another rounding, or in float.

        Bits of weights that older checkpoints hold in this callback's state are moved to the state dict.
        """
        former = self._generate_state_key(attribute=self.attribute)
        states = checkpoint.get("callbacks", {})
        state = states.get(self.state_key) or states.get(former) or {}
        if "recipe" in state:
            self._check_asked_alike(state, resumed=trainer.state.fn == "fit")
            return
        states.pop(self.state_key if self.attribute == "model" else former, None)
        reduced, ranges = state.get("reduce_range"), f"{self.attribute}.{RANGES}."
        has_ranges = reduced is not None or any(name.startswith(ranges) for name in checkpoint["state_dict"])
        if has_ranges and not self.has_ranges:
            raise MisconfigurationError(
                f"the checkpoint was trained with ranges of activations, by an earlier arclight, and this run rounds {self.attribute} to "
                f"{kind_of(type(self.recipe))}: resume it with [qat] kind = 'int8' (QuantizationAwareTraining(Int8())), or start a run from float weights"
            )
        if reduced is not None:
            bits = torch.tensor(7 if reduced else 8)
            checkpoint["state_dict"].setdefault(f"{self.attribute}.{RANGES}.{WEIGHT_BITS}", bits)
        elif not has_ranges:
            raise MisconfigurationError(
                f"the checkpoint was trained in float, and this run rounds {self.attribute} to {kind_of(type(self.recipe))}: resume it without "
                "[qat] (or QuantizationAwareTraining), or start a run from its weights"
            )

    def _check_asked_alike(self, state: Mapping[str, Any], *, resumed: bool) -> None:
        """Raise MisconfigurationError if the run of ``state`` rounds or freezes otherwise."""
        compared = [*(_STEPS if resumed else ()), "target", "attribute"]
        here = {**_described(self._settled or self.recipe), **{name: getattr(self, name) for name in compared}}
        before = {**state["recipe"], **{name: state[name] for name in compared}}
        # of graphs the bits of weights are on record, and reported with a remedy
        left_out = {*_NOT_TRAINED, *(("reduce_range",) if self.has_ranges else ())}
        if told := _differing(before, here, left_out):
            raise MisconfigurationError(
                f"the run was trained with another rounding: {told}; give the [qat] that it was begun with"
            )

    # -- training ----------------------------------------------------------------------------------------------------

    def check_reached(self, steps: float) -> None:
        """Raise MisconfigurationError for a freeze step that a run of ``steps`` does not reach."""
        for name in _STEPS:
            at = getattr(self, name)
            if at and at >= steps:
                raise MisconfigurationError(
                    f"{name} = {at} is never reached: the run has {steps:g} steps, from 0 to {steps - 1:g}; give a smaller number, or leave it out"
                )

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._frozen, self._warned = None, False
        if self.has_ranges:
            self.prepared(pl_module).synchronize(trainer.world_size > 1)
        elif trained_linears(getattr(pl_module, self.attribute))[0] is None:
            raise MisconfigurationError(
                f"{type(pl_module).__name__}.{self.attribute} has none of the layers that round any more: something has put others in their place since "
                "setup, as precisions of 8 bits and fewer do; leave that out, or QuantizationAwareTraining ([qat])"
            )

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self.has_ranges:
            self.prepared(pl_module).synchronize(False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        frozen = (
            _reached(trainer.global_step, self.freeze_observers_at),
            _reached(trainer.global_step, self.freeze_batch_norm_at),
        )
        if frozen != self._frozen and self.has_ranges:
            self._frozen = frozen
            prepared = self.prepared(pl_module)
            prepared.observe(not frozen[0])
            prepared.freeze_batch_norm(frozen[1])

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None:
        """Average running statistics of batch norms over ranks."""
        if not self.has_ranges:
            return
        statistics = self.prepared(pl_module).running_statistics()
        if trainer.world_size == 1 or not statistics or self._frozen is None or self._frozen[1]:
            return
        averaged = trainer.strategy.all_reduce(torch.cat([value.flatten() for value in statistics]), reduce_op="mean")
        for value, mean in zip(statistics, averaged.split([value.numel() for value in statistics])):
            value.copy_(mean.view_as(value))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.has_ranges and not self.prepared(pl_module).called and not self._warned:
            self._warned = True
            trainer.warn(
                f"{type(pl_module).__name__}.{self.attribute} was not called in training_step, so nothing is rounded: its methods and "
                f"submodules compute in float32; call self.{self.attribute}(...) itself"
            )

    # -- metrics of the converted model ------------------------------------------------------------------------------

    def _evaluate_int8(self, pl_module: Module, enabled: bool) -> None:
        model = getattr(pl_module, self.attribute, None)
        if isinstance(model, PreparedModel):  # not if a converted one is scored, or setup has failed
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


_STEPS = ("freeze_observers_at", "freeze_batch_norm_at")
_NOT_TRAINED = ("min_sqnr_db", "observer", "calibration_batches")
"""Fields of a recipe that change no bit of training."""


def _described(recipe: Quantization) -> dict[str, Any]:
    """Return a recipe as plain data, with its kind."""
    fields = {
        name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(recipe).items()
    }
    return {"kind": kind_of(type(recipe)), **fields}


def _differing(before: Mapping[str, Any], here: Mapping[str, Any], left_out: Collection[str]) -> str:
    """Describe the fields that are not alike, but for those ``left_out``; empty if all are."""
    names = [name for name in {**before, **here} if here.get(name) != before.get(name) and name not in left_out]
    return ", ".join(f"{name} = {before.get(name)}, here {here.get(name)}" for name in names)


def _recipe_of(described: Mapping[str, Any]) -> Quantization:
    """Return the recipe that `_described` has described."""
    kinds = {kind_of(kind): kind for kind in get_args(Quantization)}
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in described.items() if name != "kind"
    }
    try:
        made: Quantization = kinds[described["kind"]](**fields)
    except (KeyError, TypeError) as error:
        raise QuantizeError(
            f"the checkpoint was trained with rounding by {dict(described)}, which this version does not know: update arclight"
        ) from error
    return made


def _check_strategy(strategy: Strategy, recipe: Quantization) -> None:
    """Raise MisconfigurationError for a strategy that cannot train rounded layers or graphs."""
    graph = recipe.needs_calibration
    if isinstance(strategy, PlanStrategy):
        try:
            check_plan(recipe, strategy.plan)
        except ValueError as error:
            raise MisconfigurationError(f"QuantizationAwareTraining: {error}") from error
        return
    if isinstance(strategy, ShardedStrategy) and not isinstance(strategy, FSDPStrategy):
        raise MisconfigurationError(
            f"QuantizationAwareTraining does not work with {type(strategy).__name__}: its {'graph' if graph else 'rounding'} reads the weights of layers "
            "itself, and that cuts layers or gathers them one by one; train with strategy='fsdp', 'ddp' or on one device"
        )
    if not graph:
        return
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
