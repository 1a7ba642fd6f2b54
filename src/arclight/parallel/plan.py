"""Define the plan: the degree of each parallel dimension, without torch.

Users pass a `Plan` as ``strategy=`` or in a recipe's table ``[plan]``; `parallelize`, the strategies, the pipeline and ``planning`` read
it. Field names are recipe keys and stay; docstrings of fields are help texts. What a plan can be checked for without a model is refused
here, before processes start. A new field needs its effect in `planning.estimates`, or an entry of its ``_NOT_PREDICTED``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from math import prod
from typing import Literal

from arclight._intervals import Fraction, NonNegativeInt, PositiveInt, check_fields, former_values


class PlanError(ValueError):
    """Error of a plan or pipeline that cannot be run: what does not fit, and what would.

    It is raised as early as that is known: mostly before anything is built, of batches when they come.
    """


UNITS = {"GB": 1e9, "GiB": 2.0**30, "MB": 1e6, "MiB": 2.0**20, "TB": 1e12, "kB": 1e3, "KiB": 2.0**10}


def bytes_of(text: str) -> float:
    """Parse a number of bytes such as "80GB" or "79.1 GiB", ignoring case.

    Raises PlanError for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)", text.strip())
    unit = {name.lower(): size for name, size in UNITS.items()}.get(found[2].lower()) if found else None
    if found is None or unit is None or not float(found[1]):
        raise PlanError(f"memory {text}: write a number and a unit, as 80GB; units are {', '.join(UNITS)}")
    return float(found[1]) * unit


@former_values(replicas={"apart": "independent"})
@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees of parallelism of one model.

    Its ranks are ``pp * dp_replicate * dp_shard * cp * tp``. The mesh has its dimensions in that order, the innermost
    (fastest links) last. ``ep`` is no dimension of its own: it borrows from ``dp_shard * cp``.
    """

    dp_replicate: PositiveInt = 1
    """Replicas of the model, each with other samples."""
    dp_shard: PositiveInt = 1
    """Ranks over which weights, gradients and optimizer state of a replica are sharded (FSDP)."""
    cp: PositiveInt = 1
    """Ranks over which each sequence is sharded (context parallel)."""
    tp: PositiveInt = 1
    """Ranks over which each layer's matrices are sharded (tensor and sequence parallel)."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    ep: PositiveInt = 1
    """Ranks over which the experts of a mixture are sharded; divides dp_shard * cp."""

    replicas: Literal["synchronous", "independent"] = "synchronous"
    """Synchronise replicas in every step, or let them train independently (for DiLoCo)."""
    expert_capacity: NonNegativeInt = 0
    """Most rows (a token and one of its experts) that each rank of ``ep`` sends to each other, in all-to-alls of that fixed size without host
    synchronisation; further rows skip their experts. 0: no limit, nothing is dropped."""
    sequence_parallel: bool = True
    """Shard norms and residual stream along the sequence over ``tp``."""
    loss_parallel: bool = True
    """Keep logits sharded along the vocabulary over ``tp``, for a loss that takes them so."""
    async_tp: bool = False
    """Overlap collectives of ``tp`` with matrix products (CUDA, compile = "inductor")."""
    context: Literal["gather", "ulysses"] = "gather"
    """Context parallelism: gather all keys and values, or exchange sequences for heads (Ulysses)."""
    schedule: str = "1F1B"
    """Pipeline schedule, by name (``LoopedBFS:4`` has four stages on each process), or a CSV file."""
    micro_batches: NonNegativeInt = 0
    """Micro-batches per step and rank; 0: twice the number of stages."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Reshard a block's weights between forward and backward; by default without a pipeline only."""
    cpu_offload: bool = False
    """Keep shards of weights and optimizer state in host memory."""
    activation_checkpointing: Literal["none", "selective", "full"] | Fraction = "none"
    """Recomputation of blocks in backward: none, cheap operations, full; or the fraction (0 to 1) of activations to keep."""
    compile: str = "none"
    """Backend of torch.compile for each block ("inductor", "aot_eager", ...), or "none"."""
    float8: Literal["none", "tensorwise", "rowwise", "mxfp8"] = "none"
    """Scaling of 8-bit operands in the large matrix products, or "none"."""
    float8_smallest: PositiveInt = 1024
    """Minimum width, on both sides, of linear layers in float8: smaller ones are faster in 16 bits."""

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ValueError as error:
            raise PlanError(str(error)) from None
        if (self.dp_shard * self.cp) % self.ep:
            raise PlanError(
                f"ep = {self.ep} must divide dp_shard * cp = {self.dp_shard * self.cp}: experts are divided among those processes"
            )
        self._check_choices()

    def __str__(self) -> str:
        """Show what differs from a plan for one process."""
        changed = (
            f"{field.name}={value!r}" for field in fields(self) if (value := getattr(self, field.name)) != field.default
        )
        return f"Plan({', '.join(changed)})"

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise PlanError(f"{name} = {value!r} is not known; choose one of {', '.join(choices)}")
        keep = self.activation_checkpointing
        if not isinstance(keep, str) and self.compile != "inductor":
            raise PlanError('a part of activations to keep is chosen by the compiler: set compile = "inductor"')
        if self.independent_replicas and self.pp > 1:
            raise PlanError(
                f'replicas = "independent" is not done for pipelines yet, and pp = {self.pp}: set pp = 1 and use dp_shard or tp'
            )
        if 0 < self.micro_batches < self.pp:
            raise PlanError(
                f"micro_batches = {self.micro_batches} leaves some of pp = {self.pp} stages idle for good: use {self.pp} or more"
            )
        if self.expert_capacity and self.ep == 1:
            raise PlanError("expert_capacity bounds what processes of ep exchange, and ep = 1: leave it out")
        if self.async_tp and (self.tp == 1 or self.compile != "inductor"):
            raise PlanError('async_tp is done by the compiler and for tp > 1: set compile = "inductor" and tp')

    @property
    def world_size(self) -> int:
        """Processes that the plan needs."""
        return prod((self.dp_replicate, self.dp_shard, self.cp, self.tp, self.pp))

    @property
    def pieces(self) -> int:
        """Number of micro-batches of a batch that has at least as many samples."""
        return self.micro_batches or 2 * self.pp

    @property
    def passes(self) -> int:
        """Number of processes and micro-batches among which a batch's tokens are divided.

        Each of them is a pass through a layer.
        """
        return self.cp * (self.pieces if self.pp > 1 else 1)

    @property
    def data_parallel(self) -> int:
        """Processes that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def independent_replicas(self) -> bool:
        """Return True for plans whose steps exchange nothing between the dp_replicate groups."""
        return self.replicas == "independent"

    @property
    def only_replicates(self) -> bool:
        """Return True if every process holds the whole model (DDP, or independent replicas)."""
        return self.world_size == self.dp_replicate and not self.cpu_offload

    def check(
        self, *, world_size: int | None = None, sequence_length: int | None = None, heads: int | None = None,
        kv_heads: int | None = None, hidden: int | None = None, vocab_size: int | None = None, experts: int | None = None,
        layers: int | None = None, repeats: int | None = None,
    ) -> None:  # fmt: skip
        """Raise PlanError, with the fix, if the plan does not fit a model or run.

        Numbers not given are not checked.
        """
        if world_size is not None and world_size != self.world_size:
            shape = " * ".join(
                f"{name} {getattr(self, name)}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
            )
            raise PlanError(f"the plan is for {self.world_size} processes ({shape}), and there are {world_size}")
        for name, size, part in (
            ("attention heads", heads, "tp"), ("key and value heads", kv_heads, "tp"), ("hidden width", hidden, "tp"),
            ("experts", experts, "ep"),
        ):  # fmt: skip
            count = getattr(self, part)
            if size is not None and size % count:
                raise PlanError(
                    f"{size} {name} cannot be cut into {part} = {count} equal parts: use a {part} that divides them"
                )
        if vocab_size is not None and vocab_size % self.tp:
            padded = vocab_size + -vocab_size % self.tp
            raise PlanError(
                f"a vocabulary of {vocab_size} cannot be cut into tp = {self.tp} equal parts: pad it to {padded}"
            )
        if sequence_length is not None:
            self._check_sequence(sequence_length)
        if repeats is not None and repeats > 1 and self.pp > 1:
            raise PlanError(
                f"blocks that run {repeats} times with the same weights would be cut by the stages of pp = {self.pp}: use pp = 1"
            )
        if layers is not None and layers < self.pp:
            raise PlanError(f"{layers} layers are too few for pp = {self.pp} stages: use pp = {layers} or less")

    def _check_sequence(self, length: int) -> None:
        pieces = (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)
        if length % pieces:
            why = "2 * cp * tp" if self.cp > 1 and self.tp > 1 else "2 * cp" if self.cp > 1 else "tp"
            raise PlanError(
                f"sequences of {length} tokens cannot be cut into {why} = {pieces} equal parts: use {length - length % pieces or pieces}"
                f" or {length + -length % pieces} tokens"
            )


_CHOICES = {
    "replicas": ("synchronous", "independent"),
    "context": ("gather", "ulysses"),
    "reshard_after_forward": ("default", "always", "never"),
    "float8": ("none", "tensorwise", "rowwise", "mxfp8"),
}
