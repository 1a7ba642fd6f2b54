"""Build models by name, from sizes that train on a laptop in minutes to the published ones.

``arclight.text.build_model`` is `build_model`; `LanguageModel`, heads, the planner and `site_vocabularies` call it too. A new size is an entry
of its family's table (those of `deptoe` are in its file), a new family also one of `FAMILIES`. Names and fields are stored in recipes and
checkpoints: they stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from typing import Any

from torch import nn

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.text.families.deepseek import DeepSeek, DeepSeekConfig, Yarn
from arclight.text.families.deptoe import DEPTOE, SWITCH_HEAD, DEPToE
from arclight.text.families.gpt2 import GPT2, GPT2Config
from arclight.text.families.llama import Llama, LlamaConfig
from arclight.text.families.llama4 import Llama4, Llama4Config
from arclight.text.families.mpt import MPT, MPTConfig
from arclight.text.families.qwen3 import Qwen3, Qwen3Config, Qwen3MoE, Qwen3MoEConfig
from arclight.text.model.layers import RopeScaling
from arclight.text.model.moe import MoEConfig
from arclight.text.model.mup import MuP, mup_of
from arclight.text.vision_language.siglip import VisionConfig
from arclight.text.vision_language.vision_llama import VisionLlama, VisionLlamaConfig

Family = tuple[str, type[nn.Module], dict[str, Any]]

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

_MPT: dict[str, Any] = {
    "debug": MPTConfig(vocab_size=2048, dim=256, layers=6, heads=8),
    "125m": MPTConfig(vocab_size=50368, dim=768, layers=12, heads=12),
    "1b": MPTConfig(vocab_size=50368, dim=2048, layers=24, heads=16, clip_qkv=8.0),
    "7b": MPTConfig(vocab_size=50432, dim=4096, layers=32, heads=32),
}
_MPT_MUP: dict[str, Any] = {
    size: dataclasses.replace(
        config, position="rotary", qk_norm=True, clip_qkv=None, peri_norm=True, embedding_norm=True,
        mup=MuP(base_dim=64, base_layers=2) if size == "debug" else MuP(base_dim=256, base_layers=4),
    )
    for size, config in _MPT.items()
}  # fmt: skip

_SIGMA = MoEConfig(experts=16, top_k=4, hidden=128, score="sigmoid", activation="relu", entropy_loss=0.01)
_SIGMA_MOE: dict[str, Any] = {
    "debug": MPTConfig(vocab_size=2048, dim=256, layers=4, heads=8, position="rotary", moe=_SIGMA)
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

_QWEN3_MOE: dict[str, Any] = {
    "moe-debug": Qwen3MoEConfig(
        vocab_size=2048, dim=256, layers=4, heads=8, kv_heads=4, head_dim=48, hidden=704, max_positions=2048,
        moe=MoEConfig(experts=16, top_k=4, hidden=128, route_norm=True, bias_rate=1e-3),
    ),
    "30b-a3b": Qwen3MoEConfig(
        vocab_size=151936, dim=2048, layers=48, heads=32, kv_heads=4, hidden=6144,
        moe=MoEConfig(experts=128, top_k=8, hidden=768, route_norm=True),
    ),
    "235b-a22b": Qwen3MoEConfig(
        vocab_size=151936, dim=4096, layers=94, heads=64, kv_heads=4, hidden=12288,
        moe=MoEConfig(experts=128, top_k=8, hidden=1536, route_norm=True),
    ),
}  # fmt: skip

_DEEPSEEK_V3: dict[str, Any] = {
    "debug": DeepSeekConfig(
        vocab_size=2048, dim=256, layers=4, heads=8, hidden=704, dense_layers=1, max_positions=2048, q_lora_rank=96,
        kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        moe=MoEConfig(
            experts=16, top_k=4, hidden=128, shared=1, score="sigmoid", route_norm=True, route_scale=2.5, groups=4,
            top_groups=2, bias_rate=1e-3, balance_loss=1e-4,
        ),
    ),
    "16b": DeepSeekConfig(
        vocab_size=102400, dim=2048, layers=27, heads=16, hidden=10944, dense_layers=1, max_positions=163840,
        q_lora_rank=None, yarn=Yarn(mscale=0.707, mscale_all_dim=0.707),
        moe=MoEConfig(experts=64, top_k=6, hidden=1408, shared=2, bias_rate=1e-3),
    ),
    "236b": DeepSeekConfig(
        vocab_size=102400, dim=5120, layers=60, heads=128, hidden=12288, dense_layers=1, max_positions=163840,
        q_lora_rank=1536, yarn=Yarn(mscale=0.707, mscale_all_dim=0.707),
        moe=MoEConfig(
            experts=160, top_k=6, hidden=1536, shared=2, route_scale=16.0, groups=8, top_groups=3, group_best=1,
            bias_rate=1e-3,
        ),
    ),
    "671b": DeepSeekConfig(
        vocab_size=129280, dim=7168, layers=61, heads=128, hidden=18432, dense_layers=3, max_positions=163840,
        q_lora_rank=1536, yarn=Yarn(),
        moe=MoEConfig(
            experts=256, top_k=8, hidden=2048, shared=1, score="sigmoid", route_norm=True, route_scale=2.5, groups=8,
            top_groups=4, bias_rate=1e-3, balance_loss=1e-4,
        ),
    ),
}  # fmt: skip

_LLAMA4: dict[str, Any] = {
    "debug": Llama4Config(
        vocab_size=2048, dim=256, layers=4, heads=8, kv_heads=4, hidden=704, max_positions=2048, moe_every=2, chunk=128,
        temperature_floor=256,
        moe=MoEConfig(experts=8, top_k=1, hidden=352, shared=1, score="sigmoid", score_before=True, bias_rate=1e-3),
    ),
    "scout-17bx16e": Llama4Config(
        vocab_size=202048, dim=5120, layers=48, heads=40, kv_heads=8, head_dim=128, hidden=16384, max_positions=10485760,
        rope_scaling=RopeScaling(factor=16.0, low_frequency_factor=1.0, high_frequency_factor=1.0),
        moe=MoEConfig(experts=16, top_k=1, hidden=8192, shared=1, score="sigmoid", score_before=True),
    ),
    "maverick-17bx128e": Llama4Config(
        vocab_size=202048, dim=5120, layers=48, heads=40, kv_heads=8, head_dim=128, hidden=16384, max_positions=1048576,
        qk_l2_norm=False, moe_every=2,
        moe=MoEConfig(experts=128, top_k=1, hidden=8192, shared=1, score="sigmoid", score_before=True),
    ),
}  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    ("llama3", Llama, _LLAMA3),
    ("qwen3", Qwen3, _QWEN3),
    ("qwen3", Qwen3MoE, _QWEN3_MOE),
    ("gpt2", GPT2, _GPT2),
    ("mpt", MPT, _MPT),
    ("mpt-mup", MPT, _MPT_MUP),
    ("sigma-moe", MPT, _SIGMA_MOE),
    ("switch-head", DEPToE, SWITCH_HEAD),
    ("deptoe", DEPToE, DEPTOE),
    ("deepseek-v3", DeepSeek, _DEEPSEEK_V3),
    ("llama4", Llama4, _LLAMA4),
    ("llama3-vision", VisionLlama, _VISION),
)
MUP_FAMILIES = (Llama, Qwen3, MPT)
"""Models whose blocks scale their weights, branches and attention as muP and CompleteP say."""
FORMER_FIELDS = {
    "query_rank": "q_lora_rank", "latent": "kv_lora_rank", "plain_width": "qk_nope_head_dim",
    "turned_width": "qk_rope_head_dim", "value_width": "v_head_dim", "whole_every": "no_rope_layer_interval",
}  # fmt: skip
"""Fields of configurations by the names that they had in the release before; these are read for one more, with a warning."""

MODELS = {f"{family}-{size}": (model, config) for family, model, sizes in FAMILIES for size, config in sizes.items()}


def model_names() -> list[str]:
    """List all names that :func:`build_model` knows."""
    return list(MODELS)


def model_config(name: str, **overrides: Any) -> Any:
    """Return the configuration called ``name``, with fields replaced.

    Raises ValueError for an unknown name or field, and names the nearest; for heads that do not divide, and for muP where
    a family has no factors or base shapes do not divide.
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name, model_names(), 3, 0.4) or model_names()
        raise ValueError(f"there is no model {name!r}; there is {', '.join(near)}")
    config = _replaced(name, MODELS[name][1], overrides)
    if config.mup is not None and MODELS[name][0] not in MUP_FAMILIES:
        known = ", ".join(sorted(family for family, model, sizes in FAMILIES if _takes_mup(model, sizes)))
        raise ValueError(f"{name} has no table of muP's factors: leave mup out, or take a model of {known}")
    kv_heads = getattr(config, "kv_heads", None) or config.heads
    if config.heads % kv_heads:
        raise ValueError(f"{name}: {config.heads} heads do not divide among kv_heads = {kv_heads}")
    if getattr(config, "head_dim", 0) is None and config.dim % config.heads:
        raise ValueError(f"{name}: dim = {config.dim} does not divide among {config.heads} heads")
    return config


def _takes_mup(model: Any, sizes: Mapping[str, Any]) -> bool:
    """Return True for a family with a table of muP's factors, which has none for experts."""
    return model in MUP_FAMILIES and all(getattr(config, "moe", None) is None for config in sizes.values())


def _replaced(name: str, config: Any, overrides: Mapping[str, Any]) -> Any:
    """Replace fields of ``config``, recursively for mappings.

    A mapping for a field that is a configuration replaces fields of that.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    values = {}
    for key, value in overrides.items():
        if key not in fields and FORMER_FIELDS.get(key) in fields:
            former, key = key, FORMER_FIELDS[key]
            rank_zero_warn(f"{name}: {former} is called {key} now; the next release will not know {former}")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1, 0.4) or fields
            raise ValueError(f"{name} has no {key!r} to set; did you mean {', '.join(near)}?")
        inner = getattr(config, key)
        if key == "mup" and inner is None and isinstance(value, Mapping):
            values[key] = mup_of({field: _value(given) for field, given in value.items()})
            continue
        nested = isinstance(value, Mapping) and dataclasses.is_dataclass(inner)
        values[key] = _replaced(f"{name}'s {key}", inner, value) if nested else _value(value)
    return dataclasses.replace(config, **values)


def _value(value: Any) -> Any:
    """Parse a value typed on a command line as TOML; None for "none"."""
    if value == "none":
        return None
    with contextlib.suppress(tomllib.TOMLDecodeError, TypeError):
        return tomllib.loads(f"x = {value}")["x"] if isinstance(value, str) else value
    return value


def build_model(name: str, **overrides: Any) -> nn.Module:
    """Build the model ``name`` (see :func:`model_names`), with configuration ``overrides``.

    Its weights are torch's defaults until `arclight.parallel.initialize` draws them or a checkpoint is loaded.
    """
    config = model_config(name, **overrides)
    model: nn.Module = MODELS[name][0](config)
    return model
