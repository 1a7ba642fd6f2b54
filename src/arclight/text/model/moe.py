"""Define mixtures of experts: a router chooses few for each token (Shazeer et al. 2017).

The families `qwen3`, `deepseek`, `llama4`, `mpt` and `deptoe` build on it; `expert_paths` sets how experts are multiplied, and
`parallel.layers.expert_parallel` replaces a layer's ``dispatcher`` by one that exchanges tokens with other ranks. Parameter names and fields
of `MoEConfig` (recipe keys) stay; all paths give equal outputs and gradients, up to rounding.

With ``score = "sigmoid"``, an activation without a gate, ``expert_dropout`` and ``entropy_loss`` this is sigma-MoE (Csordas et al. 2023):
the sum over a token's experts of sigmoid(router)_e W2_e act(W1_e x), in which no expert's weight depends on those of others.
Beside the dimensions of `layers`: N tokens (B * T), E experts, K experts per token, R rows (a token and one of its experts).
Experts are stacked in one tensor per map, (E, outputs, inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from arclight._intervals import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ProperFraction, check
from arclight.parallel.deterministic_init import Constant, Initial, Normal
from arclight.parallel.layers.expert_parallel import TokenGroups
from arclight.parallel.layers.permute_rows import inverse_permutation, take_rows
from arclight.text.model.conditional_product import Precision, TokenOrder, conditional_product
from arclight.text.model.layers import FeedForward, without_autocast

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "gelu": F.gelu, "relu": F.relu}
Path = Literal["auto", "dense", "grouped", "triton"]


def check_path(name: str, path: str) -> None:
    """Raise ValueError for a ``path``, the setting ``name``, that is not known."""
    if path not in get_args(Path):
        raise ValueError(f"{name} = {path!r} is not known; choose {', '.join(get_args(Path))}")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routing of a layer of experts.

    Two are equal if they compute the same, however they are balanced while they train.
    """

    experts: int
    top_k: int
    hidden: int
    """Width F between the two maps of each expert."""
    activation: Literal["swiglu", "gelu", "relu"] = "swiglu"
    """What an expert does between its maps: SwiGLU has a gate beside the first one, the others have none."""
    shared: int = 0
    """Experts that every token passes through: one feed-forward part of ``shared * hidden``."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    route_norm: bool = False
    """Whether the scores of the chosen experts are divided by their sum."""
    route_scale: float = 1.0
    score_before: bool = False
    """Whether scores multiply the inputs of experts (Llama 4) instead of their outputs."""
    groups: int = 1
    """Equal groups of experts; each token chooses among the experts of its best ``top_groups``."""
    top_groups: int = 1
    group_best: int = 2
    """Scores that are summed up to a group's score: 2 (DeepSeek-V3) or 1 (V2)."""
    bias_rate: float | None = field(default=None, compare=False)
    """Step of the bias that balances the choice without a loss (Wang et al. 2024); 0: a bias that stays, None: no bias."""
    balance_loss: float = field(default=0.0, compare=False)
    """Weight of the loss, sequence by sequence, that balances the choice (DeepSeek-V3, equations 17 to 20)."""
    entropy_loss: float = field(default=0.0, compare=False)
    """Weight of minus the entropy of the choice, softmax of the router's logits averaged over the batch, in the loss (Csordas et al. 2023)."""
    expert_dropout: float = field(default=0.0, compare=False)
    """Probability that a token cannot choose an expert, in training; where fewer than ``top_k`` are left, others fill up."""
    force_balance: bool = field(default=False, compare=False)
    """For measurements: experts are taken in turn, whatever their scores."""

    path: Path = field(default="grouped", compare=False)
    """How experts are multiplied: all of them for every token (``dense``, the reference, which exported graphs hold), or the chosen ones,
    by torch's grouped product (``grouped``) or by a Triton kernel of this package on a GPU (``triton``); ``auto`` is the fastest on the
    device (see `expert_paths`), and ``grouped`` until that has measured."""
    precision: Precision = field(default="full", compare=False)
    """Operands of products on the Triton path: as they are, or rounded to 8 bits (``e4m3``, ``int8``) by rows; see `conditional_product`."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("experts", PositiveInt), ("top_k", PositiveInt), ("hidden", PositiveInt), ("shared", NonNegativeInt), ("groups", PositiveInt),
            ("top_groups", PositiveInt), ("group_best", PositiveInt), ("route_scale", PositiveFloat), ("bias_rate", NonNegativeFloat | None),
            ("entropy_loss", NonNegativeFloat), ("balance_loss", NonNegativeFloat), ("expert_dropout", ProperFraction),
        ):  # fmt: skip
            check(f"moe.{name}", getattr(self, name), kind)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"moe.activation = {self.activation!r} is not known; choose {', '.join(ACTIVATIONS)}")
        check_path("moe.path", self.path)
        if self.precision not in get_args(Precision):
            raise ValueError(
                f"moe.precision = {self.precision!r} is not known; choose {', '.join(get_args(Precision))}"
            )
        if self.precision != "full" and self.path != "triton":
            raise ValueError(f'moe.precision = "{self.precision}" needs the Triton path: set moe.path = "triton" too')
        if self.experts % self.groups:
            raise ValueError(f"{self.experts} experts do not divide into {self.groups} groups")
        if self.top_groups > self.groups:
            raise ValueError(f"moe.top_groups = {self.top_groups} is more than the {self.groups} groups: lower it")
        reachable = self.experts // self.groups * self.top_groups
        if self.top_k > reachable:
            raise ValueError(f"top_k = {self.top_k} must lie between 1 and the {reachable} experts of the best groups")


class BaseRouter(nn.Module):
    """Base of routers: logits of experts in float32, and balance losses.

    Logits are float32 whatever the precision around them. Balance losses are added to the model's loss in the backward
    pass: see `balance.weigh_balance_loss`. Choices are counted there, too, so that activation checkpointing counts
    nothing twice and validation counts nothing.
    """

    adds_loss: bool
    """Whether the router adds a balance loss."""
    heads: int = 1
    """Heads that choose among experts of their own, each by an equal part of the weight's rows."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        nn.init.trunc_normal_(self.weight, std=std)
        self.loss_scale = torch.ones((), dtype=torch.promote_types(self.weight.dtype, torch.float32), device="cpu")
        """The gradient of the added losses: see `balance.weigh_balance_loss`. Set in place, as compiled code has it as an input."""
        self.scale_per_token = False
        """Whether that is multiplied by the number of tokens."""
        self.groups = TokenGroups()
        """Set from outside if others read other tokens, or the same ones."""
        self.counts = torch.zeros(rows, dtype=torch.int64, device="cpu")
        """Choices of each expert since the last step, (rows,). No buffer, as it is each process's own; added to in place as well."""
        self.valid: Tensor | None = None
        """Tokens (B, T) of the passes to come that count in losses and loads, None for all: see `balance.count_tokens`."""
        self.initial: dict[str, Initial] = {"weight": Normal(std)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BaseRouter:
        super()._apply(fn, recurse)
        if not self.weight.is_meta:
            self._place(self.weight.device, torch.promote_types(self.weight.dtype, torch.float32))
        return self

    def _place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move what is no buffer to ``device``, and the loss's scale to ``dtype``."""
        self.loss_scale = self.loss_scale.to(device, dtype)
        self.counts = self.counts.to(device)

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Return the products (N, rows) of tokens and this process's rows of the weight."""
        if self.loss_scale.device != x_BTD.device and not x_BTD.is_meta:
            self._place(x_BTD.device, self.loss_scale.dtype)
        with without_autocast(x_BTD.device.type):
            wide = torch.promote_types(x_BTD.dtype, torch.float32)
            logits: Tensor = F.linear(x_BTD.flatten(0, 1).to(wide), self.weight.to(x_BTD.dtype).to(wide))
            return logits

    def attach(self, scores: Tensor, loss: Tensor, tokens: int, repeated: int = 1) -> Tensor:
        """Return ``scores``, in whose backward pass ``loss`` is added to the model's own.

        tokens: of this pass. repeated: processes that compute the same loss, and whose gradients are summed.
        """
        attached: Tensor = _Attach.apply(scores, loss, self.loss_scale, tokens if self.scale_per_token else 1, repeated)
        return attached

    def count(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return ``scores``, whose backward pass adds ``chosen`` to `counts`.

        ``chosen``: choices of each row's expert.
        """
        if scores.is_meta:  # nothing is chosen there
            return scores
        counted: Tensor = _Count.apply(scores, chosen, self.counts)
        return counted

    def entropy_loss(self, logits_NHE: Tensor) -> Tensor:
        """Sum minus the entropy of the batch's mean choice over heads, as far as its gradient goes.

        The batch is that of all processes of ``groups.others``, in one micro-batch, each by as many tokens as count there. The derivative of
        p log p by this process's part of the mean is log p + 1, and the 1 adds up to nothing, as all p have the sum 1.
        """
        chosen_NHE, valid_N = logits_NHE.softmax(-1), self.valid_tokens(len(logits_NHE))
        if valid_N is not None:
            chosen_NHE = chosen_NHE * valid_N[:, None, None]
        count = chosen_NHE.new_tensor(len(logits_NHE)) if valid_N is None else valid_N.sum()
        own_HE = chosen_NHE.sum(0) / count.clamp(min=1)
        loss: Tensor = (own_HE * self.groups.mean(own_HE.detach(), count).clamp(min=1e-30).log()).sum()
        return loss

    def valid_tokens(self, tokens: int) -> Tensor | None:
        """Return which of a pass's ``tokens`` count, (N,) bool; None for all.

        Raises ValueError if `valid` is of another pass.
        """
        if self.valid is not None and self.valid.numel() != tokens:
            raise ValueError(
                f"valid has {tuple(self.valid.shape)} tokens, and the pass {tokens}: set it before each pass, or to None"
            )
        return None if self.valid is None else self.valid.flatten()

    def without_dropped(self, scores: Tensor, part: float) -> Tensor:
        """Return ``scores`` with a ``part`` of them dropped at random in training.

        They are for choosing, and drops are the same on processes with the same tokens. Dropped ones are finite, so
        that they come before what cannot be chosen at all.
        """
        if not (self.training and part):
            return scores
        dropped = self.groups.first((torch.rand_like(scores) < part).to(torch.uint8))
        return scores.masked_fill(dropped.bool(), torch.finfo(scores.dtype).min)


class Router(BaseRouter):
    """Router with scores and top-k choice of experts, balanced by a bias or a loss."""

    expert_bias: Tensor | None

    def __init__(self, config: MoEConfig, width: int, std: float) -> None:
        super().__init__(config.experts, width, std)
        self.config = config
        self.adds_loss = bool(config.balance_loss or config.entropy_loss)
        bias = None if config.bias_rate is None else torch.zeros(config.experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias)
        self.initial["expert_bias"] = Constant(0.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            # steps of 1e-3 are lost in bfloat16
            self.expert_bias = (self.expert_bias if bias.is_meta else bias).to(self.expert_bias.device, torch.float32)
        return self

    def forward(self, x_BTD: Tensor, repeated: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights (N, K) and numbers (N, K) of the chosen experts, and counts (E,) int64.

        Weights are float32; a count is how many tokens chose an expert.
        repeated: processes that compute this for the same tokens, and whose gradients are summed.
        """
        config, batch = self.config, x_BTD.shape[0]
        logits_NE = self.logits(x_BTD)
        scores_NE = logits_NE.sigmoid() if config.score == "sigmoid" else logits_NE.softmax(-1)
        chosen_NK = self.choose(scores_NE.detach())
        chosen_R = chosen_NK.flatten()
        counts_E = chosen_R.new_zeros(config.experts).scatter_add_(0, chosen_R, torch.ones_like(chosen_R))
        if scores_NE.requires_grad:
            counted_E, valid_N = counts_E, self.valid_tokens(len(scores_NE))
            if valid_N is not None:
                counted_E = torch.zeros_like(counts_E).scatter_add_(
                    0, chosen_R, valid_N.repeat_interleave(config.top_k).to(chosen_R.dtype)
                )
            if config.balance_loss:
                loss = self._balance_loss(scores_NE, chosen_NK, batch)
                scores_NE = self.attach(scores_NE, loss, len(scores_NE), repeated)
            if config.entropy_loss:
                loss = config.entropy_loss * self.entropy_loss(logits_NE[:, None])
                scores_NE = self.attach(scores_NE, loss, len(scores_NE), repeated)
            scores_NE = self.count(scores_NE, counted_E)
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
        scores_NE = self.without_dropped(scores_NE, config.expert_dropout)
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

        Sum over experts of (share of choices * E) * (mean of normalised score), of the tokens that count.
        """
        config, valid_N = self.config, self.valid_tokens(len(scores_NE))
        shares_BTE = (scores_NE / scores_NE.sum(-1, keepdim=True)).unflatten(0, (batch, -1))
        chosen_BR = chosen_NK.reshape(batch, -1)
        counts_BE = torch.zeros_like(shares_BTE[:, 0])
        if valid_N is None:
            counts_BE.scatter_add_(1, chosen_BR, shares_BTE.new_ones(chosen_BR.shape))
            frequency_BE, mean_BE = counts_BE * (config.experts / chosen_BR.shape[1]), shares_BTE.mean(1)
        else:
            valid_BT = valid_N.view(batch, -1).to(shares_BTE.dtype)
            tokens_B1 = valid_BT.sum(1, keepdim=True).clamp(min=1)
            counts_BE.scatter_add_(1, chosen_BR, valid_BT.repeat_interleave(config.top_k, 1))
            frequency_BE = counts_BE * (config.experts / (tokens_B1 * config.top_k))
            mean_BE = (shares_BTE * valid_BT[..., None]).sum(1) / tokens_B1
        loss: Tensor = config.balance_loss * (frequency_BE * mean_BE).sum(-1).mean()
        return loss


class _Attach(torch.autograd.Function):
    """Identity of the first argument that adds the second to the model's loss.

    The second's gradient is ``scale``, as it is in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor, scale: Tensor, times: int, repeated: int) -> Tensor:
        ctx.scale, ctx.times, ctx.repeated, ctx.dtype = scale, times, repeated, loss.dtype
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        scale = tie_to_graph(grad, ctx.scale.to(ctx.dtype))[0]
        return grad, scale * (ctx.times / ctx.repeated), None, None, None


class _Count(torch.autograd.Function):
    """Return the first argument; the backward pass adds ``counts`` to ``total``, in place."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, counts: Tensor, total: Tensor) -> Tensor:
        ctx.counts, ctx.total = counts, total
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # By .data: the total is kept for several backward passes, which look whether its version has changed.
        ctx.total.data.add_(tie_to_graph(grad, ctx.counts))
        return grad, None, None


def tie_to_graph(grad: Tensor, value: Tensor) -> Tensor:
    """Return ``value``, flat, with a dependency on ``grad``.

    What does not depend on it, compilers compute in the forward pass, too early.
    """
    return torch.cat((value.reshape(-1), grad.reshape(-1)[:0].to(value.dtype)))


class Experts(nn.Module):
    """Experts of stacked maps w1 (E, F, D) and w2 (E, D, F), and with SwiGLU w3 (E, F, D).

    w3 is the gate's.
    """

    cuts: ClassVar[dict[str, int]] = {"w1": 1, "w3": 1, "w2": 2}
    """The dimension that tensor parallelism cuts: F of each map."""

    def __init__(self, config: MoEConfig, width: int, std: float, std_out: float) -> None:
        super().__init__()
        self.active_share = config.top_k / config.experts
        """Share of the parameters here that one token uses."""
        self.activation = ACTIVATIONS[config.activation]
        self.w1 = nn.Parameter(torch.empty(config.experts, config.hidden, width))
        self.w2 = nn.Parameter(torch.empty(config.experts, width, config.hidden))
        self.w3 = nn.Parameter(torch.empty_like(self.w1)) if config.activation == "swiglu" else None
        self.initial = {"w1": Normal(std), "w2": Normal(std_out)} | ({"w3": Normal(std)} if self.w3 is not None else {})
        for name, distribution in self.initial.items():
            nn.init.normal_(getattr(self, name), std=distribution.std)
        self.alignment = 1
        """Rows of an expert are padded to a multiple of this where a kernel asks for it (float8: 16)."""
        self.parts = 1
        """Processes that each have a part of the hidden width of every expert here."""
        self.shard: Callable[[Tensor], Tensor] | None = None
        """What turns a weight into the tensor that this process multiplies with; None if weights are whole."""
        self.path: Path = "grouped" if config.path == "auto" else config.path
        self.precision = config.precision

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the local w1, w2 and w3 (None without a gate) in ``dtype``."""
        own = (None if w is None else w if self.shard is None else self.shard(w) for w in (self.w1, self.w2, self.w3))
        w1, w2, w3 = (None if w is None else w.to(dtype) for w in own)
        assert w1 is not None
        assert w2 is not None
        return w1, w2, w3

    def forward(self, x_RD: Tensor, counts_E: Tensor, order: TokenOrder | None = None) -> Tensor:
        """Map rows (R, D), sorted by expert with ``counts_E`` of each, to as many rows (R, D).

        order: for the Triton path alone, with which ``x_RD`` are tokens (N, D), whose rows its products gather as they read them.
        """
        dtype = product_dtype(x_RD)
        w1, w2, w3 = self.weights(dtype)
        x_RD = x_RD.to(dtype)

        def compute(x_RD: Tensor, counts_E: Tensor) -> Tensor:
            ends = counts_E.cumsum(0).to(torch.int32)

            def product(x_RI: Tensor, w_EOI: Tensor, order: TokenOrder | None = None) -> Tensor:
                if self.path == "triton":
                    return conditional_product(x_RI, w_EOI, ends, order, self.precision)
                return grouped_product(x_RI, w_EOI, ends)

            hidden_RF = self.activation(product(x_RD, w1, order))
            hidden_RF = hidden_RF if w3 is None else hidden_RF * product(x_RD, w3, order)
            return product(hidden_RF, w2)

        if self.path == "triton":  # which takes no rows at all, and any number of them
            return compute(x_RD, counts_E)
        if not len(x_RD):  # kernels refuse no rows at all: one of zeros, whose gradients are zeros
            filled_E = torch.zeros_like(counts_E)
            filled_E[:1].fill_(1)  # an index would be copied from the host
            return compute(F.pad(x_RD, (0, 0, 0, 1)), filled_E)[:0]
        if self.alignment > 1:
            return _aligned(x_RD, counts_E, self.alignment, compute)
        return compute(x_RD, counts_E)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which products with ``x`` are computed: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def grouped_product(x_RI: Tensor, w_EOI: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows (R, I), sorted by expert, by each one's matrix (O, I).

    ``ends`` (E,) int32 are the ends of the experts' rows.
    """
    if x_RI.dtype == torch.float64:  # which no grouped kernel knows
        parts = x_RI.tensor_split(ends[:-1].long().cpu())
        return torch.cat([part @ w.T for part, w in zip(parts, w_EOI, strict=True)])
    rows, columns = w_EOI.shape[1:]
    unit = 16 // x_RI.element_size()
    if rows % unit or columns % unit:  # kernels want rows of a multiple of 16 bytes
        more = -columns % unit
        padded = grouped_product(F.pad(x_RI, (0, more)), F.pad(w_EOI, (0, more, 0, -rows % unit)), ends)
        return padded[:, :rows]
    if x_RI.dtype == torch.bfloat16 or not torch.compiler.is_compiling():
        return F.grouped_mm(x_RI, w_EOI.transpose(1, 2), offs=ends)
    product: Tensor = _opaque_grouped_mm(x_RI, w_EOI.transpose(1, 2), ends)
    return product


@torch.library.custom_op("arclight::grouped_mm", mutates_args=())
def _opaque_grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Wrap `F.grouped_mm` in an opaque operator for compilers.

    That of torch 2.13 believes that the kernel knows bfloat16 only.
    """
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
    """Send rows (R, D), sorted by expert, to their experts; return results in the same order.

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
    """Mixture-of-experts layer: weighted sum of a token's experts, plus the shared experts."""

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
        if (
            self.experts.path == "dense" or torch.compiler.is_exporting()
        ):  # runtimes have no grouped product, and sort slowly
            return self.dense(x_BTD)
        weights_NK, chosen_NK, counts_E = self.router(x_BTD, self.experts.parts)
        order_R = chosen_NK.flatten().argsort(stable=True)
        places_NK = inverse_permutation(order_R).view_as(chosen_NK)
        x_ND = x_BTD.flatten(0, 1)
        if (
            self.experts.path == "triton"
            and isinstance(self.dispatcher, LocalDispatcher)
            and not self.config.score_before
        ):
            y_RD = self.experts(x_ND, counts_E, TokenOrder(order_R // self.config.top_k, places_NK))
            combined: Tensor = CombineRows.apply(y_RD, weights_NK, order_R, places_NK)
            return combined.view_as(x_BTD)
        x_RD = ScatterRows.apply(x_ND, order_R, places_NK)
        if self.config.score_before:
            x_RD = (x_RD * weights_NK.flatten()[order_R][:, None]).to(x_BTD.dtype)
            weights_NK = torch.ones_like(weights_NK)
        y_RD = self.dispatcher(x_RD, counts_E, self.experts)
        y_ND: Tensor = CombineRows.apply(y_RD, weights_NK, order_R, places_NK)
        return y_ND.view_as(x_BTD)

    def dense(self, x_BTD: Tensor) -> Tensor:
        """Compute `routed` densely, as one feed-forward part of all experts: the reference.

        Hidden values are weighted. It takes E / K times the operations, and no sorting, no sizes that depend on data,
        and no operator that quantizers and runtimes do not know.

        Raises RuntimeError if other processes keep a part of the experts.
        """
        if not isinstance(self.dispatcher, LocalDispatcher):
            raise RuntimeError(
                'the dense path computes all experts on each process, and ep > 1 keeps a part of them on each: set moe.path = "grouped"'
            )
        weights_NK, chosen_NK, _ = self.router(x_BTD, self.experts.parts)
        w1, w2, w3 = self.experts.weights(product_dtype(x_BTD))
        weights_NE = weights_NK.new_zeros(weights_NK.shape[0], self.config.experts).scatter(1, chosen_NK, weights_NK)
        x_ND = x_BTD.flatten(0, 1)
        weights_NE1 = weights_NE.to(x_ND.dtype)[..., None]
        before, after = (weights_NE1, None) if self.config.score_before else (None, weights_NE1)

        def mapped(w_EFD: Tensor) -> Tensor:
            out_NEF: Tensor = F.linear(x_ND, w_EFD.flatten(0, 1)).unflatten(-1, (self.config.experts, -1))
            return out_NEF if before is None else out_NEF * before  # linear maps of weighted inputs

        hidden_NEF = self.experts.activation(mapped(w1))
        hidden_NEF = hidden_NEF if w3 is None else hidden_NEF * mapped(w3)
        hidden_NEF = hidden_NEF if after is None else hidden_NEF * after
        y_ND: Tensor = F.linear(hidden_NEF.flatten(1), w2.transpose(0, 1).flatten(1))
        return y_ND.view_as(x_BTD)


class ScatterRows(torch.autograd.Function):
    """Repeat each token's row K times, in the order of experts.

    Gradients are gathered and summed in float32, never scattered.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(places_NK)
        return x_ND.index_select(0, order_R // places_NK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (places_NK,) = ctx.saved_tensors
        return sum_rows(grad_RD, places_NK), None, None


class CombineRows(torch.autograd.Function):
    """Sum each token's K weighted rows, in float32."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_NK: Tensor, order_R: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, weights_NK, order_R, places_NK)
        return sum_rows(y_RD, places_NK, weights_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_RD, weights_NK, order_R, places_NK = ctx.saved_tensors
        grad_RD = grad_ND.index_select(0, order_R // places_NK.shape[1])
        d_weights_R = (y_RD.to(weights_NK.dtype) * grad_RD).sum(-1)
        weights_R1 = weights_NK.flatten()[order_R][:, None]
        d_y_RD = grad_RD.mul_(weights_R1) if grad_RD.dtype == weights_NK.dtype else grad_RD * weights_R1
        return d_y_RD.to(y_RD.dtype), d_weights_R[places_NK], None, None


def sum_rows(x_RD: Tensor, places_NK: Tensor, weights_NK: Tensor | None = None) -> Tensor:
    """Sum each token's K rows, weighted or not, in the order of ``places_NK``: (N, D).

    Sums are float32 (float64 of float64).
    """
    wide = torch.promote_types(x_RD.dtype, torch.float32)
    if x_RD.device.type == "cpu" and x_RD.dtype == wide and len(x_RD):  # in one pass, without a copy of the rows
        weights = None if weights_NK is None else weights_NK.to(wide)
        return F.embedding_bag(places_NK, x_RD, mode="sum", per_sample_weights=weights)
    rows_NKD = x_RD[places_NK]
    return (rows_NKD if weights_NK is None else rows_NKD * weights_NK[..., None]).sum(1, dtype=wide).to(x_RD.dtype)
