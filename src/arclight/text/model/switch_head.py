"""Define SwitchHead (Csordas et al. 2024): experts in attention's value and output maps.

`deptoe` builds attention with it, `expert_paths` chooses how it computes. Parameter names and the order of stacks are in checkpoints.

Each head has E experts of its own for either map, and each token chooses K of them: value_h = sum over K of sigmoid(router)_he V_he x, and the
output is the sum over heads and K of sigmoid(router)_he O_he head_h. Stacks have the (head, expert) pair as first dimension, head by head, so that
tensor parallelism shards them by heads. Dimensions as in `layers` and `moe`; here N tokens have G = N * H rows, one of each head, and HE experts
in all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from arclight._intervals import NonNegativeFloat, PositiveInt, ProperFraction, check
from arclight.parallel.deterministic_init import Initial, Normal
from arclight.parallel.layers.permute_rows import inverse_permutation
from arclight.text.model.conditional_product import TokenOrder, conditional_product
from arclight.text.model.moe import (
    BaseRouter,
    CombineRows,
    Path,
    ScatterRows,
    check_path,
    grouped_product,
    product_dtype,
)


@dataclass(frozen=True, kw_only=True)
class SwitchHeadConfig:
    """Routing of the experts of attention; two are equal if they compute the same."""

    experts: int
    """Experts of each head, for values and for outputs."""
    top_k: int = 2
    entropy_loss: float = field(default=0.001, compare=False)
    """Weight of minus the entropy of a head's choice, averaged over the batch, then over heads; see `MoEConfig.entropy_loss`."""
    expert_dropout: float = field(default=0.0, compare=False)
    """Probability that a token's head cannot choose an expert, in training."""
    path: Path = field(default="grouped", compare=False)
    """How experts are multiplied: see `MoEConfig.path`."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("experts", PositiveInt), ("entropy_loss", NonNegativeFloat), ("expert_dropout", ProperFraction),
        ):  # fmt: skip
            check(f"switch_head.{name}", getattr(self, name), kind)
        check_path("switch_head.path", self.path)
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"switch_head.top_k = {self.top_k} must lie between 1 and the {self.experts} experts of a head"
            )


class HeadRouter(BaseRouter):
    """Each head's scores and choice of its experts, counted by (head, expert) pair."""

    def __init__(self, config: SwitchHeadConfig, heads: int, width: int, std: float) -> None:
        super().__init__(heads * config.experts, width, std)
        self.choice, self.heads = config, heads
        self.adds_loss = bool(config.entropy_loss)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (N, H, K) float32 and numbers (N, H, K) of the chosen experts.

        Numbers are those of a head among its own, and heads are those here.
        """
        config = self.choice
        logits_NHE = self.logits(x_BTD).unflatten(-1, (-1, config.experts))
        scores_NHE = logits_NHE.sigmoid()
        chosen_NHK = self.without_dropped(scores_NHE.detach(), config.expert_dropout).topk(config.top_k, -1).indices
        if scores_NHE.requires_grad:
            if config.entropy_loss:
                loss = config.entropy_loss / self.heads * self.entropy_loss(logits_NHE)
                scores_NHE = self.attach(scores_NHE, loss, len(scores_NHE))
            scores_NHE = self.count(scores_NHE, self._pair_counts(chosen_NHK))
        return scores_NHE.gather(-1, chosen_NHK), chosen_NHK

    def _pair_counts(self, chosen_NHK: Tensor) -> Tensor:
        """Count the choices of each (head, expert) pair of all heads, (HE,).

        Pairs of heads that are elsewhere have zeros.
        """
        experts, heads, group = self.choice.experts, chosen_NHK.shape[1], self.groups.same
        first = 0 if heads == self.heads or group is None else dist.get_rank(group) * heads
        head_H1 = torch.arange(first, first + heads, device=chosen_NHK.device)[:, None]
        pair_R, valid_N = (chosen_NHK + head_H1 * experts).flatten(), self.valid_tokens(len(chosen_NHK))
        if valid_N is None:
            counted_R = torch.ones_like(pair_R)
        else:
            counted_R = valid_N[:, None, None].expand_as(chosen_NHK).flatten().to(pair_R.dtype)
        return pair_R.new_zeros(self.heads * experts).scatter_add_(0, pair_R, counted_R)


class HeadMaps(nn.Module):
    """One of the two maps: its router and its stack of experts (HE, out, in)."""

    def __init__(
        self, config: SwitchHeadConfig, heads: int, width: int, sizes: tuple[int, int], stds: tuple[float, float]
    ) -> None:
        """Initialise router and experts.

        width: D, that the router sees. sizes: (in, out) of an expert. stds: of the router's first weights and of the
        experts'.
        """
        super().__init__()
        self.active_share = config.top_k / config.experts
        """Share of the parameters here that one token uses."""
        self.router = HeadRouter(config, heads, width, stds[0])
        self.experts = nn.Parameter(torch.empty(heads * config.experts, sizes[1], sizes[0]))
        nn.init.normal_(self.experts, std=stds[1])
        self.initial: dict[str, Initial] = {"experts": Normal(stds[1])}
        self.path: Path = "grouped" if config.path == "auto" else config.path

    @property
    def sorted(self) -> bool:
        """True if products are of chosen experts only; captured graphs hold those of all.

        Runtimes have no grouped product.
        """
        return self.path != "dense" and not torch.compiler.is_exporting()

    def weight(self, x: Tensor) -> Tensor:
        """Return the stack in the type that products with ``x`` have."""
        return self.experts.to(product_dtype(x))

    def product(self, rows: Tensor, order_R: Tensor, places: Tensor, ends: Tensor) -> Tensor:
        """Multiply ``rows``, repeated in the order of experts, by each one's matrix: (R, out)."""
        weight = self.weight(rows)
        if self.path == "triton":
            order = TokenOrder(order_R // places.shape[1], places)
            return conditional_product(rows.to(weight.dtype), weight, ends, order)
        repeated: Tensor = ScatterRows.apply(rows.to(weight.dtype), order_R, places)
        return grouped_product(repeated, weight, ends)

    def spread(self, weights_NHK: Tensor, chosen_NHK: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights of all experts (N, H, E): 0 of those that are not chosen."""
        zeros_NHE = weights_NHK.new_zeros(*weights_NHK.shape[:2], self.router.choice.experts)
        return zeros_NHE.scatter(-1, chosen_NHK, weights_NHK).to(dtype)

    def order(self, chosen_NHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows (R,) sorted by expert, their places (N, H, K), and the ends (HE,).

        Experts are those of all heads, and ends are those of their rows.
        """
        experts, heads = self.router.choice.experts, chosen_NHK.shape[1]
        pair_R = (chosen_NHK + torch.arange(heads, device=chosen_NHK.device)[:, None] * experts).flatten()
        order_R = pair_R.argsort(stable=True)
        counts = pair_R.new_zeros(heads * experts).scatter_add_(0, pair_R, torch.ones_like(pair_R))
        return order_R, inverse_permutation(order_R).view_as(chosen_NHK), counts.cumsum(0).to(torch.int32)


class HeadValues(HeadMaps):
    """Map tokens (B, T, D) to the values of all heads (B, T, H * C)."""

    def __init__(
        self, config: SwitchHeadConfig, heads: int, width: int, head_width: int, std: float
    ) -> None:  # fmt: skip
        super().__init__(config, heads, width, (width, head_width), (std, std))

    def forward(self, x_BTD: Tensor) -> Tensor:
        weights_NHK, chosen_NHK = self.router(x_BTD)
        x_ND = x_BTD.flatten(0, 1)
        if not self.sorted:
            values = F.linear(x_ND, self.experts.flatten(0, 1))  # (N, H * E * C)
            values_NHEC = values.unflatten(-1, (*weights_NHK.shape[1:2], self.router.choice.experts, -1))
            weights_NHE = self.spread(weights_NHK, chosen_NHK, values.dtype)
            values_NF: Tensor = (values_NHEC * weights_NHE[..., None]).sum(2).flatten(1)
            return values_NF.view(*x_BTD.shape[:2], -1)
        order_R, places_NHK, ends = self.order(chosen_NHK)
        v_RC = self.product(x_ND, order_R, places_NHK.flatten(1), ends)
        v_GC: Tensor = CombineRows.apply(v_RC, weights_NHK.flatten(0, 1), order_R, places_NHK.flatten(0, 1))
        return v_GC.view(*x_BTD.shape[:2], -1)


class HeadOutputs(HeadMaps):
    """Map the heads' results (B, T, H * C) to the sum of their outputs (B, T, D).

    The tokens (B, T, D) themselves choose the experts.
    """

    sharding: ClassVar[dict[str, str]] = {"total": "row"}

    def __init__(
        self, config: SwitchHeadConfig, heads: int, width: int, head_width: int, stds: tuple[float, float]
    ) -> None:
        super().__init__(config, heads, width, (head_width, width), stds)
        self.total = nn.Identity()

    def forward(self, heads_BTF: Tensor, x_BTD: Tensor) -> Tensor:
        weights_NHK, chosen_NHK = self.router(x_BTD)
        heads_NHC = heads_BTF.flatten(0, 1).unflatten(-1, (weights_NHK.shape[1], -1))
        if self.sorted:
            order_R, places_NHK, ends = self.order(chosen_NHK)
            out_RD = self.product(heads_NHC.flatten(0, 1), order_R, places_NHK.flatten(0, 1), ends)
            out_ND: Tensor = CombineRows.apply(out_RD, weights_NHK.flatten(1), order_R, places_NHK.flatten(1))
        else:
            weights_NHE = self.spread(weights_NHK, chosen_NHK, heads_NHC.dtype)
            hidden = (heads_NHC[:, :, None] * weights_NHE[..., None]).flatten(1)  # (N, H * E * C)
            out_ND = F.linear(hidden, self.experts.transpose(0, 1).flatten(1))
        out: Tensor = self.total(out_ND.view_as(x_BTD))
        return out
