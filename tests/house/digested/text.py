"""Digest language models from the shell, and logits and gradients of the zoo.

`digests` runs `values`: a model is trained, asked for text, exported, opened again and resumed; six debug models are run backward; texts are
generated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.house.digested.common import newest, rows, typed

from arclight.parallel import initialize
from arclight.text import ByteTokenizer, build_model, from_hf, generate

RECIPE = """
name = "lm"
seed = 3
[task]
kind = "language"
overrides = {layers = 2, dim = 32, heads = 2, kv_heads = 1, hidden = 48}
[task.data]
data = "texts"
sequence_length = 32
batch_size = 4
held_out = 0.1
tokenizer = {kind = "bpe", vocab_size = 300}
[task.optimizer]
kind = "adamw"
lr = 3e-3
[trainer]
accelerator = "cpu"
max_steps = 8
val_check_interval = 4
log_every_n_steps = 1
enable_progress_bar = false
gradient_clip_val = 1.0
"""
ZOO = {
    "llama3-debug": {}, "qwen3-debug": {}, "qwen3-moe-debug": {}, "gpt2-debug": {}, "deepseek-v3-debug": {}, "llama4-debug": {},
}  # fmt: skip


def logits(name: str) -> dict[str, Any]:
    model: Any = build_model(name, vocab_size=64, layers=2)
    initialize(model, 5)
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    out = model(tokens)
    out.square().mean().backward()
    return {"logits": out, "gradients": {key: p.grad for key, p in model.named_parameters() if p.grad is not None}}


def values(folder: Path) -> dict[str, Any]:
    Path("texts").mkdir()
    for number in range(40):
        Path(f"texts/{number}.txt").write_text(f"the {number} cats sat on the mat and saw {number} birds\n" * 40)
    Path("lm.toml").write_text(RECIPE)
    typed("train", "lm.toml")
    run = Path("runs/lm/1")
    found: dict[str, Any] = {"trained": newest(run), "rows": rows(run)}
    typed("predict", run, "--prompt", "the 7", "--tokens", "8", "--temperature", "0", "--json", "said.json")
    found["said"] = json.loads(Path("said.json").read_text())[0]["text"]
    typed("export", run, "--out", "hf")
    found["exported"] = load_file("hf/model.safetensors")
    found["opened"] = from_hf("hf").state_dict()
    typed("train", "lm.toml", "--trainer.max_steps", "4", "--name", "half", "--task.schedule.kind", "constant")
    typed("train", "lm.toml", "--name", "half", "--task.schedule.kind", "constant", "--resume", "last")
    found["resumed"] = newest(sorted(Path("runs/half").iterdir())[-1])
    typed("train", "lm.toml", "--name", "muon", "--task.optimizer.kind", "muon", "--trainer.max_steps", "3")
    found["muon"] = newest(Path("runs/muon/1"))
    found |= {f"zoo-{name}": logits(name) for name in ZOO}
    model: Any = build_model("llama3-debug", vocab_size=264, layers=2)
    initialize(model, 5)
    found["tokens"] = ByteTokenizer().encode("the cat sat")
    found["greedy"] = generate(model, ByteTokenizer(), "the cat", 6, temperature=0.0)
    found["drawn"] = generate(model, ByteTokenizer(), ["the cat", "a"], 6, temperature=0.9, top_k=20, seed=4)
    return found
