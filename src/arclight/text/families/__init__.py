"""Define model families, one file each, from the parts in `arclight.text.model`.

A name such as ``llama3-8b`` comes in through `zoo`, which lists every family's sizes; a model comes out. Open `llama` first: `qwen3`,
`llama4` and `deepseek` change a part of it, and `deptoe` one of `mpt`. A new family is a file here and an entry of `zoo.FAMILIES`.
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
