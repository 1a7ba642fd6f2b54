"""Models to and from Hugging Face folders: config.json, safetensors in shards, tokenizer.json. Nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.text.interchange.reading import from_hf
    from arclight.text.interchange.writing import to_hf

__getattr__, __dir__, __all__ = lazy(
    __name__, {"from_hf": "arclight.text.interchange.reading", "to_hf": "arclight.text.interchange.writing"}
)
