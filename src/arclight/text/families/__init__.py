"""Model families, one readable file each, built from the parts in `arclight.text.model`.

A name such as ``llama3-8b`` comes in through `zoo`, which holds every family's published sizes; a model comes out. Open `llama`
first: most families change a part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.text.families.llama import Llama as Llama
    from arclight.text.families.llama import LlamaConfig as LlamaConfig

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Llama": "arclight.text.families.llama",
        "LlamaConfig": "arclight.text.families.llama",
    },
)
