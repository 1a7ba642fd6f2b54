"""Models with experts beside dense ones: loss at equal operations, and the bytes that a site sends of half of the experts.

sigma-MoE and MPT, 64 wide, two layers, on the bytes of Python's own sources, each at its best of three rates, three seeds; 4 of 16 experts of
60 hidden features have 94 % of the multiplications of a dense part of 256, and the router brings a layer to 97 %. The bytes are those of the
keys that each site of ``recipes/fed-moe.toml`` sends. Used by `benchmarks.moe`.
"""

from __future__ import annotations

import dataclasses
import statistics
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from arclight.federated.masks.experts import expert_of
from arclight.federated.masks.transfer_mask import ServerMasks
from arclight.federated.protocol import Entry, Manifest
from arclight.federated.settings import Federation
from arclight.parallel import initialize
from arclight.recipe import read
from arclight.text import build_model
from arclight.text.model.decoder import flops_per_token
from benchmarks.rate_transfer import ADAMW, LENGTH, ROWS, Losses, best, train

RECIPE = Path(__file__).parents[1] / "recipes/fed-moe.toml"
VOCABULARY = 4096
"""As many tokens as the recipe's tokenizer learns."""
SIZES: dict[str, Any] = {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "tied": False, "max_positions": 256}
MOE = {"experts": 16, "top_k": 4, "hidden": 60}


def build(name: str) -> nn.Module:
    return build_model("mpt-debug", **SIZES, position="rotary") if name == "dense" else build_model("sigma-moe-debug", **SIZES, moe=MOE)  # fmt: skip


def losses_of(name: str, steps: int, rates: tuple[float, ...], seeds: tuple[int, ...]) -> Losses:
    """Train at every rate with every seed."""
    found: Losses = {}
    for rate in rates:
        found[rate] = []
        for seed in seeds:
            model = build(name)
            initialize(model, seed)
            found[rate].append(train(model, dataclasses.replace(ADAMW, lr=rate), steps, seed))
    return found


def bytes_over_all() -> float:
    """Return the most that a site of the recipe sends, over the bytes of all weights and moments."""
    recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    federation, task = read(Federation, recipe["federation"]), recipe["task"]
    with torch.device("meta"):
        model = build_model(task["model"], **task["overrides"], vocab_size=VOCABULARY)
    shapes = {
        f"{state}/{name}": tuple(parameter.shape)
        for state in ("model", *federation.moments)
        for name, parameter in model.named_parameters()
    }
    tensors = {key: Entry(blob="0" * 64, dtype="F32", shape=shape) for key, shape in shapes.items()}
    manifest = Manifest(kind="weights", tensors=tensors, blobs={"0" * 64: 0})
    sites = {str(number): number for number in range(federation.clients)}
    server, sent = ServerMasks(federation, recipe["seed"], sites.get), []
    for site in sites:
        up = 0
        for key in server.of(site, 1, manifest).up(shapes, 1):
            whole, number = expert_of(key) or (key, None)
            up += torch.Size(shapes[whole] if number is None else shapes[whole][1:]).numel()
        sent.append(up)
    return max(sent) / sum(torch.Size(shape).numel() for shape in shapes.values())


def measure(quick: bool) -> tuple[dict[str, float], str]:
    """Return the figures, and lines that show the losses behind them."""
    steps, rates, seeds = (4, (2.0**-8,), (0, 1)) if quick else (400, (2.0**-8, 2.0**-7, 2.0**-6), (0, 1, 2))
    operations = {name: flops_per_token(build(name), LENGTH) for name in ("sigma-MoE", "dense")}
    assert operations["sigma-MoE"] <= operations["dense"]
    runs = {name: losses_of(name, steps, rates, seeds) for name in operations}
    at_best = {name: list(losses.values())[best(losses)] for name, losses in runs.items()}
    apart = [a - b for a, b in zip(at_best["sigma-MoE"], at_best["dense"], strict=True)]
    figures = {
        "moe_minus_dense_loss": statistics.mean(apart),
        "moe_minus_dense_loss_of_worst_seed": max(apart),
        "expert_bytes_over_all": bytes_over_all(),
    }
    lines = [
        f"* {name}, {operations[name]:,.0f} operations per token: "
        + ", ".join(
            f"2^{torch.tensor(rate).log2():.0f} {' '.join(f'{one:.3f}' for one in found)}"
            for rate, found in runs[name].items()
        )
        for name in runs
    ]
    about = f"Losses (nats per byte) of each seed by peak rate; {steps} steps of {ROWS} x {LENGTH} bytes:\n\n"
    return figures, about + "\n".join(lines)
