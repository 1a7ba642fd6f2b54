"""Build language models from parts: single-device code that declares how it may be sharded.

Token ids come in; `decoder` is the trunk that all families share, `layers` its norms, rotary embeddings and feed-forward part,
`attention` its masks and kernels, `kv_cache` the keys and values kept while text is generated. `moe` has mixtures of
experts and `balance` their loads; `expert_paths` chooses how they are multiplied, one way being `conditional_product` (by
`triton_kernels`); `switch_head` puts experts into attention. `mup` scales initial weights and learning rates with a model's size. Whole
families lie in `arclight.text.families`. Open `decoder` first. Names of parameters are in checkpoints and stay.

``sharding`` of a module names for its children (``""`` is the module itself) how tensor parallelism cuts them: ``column`` and ``row`` (a
linear map by its outputs or inputs), ``vocabulary`` (embeddings by rows), ``head`` (the output by its rows, for a loss that is computed
on shares), ``sequence`` (computed on parts of the sequence), ``sequence_gather`` (the same, and whole afterwards), ``gather`` (a module
whose input must be whole), ``shared`` (small weights that work inside such a module, on whole sequences or on shares of heads), ``part``
(a ``row`` whose result is summed later, with others'), ``heads`` (no parameters, but another computation for each head), ``experts``
(stacked weights: see `arclight.parallel.layers.expert_parallel`).
``initial`` gives the distribution of first weights: see `arclight.parallel.deterministic_init`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.text.model.decoder import Decoder as Decoder
    from arclight.text.model.decoder import DecoderConfig as DecoderConfig

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Decoder": "arclight.text.model.decoder",
        "DecoderConfig": "arclight.text.model.decoder",
    },
)
