"""Balance the loads of experts in training, by a bias without a loss, or by a weighed loss.

`LanguageModel` and ``text.heads`` call it around each step: `weigh_balance_loss` before backward, `update_expert_bias` before the optimizer's
step, on all ranks, as it communicates. The biases (`Router.expert_bias`) are in checkpoints; the counts of choices, which are each
process's own and start again after each step, are in those that are saved within an accumulation window (`ExpertChoices`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arclight.parallel import Mesh
from arclight.parallel.layers.expert_parallel import AllToAllDispatcher, TokenGroups, expert_layers, token_readers
from arclight.text.model.moe import BaseRouter, Router


def routers(model: nn.Module) -> Iterator[tuple[str, BaseRouter]]:
    """Yield the routers of ``model`` by name: of feed-forward parts and of attention."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseRouter))


def loss_routers(model: nn.Module) -> list[BaseRouter]:
    """List the routers that add losses of their own to the loss of ``model``."""
    return [module for module in model.modules() if isinstance(module, BaseRouter) and module.adds_loss]


def count_tokens(model: nn.Module, valid_BT: Tensor | None) -> None:
    """Set the tokens that count in balance losses and expert loads, ``valid_BT``; None for all.

    ``valid_BT`` is bool. Call it before each pass, and again after its backward pass, with None. Tokens that do not
    count are routed as others are.
    """
    for module in model.modules():
        if isinstance(module, BaseRouter):
            module.valid = valid_BT


def share_tokens(model: nn.Module, strategy: Any) -> None:
    """Average routers' choices over all processes of a ``strategy`` without a mesh.

    With a mesh routers know theirs from it. Call it on all of them, before the first pass.
    """
    if isinstance(getattr(strategy, "mesh", None), Mesh):
        return
    groups = TokenGroups(balance_group(strategy))
    for reader in token_readers(model):
        reader.groups = groups


class ExpertChoices:
    """Carry the choices of routers in an accumulation window to the run that goes on with it.

    In between they are in a checkpoint that was saved within the window.
    """

    def __init__(self) -> None:
        self._saved: list[dict[str, Tensor]] = []

    def save(self, checkpoint: dict[str, Any], model: nn.Module, strategy: Any) -> None:
        """Add the choices that a window has counted so far, of each process by router.

        A checkpoint between two windows gets none. A collective.
        """
        if not any(checkpoint.get("loops", {}).get("window", ())):
            return
        own = {name: router.counts.cpu().clone() for name, router in routers(model)}
        everyones = strategy.all_gather_object(own)
        if any(everyones):
            checkpoint["expert_choices"] = everyones

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the choices of a checkpoint until its window is taken up, if it is."""
        self._saved = checkpoint.get("expert_choices", [])

    def restore(self, model: nn.Module, strategy: Any, within_window: bool) -> None:
        """Restore this process's part, if a resumed run goes on ``within_window``."""
        if self._saved and within_window:
            for name, router in routers(model):
                router.counts.copy_(self._saved[strategy.global_rank][name])
        self._saved = []


def weigh_balance_loss(loss: Tensor, model: nn.Module) -> Tensor:
    """Return ``loss``, whose gradient scales the balance losses of ``model``, too.

    So they count as the loss does, whatever it is multiplied by (weights of batches, a scaler). Stages of a pipeline run backward
    without seeing it: there `scale_balance_loss` says how they count.
    """
    balanced = loss_routers(model)
    if not balanced or any(router.scale_per_token for router in balanced):
        return loss
    weighed: Tensor = _Weigh.apply(loss, model)
    return weighed


def scale_balance_loss(model: nn.Module, scale: float | Tensor, per_token: bool = False) -> None:
    """Set the scale of the balance losses of ``model`` in later backward passes.

    per_token: times the tokens of a pass, as beside a loss that is a sum over tokens.
    """
    for router in loss_routers(model):
        router.loss_scale.data.copy_(torch.as_tensor(scale))  # by .data: backward passes to come have it already
        router.scale_per_token = per_token


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, model: nn.Module) -> Tensor:
        ctx.model = model
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scale_balance_loss(ctx.model, grad)
        return grad, None


def balance_group(strategy: Any) -> dist.ProcessGroup | None:
    """Return the process group whose ranks have different tokens; None for one process.

    `update_expert_bias` takes it.
    """
    mesh = getattr(strategy, "mesh", None)
    everyone = dist.group.WORLD if strategy.world_size > 1 else None
    group: dist.ProcessGroup | None = mesh.loss_group if isinstance(mesh, Mesh) else everyone
    return group


@torch.no_grad()
def update_expert_bias(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Move every balancing bias one step towards equal loads; call it before optimizer steps.

    The counts of all layers are summed up in one all-reduce over ``group``: the processes that read different tokens (data and
    context parallel), None for one process; heads that tensor parallelism shards take one more for each layer. Then
    bias += rate * sign(mean count - count), minus the mean of that step (Wang et al. 2024). A `Module` calls it in
    ``on_before_optimizer_step``.

    Returns the loads as tensors on the device: ``max_violation`` (highest load over mean load, minus 1) averaged over layers,
    ``max_violation_of_worst``, its highest, and ``entropy`` (of the loads, 1 if all are equal), averaged over layers. In attention each
    head has loads of its own: averages are over heads first. If experts have a capacity (`AllToAllDispatcher`), ``dropped`` is the share
    of rows beyond it in the last pass. Empty for a model without routers.
    """
    layers = [router for _, router in routers(model)]
    if not layers:
        return {}
    flat = torch.cat([router.counts for router in layers]).to(layers[0].weight.device)
    if group is not None:
        dist.all_reduce(flat, group=group)
    violations, worst, entropies = [], [], []
    for router, counts in zip(layers, flat.split([len(router.counts) for router in layers]), strict=True):
        router.counts.zero_()
        load_HE = _of_all_heads(router, counts).double().view(router.heads, -1)
        mean_H1 = load_HE.mean(1, keepdim=True)
        share_HE = load_HE / load_HE.sum(1, keepdim=True).clamp(min=1)
        violation_H = (load_HE.amax(1) - mean_H1[:, 0]) / mean_H1[:, 0].clamp(min=1e-9)
        violations.append(violation_H.mean())
        worst.append(violation_H.max())
        entropies.append((torch.special.entr(share_HE).sum(1) / math.log(max(2, load_HE.shape[1]))).mean())
        if isinstance(router, Router) and router.expert_bias is not None and router.config.bias_rate:
            step_E = (mean_H1 - load_HE)[0].sign() * router.config.bias_rate
            router.expert_bias += (step_E - step_E.mean()).float()
    return {
        "max_violation": torch.stack(violations).mean().float(),
        "max_violation_of_worst": torch.stack(worst).max().float(),
        "entropy": torch.stack(entropies).mean().float(),
    } | _dropped(model, group)


def _dropped(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return the share of rows beyond the capacity in the last pass; nothing without one.

    It is a mean over layers and processes.
    """
    dispatchers = [layer.dispatcher for _, layer, _ in expert_layers(model)]
    shares = [d.dropped for d in dispatchers if isinstance(d, AllToAllDispatcher) and d.dropped is not None]
    if not shares:
        return {}
    total = torch.stack(shares).mean()
    if group is not None:
        dist.all_reduce(total, group=group)
        total /= dist.get_world_size(group)
    return {"dropped": total}


def _of_all_heads(router: BaseRouter, counts: Tensor) -> Tensor:
    """All-reduce ``counts`` over processes with other heads for the same tokens.

    Those are of tensor parallelism.
    """
    if router.heads > 1 and router.groups.same is not None:
        dist.all_reduce(counts, group=router.groups.same)
    return counts
