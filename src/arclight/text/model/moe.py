"""Mixtures of experts: a router chooses few experts for each token (Shazeer et al. 2017).

Beside the dimensions of `layers`: N tokens (B * T), E experts, K experts per token, R rows (a token and one of its experts).
Experts lie stacked in one tensor per map, (E, F, D), and are multiplied group by group. A layer computes where it is; its
``dispatcher`` is what `arclight.parallel.layers.expert_parallel` replaces by one that exchanges tokens with other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from arclight.parallel.deterministic_init import Constant, Normal
from arclight.parallel.layers.permute_rows import inverse_permutation, take_rows
from arclight.text.model.layers import FeedForward


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routing of a layer of experts.

    Two are equal where they compute the same, however they are balanced while they train.
    """

    experts: int
    top_k: int
    hidden: int
    """Width F between the two maps of each expert."""
    shared: int = 0
    """Experts that every token passes through: one feed-forward part of ``shared * hidden``."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    route_norm: bool = False
    """Whether the scores of the chosen experts are divided by their sum."""
    route_scale: float = 1.0
    score_before: bool = False
    """Whether scores multiply what goes into the experts (Llama 4) and not what comes out of them."""
    groups: int = 1
    """Groups (nodes) that the experts lie in; each token chooses among the experts of its best ``top_groups``."""
    top_groups: int = 1
    group_best: int = 2
    """Scores that are summed up to a group's score: 2 (DeepSeek-V3) or 1 (V2)."""
    bias_rate: float | None = field(default=None, compare=False)
    """Step of the bias that balances the choice without a loss (Wang et al. 2024); 0: a bias that stays, None: no bias."""
    balance_loss: float = field(default=0.0, compare=False)
    """Weight of the loss, sequence by sequence, that balances the choice (DeepSeek-V3, equations 17 to 20)."""
    force_balance: bool = field(default=False, compare=False)
    """For measurements: experts are taken in turn, whatever their scores."""

    def __post_init__(self) -> None:
        if self.experts % self.groups:
            raise ValueError(f"{self.experts} experts do not divide into {self.groups} groups")
        reachable = self.experts // self.groups * self.top_groups
        if not 1 <= self.top_k <= reachable:
            raise ValueError(f"top_k = {self.top_k} must lie between 1 and the {reachable} experts of the best groups")


class Router(nn.Module):
    """Scores and choice of experts, in float32 whatever the precision around it.

    Where a bias balances the choice, the layer counts what its tokens chose while they are trained on: the count is made in the
    backward pass, so that activation checkpointing counts nothing twice and validation counts nothing.
    """

    expert_bias: Tensor | None

    def __init__(self, config: MoEConfig, width: int, std: float) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, width))
        nn.init.trunc_normal_(self.weight, std=std)
        self.loss_scale = torch.ones((), dtype=torch.promote_types(self.weight.dtype, torch.float32), device="cpu")
        """The gradient of the balance loss: see `balance.weigh_balance_loss`. Set in place, as compiled code has it as an input."""
        self.scale_per_token = False
        """Whether that is multiplied by the number of tokens."""
        bias = None if config.bias_rate is None else torch.zeros(config.experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias)
        self.counts = torch.zeros(config.experts, dtype=torch.int64, device="cpu")
        """Choices of each expert since the last step, (E,). No buffer, as it is each process's own; added to in place as well."""
        self.initial = {"weight": Normal(std), "expert_bias": Constant(0.0)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            # steps of 1e-3 are lost in bfloat16
            self.expert_bias = (self.expert_bias if bias.is_meta else bias).to(self.expert_bias.device, torch.float32)
        if not self.weight.is_meta:
            self._place(self.weight.device, torch.promote_types(self.weight.dtype, torch.float32))
        return self

    def _place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move what is no buffer to ``device``, and the scale of the loss to ``dtype``."""
        self.counts, self.loss_scale = self.counts.to(device), self.loss_scale.to(device, dtype)

    def forward(self, x_BTD: Tensor, repeated: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (N, K) float32 and numbers (N, K) of the chosen experts, and how many chose each expert, (E,) int64.

        repeated: processes that compute this for the same tokens, and whose gradients are summed.
        """
        config, (batch, _, width) = self.config, x_BTD.shape
        if self.counts.device != x_BTD.device and not x_BTD.is_meta:
            self._place(x_BTD.device, self.loss_scale.dtype)
        with torch.autocast(x_BTD.device.type, enabled=False):
            wide = torch.promote_types(x_BTD.dtype, torch.float32)
            logits_NE = F.linear(x_BTD.reshape(-1, width).to(wide), self.weight.to(x_BTD.dtype).to(wide))
            scores_NE = logits_NE.sigmoid() if config.score == "sigmoid" else logits_NE.softmax(-1)
        chosen_NK = self.choose(scores_NE.detach())
        chosen_R = chosen_NK.flatten()
        counts_E = chosen_R.new_zeros(config.experts).scatter_add_(0, chosen_R, torch.ones_like(chosen_R))
        if scores_NE.requires_grad:
            if config.balance_loss:
                loss = self._balance_loss(scores_NE, chosen_NK, batch)
                scores_NE = _Attach.apply(scores_NE, loss, self.loss_scale, self.scale_per_token, repeated)
            scores_NE = _Count.apply(scores_NE, counts_E, self.counts)
        weights_NK = scores_NE.gather(1, chosen_NK)
        if config.route_norm:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        return weights_NK * config.route_scale, chosen_NK, counts_E

    def choose(self, scores_NE: Tensor) -> Tensor:
        """Choose the experts (N, K) with the highest scores plus bias, within the best groups."""
        config = self.config
        if config.force_balance:
            turn = torch.arange(len(scores_NE) * config.top_k, device=scores_NE.device) % config.experts
            return turn.view(-1, config.top_k)
        if self.expert_bias is not None:
            scores_NE = scores_NE + self.expert_bias
        if config.groups > 1:
            grouped_NGE = scores_NE.unflatten(1, (config.groups, -1))
            best = min(config.group_best, grouped_NGE.shape[-1])
            groups_NG = grouped_NGE.topk(best, dim=-1).values.sum(-1)
            closed_NG = torch.ones_like(groups_NG, dtype=torch.bool)
            closed_NG.scatter_(1, groups_NG.topk(config.top_groups, dim=-1).indices, False)
            scores_NE = grouped_NGE.masked_fill(closed_NG[..., None], float("-inf")).flatten(1)
        return scores_NE.topk(config.top_k, dim=-1).indices

    def _balance_loss(self, scores_NE: Tensor, chosen_NK: Tensor, batch: int) -> Tensor:
        """Compute the loss that balances the choice, mean over the ``batch`` sequences.

        Sum over experts of (share of choices * E) * (mean of normalised score).
        """
        shares_BTE = (scores_NE / scores_NE.sum(-1, keepdim=True)).unflatten(0, (batch, -1))
        chosen_BR = chosen_NK.reshape(batch, -1)
        counts_BE = torch.zeros_like(shares_BTE[:, 0]).scatter_add_(1, chosen_BR, shares_BTE.new_ones(chosen_BR.shape))
        frequency_BE = counts_BE * (self.config.experts / chosen_BR.shape[1])
        loss: Tensor = self.config.balance_loss * (frequency_BE * shares_BTE.mean(1)).sum(-1).mean()
        return loss


class _Attach(torch.autograd.Function):
    """Its first argument; the gradient of the second, a loss added to the model's own, is what ``scale`` is by then."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor, scale: Tensor, per_token: bool, repeated: int) -> Tensor:
        ctx.scale, ctx.per_token, ctx.repeated, ctx.dtype = scale, per_token, repeated, loss.dtype
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        tokens = len(grad) if ctx.per_token else 1
        scale = _with_nothing_of(grad, ctx.scale.to(ctx.dtype))[0]
        return grad, scale * (tokens / ctx.repeated), None, None, None


class _Count(torch.autograd.Function):
    """Its first argument; the backward pass adds ``counts`` to ``total``, in place."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, counts: Tensor, total: Tensor) -> Tensor:
        ctx.counts, ctx.total = counts, total
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # By .data: the total is kept for several backward passes, which look whether its version has changed.
        ctx.total.data.add_(_with_nothing_of(grad, ctx.counts))
        return grad, None, None


def _with_nothing_of(grad: Tensor, value: Tensor) -> Tensor:
    """Give ``value`` (flat) as something that needs ``grad``: compilers do in the forward pass what does not, with values of then."""
    return torch.cat((value.reshape(-1), grad.reshape(-1)[:0].to(value.dtype)))


class Experts(nn.Module):
    """SwiGLU experts, stacked: w1, w3 (E, F, D) and w2 (E, D, F)."""

    cuts: ClassVar[dict[str, int]] = {"w1": 1, "w3": 1, "w2": 2}
    """The dimension that tensor parallelism cuts: F of each map."""

    def __init__(self, config: MoEConfig, width: int, std: float, std_out: float) -> None:
        super().__init__()
        self.active_share = config.top_k / config.experts
        """Of the parameters here, those that one token meets."""
        self.w1 = nn.Parameter(torch.empty(config.experts, config.hidden, width))
        self.w2 = nn.Parameter(torch.empty(config.experts, width, config.hidden))
        self.w3 = nn.Parameter(torch.empty(config.experts, config.hidden, width))
        self.initial = {"w1": Normal(std), "w2": Normal(std_out), "w3": Normal(std)}
        for name, distribution in self.initial.items():
            nn.init.normal_(getattr(self, name), std=distribution.std)
        self.alignment = 1
        """Rows of an expert are padded to a multiple of this where a kernel asks for it (float8: 16)."""
        self.parts = 1
        """Processes that each have a part of the hidden width of every expert here."""
        self.share: Callable[[Tensor], Tensor] | None = None
        """What turns a weight into the tensor that this process multiplies with; None where weights are whole."""

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows (R, D) in the order of their experts, ``counts_E`` of each; as many rows (R, D)."""
        kind = x_RD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_RD.dtype
        w1, w2, w3 = ((w if self.share is None else self.share(w)).to(dtype) for w in (self.w1, self.w2, self.w3))
        x_RD = x_RD.to(dtype)
        if not len(x_RD):  # kernels refuse no rows at all: one of zeros, whose gradients are zeros
            filled_E = torch.zeros_like(counts_E)
            filled_E[:1].fill_(1)  # an index would be copied from the host
            return _swiglu(F.pad(x_RD, (0, 0, 0, 1)), filled_E, w1, w2, w3)[:0]
        if self.alignment > 1:
            return _aligned(x_RD, counts_E, self.alignment, lambda x, counts: _swiglu(x, counts, w1, w2, w3))
        return _swiglu(x_RD, counts_E, w1, w2, w3)


def _swiglu(x_RD: Tensor, counts_E: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor) -> Tensor:
    ends = counts_E.cumsum(0).to(torch.int32)
    gate_RF, up_RF = (_grouped(x_RD, w, ends) for w in (w1_EFD, w3_EFD))
    return _grouped(F.silu(gate_RF) * up_RF, w2_EDF, ends)


def _grouped(x_RI: Tensor, w_EOI: Tensor, ends: Tensor) -> Tensor:
    if x_RI.dtype == torch.float64:  # which no grouped kernel knows
        parts = x_RI.tensor_split(ends[:-1].long().cpu())
        return torch.cat([part @ w.T for part, w in zip(parts, w_EOI, strict=True)])
    if x_RI.dtype == torch.bfloat16 or not torch.compiler.is_compiling():
        return F.grouped_mm(x_RI, w_EOI.transpose(1, 2), offs=ends)
    product: Tensor = _opaque_grouped_mm(x_RI, w_EOI.transpose(1, 2), ends)
    return product


@torch.library.custom_op("arclight::grouped_mm", mutates_args=())
def _opaque_grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`F.grouped_mm` for compilers: that of torch 2.13 believes that the kernel knows bfloat16 only."""
    return F.grouped_mm(left, right, offs=ends)


@_opaque_grouped_mm.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if right.ndim == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(ends.shape[0], left.shape[0], right.shape[1])


def _save_operands(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    left, right, ends = ctx.saved_tensors
    return _opaque_grouped_mm(grad, right.transpose(1, 2), ends), _opaque_grouped_mm(left.T, grad, ends), None


_opaque_grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_operands)


def _aligned(
    x_RD: Tensor, counts_E: Tensor, multiple: int, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    """Run ``compute`` with each expert's rows padded by zeros to a multiple.

    The number of rows is fixed, so the host waits for nothing.
    """
    rows, experts = len(x_RD), len(counts_E)
    total = -(-(rows + experts * (multiple - 1)) // multiple) * multiple
    padded_E = (counts_E + multiple - 1) // multiple * multiple
    ends_E, padded_ends_E = counts_E.cumsum(0), padded_E.cumsum(0)
    places = torch.arange(total, device=x_RD.device)
    expert = torch.searchsorted(padded_ends_E, places, right=True).clamp(max=experts - 1)
    inside = places - (padded_ends_E - padded_E)[expert]
    source, real = (ends_E - counts_E)[expert] + inside, inside < counts_E[expert]
    own = torch.arange(rows, device=x_RD.device)
    holder = torch.searchsorted(ends_E, own, right=True)
    target = own - (ends_E - counts_E)[holder] + (padded_ends_E - padded_E)[holder]
    # what is left at the end goes with the last expert: rows of zeros, which a kernel would leave undefined otherwise
    padded_E = torch.cat((padded_E[:-1], total - padded_ends_E[-2:-1])) if experts > 1 else padded_E.new_tensor([total])
    source = source.clamp(max=rows - 1)
    return take_rows(compute(take_rows(x_RD, source, target, valid=real), padded_E), target, source, back_valid=real)


class Dispatcher(Protocol):
    """Send rows (R, D), sorted by expert, to their experts, and return the results in the same order.

    ``counts_E`` is the rows of each.
    """

    def __call__(self, rows_RD: Tensor, counts_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor: ...


class LocalDispatcher:
    """Compute all rows here, where all experts are."""

    def __call__(self, rows_RD: Tensor, counts_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return experts(rows_RD, counts_E)


class SharedExperts(FeedForward):
    """Experts that all tokens pass through.

    Under tensor parallelism they give a part of a sum, made by the layer.
    """

    sharding: ClassVar[dict[str, str]] = {"w1": "column", "w3": "column", "w2": "part"}


class MoE(nn.Module):
    """Layer of experts: the sum over a token's experts of weight * expert(x), plus the shared experts."""

    sharding: ClassVar[dict[str, str]] = {"": "gather", "router": "shared", "experts": "experts", "total": "row"}

    def __init__(self, config: MoEConfig, width: int, std: float, std_out: float) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config, width, std)
        self.experts = Experts(config, width, std, std_out)
        self.shared = SharedExperts(width, config.shared * config.hidden, std, std_out) if config.shared else None
        self.total = nn.Identity()
        self.dispatcher: Dispatcher = LocalDispatcher()

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD = self.routed(x_BTD)
        out: Tensor = self.total(out_BTD if self.shared is None else out_BTD + self.shared(x_BTD))
        return out

    def routed(self, x_BTD: Tensor) -> Tensor:
        if torch.compiler.is_exporting():  # runtimes have no grouped product, and sort slowly
            return self.dense(x_BTD)
        weights_NK, chosen_NK, counts_E = self.router(x_BTD, self.experts.parts)
        order_R = chosen_NK.flatten().argsort(stable=True)
        places_NK = inverse_permutation(order_R).view_as(chosen_NK)
        x_ND = x_BTD.flatten(0, 1)
        x_RD = _Scatter.apply(x_ND, order_R, places_NK)
        if self.config.score_before:
            x_RD = (x_RD * weights_NK.flatten()[order_R][:, None]).to(x_BTD.dtype)
            weights_NK = torch.ones_like(weights_NK)
        y_RD = self.dispatcher(x_RD, counts_E, self.experts)
        y_ND: Tensor = _Combine.apply(y_RD, weights_NK, order_R, places_NK)
        return y_ND.view_as(x_BTD)

    def dense(self, x_BTD: Tensor) -> Tensor:
        """Compute `routed` as one feed-forward part of all experts, whose hidden values are weighted: the reference.

        It takes E / K times the operations, and no sorting, no sizes that depend on data, and no operator that quantizers
        and runtimes do not know.
        """
        weights_NK, chosen_NK, _ = self.router(x_BTD, self.experts.parts)
        w1_EFD, w2_EDF, w3_EFD = self.experts.w1, self.experts.w2, self.experts.w3
        weights_NE = weights_NK.new_zeros(weights_NK.shape[0], self.config.experts).scatter(1, chosen_NK, weights_NK)
        x_ND = x_BTD.flatten(0, 1)
        gate_NEF, up_NEF = (
            F.linear(x_ND, w_EFD.flatten(0, 1)).unflatten(-1, (self.config.experts, -1)) for w_EFD in (w1_EFD, w3_EFD)
        )
        weights_NE1 = weights_NE.to(x_ND.dtype)[..., None]
        if self.config.score_before:  # linear maps of weighted inputs
            hidden_NEF = F.silu(gate_NEF * weights_NE1) * (up_NEF * weights_NE1)
        else:
            hidden_NEF = F.silu(gate_NEF) * up_NEF * weights_NE1
        y_ND: Tensor = F.linear(hidden_NEF.flatten(1), w2_EDF.transpose(0, 1).flatten(1))
        return y_ND.view_as(x_BTD)


class _Scatter(torch.autograd.Function):
    """Repeat each token's row K times, in the order of experts.

    Gradients are gathered and summed in float32, never scattered.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(places_NK)
        return x_ND[order_R // places_NK.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (places_NK,) = ctx.saved_tensors
        wide = torch.promote_types(grad_RD.dtype, torch.float32)
        return grad_RD[places_NK].sum(1, dtype=wide).to(grad_RD.dtype), None, None


class _Combine(torch.autograd.Function):
    """Sum each token's K weighted rows, in float32."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_NK: Tensor, order_R: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, weights_NK, order_R, places_NK)
        return (y_RD[places_NK] * weights_NK[..., None]).sum(1).to(y_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_RD, weights_NK, order_R, places_NK = ctx.saved_tensors
        d_y_RD = grad_ND[order_R // places_NK.shape[1]] * weights_NK.flatten()[order_R][:, None]
        d_weights_NK = (y_RD[places_NK].to(weights_NK.dtype) * grad_ND[:, None]).sum(-1)
        return d_y_RD.to(y_RD.dtype), d_weights_NK, None, None
