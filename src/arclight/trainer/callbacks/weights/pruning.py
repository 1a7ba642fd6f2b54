"""Prune a model while it trains, with torch.nn.utils.prune.

Users pass it to a Trainer, as in Lightning, whose arguments and overridable methods it has. Its own state in checkpoints holds masks and
initial weights by their position among the parameters to prune, so that order must stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import prune

from arclight._intervals import Fraction, NonNegativeInt, check
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_info
from arclight.trainer.callback import Callback
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

_METHODS: dict[str, type[prune.BasePruningMethod]] = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}
_CONTAINERS = (Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)

Parameters = Sequence[tuple[nn.Module, str]]
Amount = int | float


class ModelPruning(Callback):
    """Prune at the end of every epoch.

    ``pruning_fn``: "l1_unstructured", "random_unstructured", "ln_structured" or "random_structured" (the last two need
    ``pruning_dim``, ln also ``pruning_norm``), or a subclass of ``torch.nn.utils.prune.BasePruningMethod``.
    ``parameters_to_prune``: pairs of module and parameter name; empty for all named in ``parameter_names`` (default
    weight and bias). ``use_global_unstructured`` ranks the weights of all of them together.
    ``amount``: a share (float), a count (int) or a function of the epoch. ``apply_pruning`` and
    ``use_lottery_ticket_hypothesis``: whether to, or a function of the epoch that says so. The latter rewinds the weights that
    are not pruned to their initial values (Frankle and Carbin 2019, arXiv:1803.03635), or with ``resample_parameters`` to newly drawn
    ones. ``make_pruning_permanent``: after training, and in the ``state_dict`` of checkpoints, weights are the masked ones and masks
    are gone; the callback's state keeps the masks, for a resumed run.
    ``verbose``: 1 logs how much is pruned, 2 also by parameter. ``prune_on_train_epoch_end=False`` prunes after validation.

    Raises MisconfigurationError for settings that do not go together.
    """

    PARAMETER_NAMES = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: type[prune.BasePruningMethod] | str,
        parameters_to_prune: Parameters = (),
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: Amount | Callable[[int], Amount] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        self._parameter_names = parameter_names or self.PARAMETER_NAMES
        for name in self._parameter_names:
            if name not in self.PARAMETER_NAMES:
                raise MisconfigurationError(f"parameter_names: {name} isn't in {self.PARAMETER_NAMES}")
        if not (callable(amount) or isinstance(amount, (int, float))):
            raise MisconfigurationError(
                f"`amount` should be provided as an int, a float or a function of the epoch, got {amount!r}"
            )
        if not callable(amount):
            check("amount", amount, NonNegativeInt | Fraction)
        if verbose not in (0, 1, 2):
            raise MisconfigurationError(f"`verbose` must be any of (0, 1, 2), got {verbose!r}")
        method, options = _method(pruning_fn, pruning_dim, pruning_norm)
        if use_global_unstructured and method.PRUNING_TYPE != "unstructured":
            raise MisconfigurationError(
                f'Only the "unstructured" PRUNING_TYPE is supported with `use_global_unstructured=True`; '
                f"{method.__name__} is {method.PRUNING_TYPE}"
            )
        if not use_global_unstructured and not isinstance(pruning_fn, str):
            raise MisconfigurationError(
                "a BasePruningMethod is currently only supported with `use_global_unstructured=True`"
            )
        self.pruning_fn: Any = method if use_global_unstructured else partial(method.apply, **options)
        self._pruning_method_name, self._global_kwargs = method.__name__, options
        self._use_global_unstructured, self._verbose = use_global_unstructured, verbose
        self._parameters_to_prune: Parameters = parameters_to_prune
        self._given = list(parameters_to_prune or ()) if isinstance(parameters_to_prune, (list, tuple)) else []
        self.amount, self._apply_pruning = amount, apply_pruning
        self._use_lottery_ticket_hypothesis = use_lottery_ticket_hypothesis
        self._resample_parameters, self._make_pruning_permanent = resample_parameters, make_pruning_permanent
        self._prune_on_train_epoch_end = prune_on_train_epoch_end
        self._restored: dict[str, Any] = {}
        self._original_layers: dict[int, dict[str, Any]] = {}
        """By ``id`` of a module: its copy from before training (``data``), and the pruned ``names`` with their places."""

    def filter_parameters_to_prune(self, parameters_to_prune: Parameters = ()) -> Parameters:
        """Override to leave some parameters out."""
        return parameters_to_prune

    # -- hooks -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        chosen = self.sanitize_parameters_to_prune(pl_module, self._parameters_to_prune, self._parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(chosen)
        if self._use_lottery_ticket_hypothesis and not self._original_layers:
            for place, (module, name) in enumerate(self._parameters_to_prune):
                if id(module) not in self._original_layers:
                    self._original_layers[id(module)] = {"data": deepcopy(module), "names": []}
                self._original_layers[id(module)]["names"].append((place, name))

    @property
    def state_key(self) -> str:
        chosen = [repr(pair) for pair in self._given]
        return self._generate_state_key(
            pruning_fn=self._pruning_method_name, names=list(self._parameter_names), parameters=chosen
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the masks and the initial weights of lottery tickets.

        Keys are positions among the parameters to prune.
        """
        places = enumerate(self._parameters_to_prune)
        masks = {str(place): getattr(module, f"{name}_mask", None) for place, (module, name) in places}
        starts = {
            str(place): _original(original["data"], name).detach()
            for original in self._original_layers.values()
            for place, name in original["names"]
        }
        return {"masks": {place: mask for place, mask in masks.items() if mask is not None}, "starts": starts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Restore the masks and initial weights of a resumed run."""
        restored, self._restored = self._restored, {}
        for place, mask in restored.get("masks", {}).items():
            module, name = self._parameters_to_prune[int(place)]
            if not hasattr(module, f"{name}_mask"):
                prune.custom_from_mask(module, name, mask.to(getattr(module, name).device))
        for original in self._original_layers.values():
            for place, name in original["names"]:
                if (start := restored.get("starts", {}).get(str(place))) is not None:
                    with torch.no_grad():
                        _original(original["data"], name).copy_(start)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._prune_on_train_epoch_end:
            self._run_pruning(trainer.current_epoch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._prune_on_train_epoch_end and not trainer.sanity_checking:
            self._run_pruning(trainer.current_epoch)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._make_pruning_permanent:
            self.make_pruning_permanent(pl_module)

    def weights_to_save(self, pl_module: Module, weights: dict[str, Any]) -> dict[str, Any]:
        """Return weights without masks if pruning is made permanent."""
        return _masked(weights) if self._make_pruning_permanent else weights

    # -- pruning ---------------------------------------------------------------------------------------------------

    def _run_pruning(self, epoch: int) -> None:
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not _now(self._apply_pruning, epoch) or not amount:
            return
        with torch.inference_mode(False):  # after a validation: masks made under it could not be trained with
            self.apply_pruning(amount)
            if _now(self._use_lottery_ticket_hypothesis, epoch):
                self.apply_lottery_ticket_hypothesis()

    def apply_pruning(self, amount: Amount) -> None:
        """Prune ``amount`` of the entries that are not pruned yet."""
        before = [_zeros(module, name) for module, name in self._parameters_to_prune]
        if self._use_global_unstructured:
            taken = inspect.signature(self.pruning_fn).parameters
            options = {**self._global_kwargs, "amount": amount}
            prune.global_unstructured(
                self._parameters_to_prune,
                pruning_method=self.pruning_fn,
                **{name: value for name, value in options.items() if name in taken},
            )
        else:
            for module, name in self._parameters_to_prune:
                self.pruning_fn(module, name=name, amount=amount)
        if self._verbose:
            self._report(before, amount)

    def _report(self, before: list[int], amount: Amount) -> None:
        after = [_zeros(module, name) for module, name in self._parameters_to_prune]
        sizes = [getattr(module, name).numel() for module, name in self._parameters_to_prune]
        total, old, new = sum(sizes), sum(before), sum(after)
        rank_zero_info(
            f"Applied `{self._pruning_method_name}`. Pruned: {old}/{total} ({old / total:.2%}) -> "
            f"{new}/{total} ({new / total:.2%})"
        )
        if self._verbose < 2:
            return
        for (module, name), old, new, size in zip(self._parameters_to_prune, before, after, sizes, strict=True):
            rank_zero_info(
                f"Applied `{self._pruning_method_name}` to `{module!r}.{name}` with amount={amount}. "
                f"Pruned: {old} ({old / size:.2%}) -> {new} ({new / size:.2%})"
            )

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the pruned parameters to their initial values, or to newly drawn ones."""
        for original in self._original_layers.values():
            start = original["data"]
            if self._resample_parameters and callable(getattr(start, "reset_parameters", None)):
                start = deepcopy(start)
                start.reset_parameters()
            for place, name in original["names"]:
                module = self._parameters_to_prune[place][0]
                target = getattr(module, f"{name}_orig", None)
                target = getattr(module, name) if target is None else target
                with torch.no_grad():
                    target.copy_(getattr(start, name))

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Replace every pruned parameter in ``module`` by its masked value."""
        for part in module.modules():
            for hook in list(part._forward_pre_hooks.values()):
                if isinstance(hook, prune.BasePruningMethod):
                    prune.remove(part, hook._tensor_name)

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module, parameters_to_prune: Parameters | None = (), parameter_names: Sequence[str] = ()
    ) -> Parameters:
        """Return the parameters to prune: those given, or every parameter with one of the names.

        Raises MisconfigurationError for pairs of another shape or that are not in the model.
        """
        names = parameter_names or ModelPruning.PARAMETER_NAMES
        parts = [part for part in pl_module.modules() if not isinstance(part, _CONTAINERS)]
        if not parameters_to_prune:
            return [(part, name) for name in names for part in parts if _is_parameter(part, name)]
        if not isinstance(parameters_to_prune, (list, tuple)) or not all(
            len(pair) == 2 and isinstance(pair[0], nn.Module) and isinstance(pair[1], str)
            for pair in parameters_to_prune
        ):
            raise MisconfigurationError(
                "The provided `parameters_to_prune` should either be list of tuple with 2 elements: "
                "(nn.Module, parameter_name_to_prune) or None"
            )
        known = {id(part) for part in parts}
        strangers = [module for module, _ in parameters_to_prune if id(module) not in known]
        missing = [name for module, name in parameters_to_prune if id(module) in known and not hasattr(module, name)]
        if strangers or missing:
            raise MisconfigurationError(
                "Some provided `parameters_to_prune` don't exist in the model. Found missing modules: "
                f"{strangers} and missing parameters: {missing}"
            )
        return parameters_to_prune

    @staticmethod
    def _is_pruning_method(method: Any) -> bool:
        return inspect.isclass(method) and issubclass(method, prune.BasePruningMethod)


def _method(
    choice: type[prune.BasePruningMethod] | str, dim: int | None, norm: int | None
) -> tuple[Any, dict[str, Any]]:
    """Return the pruning method that ``choice`` means, and its settings."""
    if ModelPruning._is_pruning_method(choice):
        return choice, {}
    if not isinstance(choice, str):
        raise MisconfigurationError(
            f"`pruning_fn` is expected to be a str in {list(_METHODS)} or a subclass of BasePruningMethod (the class, not "
            f"an instance), got {choice!r}"
        )
    choice = choice.lower()
    if choice not in _METHODS:
        raise MisconfigurationError(f"The provided `pruning_fn` {choice} isn't available; choose from {list(_METHODS)}")
    options: dict[str, Any] = {}
    if choice.endswith("_structured"):
        if dim is None:
            raise MisconfigurationError("When requesting `structured` pruning, the `pruning_dim` should be provided.")
        options["dim"] = dim
    if choice == "ln_structured":
        if norm is None:
            raise MisconfigurationError(
                "When requesting `ln_structured` pruning, the `pruning_norm` should be provided."
            )
        options["n"] = norm
    return _METHODS[choice], options


def _now(choice: bool | Callable[[int], bool], epoch: int) -> bool:
    return bool(choice(epoch)) if callable(choice) else choice


def _original(module: nn.Module, name: str) -> torch.Tensor:
    """Return the parameter, under a mask or without one."""
    found: torch.Tensor | None = getattr(module, f"{name}_orig", None)
    return getattr(module, name) if found is None else found


def _zeros(module: nn.Module, name: str) -> int:
    mask = getattr(module, f"{name}_mask", None)
    return 0 if mask is None else int((mask == 0).sum())


def _is_parameter(module: nn.Module, name: str) -> bool:
    """Return True for a parameter, also one that an earlier fit has pruned."""
    return isinstance(getattr(module, name, None), nn.Parameter) or f"{name}_orig" in module._parameters


def _masked(weights: dict[str, Any]) -> dict[str, Any]:
    """Return ``weights`` with each original and mask merged into one parameter, on the host."""
    pruned = {
        name.removesuffix("_mask") for name in weights if name.endswith("_mask") and f"{name[:-5]}_orig" in weights
    }
    plain = {}
    for name, value in weights.items():
        base = name.removesuffix("_orig")
        if base in pruned and base != name:
            plain[base] = (weights[f"{base}_mask"].to(value.dtype) * value).cpu()
        elif name.removesuffix("_mask") not in pruned:
            plain[name] = value.cpu() if isinstance(value, torch.Tensor) else value
    return plain
