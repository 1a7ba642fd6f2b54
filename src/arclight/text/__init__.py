"""Build and train language models: families, tokenizers, corpora, generation, evaluation.

Text comes in through `data`; `families` are built from the parts in `model` (and in `vision_language`, beside `diffusion` for images);
`language_model` trains them on `loss`, as `training_settings` say (a recipe's task builds it: `settings`), observed by `callbacks`; `heads`
fine-tune them for labels and spans; `generation`, `multiple_choice` and `evaluation` use what was trained; `hf` exchanges weights with
Hugging Face, `deployment` writes programs (`language_program`, `embedding_program`), `workload` describes them to the planner, and
`site_vocabularies` checks those of a federation. Open `language_model` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.text.data.data_module import TextDataModule as TextDataModule
    from arclight.text.data.data_settings import Text as Text
    from arclight.text.data.tokenizer import ByteTokenizer as ByteTokenizer
    from arclight.text.data.tokenizer import Tokenizer as Tokenizer
    from arclight.text.families.zoo import build_model as build_model
    from arclight.text.families.zoo import model_names as model_names
    from arclight.text.generation import generate as generate
    from arclight.text.hf.read import from_hf as from_hf
    from arclight.text.hf.write import to_hf as to_hf
    from arclight.text.language_model import LanguageModel as LanguageModel

__getattr__, __dir__, __all__ = lazy(
    __name__,
    dict.fromkeys(("build_model", "model_names"), "arclight.text.families.zoo")
    | {"Text": "arclight.text.data.data_settings", "TextDataModule": "arclight.text.data.data_module"}
    | {"generate": "arclight.text.generation"}
    | {"from_hf": "arclight.text.hf.read", "to_hf": "arclight.text.hf.write"}
    | {"LanguageModel": "arclight.text.language_model"}
    | dict.fromkeys(("ByteTokenizer", "Tokenizer"), "arclight.text.data.tokenizer"),
)
