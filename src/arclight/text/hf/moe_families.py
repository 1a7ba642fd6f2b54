"""Map Hugging Face families with experts (MoE) to ours.

`registry` lists these tables; `read` and `write` follow them in both directions. A new family is a table here and an entry of
`registry.FAMILIES`, with a test that compares its logits with those of transformers.

Files of the hub and those of transformers have a tensor per expert and map; if transformers 5 wrote its weights as it holds them,
the gate and the up map of all experts are one tensor.
"""

from __future__ import annotations

from typing import Any

from arclight.text.families.deepseek import DeepSeek, DeepSeekConfig, Yarn
from arclight.text.families.llama4 import Llama4, Llama4Config
from arclight.text.families.qwen3 import Qwen3MoE, Qwen3MoEConfig
from arclight.text.hf.families import (
    GROUPED_ATTENTION_KEYS,
    LLAMA_FIXED,
    QK_NORM_KEYS,
    REQUIRED,
    TRUNK_FIELDS,
    TRUNK_KEYS,
    Family,
    Fields,
    check_type,
    feed_forward_keys,
    read_llama,
    rope_number,
    rope_table,
    write_llama,
)  # fmt: skip
from arclight.text.hf.state_keys import Key
from arclight.text.model.moe import MoEConfig

_OURS, _THEIRS = "layers.{layer}.feed_forward", "model.layers.{layer}.mlp"

EXPERT_KEYS = (
    *(
        Key(f"{_OURS}.experts.{own}", f"{_THEIRS}.experts.{{expert}}.{other}.weight")
        for own, other in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
    ),
    Key(f"{_OURS}.experts.w1", f"{_THEIRS}.experts.gate_up_proj", 0, 2, dim=1),
    Key(f"{_OURS}.experts.w3", f"{_THEIRS}.experts.gate_up_proj", 1, 2, dim=1),
    Key(f"{_OURS}.experts.w2", f"{_THEIRS}.experts.down_proj"),
    Key(f"{_OURS}.router.weight", f"{_THEIRS}.gate.weight"),
)


def _required(theirs: Fields, name: str) -> Any:
    if theirs.get(name) is None:
        raise ValueError(f"config.json has no {name}, which a {theirs.get('model_type')} model needs")
    return theirs[name]


def _known(theirs: Fields, name: str, value: Any) -> None:
    if theirs.get(name, value) != value:
        raise ValueError(f"config.json has {name} = {theirs[name]!r}; the model here knows only {value!r}")


def _read_qwen3_moe(theirs: Fields) -> Fields:
    if theirs.get("mlp_only_layers"):
        raise ValueError(f"config.json has mlp_only_layers = {theirs['mlp_only_layers']}; all layers here have experts")
    norm = theirs.get("norm_topk_prob", False)
    check_type("norm_topk_prob", norm, False)
    experts: int = theirs.get("num_experts") or _required(theirs, "num_local_experts")
    moe = MoEConfig(
        experts=experts, top_k=theirs.get("num_experts_per_tok", 8), hidden=theirs.get("moe_intermediate_size", 768),
        route_norm=norm,
    )  # fmt: skip
    return read_llama(theirs) | {"moe": moe}


def _write_qwen3_moe(config: Qwen3MoEConfig) -> Fields:
    moe = config.moe
    _expressible(moe, score="softmax", shared=0, groups=1, score_before=False, route_scale=1.0)
    return write_llama(config) | {
        "num_experts": moe.experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.hidden,
        "norm_topk_prob": moe.route_norm,
    }  # fmt: skip


def _expressible(moe: MoEConfig, **values: Any) -> None:
    """Raise ValueError for experts that the family at Hugging Face cannot express."""
    for name, value in {"activation": "swiglu", **values}.items():
        if getattr(moe, name) != value:
            raise ValueError(f"moe.{name} is {getattr(moe, name)!r}; the family at Hugging Face knows only {value!r}")


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    model=Qwen3MoE,
    config=Qwen3MoEConfig,
    fields=TRUNK_FIELDS | {"head_dim": ("head_dim", 128)},
    fixed=LLAMA_FIXED | {"use_sliding_window": False, "decoder_sparse_step": 1},
    keys=(*TRUNK_KEYS, *GROUPED_ATTENTION_KEYS, *QK_NORM_KEYS, *EXPERT_KEYS),
    read_more=_read_qwen3_moe,
    write_more=_write_qwen3_moe,
)


def _read_deepseek(theirs: Fields) -> Fields:
    _known(theirs, "scoring_func", "sigmoid")
    _known(theirs, "topk_method", "noaux_tc")
    _known(theirs, "rope_interleave", True)
    norm = theirs.get("norm_topk_prob", True)
    check_type("norm_topk_prob", norm, True)
    moe = MoEConfig(
        experts=theirs.get("n_routed_experts", 256), top_k=theirs.get("num_experts_per_tok", 8),
        hidden=theirs.get("moe_intermediate_size", 2048), shared=theirs.get("n_shared_experts", 1), score="sigmoid",
        route_norm=norm, route_scale=theirs.get("routed_scaling_factor", 2.5),
        groups=theirs.get("n_group", 8), top_groups=theirs.get("topk_group", 4), bias_rate=0.0,
    )  # fmt: skip
    rope = rope_table(theirs)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise ValueError(f"config.json stretches rotary embeddings as {kind!r}; only 'default' and 'yarn' are known")
    yarn = None
    if kind == "yarn":
        _known(rope, "attention_factor", None)
        _known(rope, "truncate", True)
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if rope.get(name):
                check_type(name, rope[name], 1.0)
        yarn = Yarn(
            factor=rope_number(rope, "factor", 40.0), original_positions=rope_number(rope, "original_max_position_embeddings", 4096),
            fast=rope.get("beta_fast") or 32.0, slow=rope.get("beta_slow") or 1.0, mscale=rope.get("mscale") or 0.0,
            mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
        )  # fmt: skip
    base = rope.get("rope_theta", theirs.get("rope_theta", 10_000.0))
    check_type("rope_theta", base, 10_000.0)
    return {"rope_theta": base, "yarn": yarn, "moe": moe}


def _write_deepseek(config: DeepSeekConfig) -> Fields:
    moe, yarn = config.moe, config.yarn
    _expressible(moe, score="sigmoid", score_before=False, group_best=2)
    stretched = yarn and {
        "type": "yarn", "rope_type": "yarn", "factor": yarn.factor, "beta_fast": yarn.fast, "beta_slow": yarn.slow,
        "original_max_position_embeddings": yarn.original_positions, "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }  # fmt: skip
    return {
        "rope_theta": config.rope_theta, "rope_scaling": stretched, "num_key_value_heads": config.heads,
        "n_routed_experts": moe.experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.hidden,
        "n_shared_experts": moe.shared, "norm_topk_prob": moe.route_norm, "routed_scaling_factor": moe.route_scale,
        "n_group": moe.groups, "topk_group": moe.top_groups, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    }  # fmt: skip


def _further_tokens(theirs: Fields) -> tuple[str, ...]:
    """List the layers behind the last that predict further tokens, for training and drafts only."""
    first, count = theirs["num_hidden_layers"], theirs.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{first + number}." for number in range(count))


_LATENT_NAMES = {
    "wq": "q_proj", "wq_a": "q_a_proj", "wq_b": "q_b_proj", "q_norm": "q_a_layernorm", "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj", "wo": "o_proj",
}  # fmt: skip

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model=DeepSeek,
    config=DeepSeekConfig,
    fields=TRUNK_FIELDS
    | {
        "dense_layers": ("first_k_dense_replace", 3),
        "q_lora_rank": ("q_lora_rank", 1536),
        "kv_lora_rank": ("kv_lora_rank", 512),
        "qk_nope_head_dim": ("qk_nope_head_dim", 128),
        "qk_rope_head_dim": ("qk_rope_head_dim", 64),
        "v_head_dim": ("v_head_dim", 128),
    },
    fixed=LLAMA_FIXED,
    keys=(
        *TRUNK_KEYS,
        *(
            Key(f"layers.{{layer}}.attention.{own}.weight", f"model.layers.{{layer}}.self_attn.{other}.weight")
            for own, other in _LATENT_NAMES.items()
        ),
        *feed_forward_keys(_OURS, _THEIRS),
        *feed_forward_keys(f"{_OURS}.shared", f"{_THEIRS}.shared_experts"),
        *EXPERT_KEYS,
        Key(f"{_OURS}.router.expert_bias", f"{_THEIRS}.gate.e_score_correction_bias", exact=True),
    ),
    unread=_further_tokens,
    read_more=_read_deepseek,
    write_more=_write_deepseek,
)


def _read_llama4(theirs: Fields) -> Fields:
    layers, every = theirs["num_hidden_layers"], theirs.get("interleave_moe_layer_step", 1)
    interval = theirs.get("no_rope_layer_interval", 4)
    check_type("interleave_moe_layer_step", every, REQUIRED)
    check_type("no_rope_layer_interval", interval, REQUIRED)
    rotated = [(number + 1) % interval != 0 for number in range(layers)]
    chunked = theirs.get("attention_chunk_size", 8192) is not None
    expected: dict[str, list[Any]] = {
        "no_rope_layers": [int(rope) for rope in rotated],
        "layer_types": ["chunked_attention" if rope and chunked else "full_attention" for rope in rotated],
        "moe_layers": list(range(every - 1, layers, every)),
    }
    for name, value in expected.items():
        if theirs.get(name) and theirs[name] != value:
            setting = "interleave_moe_layer_step" if name == "moe_layers" else "no_rope_layer_interval"
            raise ValueError(
                f"config.json has {name} = {theirs[name]}; Llama4 here has them at regular intervals ({setting}): {value}"
            )
    moe = MoEConfig(
        experts=theirs.get("num_local_experts", 16), top_k=theirs.get("num_experts_per_tok", 1), shared=1,
        hidden=_required(theirs, "intermediate_size"), score="sigmoid", score_before=True,
    )  # fmt: skip
    tuned = theirs.get("attn_temperature_tuning", True)
    return read_llama(theirs, 500_000.0) | {
        "moe": moe, "moe_every": every, "no_rope_layer_interval": interval,
        "temperature": theirs.get("attn_scale", 0.1) if tuned else None,
    }  # fmt: skip


def _write_llama4(config: Llama4Config) -> Fields:
    moe = config.moe
    _expressible(moe, score="sigmoid", shared=1, groups=1, score_before=True, route_scale=1.0, route_norm=False)
    return write_llama(config) | {
        "num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k, "intermediate_size": moe.hidden,
        "interleave_moe_layer_step": config.moe_every, "no_rope_layer_interval": config.no_rope_layer_interval,
        "attn_temperature_tuning": config.temperature is not None, "attn_scale": 0.1 if config.temperature is None else config.temperature,
    }  # fmt: skip


LLAMA4 = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    model=Llama4,
    config=Llama4Config,
    fields=TRUNK_FIELDS
    | {
        "hidden": ("intermediate_size_mlp", REQUIRED),
        "head_dim": ("head_dim", 128),
        "chunk": ("attention_chunk_size", 8192),
        "qk_l2_norm": ("use_qk_norm", True),
        "temperature_floor": ("floor_scale", 8192.0),
        "norm_eps": ("rms_norm_eps", 1e-5),
    },
    fixed=LLAMA_FIXED,
    keys=(
        *TRUNK_KEYS,
        *GROUPED_ATTENTION_KEYS,
        *feed_forward_keys(_OURS, "model.layers.{layer}.feed_forward"),
        *feed_forward_keys(f"{_OURS}.shared", "model.layers.{layer}.feed_forward.shared_expert"),
        Key(f"{_OURS}.experts.w1", "model.layers.{layer}.feed_forward.experts.gate_up_proj", 0, 2, dim=1, transposed=True),
        Key(f"{_OURS}.experts.w3", "model.layers.{layer}.feed_forward.experts.gate_up_proj", 1, 2, dim=1, transposed=True),
        Key(f"{_OURS}.experts.w2", "model.layers.{layer}.feed_forward.experts.down_proj", transposed=True),
        Key(f"{_OURS}.router.weight", "model.layers.{layer}.feed_forward.router.weight"),
    ),
    read_more=_read_llama4,
    write_more=_write_llama4,
)  # fmt: skip
