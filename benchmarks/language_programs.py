"""Language programs beside the eager model: one thread, a token after others (decode) and a prompt (prefill).

A Llama of 101 million random weights (12 layers, dim 768, 12 heads on 4 of keys and values, a vocabulary of 16,384), one sequence,
float32. Each contender makes the call that generation makes: `generate`'s model with its cache in PyTorch, the program with its
cache passed in and out. Calls take turns; figures are medians of ratios within a turn, by the time of the process's own CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from arclight.deploy import LowBit, Program, WeightOnly
from arclight.deploy.settings import Quantization
from arclight.parallel import initialize
from arclight.text import build_model
from arclight.text.language_program import CachedDecoder, export_language_model
from arclight.text.model.kv_cache import KVCache
from benchmarks.results import SPREAD, Ratio, paired, parser, publish, timed_in_turns, versions

SIZES = {
    "dim": 768,
    "layers": 12,
    "heads": 12,
    "kv_heads": 4,
    "hidden": 2048,
    "vocab_size": 16384,
    "max_positions": 2048,
}
QUICK = {"dim": 128, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 256, "vocab_size": 512, "max_positions": 256}
NOISY = 3.0
"""Least signal-to-noise ratio of logits, decibels: of random weights, which nothing was trained to be far apart."""
RECIPES: dict[str, Quantization | None] = {
    "float32": None,
    "WeightOnly(bits=4, group_size=128)": WeightOnly(bits=4, group_size=128, min_sqnr_db=NOISY),
    "LowBit(group_size=128)": LowBit(group_size=128, min_sqnr_db=NOISY),
}
FASTEST = "LowBit(group_size=128)"
"""4-bit weights by the kernel that is fastest at a token: activations are rounded to 8 bits."""
Call = Callable[[], Any]


def decode_ratios(
    quick: bool, names: Sequence[str] | None = None, lengths: Sequence[tuple[int, int]] | None = None
) -> tuple[list[list[str]], dict[str, Ratio]]:
    """Return rows of the table, and the ratios of the eager model's time over those of programs with 4-bit weights.

    ``names`` are recipes (default: all), ``lengths`` pairs of new tokens and those before them.
    """
    model: Any = build_model("llama3-debug", **(QUICK if quick else SIZES))
    initialize(model, 0)
    model.eval().requires_grad_(False)
    texts = torch.randint(0, model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    names = names or (["float32", FASTEST] if quick else list(RECIPES))
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        programs = {}
        for place, name in enumerate(names):
            program = export_language_model(model, Path(folder) / f"{place}.onnx", [texts], RECIPES[name])
            for runtime in ("onnxruntime", "openvino"):
                label = f"{name}, {'ONNX Runtime' if runtime == 'onnxruntime' else 'OpenVINO'}"
                programs[label] = Program.load(program.path, threads=1, device="cpu", runtime=runtime)
        for new, past in lengths or (((1, 32), (32, 0)) if quick else ((1, 64), (1, 512), (128, 0))):
            title = f"a token after {past}" if past else f"a prompt of {new}"
            times = timed_in_turns(_calls(model, programs, new, past), 3 if quick else (25 if new == 1 else 9))
            for label, own in times.items():
                ratio = paired(times["eager"], own)
                rate = f"{new / sorted(own)[len(own) // 2]:.1f}"
                rows.append([title, label, rate, "1" if label == "eager" else str(ratio)])
                if label.startswith(FASTEST):
                    phase = "decode" if past else "prefill"
                    runtime = "ort" if "ONNX" in label else "openvino"
                    found[f"w4_{phase}_{past or new}_{runtime}_over_eager"] = ratio
    return rows, found


def _calls(model: Any, programs: dict[str, Program], new: int, past: int) -> dict[str, Call]:
    """Bind every contender to ``new`` tokens behind ``past`` others."""
    tokens, padding = torch.ones(1, new, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    cached = CachedDecoder(model)
    held = cached.empty(1)
    cache = KVCache(1, past + new)
    if past:
        with torch.no_grad():
            held = cached(torch.arange(past)[None], padding, *held)[1:]
            model(torch.arange(past)[None], cache=cache, last=True)

    @torch.no_grad()
    def eager() -> None:
        cache.used = past
        model(tokens, cache=cache, last=True)

    calls: dict[str, Call] = {"eager": eager}
    for label, program in programs.items():
        calls[label] = lambda program=program: program(tokens, padding, *held)
    return calls


def fastest(ratios: dict[str, Ratio], phase: str) -> Ratio:
    """Return the ratio of the faster runtime at the shortest length of decode or prefill."""
    both = [ratio for name, ratio in ratios.items() if f"_{phase}_" in name][:2]
    return max(both, key=lambda ratio: ratio.value)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows, ratios = decode_ratios(options.quick)
    best = {f"w4_{phase}_over_eager": fastest(ratios, phase) for phase in ("decode", "prefill")}
    publish(
        "language_programs", "Language programs beside the eager model, one thread",
        ("call", "contender", "tokens/s", f"speed over eager: {SPREAD}"), rows, best | ratios,
        options=options, packages=versions("torch", "onnxruntime", "openvino", "arclight-torch"), notes=__doc__.split("\n\n", 1)[1].strip(),
    )  # fmt: skip


if __name__ == "__main__":
    main(parser(__doc__.split("\n")[0]).parse_args())
