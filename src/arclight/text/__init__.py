"""Language models: families, tokenizers, corpora, pre-training, generation, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.text.models.zoo import build_model, model_names

__getattr__, __dir__, __all__ = lazy(
    __name__, {"build_model": "arclight.text.models.zoo", "model_names": "arclight.text.models.zoo"}
)
