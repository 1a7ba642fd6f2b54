"""Language models: families, tokenizers, corpora, pre-training, generation, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.text.data_module import TextDataModule
    from arclight.text.data_settings import Text
    from arclight.text.generation import generate
    from arclight.text.interchange.reading import from_hf
    from arclight.text.interchange.writing import to_hf
    from arclight.text.language_model import LanguageModel
    from arclight.text.models.zoo import build_model, model_names
    from arclight.text.tokenizer import ByteTokenizer, Tokenizer

__getattr__, __dir__, __all__ = lazy(
    __name__,
    dict.fromkeys(("build_model", "model_names"), "arclight.text.models.zoo")
    | {"Text": "arclight.text.data_settings", "TextDataModule": "arclight.text.data_module"}
    | {"generate": "arclight.text.generation"}
    | {"from_hf": "arclight.text.interchange.reading", "to_hf": "arclight.text.interchange.writing"}
    | {"LanguageModel": "arclight.text.language_model"}
    | dict.fromkeys(("ByteTokenizer", "Tokenizer"), "arclight.text.tokenizer"),
)
