"""Sizes of gradients, for logs."""

from __future__ import annotations

import torch
from torch import nn


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """The ``norm_type``-norm (2, 1, ``"inf"``, ...) of each parameter's gradient, and of all of them as one vector.

    Keys are ``grad_2.0_norm/<parameter>`` and ``grad_2.0_norm_total``; nothing where no parameter has a gradient.
    Raises ValueError for a norm that is not positive.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {norm_type}")
    norms = {
        f"grad_{order}_norm{group_separator}{name}": torch.linalg.vector_norm(parameter.grad.detach(), order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), order)
    return norms
