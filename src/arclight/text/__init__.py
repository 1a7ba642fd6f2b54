"""Language models: families, tokenizers, corpora, pre-training, generation, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.text.data_module import TextDataModule as TextDataModule
    from arclight.text.data_settings import Text as Text
    from arclight.text.generation import generate as generate
    from arclight.text.interchange.reading import from_hf as from_hf
    from arclight.text.interchange.writing import to_hf as to_hf
    from arclight.text.language_model import LanguageModel as LanguageModel
    from arclight.text.models.zoo import build_model as build_model
    from arclight.text.models.zoo import model_names as model_names
    from arclight.text.tokenizer import ByteTokenizer as ByteTokenizer
    from arclight.text.tokenizer import Tokenizer as Tokenizer

__getattr__, __dir__, __all__ = lazy(
    __name__,
    dict.fromkeys(("build_model", "model_names"), "arclight.text.models.zoo")
    | {"Text": "arclight.text.data_settings", "TextDataModule": "arclight.text.data_module"}
    | {"generate": "arclight.text.generation"}
    | {"from_hf": "arclight.text.interchange.reading", "to_hf": "arclight.text.interchange.writing"}
    | {"LanguageModel": "arclight.text.language_model"}
    | dict.fromkeys(("ByteTokenizer", "Tokenizer"), "arclight.text.tokenizer"),
)
