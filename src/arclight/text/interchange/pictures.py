"""What Hugging Face calls the parts of models that see or draw: SigLIP 2's encoder, and FLUX.1 as diffusers has it."""

from __future__ import annotations

from math import isqrt

from arclight.text.interchange.families import REQUIRED, Family, Fields
from arclight.text.interchange.keys import Key
from arclight.text.models.flux import Flux, FluxConfig
from arclight.text.models.vlm import VisionConfig, VisionEncoder


def _both(names: dict[str, str]) -> list[Key]:
    """Weights and biases of maps and norms."""
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
        raise ValueError(f"config.json has num_patches = {places}, which is no square")
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
