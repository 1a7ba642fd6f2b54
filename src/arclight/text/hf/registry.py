"""Register the families of `families` and `moe_families`; find one by model type or class.

`read` and `write` look families up here. A new family is a table in one of these modules and an entry of `FAMILIES`.
"""

from __future__ import annotations

from torch import nn

from arclight.text.hf.families import FLUX, GPT2_FAMILY, LLAMA, MPT_FAMILY, QWEN3, SIGLIP2, Family
from arclight.text.hf.moe_families import DEEPSEEK_V3, LLAMA4, QWEN3_MOE

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN3, GPT2_FAMILY, MPT_FAMILY, QWEN3_MOE, DEEPSEEK_V3, LLAMA4, SIGLIP2, FLUX)


def family_of_type(model_type: str) -> Family:
    """Return the family that config.json calls ``model_type``.

    Raises ValueError that names the known ones.
    """
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(f"config.json has model_type {model_type!r}; families known here: {known}")


def family_of_model(model: nn.Module) -> Family:
    """Return the family of one of our models; raises TypeError for a model of none."""
    for kind in type(model).__mro__:  # FSDP derives a class of its own
        for family in FAMILIES:
            if kind is family.model:
                return family
    known = ", ".join(family.model.__name__ for family in FAMILIES)
    raise TypeError(f"{type(model).__name__} has no names at Hugging Face; models that have: {known}")
