"""Arithmetic of a language model: what MFU is a share of."""

from __future__ import annotations

from typing import Any

from torch import nn


def active_parameters(model: nn.Module, embeddings: bool = True) -> float:
    """Count the parameters that one token passes through: of a mixture's experts only the share that is chosen.

    A module says that share in an attribute ``active_share``. Without ``embeddings`` the table that is only looked up is left out (a
    tied one is multiplied with at the output, and counts).
    """
    total = 0.0
    seen: set[int] = set()
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    multiplied = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()}
    for module in model.modules():
        share = getattr(module, "active_share", 1.0)
        for parameter in module.parameters(recurse=False):
            left_out = not embeddings and id(parameter) in looked_up and id(parameter) not in multiplied
            if id(parameter) not in seen and not left_out:
                total += parameter.numel() * share
            seen.add(id(parameter))
    return total


def flops_per_token(model: nn.Module, sequence: int) -> float:
    """Count the operations of forward and backward for a token of text: 6 N + 12 H C (sum over layers of keys).

    N: parameters of the trunk that it is multiplied with (of experts, the chosen ones); what is beside the trunk sees other things
    than tokens. Keys: those of the sequence, or of a layer's window or chunk where that is shorter; counted whole although half of
    them are masked, as publications of MFU do.
    """
    config: Any = model.config
    keys = sum(config.keys(layer, sequence) for layer in range(config.layers))
    beside = sum(
        active_parameters(model.get_submodule(name), embeddings=False) for name in getattr(model, "beside", ())
    )
    attention: float = 12 * config.heads * config.attention_width * keys
    return 6 * (active_parameters(model, embeddings=False) - beside) + attention
