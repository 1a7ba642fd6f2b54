"""Define an optimizer with an update rule per group and state keyed by parameter name.

`settings` builds a `MixedOptimizer`, the fit loop steps it. Its state is in checkpoints, keyed by parameter name, and opens on any mesh:
names of states and options stay. A new rule implements `Rule`, is added to `RULES` and gets a class in `settings`. `restore_optimizer`
loads the state of any torch optimizer (``trainer.checkpoint.state``, the tuner's trials, `DiLoCo`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from arclight._intervals import Fraction, NonNegativeFloat, PositiveInt, ProperFraction, check
from arclight.fabric.distributed.dtensor import local_tensor
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.optim.adopt import AdoptRule
from arclight.optim.elementwise_rules import AdamWRule, SGDRule
from arclight.optim.muon import MuonRule
from arclight.optim.stochastic_rounding import Owned

_NOT_OPTIONS = ("params", "param_names")
_OF_THIS_RUN = (*_NOT_OPTIONS, "state_dtype", "stochastic_rounding", "precision")
"""Entries of a group that keep this run's values when a checkpoint is loaded: its parameters, and how numbers are stored and rounded."""


class Rule(Protocol):
    """Update rule of one kind of parameter group; it has no state of its own."""

    def new_state(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Make the state of ``parameter`` before its first step, sharded as the parameter is."""
        ...

    def step(self, own: list[Owned], group: Mapping[str, Any], skip: torch.Tensor | None) -> None:
        """Update parameters that have gradients, unless ``skip`` is true."""
        ...


RULES: dict[str, Rule] = {
    "adamw": AdamWRule(), "adopt": AdoptRule(), "qhadopt": AdoptRule(), "muon": MuonRule(), "normuon": MuonRule(), "sgd": SGDRule()
}  # fmt: skip


_OPTIONS: dict[str, Any] = {
    "lr": NonNegativeFloat, "initial_lr": NonNegativeFloat, "weight_decay": NonNegativeFloat, "eps": NonNegativeFloat,
    "momentum": ProperFraction, "betas": tuple[ProperFraction, ProperFraction], "beta2": ProperFraction | None, "ns_steps": PositiveInt,
    "v1": Fraction,
}  # fmt: skip
"""Allowed values of a group's options. Tensors (a rate may be one) are not checked: reading them would wait for the device."""


def _blame_sparse(owned: list[Owned], error: Exception) -> None:
    """Raise ValueError for the first sparse gradient."""
    for name, parameter, _ in owned:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of {name} is sparse, which no optimizer here supports: make its layer without sparse=True, or give that "
                "layer an optimizer of torch's own (torch.optim.SparseAdam)"
            ) from error


def _check_dtype(kind: str, name: str, parameter: torch.Tensor) -> None:
    """Raise ValueError for a parameter that is no real floating-point tensor."""
    if not parameter.is_floating_point():
        raise ValueError(
            f"{name} is of {parameter.dtype}, and kind={kind!r} updates real floating-point numbers: keep real and imaginary parts "
            "as two parameters (torch.view_as_real)"
        )


class MixedOptimizer(Optimizer):
    """Optimizer whose groups are each updated by the rule (:data:`RULES`) of their ``kind``.

    ``groups`` are as torch's, with ``params`` a list of ``(name, parameter)`` and the options of their rule.
    ``known`` has all of the model's parameters, trained or not, by which parameters that are added later get their names.

    ``state_dict`` keys state and groups by name, so that it fits another order of groups, another mesh (checkpoints gather or
    reshard its tensors) and a part of the model. ``load_state_dict`` takes that, and torch's own form by position.
    """

    knows_names = True
    """Tell `fabric.distributed.optimizer_names` that states are loaded by name, in any order of parameters."""

    skip: torch.Tensor | None = None
    """Boolean tensor (0-dim) on the device: if it is true the next step changes nothing. `LossGuard` sets it before a step, which clears it."""

    def __init__(self, groups: list[dict[str, Any]], known: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in known}
        super().__init__(groups, {})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_names": self._names}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; options left out are those of the first group.

        Raises ValueError for parameters without a name.
        """
        given = param_group["params"]
        items = [given] if isinstance(given, torch.Tensor) else list(given)
        if items and not isinstance(items[0], tuple):
            unknown = sum(item not in self._names for item in items)
            if unknown:
                raise ValueError(
                    f"{unknown} of the parameters to add have no name, under which their state would be kept: give "
                    "(name, parameter) pairs"
                )
            items = [(self._names[item], item) for item in items]
        usual = {k: v for k, v in self.param_groups[0].items() if k not in _NOT_OPTIONS} if self.param_groups else {}
        made = {**usual, **param_group, "params": items}
        if made.get("kind") not in RULES:
            raise ValueError(f"kind={made.get('kind')!r} of a parameter group is not known; choose {', '.join(RULES)}")
        if "lr" in param_group:
            made["initial_lr"] = param_group.get("initial_lr", param_group["lr"])
        if "initial_lr" not in usual and "initial_lr" not in param_group:
            made.pop("initial_lr", None)  # a schedule made later takes the rate as it is then
        for option, hint in _OPTIONS.items():
            if option in made and not isinstance(made[option], torch.Tensor):
                check(option, made[option], hint)
        for name, parameter in items:
            _check_dtype(made["kind"], name, parameter)
        super().add_param_group(made)
        self._names.update((parameter, name) for name, parameter in items)

    def named(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Yield name, parameter and group of each parameter, in the order of the groups."""
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                yield name, parameter, group

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip, self.skip = self.skip, None
        for group in self.param_groups:
            rule, owned = RULES[group["kind"]], []
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(rule.new_state(parameter, group))
                owned.append((name, parameter, state))
            if owned:
                try:
                    rule.step(owned, group, skip)
                except (RuntimeError, NotImplementedError) as error:
                    _blame_sparse(owned, error)
                    raise
        return loss

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return state, options and groups, keyed by parameter name.

        ``{"state": {name: entries}, "options": {name: options}, "param_groups": [{"params": names, ...}]}``. Options are also listed by
        name, so that the states of a pipeline's stages can be merged.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        groups = [
            {**{key: value for key, value in group.items() if key not in _NOT_OPTIONS}, "params": group["param_names"]}
            for group in self.param_groups
        ]
        state = {name: dict(self.state[p]) for name, p, _ in self.named() if self.state.get(p)}
        options = {name: {k: v for k, v in group.items() if k not in _NOT_OPTIONS} for name, _, group in self.named()}
        made: dict[str, Any] = {"state": state, "options": options, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            made = result if (result := after(self, made)) is not None else made
        return made

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and options of this optimizer's parameters; ignore those of others.

        Raises ValueError for a parameter that the state does not know, that another rule trained, or whose state has other entries or
        shapes.
        """
        state = self._in_own_order(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state = result if (result := before(self, state)) is not None else state
        self._warn_of_replaced(state["param_groups"])
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in _OF_THIS_RUN})
        self.state.clear()
        for name, parameter, group in self.named():
            entries = {k: v for k, v in state["state"].get(name, {}).items() if v is not None}
            if entries:
                self.state[parameter] = _restored(name, parameter, group, entries)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _warn_of_replaced(self, saved_groups: Iterable[Mapping[str, Any]]) -> None:
        """Warn of options that those of a checkpoint replace: a resumed run goes on as it was begun."""
        replaced: dict[str, str] = {}
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            cycled = {"betas", "momentum"} if "max_momentum" in saved else set()  # by a schedule, from step to step
            for name in _OPTIONS.keys() & group.keys() & saved.keys() - {"lr"} - cycled:
                here, there = (tuple(v) if isinstance(v, list) else v for v in (group[name], saved[name]))
                if not any(isinstance(v, torch.Tensor) for v in (here, there)) and here != there:
                    replaced.setdefault("lr" if name == "initial_lr" else name, f"{there}, not {here}")
        if replaced:
            listed = "; ".join(f"{name} = {values}" for name, values in sorted(replaced.items()))
            rank_zero_warn(
                f"the optimizer goes on with the checkpoint's options: {listed}. To train with others, start from its weights alone"
            )

    def _in_own_order(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``saved`` keyed by name, with the options that it has for this optimizer's groups."""
        if "options" in saved:
            return self._with_options(saved["options"], saved["state"])
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        names = [name for group in saved["param_groups"] for name in group.get("param_names", group["params"])]
        own = [name for name, _, _ in self.named()]
        counted = not all(isinstance(key, str) for key in keys)
        if counted and not set(own) <= set(names):  # by position; names, if any, are as another module calls them
            names = own
            if len(names) != len(keys):
                raise ValueError(
                    f"the optimizer's saved state has {len(keys)} parameters by position, this optimizer has {len(names)}"
                )
        name_of = dict(zip(keys, names, strict=True))
        homes = {name_of[key]: group for group in saved["param_groups"] for key in group["params"]}
        return self._with_options(homes, {name_of[k]: own for k, own in saved["state"].items() if k in name_of})

    def _with_options(self, homes: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any]) -> dict[str, Any]:
        groups = [_options_of(group, homes) | {"params": list(group["param_names"])} for group in self.param_groups]
        return {"state": state, "param_groups": groups}


def _options_of(group: Mapping[str, Any], homes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options saved for a group's parameters.

    The group's own, with a warning, if the parameters have different ones.
    """
    found: list[dict[str, Any]] = []
    for name in group["param_names"]:
        if name not in homes:
            raise ValueError(
                f"the optimizer's saved state does not have {name}; it has {len(homes)} other parameters. Was it saved for "
                "another model, or when this parameter was frozen?"
            )
        saved = homes[name]
        if "kind" not in saved and isinstance(RULES[group["kind"]], AdoptRule):  # the moments have the names of Adam's
            raise ValueError(
                f"{name} is resumed with kind={group['kind']!r} from an optimizer of torch, which has no ADOPT: resume with AdamW, "
                "or load the weights alone, with which the optimizer starts afresh"
            )
        if saved.get("kind", group["kind"]) != group["kind"]:
            muon = any(kind.endswith("muon") for kind in (saved["kind"], group["kind"]))
            raise ValueError(
                f"{name} was trained with kind={saved['kind']!r} and is resumed with kind={group['kind']!r}: let its name match "
                f"what it did ({'not_hidden and stacks of Muon, pattern' if muon else 'pattern'} of its group), or load the weights "
                "alone, with which the optimizer starts afresh"
            )
        options = {key: value for key, value in saved.items() if key not in _OF_THIS_RUN}
        if "decay_scale" in group:  # the saved decay is meant as it was saved; the usual scale is not written
            options.setdefault("decay_scale", "lr")
        if options not in found:
            found.append(options)
    if len(found) == 1:
        return found[0]
    rank_zero_warn(
        f"the parameters of the group of {group['param_names'][0]} were saved in groups with other options; those of the recipe "
        "are taken"
    )
    return {key: value for key, value in group.items() if key not in _OF_THIS_RUN}


def _restored(
    name: str, parameter: torch.Tensor, group: Mapping[str, Any], entries: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return ``entries`` sharded, stored and laid out as this run has the state."""
    from arclight.fabric.distributed.sharding import shard_like

    made = RULES[group["kind"]].new_state(parameter, group)
    if set(entries) != set(made):
        raise ValueError(
            f"the saved state of {name} is {', '.join(map(str, entries))}; kind={group['kind']!r} as it is set here needs "
            f"{', '.join(made) or 'none'}"
        )
    for key, place in made.items():
        value = torch.as_tensor(entries[key])
        if value.shape != place.shape:
            raise ValueError(
                f"the saved {key} of {name} is {tuple(value.shape)}, not {tuple(place.shape)}: it is of another model"
            )
        local_tensor(place).copy_(local_tensor(shard_like(value, place)))
    return made


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load ``state`` into ``optimizer``, with tensors in their parameters' memory layout.

    Fused optimizers walk parameter, gradient and moments as flat memory. Moments that come back from a file are
    contiguous; beside a ``channels_last`` weight each would be applied to another element, without an error.
    """
    optimizer.load_state_dict(state)
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
