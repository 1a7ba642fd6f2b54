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

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama-stretched-tied": ("Llama", SMALL | {"tie_word_embeddings": True, "rope_parameters": STRETCHED}),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 24}),
    "qwen3-tied": ("Qwen3", SMALL | {"head_dim": 24, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"vocab_size": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}),
}


def hf_model(case: str) -> Any:
    """In float32, its weights larger than a fresh model's and its norms not all ones, so that differences show."""
    transformers = pytest.importorskip("transformers")
    family, fields = CASES[case]
    config = getattr(transformers, f"{family}Config")(**fields, attn_implementation="eager")
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
