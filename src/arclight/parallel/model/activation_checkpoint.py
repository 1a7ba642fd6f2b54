"""Apply activation checkpointing to a model's blocks: recompute in backward.

`parallelize` (`checkpoint_blocks`) and `parallelize_steps` (`checkpoint_block`) apply it before compilation. Results and names of
parameters stay; which operations "selective" keeps may change here together with `planning.chain`, which predicts the same policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from arclight.parallel.blocks import repeated_blocks

Policy = Callable[..., CheckpointPolicy]


def checkpoint_blocks(model: nn.Module, how: str | float) -> None:
    """Checkpoint each block of ``model``: "full", or "selective" for cheap operations.

    It is done in place; names stay. A number is left to the compiler: see `arclight.parallel.model.compile`.
    """
    for _, block in repeated_blocks(model):
        checkpoint_block(block, how)


def checkpoint_block(block: nn.Module, how: str | float) -> None:
    """Checkpoint the activations of one block."""
    if how != "none" and isinstance(how, str):
        block.forward = _checkpointed(block.forward, how == "selective")


def _checkpointed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"context_fn": selective_contexts} if selective else {}

    @functools.wraps(forward)  # so that copies find what is checkpointed
    def run(
        *arguments: Any, **others: Any
    ) -> Any:  # a function of ours, which the compiler looks into, unlike a partial of torch's
        return checkpoint(forward, *arguments, use_reentrant=False, **options, **others)

    return run


def selective_contexts() -> Any:
    """Return the contexts of forward and of recomputing, for one call of one block."""
    return create_selective_checkpoint_contexts(_policy())


def _policy() -> Policy:
    """Return the policy of selective checkpointing.

    Attention, communication, choices of experts and every second matrix product are kept; all else is computed again.
    Products are counted apart in forward and in recomputation, as the same calls come in both.
    """
    products = {False: 0, True: 0}
    keep, products_of = _kept_operations(), _products()

    def policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if operation in products_of or str(operation) == _CONDITIONAL_PRODUCT:
            again = context.is_recompute
            products[again] += 1
            return CheckpointPolicy.MUST_SAVE if products[again] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        if operation in keep or operation.namespace in (
            "_c10d_functional",
            "_c10d_functional_autograd",
            "c10d_functional",
        ):
            return CheckpointPolicy.MUST_SAVE
        if operation is torch.ops.aten._to_copy.default and _to_host(arguments, options):
            return (
                CheckpointPolicy.MUST_SAVE
            )  # sizes of an exchange: the same copy again would wait for the device again
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


_CONDITIONAL_PRODUCT = "arclight.conditional_product.default"
"""The products of models' own kernels, by name: see `arclight.text.model.conditional_product`."""


def _products() -> set[Any]:
    aten = torch.ops.aten
    return {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._grouped_mm.default, aten._scaled_mm.default}


def _kept_operations() -> set[Any]:
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.higher_order.flex_attention,
        aten.topk.default,  # ties may fall otherwise the second time
    }


def _to_host(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    source = arguments[0].device.type if arguments and isinstance(arguments[0], torch.Tensor) else "cpu"
    target = options.get("device")
    return source != "cpu" and target is not None and torch.device(target).type == "cpu"
