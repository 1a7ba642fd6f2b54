"""Language models, one readable file per family: single-device code that declares how it may be spread and how it begins.

``sharding`` of a module names for its children (``""`` is the module itself) how tensor parallelism cuts them: ``column`` and
``row`` (a linear map by its outputs or inputs), ``vocabulary`` (embeddings by rows), ``head`` (the output by its rows, for a
loss that is computed on shares), ``sequence`` (computed on parts of the sequence), ``sequence_gather`` (the same, and whole
afterwards), ``gather`` (a module whose input must be whole), ``shared`` (small weights that work inside such a module, on whole
sequences or on shares of heads), ``part`` (a ``row`` whose result is summed later, with others'), ``experts`` (stacked weights:
see `arclight.parallel.layers.expert_parallel`). ``initial`` gives the distribution of first weights: see `arclight.parallel.deterministic_init`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.text.families.llama import Llama as Llama
    from arclight.text.families.llama import LlamaConfig as LlamaConfig
    from arclight.text.model.decoder import Decoder as Decoder
    from arclight.text.model.decoder import DecoderConfig as DecoderConfig

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Decoder": "arclight.text.model.decoder",
        "DecoderConfig": "arclight.text.model.decoder",
        "Llama": "arclight.text.families.llama",
        "LlamaConfig": "arclight.text.families.llama",
    },
)
