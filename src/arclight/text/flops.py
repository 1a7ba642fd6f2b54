"""Arithmetic of a language model: what MFU is a share of."""

from __future__ import annotations

from typing import Any

from torch import nn


def active_parameters(model: nn.Module, embeddings: bool = True) -> float:
    """Parameters that one token passes through: of a mixture's experts only the share that is chosen.

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
    """Operations of forward and backward for a token: 6 N + 12 L H C T.

    N: parameters it is multiplied with (of experts, the chosen ones); the second part is attention over T tokens, counted
    whole although half of it is masked, as publications of MFU do.
    """
    config: Any = model.config
    attention: float = 12 * config.layers * config.heads * config.attention_width * sequence
    return 6 * active_parameters(model, embeddings=False) + attention
