"""Settings that a user may keep on the module, among its hyper-parameters, or on the data module: find and change them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arclight.trainer.module import Module


def holders(module: Module, name: str) -> list[Any]:
    """Every place that has ``name``: the module, its ``hparams``, the data module, its ``hparams``; the last one counts."""
    trainer = getattr(module, "_trainer", None)
    data = trainer.datamodule if trainer is not None else None
    found: list[Any] = []
    for owner in (module, data):
        if owner is None:
            continue
        if hasattr(owner, name):
            found.append(owner)
        if name in (getattr(owner, "hparams", None) or ()):
            found.append(owner.hparams)
    return found


def has_setting(module: Module, name: str) -> bool:
    return bool(holders(module, name))


def get_setting(module: Module, name: str) -> Any:
    """The value in the last place that has it. Raises AttributeError where none has."""
    holder = _holders(module, name)[-1]
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def set_setting(module: Module, name: str, value: Any) -> None:
    """Change it in every place that has it. Raises AttributeError where none has."""
    for holder in _holders(module, name):
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)


def _holders(module: Module, name: str) -> list[Any]:
    found = holders(module, name)
    if not found:
        raise AttributeError(
            f"{name} is neither stored in the model namespace nor the `hparams` namespace/dict, nor the datamodule."
        )
    return found
