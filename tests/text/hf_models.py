"""Small models of Hugging Face with random weights: what ours are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0,
    "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip
QWEN3_MOE = SMALL | {
    "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True
}  # fmt: skip
DEEPSEEK_V3 = SMALL | {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
LLAMA4 = SMALL | {
    "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 48, "intermediate_size_mlp": 80, "num_local_experts": 4,
    "interleave_moe_layer_step": 2, "attention_chunk_size": 16, "floor_scale": 8,
}  # fmt: skip
MPT = {"vocab_size": 256, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama-stretched-tied": ("Llama", SMALL | {"tie_word_embeddings": True, "rope_parameters": STRETCHED}),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 24}),
    "qwen3-tied": ("Qwen3", SMALL | {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK_V3),
    "deepseek-v3-whole-queries-yarn": ("DeepseekV3", DEEPSEEK_V3 | {"q_lora_rank": None, "rope_parameters": YARN}),
    "llama4": ("Llama4", LLAMA4),
    "llama4-all-mixtures": (
        "Llama4",
        LLAMA4 | {"interleave_moe_layer_step": 1, "use_qk_norm": False, "rope_parameters": STRETCHED},
    ),
    "mpt": ("Mpt", MPT),
    "mpt-clipped": (
        "Mpt",
        MPT
        | {
            "n_heads": 6,
            "d_model": 96,
            "tie_word_embeddings": False,
            "attn_config": {"clip_qkv": 0.3, "softmax_scale": 0.2},
        },
    ),
    "gpt2": ("GPT2", {"vocab_size": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}),
}


def hf_model(case: str) -> Any:
    """In float32, its weights larger than a fresh model's and its norms not all ones, so that differences show."""
    transformers = pytest.importorskip("transformers")
    family, fields = CASES[case]
    name = "Llama4TextConfig" if family == "Llama4" else f"{family}Config"
    config = getattr(transformers, name)(**fields, attn_implementation="eager")
    torch.manual_seed(0)
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.uniform_(-0.1, 0.1)
    return model


def hf_folder(case: str, folder: Path, **options: Any) -> Any:
    model = hf_model(case)
    model.save_pretrained(folder, **options)
    return model
