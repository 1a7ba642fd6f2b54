"""Map Hugging Face model families to ours: fields of config.json and names of parameters.

`registry` lists these tables; `read` and `write` follow them in both directions, and `moe_families` extends them. A new family is a `Family`
here and an entry of `registry.FAMILIES`, with a test that compares its outputs with those of transformers (or diffusers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isqrt
from typing import Any, get_args, get_type_hints

from torch import nn

from arclight._intervals import NonNegativeInt
from arclight.text.diffusion.flux import Flux, FluxConfig
from arclight.text.families.gpt2 import GPT2, GPT2Config
from arclight.text.families.llama import Llama, LlamaConfig
from arclight.text.families.mpt import MPT, MPTConfig
from arclight.text.families.qwen3 import Qwen3, Qwen3Config
from arclight.text.hf.state_keys import Key
from arclight.text.model.layers import RopeScaling
from arclight.text.vision_language.siglip import VisionConfig, VisionEncoder

REQUIRED = object()
"""Stands for a default that does not exist: config.json must have the field."""

Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family under its names at Hugging Face."""

    model_type: str
    architecture: str
    kind: str = "model_type"
    """The field of config.json that holds ``model_type``."""
    stem: str = "model"
    """Names of weight files, up to the first dot or number."""
    model: type[nn.Module]
    config: type[Any]
    fields: dict[str, tuple[str, Any]]
    """Our field: (their field, its value if config.json leaves it out)."""
    fixed: dict[str, Any]
    """Fields of theirs of which our model supports one value, which is also the value if config.json leaves them out."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names under which transformers reads fields of theirs: other name -> name."""
    keys: tuple[Key, ...]
    """Map of tensors. Of several keys for one parameter of ours the first that a file has is read, and the first is written."""
    prefix: str = "model."
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Pieces of names of tensors that our model has no use for: nothing learned, or parts that it does not have."""
    unread: Callable[[Fields], tuple[str, ...]] = field(default=lambda theirs: ())
    """Parts of names of tensors that a folder holds beside the model, as its config.json says."""
    read_more: Callable[[Fields], Fields] = field(default=lambda theirs: {})
    """Read fields that a table cannot express (``read_more``), and write them (``write_more``)."""
    write_more: Callable[[Any], Fields] = field(default=lambda config: {})

    def read(self, theirs: Fields) -> Fields:
        """Return the arguments of our configuration for theirs.

        Raises ValueError for what our model does not do.
        """
        theirs = {name: theirs[other] for other, name in self.aliases.items() if other in theirs} | theirs
        for name, value in self.fixed.items():
            if theirs.get(name, value) != value:
                raise ValueError(
                    f"config.json has {name} = {theirs[name]!r}; {self.model.__name__} here knows only {value!r}"
                )
        ours, types = {}, get_type_hints(self.config, include_extras=True)
        for name, (other, default) in self.fields.items():
            value = theirs.get(other, default)
            if value is REQUIRED:
                raise ValueError(f"config.json has no {other}, which a {self.model_type} model needs")
            if value is not None or type(None) not in get_args(types.get(name)):
                check_type(other, value, default, least=0 if types.get(name) == NonNegativeInt else 1)
            ours[name] = value
        return ours | self.read_more(theirs)

    def write(self, config: Any) -> Fields:
        """Return the fields of config.json.

        Raises ValueError for what a model there does not do.
        """
        if getattr(config, "logit_cap", None):
            raise ValueError(f"a {self.model_type} model at Hugging Face caps no logits: keep a checkpoint instead")
        theirs = {other: getattr(config, name) for name, (other, _) in self.fields.items()}
        base: Fields = {self.kind: self.model_type}
        if self.kind == "model_type":
            base = {"architectures": [self.architecture]} | base
        return base | self.fixed | theirs | self.write_more(config)


def check_type(name: str, value: Any, default: Any, least: int = 1) -> None:
    """Raise ValueError for a value of another type than ``default``.

    What is required, or has no default, is a whole number from ``least`` on.
    """
    if type(default) is bool:
        fits, what = type(value) is bool, "true or false"
    elif type(default) is float:
        fits, what = type(value) in (int, float) and 0 < value < inf, "a number above 0"
    else:
        fits, what = type(value) is int and value >= least, f"a whole number of {least} or more"
    if not fits:
        raise ValueError(f"config.json has {name} = {value!r}: need {what}")


def rope_table(theirs: Fields) -> Fields:
    """Return the settings of rotary embeddings, also from transformers 5's rope_parameters.

    Raises ValueError for two tables that differ in a setting.
    """
    found: Fields = {}
    for name in ("rope_scaling", "rope_parameters"):
        table = theirs.get(name) or {}
        if not isinstance(table, dict):
            raise ValueError(f"config.json has {name} = {table!r}: need a table, or null")
        table = {"rope_type" if key == "type" and "rope_type" not in table else key: table[key] for key in table}
        for key in found.keys() & table.keys():
            if found[key] != table[key]:
                raise ValueError(
                    f"config.json has {key} = {found[key]!r} in rope_scaling and {table[key]!r} in rope_parameters: leave one table out"
                )
        found |= table
    return found


def rope_number(rope: Fields, name: str, like: float) -> Any:
    """Return a number above 0 of the settings of rotary embeddings, whole if ``like`` is.

    Raises ValueError for others, and if it is missing.
    """
    if rope.get(name) is None:
        raise ValueError(f"config.json has no {name}, which rotary embeddings that are stretched need")
    check_type(name, rope[name], REQUIRED if type(like) is int else like)
    return rope[name]


def read_rope(theirs: Fields, theta: float) -> Fields:
    """Read rope_theta and rope_scaling, also from transformers 5's rope_parameters."""
    rope = rope_table(theirs)
    kind = rope.get("rope_type", "default")
    base = rope.get("rope_theta", theirs.get("rope_theta", theta))
    check_type("rope_theta", base, theta)
    if kind == "default":
        return {"rope_theta": base, "rope_scaling": None}
    if kind != "llama3":
        raise ValueError(f"config.json stretches rotary embeddings as {kind!r}; only 'default' and 'llama3' are known")
    scaling = RopeScaling(
        factor=rope_number(rope, "factor", 8.0), low_frequency_factor=rope_number(rope, "low_freq_factor", 1.0),
        high_frequency_factor=rope_number(rope, "high_freq_factor", 4.0),
        original_positions=rope_number(rope, "original_max_position_embeddings", 8192),
    )  # fmt: skip
    return {"rope_theta": base, "rope_scaling": scaling}


def write_rope(config: LlamaConfig) -> Fields:
    scaling = config.rope_scaling
    stretched = scaling and {
        "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor, "original_max_position_embeddings": scaling.original_positions,
    }  # fmt: skip
    return {"rope_theta": config.rope_theta, "rope_scaling": stretched}


def read_llama(theirs: Fields, theta: float = 10_000.0) -> Fields:
    heads = theirs.get("num_attention_heads")
    kv_heads = theirs.get("num_key_value_heads")
    if kv_heads is not None:
        check_type("num_key_value_heads", kv_heads, REQUIRED)
    return read_rope(theirs, theta) | {"kv_heads": heads if kv_heads is None else kv_heads}


def write_llama(config: LlamaConfig) -> Fields:
    return write_rope(config) | {"num_key_value_heads": config.kv_heads, "head_dim": config.width}


TRUNK_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", REQUIRED),
    "dim": ("hidden_size", REQUIRED),
    "layers": ("num_hidden_layers", REQUIRED),
    "heads": ("num_attention_heads", REQUIRED),
    "hidden": ("intermediate_size", REQUIRED),
    "max_positions": ("max_position_embeddings", REQUIRED),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
    "std": ("initializer_range", 0.02),
}

TRUNK_KEYS = (
    Key("tok_embeddings.weight", "model.embed_tokens.weight"),
    Key("norm.weight", "model.norm.weight"),
    Key("output.weight", "lm_head.weight"),
    Key("layers.{layer}.attention_norm.weight", "model.layers.{layer}.input_layernorm.weight"),
    Key("layers.{layer}.feed_forward_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
)

GROUPED_ATTENTION_KEYS = (
    Key("layers.{layer}.attention.wq.weight", "model.layers.{layer}.self_attn.q_proj.weight"),
    Key("layers.{layer}.attention.wk.weight", "model.layers.{layer}.self_attn.k_proj.weight"),
    Key("layers.{layer}.attention.wv.weight", "model.layers.{layer}.self_attn.v_proj.weight"),
    Key("layers.{layer}.attention.wo.weight", "model.layers.{layer}.self_attn.o_proj.weight"),
)

QK_NORM_KEYS = (
    Key("layers.{layer}.attention.q_norm.weight", "model.layers.{layer}.self_attn.q_norm.weight"),
    Key("layers.{layer}.attention.k_norm.weight", "model.layers.{layer}.self_attn.k_norm.weight"),
)


def feed_forward_keys(ours: str, theirs: str) -> tuple[Key, ...]:
    """List the three maps of a SwiGLU below ``ours`` and ``theirs``."""
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    return tuple(Key(f"{ours}.{own}.weight", f"{theirs}.{other}.weight") for own, other in names.items())


LLAMA_KEYS = (
    *TRUNK_KEYS,
    *GROUPED_ATTENTION_KEYS,
    *feed_forward_keys("layers.{layer}.feed_forward", "model.layers.{layer}.mlp"),
)
LLAMA_FIXED: Fields = {"hidden_act": "silu", "attention_bias": False}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    model=Llama,
    config=LlamaConfig,
    fields=TRUNK_FIELDS | {"head_dim": ("head_dim", None)},
    fixed=LLAMA_FIXED | {"mlp_bias": False},
    keys=LLAMA_KEYS,
    read_more=read_llama,
    write_more=write_llama,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    model=Qwen3,
    config=Qwen3Config,
    fields=TRUNK_FIELDS | {"head_dim": ("head_dim", 128)},
    fixed=LLAMA_FIXED | {"use_sliding_window": False},
    keys=LLAMA_KEYS + QK_NORM_KEYS,
    read_more=read_llama,
    write_more=write_llama,
)


def _gpt2_keys() -> tuple[Key, ...]:
    ours, theirs, found = "layers.{layer}", "transformer.h.{layer}", []
    for number, name in enumerate(("wq", "wk", "wv")):  # one map in the file, its matrix with inputs first
        found.append(Key(f"{ours}.attention.{name}.weight", f"{theirs}.attn.c_attn.weight", number, 3, transposed=True))
        found.append(Key(f"{ours}.attention.{name}.bias", f"{theirs}.attn.c_attn.bias", number, 3))
    for own, other in {
        "attention.wo": "attn.c_proj",
        "feed_forward.w1": "mlp.c_fc",
        "feed_forward.w2": "mlp.c_proj",
    }.items():
        found.append(Key(f"{ours}.{own}.weight", f"{theirs}.{other}.weight", transposed=True))
        found.append(Key(f"{ours}.{own}.bias", f"{theirs}.{other}.bias"))
    norms = {
        f"{ours}.attention_norm": f"{theirs}.ln_1",
        f"{ours}.feed_forward_norm": f"{theirs}.ln_2",
        "norm": "transformer.ln_f",
    }
    found += [Key(f"{own}.{end}", f"{other}.{end}") for own, other in norms.items() for end in ("weight", "bias")]
    return (
        Key("tok_embeddings.weight", "transformer.wte.weight"),
        Key("positions.weight", "transformer.wpe.weight"),
        Key("output.weight", "lm_head.weight"),
        *found,
    )


def _read_gpt2(theirs: Fields) -> Fields:
    inner, usual = theirs.get("n_inner"), 4 * theirs.get("n_embd", 768)
    if inner is not None and inner != usual:
        raise ValueError(f"config.json has n_inner = {inner}; GPT2 here knows only 4 * n_embd = {usual}")
    return {}


GPT2_FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    model=GPT2,
    config=GPT2Config,
    fields={
        "vocab_size": ("vocab_size", 50257),
        "dim": ("n_embd", 768),
        "layers": ("n_layer", 12),
        "heads": ("n_head", 12),
        "max_positions": ("n_positions", 1024),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tied": ("tie_word_embeddings", True),
        "std": ("initializer_range", 0.02),
    },
    fixed={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    aliases={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    keys=_gpt2_keys(),
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
    read_more=_read_gpt2,
    write_more=lambda config: {"n_inner": None},
)


def _mpt_keys() -> tuple[Key, ...]:
    ours, theirs = "layers.{layer}", "transformer.blocks.{layer}"
    names = {
        f"{ours}.attention.wo": f"{theirs}.attn.out_proj",
        f"{ours}.attention_norm": f"{theirs}.norm_1",
        f"{ours}.feed_forward_norm": f"{theirs}.norm_2",
        f"{ours}.feed_forward.w1": f"{theirs}.ffn.up_proj",
        f"{ours}.feed_forward.w2": f"{theirs}.ffn.down_proj",
        "tok_embeddings": "transformer.wte",
        "norm": "transformer.norm_f",
        "output": "lm_head",
    }
    return (
        *(Key(f"{own}.weight", f"{other}.weight") for own, other in names.items()),
        *(Key(f"{ours}.attention.w{x}.weight", f"{theirs}.attn.Wqkv.weight", n, 3) for n, x in enumerate("qkv")),
    )


_MPT_ATTENTION: Fields = {"attn_type": "multihead_attention", "alibi": True, "qk_ln": False, "prefix_lm": False}
"""What transformers computes, of the fields of attn_config."""


def _read_mpt(theirs: Fields) -> Fields:
    attention = theirs.get("attn_config") or {}
    if not isinstance(attention, dict):
        raise ValueError(f"config.json has attn_config = {attention!r}: need a table, or null")
    for name, value in _MPT_ATTENTION.items():
        if attention.get(name, value) != value:
            raise ValueError(f"config.json has attn_config.{name} = {attention[name]!r}; MPT here reads only {value!r}")
    return {
        "position": "alibi", "alibi_max": attention.get("alibi_bias_max", 8), "clip_qkv": attention.get("clip_qkv"),
        "softmax_scale": attention.get("softmax_scale"),
    }  # fmt: skip


def _write_mpt(config: MPTConfig) -> Fields:
    unknown = [name for name in ("head_dim", "qk_norm", "peri_norm", "embedding_norm") if getattr(config, name)]
    unknown += ["experts"] if config.moe is not None else []
    unknown += ["rotary embeddings"] if config.position != "alibi" else ["alibi_max"] if config.alibi_max != 8 else []
    if unknown:  # it reads alibi_bias_max, and computes with 8
        raise ValueError(f"transformers has no MPT with {', '.join(unknown)}: keep a checkpoint instead")
    scale = config.query_scale if config.mup is not None or config.softmax_scale else None
    own = {"alibi_bias_max": config.alibi_max, "clip_qkv": config.clip_qkv, "softmax_scale": scale}
    return {"attn_config": _MPT_ATTENTION | own}


MPT_FAMILY = Family(
    model_type="mpt",
    architecture="MptForCausalLM",
    model=MPT,
    config=MPTConfig,
    fields={
        "vocab_size": ("vocab_size", 50368),
        "dim": ("d_model", 2048),
        "layers": ("n_layers", 24),
        "heads": ("n_heads", 16),
        "max_positions": ("max_seq_len", 2048),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tied": ("tie_word_embeddings", True),
        "std": ("initializer_range", 0.02),
    },
    fixed={"no_bias": True, "expansion_ratio": 4, "norm_type": "low_precision_layernorm", "logit_scale": None},
    aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    keys=_mpt_keys(),
    prefix="transformer.",
    ignored=(),
    read_more=_read_mpt,
    write_more=_write_mpt,
)


def _both(names: dict[str, str]) -> list[Key]:
    """Return the weights and biases of maps and norms."""
    return [Key(f"{own}.{end}", f"{other}.{end}") for own, other in names.items() for end in ("weight", "bias")]


def _siglip2_keys() -> tuple[Key, ...]:
    ours, theirs = "layers.{layer}", "vision_model.encoder.layers.{layer}"
    names = {
        f"{ours}.attention.wq": f"{theirs}.self_attn.q_proj",
        f"{ours}.attention.wk": f"{theirs}.self_attn.k_proj",
        f"{ours}.attention.wv": f"{theirs}.self_attn.v_proj",
        f"{ours}.attention.wo": f"{theirs}.self_attn.out_proj",
        f"{ours}.feed_forward.w1": f"{theirs}.mlp.fc1",
        f"{ours}.feed_forward.w2": f"{theirs}.mlp.fc2",
        f"{ours}.attention_norm": f"{theirs}.layer_norm1",
        f"{ours}.feed_forward_norm": f"{theirs}.layer_norm2",
        "patches": "vision_model.embeddings.patch_embedding",
        "norm": "vision_model.post_layernorm",
    }
    return (*_both(names), Key("positions.weight", "vision_model.embeddings.position_embedding.weight"))


def _read_siglip2(theirs: Fields) -> Fields:
    places = theirs.get("num_patches", 256)
    if isqrt(places) ** 2 != places:
        raise ValueError(f"config.json has num_patches = {places}, which is not a square number")
    return {"grid": isqrt(places)}


SIGLIP2 = Family(
    model_type="siglip2_vision_model",
    architecture="Siglip2VisionModel",
    model=VisionEncoder,
    config=VisionConfig,
    fields={
        "dim": ("hidden_size", 768),
        "layers": ("num_hidden_layers", 12),
        "heads": ("num_attention_heads", 12),
        "hidden": ("intermediate_size", 3072),
        "patch": ("patch_size", 16),
        "channels": ("num_channels", 3),
        "norm_eps": ("layer_norm_eps", 1e-6),
    },
    fixed={"hidden_act": "gelu_pytorch_tanh"},
    keys=_siglip2_keys(),
    prefix="vision_model.",
    ignored=("vision_model.head.",),
    read_more=_read_siglip2,
    write_more=lambda config: {"num_patches": config.grid**2, "vision_use_head": False},
)


def _flux_keys() -> tuple[Key, ...]:
    names = {
        "text_in": "context_embedder",
        "image_in": "x_embedder",
        "modulation.w": "norm_out.linear",
        "output": "proj_out",
    }
    for own, other in (("time", "timestep"), ("summary", "text"), ("guidance", "guidance")):
        for number in "12":
            names[f"{own}_in.w{number}"] = f"time_text_embed.{other}_embedder.linear_{number}"
    ours, theirs, norms = "double_layers.{layer}", "transformer_blocks.{layer}", {}
    for stream, end, added in (("image", "", False), ("text", "_context", True)):
        names[f"{ours}.{stream}.modulation.w"] = f"{theirs}.norm1{end}.linear"
        names[f"{ours}.{stream}.wo"] = f"{theirs}.attn.{'to_add_out' if added else 'to_out.0'}"
        names[f"{ours}.{stream}.feed_forward.w1"] = f"{theirs}.ff{end}.net.0.proj"
        names[f"{ours}.{stream}.feed_forward.w2"] = f"{theirs}.ff{end}.net.2"
        for name in "qkv":
            names[f"{ours}.{stream}.heads.w{name}"] = f"{theirs}.attn.{f'add_{name}_proj' if added else f'to_{name}'}"
        for name in "qk":
            norms[f"{ours}.{stream}.heads.{name}_norm"] = f"{theirs}.attn.norm_{'added_' if added else ''}{name}"
    ours, theirs = "layers.{layer}", "single_transformer_blocks.{layer}"
    names |= {f"{ours}.modulation.w": f"{theirs}.norm.linear", f"{ours}.w1": f"{theirs}.proj_mlp"}
    names |= {f"{ours}.heads.w{name}": f"{theirs}.attn.to_{name}" for name in "qkv"}
    norms |= {f"{ours}.heads.{name}_norm": f"{theirs}.attn.norm_{name}" for name in "qk"}
    return (
        *_both(names),
        *(Key(f"{own}.weight", f"{other}.weight") for own, other in norms.items()),
        Key(f"{ours}.wo.bias", f"{theirs}.proj_out.bias"),
        Key(
            f"{ours}.wo.weight", f"{theirs}.proj_out.weight", 0, 5, dim=1
        ),  # one map of attention and feed-forward part
        Key(f"{ours}.w2.weight", f"{theirs}.proj_out.weight", 1, 5, dim=1, span=4),
    )


def _read_flux(theirs: Fields) -> Fields:
    dim = theirs["num_attention_heads"] * theirs.get("attention_head_dim", 128)
    if theirs.get("out_channels") not in (None, theirs.get("in_channels", 64)):
        raise ValueError(
            f"config.json has out_channels = {theirs['out_channels']}; Flux here gives as many as it takes"
        )
    return {"dim": dim, "hidden": 4 * dim, "axes": tuple(theirs.get("axes_dims_rope", (16, 56, 56)))}


def _write_flux(config: FluxConfig) -> Fields:
    if config.hidden != 4 * config.dim or config.rope_theta != 10_000.0:
        raise ValueError("diffusers knows Flux with hidden = 4 * dim and rope_theta = 10000 only")
    return {"attention_head_dim": config.dim // config.heads, "axes_dims_rope": list(config.axes), "out_channels": None}


FLUX = Family(
    model_type="FluxTransformer2DModel",
    architecture="FluxTransformer2DModel",
    kind="_class_name",
    stem="diffusion_pytorch_model",
    model=Flux,
    config=FluxConfig,
    fields={
        "in_channels": ("in_channels", 64),
        "text_dim": ("joint_attention_dim", 4096),
        "summary_dim": ("pooled_projection_dim", 768),
        "heads": ("num_attention_heads", REQUIRED),
        "double_layers": ("num_layers", REQUIRED),
        "single_layers": ("num_single_layers", REQUIRED),
        "guidance": ("guidance_embeds", False),
    },
    fixed={"patch_size": 1},
    keys=_flux_keys(),
    prefix="",
    ignored=(),
    read_more=_read_flux,
    write_more=_write_flux,
)
