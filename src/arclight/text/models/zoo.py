"""Models by name: each family's sizes, from one that trains on a laptop in minutes to the published ones."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from torch import nn

from arclight.text.models.gpt2 import GPT2, GPT2Config
from arclight.text.models.layers import RopeScaling
from arclight.text.models.llama import Llama, LlamaConfig
from arclight.text.models.qwen3 import Qwen3, Qwen3Config
from arclight.text.models.vlm import VisionConfig, VisionLlama, VisionLlamaConfig

Family = tuple[type[nn.Module], dict[str, Any]]

_STRETCHED = RopeScaling()
_LLAMA3: dict[str, Any] = {
    "debug": LlamaConfig(vocab_size=2048, dim=256, layers=6, heads=8, kv_heads=4, hidden=704, max_positions=2048),
    "1b": LlamaConfig(
        vocab_size=128256, dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, max_positions=131072, tied=True,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "3b": LlamaConfig(
        vocab_size=128256, dim=3072, layers=28, heads=24, kv_heads=8, hidden=8192, max_positions=131072, tied=True,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "8b": LlamaConfig(
        vocab_size=128256, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, max_positions=131072,
        rope_scaling=_STRETCHED,
    ),
    "70b": LlamaConfig(
        vocab_size=128256, dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672, max_positions=131072,
        rope_scaling=_STRETCHED,
    ),
    "405b": LlamaConfig(
        vocab_size=128256, dim=16384, layers=126, heads=128, kv_heads=8, hidden=53248, max_positions=131072,
        rope_scaling=_STRETCHED,
    ),
}  # fmt: skip

_QWEN3: dict[str, Any] = {
    "debug": Qwen3Config(
        vocab_size=2048, dim=256, layers=6, heads=8, kv_heads=4, head_dim=48, hidden=704, max_positions=2048, tied=True
    ),
    "0.6b": Qwen3Config(vocab_size=151936, dim=1024, layers=28, heads=16, kv_heads=8, hidden=3072, tied=True),
    "1.7b": Qwen3Config(vocab_size=151936, dim=2048, layers=28, heads=16, kv_heads=8, hidden=6144, tied=True),
    "4b": Qwen3Config(vocab_size=151936, dim=2560, layers=36, heads=32, kv_heads=8, hidden=9728, tied=True),
    "8b": Qwen3Config(vocab_size=151936, dim=4096, layers=36, heads=32, kv_heads=8, hidden=12288),
    "14b": Qwen3Config(vocab_size=151936, dim=5120, layers=40, heads=40, kv_heads=8, hidden=17408),
    "32b": Qwen3Config(vocab_size=151936, dim=5120, layers=64, heads=64, kv_heads=8, hidden=25600),
}

_GPT2: dict[str, Any] = {
    "debug": GPT2Config(vocab_size=2048, dim=256, layers=6, heads=8),
    "124m": GPT2Config(vocab_size=50257, dim=768, layers=12, heads=12),
    "350m": GPT2Config(vocab_size=50257, dim=1024, layers=24, heads=16),
    "774m": GPT2Config(vocab_size=50257, dim=1280, layers=36, heads=20),
    "1.5b": GPT2Config(vocab_size=50257, dim=1600, layers=48, heads=25),
}

_SO400M = VisionConfig(dim=1152, layers=27, heads=16, hidden=4304)
_VISION: dict[str, Any] = {
    "debug": VisionLlamaConfig(
        vocab_size=2048, dim=256, layers=6, heads=8, kv_heads=4, hidden=704, max_positions=2048, image_token=2047,
        vision=VisionConfig(dim=192, layers=4, heads=4, hidden=512),
    ),
    "1b": VisionLlamaConfig(**vars(_LLAMA3["1b"]), vision=VisionConfig(), image_token=128255),
    "8b": VisionLlamaConfig(**vars(_LLAMA3["8b"]), vision=_SO400M, image_token=128255),
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama3": (Llama, _LLAMA3),
    "qwen3": (Qwen3, _QWEN3),
    "gpt2": (GPT2, _GPT2),
    "llama3-vision": (VisionLlama, _VISION),
}


def model_names() -> list[str]:
    """All names that :func:`build_model` knows."""
    return [f"{family}-{size}" for family, (_, sizes) in FAMILIES.items() for size in sizes]


def model_config(name: str, **overrides: Any) -> Any:
    """The configuration called ``name``, with fields replaced. Raises ValueError for an unknown name or field, and names the nearest."""
    family, _, size = name.rpartition("-")
    if family not in FAMILIES or size not in FAMILIES[family][1]:
        near = difflib.get_close_matches(name, model_names(), 3, 0.4) or model_names()
        raise ValueError(f"there is no model {name!r}; there is {', '.join(near)}")
    config = FAMILIES[family][1][size]
    fields = [field.name for field in dataclasses.fields(config)]
    for key in overrides:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1, 0.4) or fields
            raise ValueError(f"{name} has no {key!r} to set; did you mean {', '.join(near)}?")
    return dataclasses.replace(config, **overrides)


def build_model(name: str, **overrides: Any) -> nn.Module:
    """The model called ``name`` (see :func:`model_names`), its configuration changed by ``overrides``.

    Its weights are torch's defaults until `arclight.parallel.initialize` draws them or a checkpoint is loaded.
    """
    config = model_config(name, **overrides)
    family = FAMILIES[name.rpartition("-")[0]][0]
    return family(config)
