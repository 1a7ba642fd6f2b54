"""Pre-training of language models: ours beside Hugging Face's in a plain loop, and what trainer, loader and checkpoints cost.

On a CPU the debug Llama trains at equal precision, weights and batches; after each step of the trainer every rival takes one, in
random order, so that whatever else the machine does strikes all of them. With a CUDA GPU the published sizes follow.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import arclight as al
from arclight.parallel import Plan, PlanStrategy
from arclight.text import LanguageModel, TextDataModule, build_model
from arclight.text.data.data_settings import Bytes, Text
from arclight.text.loss import cross_entropy
from arclight.text.settings import LanguageTask
from benchmarks.planning import plan_65536
from benchmarks.results import SPREAD, Ratio, median, paired, parser, publish, versions

MODEL, LENGTH, BATCH = "llama3-debug", 256, 4
PUBLISHED = {
    # name: (model, sequence length, sequences per step, activation checkpointing)
    "tokens_124m": ("gpt2-124m", 1024, 32, "none"),
    "tokens_1b": ("llama3-1b", 4096, 4, "none"),
    "tokens_8b": ("llama3-8b", 8192, 1, "selective"),
}


class Random(al.DataModule):
    """Batches of random tokens, made beforehand."""

    def __init__(self, vocabulary: int, length: int, batch: int) -> None:
        tokens = torch.randint(0, vocabulary, (8, batch, length + 1))
        self.batches = [{"tokens": t[:, :-1].contiguous(), "labels": t[:, 1:].contiguous()} for t in tokens]

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches * 512, batch_size=None)  # type: ignore[arg-type]


@dataclass
class TakingTurns(al.Callback):
    """Have every rival take a step after each of the trainer's, in random order; ``seconds`` has each step's time.

    The first ``warm`` steps are not measured: they fill optimizers' states, and compile.
    """

    rivals: dict[str, Callable[[dict[str, torch.Tensor]], None]]
    warm: int = 3
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        ended, measured = time.perf_counter(), batch_idx >= self.warm
        if measured:
            self.seconds.setdefault("trainer", []).append(ended - self.began)
        for name in random.sample(list(self.rivals), len(self.rivals)):
            started = time.perf_counter()
            self.rivals[name](batch)
            if measured:
                self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        self.began = time.perf_counter()


def training(
    model: torch.nn.Module, loss: Callable[..., torch.Tensor], dtype: torch.dtype | None
) -> Callable[..., None]:
    """A plain loop's step, as written by hand: forward, backward, clipping, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            value = loss(model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def hugging_face(dtype: torch.dtype | None) -> Callable[..., None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = build_model(MODEL).config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ours.vocab_size, hidden_size=ours.dim, intermediate_size=ours.hidden, num_hidden_layers=ours.layers,
            num_attention_heads=ours.heads, num_key_value_heads=ours.kv_heads, use_cache=False,
        )
    )  # fmt: skip

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        value: torch.Tensor = model(
            input_ids=batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"]
        ).loss
        return value

    return training(theirs, loss, dtype)


def by_hand(dtype: torch.dtype | None) -> Callable[..., None]:
    """Our model and loss in a plain loop."""

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (
            cross_entropy(model(batch["tokens"], logits=False), model.output.weight, batch["labels"])
            / batch["labels"].numel()
        )

    return training(build_model(MODEL), loss, dtype)


def fit(
    model: str,
    length: int,
    batch: int,
    callbacks: list[Any],
    steps: int,
    precision: str,
    plan: Plan | None = None,
    **options: Any,
) -> Any:
    """Train ``model`` on random tokens; the trainer."""
    vocabulary = build_on_meta(model).config.vocab_size
    module = LanguageModel(LanguageTask(model=model, data=Text(sequence_length=length), sampling=None), vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        trainer = al.Trainer(
            max_steps=steps, precision=precision, callbacks=callbacks, strategy="auto" if plan is None else PlanStrategy(plan),
            logger=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=folder,
            **options,
        )  # fmt: skip
        trainer.fit(module, datamodule=Random(vocabulary, length, batch))
    return trainer


def build_on_meta(model: str) -> Any:
    with torch.device("meta"):
        return build_model(model)


def beside_hugging_face(precision: str, steps: int, plan: Plan | None = None) -> dict[str, list[float]]:
    """Return seconds of single steps in turns: our trainer, our model by hand, Hugging Face's model by hand."""
    dtype = torch.bfloat16 if precision == "bf16-mixed" else None
    turns = TakingTurns({"by hand": by_hand(dtype), "transformers": hugging_face(dtype)})
    fit(
        MODEL,
        LENGTH,
        BATCH,
        [turns],
        turns.warm + steps,
        precision,
        plan,
        enable_checkpointing=False,
        accelerator="cpu",
    )
    return turns.seconds


def loader_tokens_per_second(rounds: int) -> list[float]:
    """Measure tokens per second, ``rounds`` times, of the loader over the standard library's sources, shuffled, documents masked."""
    with tempfile.TemporaryDirectory() as folder:
        data = TextDataModule(Text(tokenizer=Bytes(), sequence_length=LENGTH, batch_size=BATCH, cache=Path(folder)))
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        rates = []
        for _ in range(rounds):
            started, count = time.perf_counter(), 0
            for batch in loader:
                count += batch["tokens"].numel()
                if time.perf_counter() - started > 1.0:
                    break
            rates.append(count / (time.perf_counter() - started))
    return rates


class Saves(al.Callback):
    """Saves in the background after every ``every``-th step; ``blocked`` and ``interval`` are what that cost and the time between."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.blocked: list[float] = []
        self.interval: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.every:
            return
        now = time.perf_counter()
        if self.blocked:
            self.interval.append(now - self.ended)
        trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")
        self.ended = time.perf_counter()
        self.blocked.append(self.ended - now)


def checkpoint_stall(saves: int, every: int) -> Ratio:
    """Measure how long training waits for a save in the background, as a share of the time since the one before."""
    from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO

    with tempfile.TemporaryDirectory() as folder:
        watched = Saves(Path(folder), every)
        fit(
            MODEL, LENGTH, BATCH, [watched], every * saves, "32-true", plugins=[AsyncCheckpointIO()], enable_checkpointing=False,
            accelerator="cpu",
        )  # fmt: skip
    return paired(watched.blocked[1:], watched.interval, same=None)


def plan_suite_errors(quick: bool) -> tuple[int, float]:
    """Count the plans of up to eight processes tried in float32 throughout; the largest difference of any gradient to one process."""
    from tests.parallel.plan_suite import CASES
    from tests.parallel.test_plan_suite import run

    tried = [case for case in CASES if case.dtype == torch.float32 and not case.half and (case.quick or not quick)]
    found: dict[str, dict[str, float]] = {}
    for world_size in sorted({case.plan.world_size for case in tried}):
        found |= run(world_size, "quick" if quick else "all")
    return len(tried), max(found[case.name]["gradient"] for case in tried)


class Pace(al.Callback):
    """Measure tokens per second of every ``stretch`` steps after the first ``warm``."""

    def __init__(self, warm: int, stretch: int = 5) -> None:
        self.warm, self.stretch, self.tokens = warm, stretch, 0
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tokens += batch["tokens"].numel()
        measured = batch_idx + 1 - self.warm
        if measured < 0 or measured % self.stretch:
            return
        torch.cuda.synchronize()
        if measured:
            self.rates.append(self.tokens / (time.perf_counter() - self.began))
        self.began, self.tokens, self.flops_per_token = time.perf_counter(), 0, pl_module.flops_per_token


def on_gpu(steps: int) -> tuple[list[tuple[str, str]], dict[str, float | Ratio]]:
    """Measure the published sizes on one GPU: bfloat16, blocks compiled."""
    from arclight.text.language_model import matmul_rate

    rows: list[tuple[str, str]] = []
    figures: dict[str, float | Ratio] = {}
    peak = matmul_rate(torch.device("cuda"), torch.bfloat16)
    for name, (model, length, batch, checkpointing) in PUBLISHED.items():
        pace = Pace(10)
        plan = Plan(compile="inductor", activation_checkpointing=checkpointing)  # type: ignore[arg-type]
        fit(
            model,
            length,
            batch,
            [pace],
            steps,
            "bf16-mixed",
            plan,
            enable_checkpointing=False,
            accelerator="cuda",
            devices=1,
        )
        reached = median([rate * pace.flops_per_token / peak for rate in pace.rates])
        figures[name] = statistics.median(pace.rates)
        rows.append(
            (
                f"{model}, {batch} x {length} tokens, {torch.cuda.get_device_name()}",
                f"{figures[name]:,.0f} tokens/s, {reached.value:.0%} ({reached.smallest:.0%} to {reached.largest:.0%}) of the measured peak",
            )
        )
        if name == "tokens_1b":
            figures["mfu_1b"] = reached
    return rows, figures


def contenders(setting: str, seconds: dict[str, list[float]]) -> list[tuple[str, str, str, str]]:
    """Return a row for each contender: its rate, and its time over our trainer's."""
    rows = []
    for contender, label in (
        ("trainer", "our trainer"),
        ("by hand", "our model, loop by hand"),
        ("transformers", "transformers, loop by hand"),
    ):
        rate = f"{BATCH * LENGTH / statistics.median(seconds[contender]):,.0f} tokens/s"
        over = paired(seconds[contender], seconds["trainer"])
        said = ("1", "") if contender == "trainer" else (str(over), over.difference)
        rows.append((f"{setting}: {label}", rate, *said))
    return rows


def main() -> None:
    options = parser(__doc__.splitlines()[0]).parse_args()
    warnings.filterwarnings("ignore")
    rows: list[tuple[str, str, str, str]] = []
    figures: dict[str, float | Ratio] = {}
    settings = {"float32": ("32-true", None), "bfloat16": ("bf16-mixed", None)}
    if not options.quick:
        settings["bfloat16, ours compiled by block"] = ("bf16-mixed", Plan(compile="inductor"))
    for name, (precision, plan) in settings.items():
        al.seed_everything(0)
        seconds = beside_hugging_face(precision, 8 if options.quick else 120, plan)
        rows += contenders(name, seconds)
        key = f"tokens_over_hf_loop_{precision.partition('-')[0]}{'_compiled' * (plan is not None)}"
        figures[key] = paired(seconds["transformers"], seconds["trainer"])
        if name == "float32":
            figures["trainer_overhead"] = paired(seconds["trainer"], seconds["by hand"]).minus_one()
            step_rate = BATCH * LENGTH / statistics.median(seconds["trainer"])
    ratios = [value for name, value in figures.items() if name.startswith("tokens_over") and isinstance(value, Ratio)]
    figures["tokens_over_hf_loop"] = max(ratios, key=lambda ratio: ratio.value)
    loader = loader_tokens_per_second(2 if options.quick else 7)
    figures["loader_over_step"] = median([rate / step_rate for rate in loader])
    rows.append(
        ("loader, standard library's sources, one process", f"{statistics.median(loader):,.0f} tokens/s", "", "")
    )
    figures["checkpoint_stall"] = checkpoint_stall(3 if options.quick else 9, 5 if options.quick else 20)
    plans, figures["plan_suite_max_gradient_error"] = plan_suite_errors(options.quick)
    rows.append(
        (
            f"plan suite, {plans} plans: largest difference of a gradient to one process",
            f"{figures['plan_suite_max_gradient_error']:.1e}",
            "",
            "",
        )
    )
    planned = plan_65536()
    figures |= planned
    rows.append(
        (
            "fastest plan of llama3-405b for 65,536 GPUs, in a process of its own",
            f"{planned['plan_65536_seconds']:.1f} s, {planned['plan_65536_gib']:.2f} GiB",
            "",
            "",
        )
    )
    if torch.cuda.is_available():
        more, found = on_gpu(20 if options.quick else 60)
        rows += [(*row, "", "") for row in more]
        figures |= found
    publish(
        "text", "Pre-training of language models", ("", "rate", f"time over our trainer's: {SPREAD}", "difference"), rows, figures, options=options,
        packages=versions("torch", "arclight-torch", "transformers"),
        notes=f"{MODEL}, {BATCH} x {LENGTH} random tokens a step, AdamW, clipping. Single steps in random order, each beside the trainer's "
        "step before it. `tokens_over_hf_loop` is the best setting's ratio at equal precision. "
        "`checkpoint_stall`: time that a save in the background holds up training, as a share of the time between two saves (20 steps). "
        "`loader_over_step`: rates of the loader over the median rate of the trainer's steps in float32.",
    )  # fmt: skip


if __name__ == "__main__":
    main()
