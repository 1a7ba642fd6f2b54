"""Define the trunk that all language models share: embeddings, blocks, norm, output.

``text.families`` subclass `Decoder`. Training, generation, the tables of ``text.hf`` and the pipeline's `layer_pruning` rely on its names
(``tok_embeddings``, ``layers``, ``norm``, ``output``), which are in checkpoints: they stay. A family changes `embed`, `run_layers`, `masks`,
`rotation` or `final_norm`, and has a `DecoderConfig` of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from arclight._intervals import PositiveFloat, PositiveInt, check_fields
from arclight.optim.settings import Scale
from arclight.parallel.deterministic_init import Normal
from arclight.text.model.attention import Mask
from arclight.text.model.kv_cache import KVCache
from arclight.text.model.layers import RMSNorm, RotaryEmbedding, in_compute_type, scaled
from arclight.text.model.mup import MuP


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of the trunk; families add those of their blocks."""

    vocab_size: PositiveInt
    dim: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    max_positions: PositiveInt = 8192
    norm_eps: float = 1e-5
    tied: bool = False
    """Whether the output uses the embeddings' weights."""
    std: float = 0.02
    """Standard deviation of initial weights; maps back into the residual stream have std / sqrt(2 layers)."""
    logit_cap: PositiveFloat | None = None
    """Logits become logit_cap * tanh(logits / logit_cap) (Gemma Team 2024); None: they stay as they are."""
    mup: MuP | None = None
    """Base shapes of muP or CompleteP, so that one learning rate fits any width and depth; None: standard parametrisation."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.mup is not None:
            self.mup.check(self.dim, self.layers)

    @property
    def repeats(self) -> int:
        """Number of runs of the blocks with the same weights; ``layers`` counts every run."""
        return 1

    @property
    def attention_width(self) -> float:
        """Width of a head, the mean of keys' and values', as operations are counted."""
        return self.dim / self.heads

    def keys(self, layer: int, sequence: int) -> int:
        """Return the number of keys a query of a layer sees in a ``sequence``, to count operations."""
        return sequence

    @property
    def hidden_std(self) -> float:
        """Standard deviation of the first weights of blocks."""
        return self.std if self.mup is None else self.std / math.sqrt(self.mup.widths(self.dim))

    @property
    def std_out(self) -> float:
        layers = self.layers if self.mup is None or self.mup.base_layers is None else self.mup.base_layers
        return self.hidden_std / math.sqrt(2 * layers)

    @property
    def branch_scale(self) -> float:
        """Factor of a block's output in the residual stream."""
        return 1.0 if self.mup is None else float(self.mup.depths(self.layers) ** -self.mup.alpha)

    @property
    def output_scale(self) -> float:
        """Factor of logits."""
        return 1.0 if self.mup is None else 1 / self.mup.widths(self.dim)

    @property
    def rates(self) -> Callable[[str, nn.Parameter], Scale] | None:
        """Function of names and parameters to the factors of their rates; None without muP."""
        return None if self.mup is None else self.mup.rates(self.dim, self.layers)

    @property
    def output_std(self) -> float:
        return float((self.dim if self.mup is None else self.mup.base_dim) ** -0.5)

    def attention_scale(self, width: int) -> float | None:
        """Return the softmax scale of heads of ``width``; None: 1 / sqrt(width)."""
        return None if self.mup is None else 1 / width


@dataclass
class BlockContext:
    """Inputs of every block in one forward pass, beside the hidden states."""

    masks: dict[str, Mask]
    positions: Tensor
    """Place of each token in its document, (T,) or (B, T)."""
    rotation: RotaryEmbedding | None
    cache: KVCache | None = None
    repeat: int = 0
    """Number of the run through all blocks, if they run several times."""
    extra: dict[str, Any] = field(default_factory=dict)


class Decoder(nn.Module):
    """Trunk of a language model: token ids (B, T) to logits (B, T, V).

    In a pipeline stage ``layers`` are fewer and other parts may be None: without ``tok_embeddings`` hidden states (B, T, D) come in, without
    ``output`` hidden states go out.
    """

    sharding: ClassVar[dict[str, str]] = {"tok_embeddings": "vocabulary", "norm": "sequence_gather", "output": "head"}
    inputs: ClassVar[frozenset[str]] = frozenset()
    """Keyword arguments that a family takes beside tokens, as ``images``; blocks and ``embed`` find them in ``BlockContext.extra``."""
    non_trunk: ClassVar[tuple[str, ...]] = ()
    """Children beside the trunk, as an image encoder: ``hf`` neither reads nor writes them, and FLOPs per token leave them out."""

    def __init__(self, config: DecoderConfig, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Module | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(number): block(number) for number in range(config.layers // config.repeats)})
        self.norm: nn.Module | None = self.final_norm(config)
        self.output: nn.Linear | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.initial = {"tok_embeddings.weight": Normal(config.std), "output.weight": Normal(config.output_std)}
        if config.tied:
            self.output.weight = self.tok_embeddings.weight

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Return the tokens that stand for inputs of other kinds, and are never generated."""
        return ()

    def final_norm(self, config: DecoderConfig) -> nn.Module:
        return RMSNorm(config.dim, config.norm_eps)

    def forward(
        self, tokens_BT: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, cache: KVCache | None = None,
        logits: bool = True, last: bool = False, **extra: Any,
    ) -> Tensor:  # fmt: skip
        """Return logits (B, T, V).

        ``positions`` (B, T) and ``documents`` (B, T) are those of packed documents, ``cache`` that of generation.
        Without ``logits``: the hidden states (B, T, D) that ``output`` maps to them (before a cap), for a loss that
        never holds them all. With ``last``: what belongs to the last token only (B, 1, ...).
        """
        h_BTD = self.hidden(tokens_BT, positions, documents, cache, **extra)
        h_BTD = h_BTD[:, -1:] if last else h_BTD
        if self.output is None or not logits:
            return h_BTD
        cap = self.config.logit_cap
        out_BTV: Tensor = self.output(h_BTD)
        return out_BTV if cap is None else cap * torch.tanh(out_BTV / cap)

    def hidden(
        self, tokens_BT: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, cache: KVCache | None = None,
        **extra: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the hidden states (B, T, D) that ``output`` maps to logits."""
        new = tokens_BT.shape[1]
        context = self.block_context(new, tokens_BT.device, positions, documents, cache)
        if extra.keys() - self.inputs:
            raise TypeError(f"{type(self).__name__} does not take {', '.join(sorted(extra.keys() - self.inputs))}")
        context.extra |= extra
        h_BTD = self.embed(tokens_BT, context) if self.tok_embeddings is not None else tokens_BT
        h_BTD = self.run_layers(h_BTD, context)
        if cache is not None:
            cache.used += new
        return scaled(self.norm(h_BTD), self.config.output_scale) if self.norm is not None else h_BTD

    def run_layers(self, h_BTD: Tensor, context: BlockContext) -> Tensor:
        for layer in self.layers.values():
            h_BTD = layer(h_BTD, context)
        return h_BTD

    def embed(self, tokens_BT: Tensor, context: BlockContext) -> Tensor:
        assert self.tok_embeddings is not None
        return in_compute_type(self.tok_embeddings(tokens_BT))

    def block_context(
        self, new: int, device: torch.device, positions: Tensor | None, documents: Tensor | None, cache: KVCache | None
    ) -> BlockContext:  # fmt: skip
        """Return masks and rotation of a pass over ``new`` tokens."""
        if cache is None:
            mask = Mask(documents_q=documents, documents_k=documents, positions_q=positions, positions_k=positions)
            places = torch.arange(new, device=device) if positions is None else positions
        elif positions is None and documents is None:
            mask, places = cache.mask(new, device)
        else:
            raise ValueError("with a cache, positions and documents follow from what it holds: leave them out")
        return BlockContext(self.masks(mask), places, self.rotation(places), cache)

    def masks(self, mask: Mask) -> dict[str, Mask]:
        """Return the masks that blocks choose from by name; ``mask`` is causal, within documents."""
        return {"full": mask}

    def rotation(self, positions: Tensor) -> RotaryEmbedding | None:
        """Return the angles at ``positions``; None for models without rotary embeddings."""
        return None


def active_parameters(model: nn.Module, embeddings: bool = True) -> float:
    """Count the parameters that one token uses; of experts, only the chosen share.

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
    """Count forward and backward operations for a token: 6 N + 12 H C (sum over layers of keys).

    N: parameters of the trunk that it is multiplied with (of experts, the chosen ones), as often as it is; what is beside the trunk sees
    other things than tokens. Keys: those of the sequence, or of a layer's window or chunk if that is shorter; counted whole although half of
    them are masked, as publications of MFU do.
    """
    config: Any = model.config
    keys = sum(config.keys(layer, sequence) for layer in range(config.layers))
    non_trunk = sum(
        active_parameters(model.get_submodule(name), embeddings=False) for name in getattr(model, "non_trunk", ())
    )
    again: float = (config.repeats - 1) * active_parameters(model.get_submodule("layers"))
    attention: float = 12 * config.heads * config.attention_width * keys
    return 6 * (active_parameters(model, embeddings=False) - non_trunk + again) + attention
