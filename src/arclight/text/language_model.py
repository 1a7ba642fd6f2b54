"""Define the Module that trains language models, and callbacks for throughput and samples.

`LanguageModel` is public; a recipe's ``[task]`` builds it, and ``heads`` fine-tune it. The Trainer calls its steps.
Names of weights are the model's own below ``model.`` and are in checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from arclight.checkpoint import load
from arclight.fabric.distributed.dtensor import is_sharded
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.modules import SkipInit
from arclight.parallel import initialize
from arclight.parallel.step_protocol import Split, batch_loss
from arclight.text.families.zoo import build_model, model_config
from arclight.text.loss import IGNORED, UnigramLoss, cross_entropy
from arclight.text.model.balance import (
    ExpertChoices,
    balance_group,
    routers,
    scale_balance_loss,
    share_tokens,
    update_expert_bias,
    weigh_balance_loss,
)
from arclight.text.model.decoder import flops_per_token
from arclight.text.model.expert_paths import prepare_paths_for_fit
from arclight.text.model.moe import Experts
from arclight.text.model.switch_head import HeadMaps
from arclight.text.training_settings import LanguageSettings, Sampling
from arclight.trainer import Callback, Module
from arclight.trainer.checkpoint.loading import WeightsMisfitError, load_weights
from arclight.trainer.throughput import compute_dtype, get_available_flops

if TYPE_CHECKING:
    from arclight.deploy.deployment import Deployment
    from arclight.fabric.strategies.base import Strategy
    from arclight.trainer import Trainer


VOCABULARY_MULTIPLE = 64
"""Vocabularies are padded to a multiple of this, for matrix kernels and for cutting."""


@runtime_checkable
class RoundsOperands(Protocol):
    """Linear layer that rounds its operands in training, as a loss needs that multiplies itself."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x`` and the weight, both as the layer rounds them."""


class LanguageModel(Module):
    """Trains and runs a language model.

    A batch is a mapping: ``tokens`` (B, T) and ``labels`` (B, T) int64, labels -100 where nothing is to be predicted; of packed documents
    also ``positions`` and ``documents`` (B, T); ``bytes`` (B,), how much text the labels stand for.

    vocab_size: ids of the tokenizer, and vocabulary: its digest; None takes both from the data module's tokenizer in ``setup``. ``model``
    maps token ids (B, T) to logits (B, T, V); ``configure_model`` builds it, on the meta device if a plan shards it.
    """

    def __init__(
        self, settings: LanguageSettings, vocab_size: int | None = None, vocabulary: str | None = None
    ) -> None:
        super().__init__()
        if settings.weights is not None and "vocab_size" not in settings.overrides:  # whose vocabulary is its own
            size, _ = vocabulary_of(settings.weights)
            known = {} if size is None else {"vocab_size": size}
            settings = dataclasses.replace(settings, overrides=settings.overrides | known)
        self.settings = settings
        self.save_hyperparameters({"settings": settings, "vocab_size": vocab_size, "vocabulary": vocabulary})
        self.config = model_config(settings.model, **self._overrides(vocab_size))
        """Sizes of the model, which a plan is checked against before anything is built."""
        self.sequence_length = settings.data.sequence_length
        if self.sequence_length > self.config.max_positions:
            raise MisconfigurationError(
                f"data.sequence_length = {self.sequence_length} is more than the {self.config.max_positions} positions of "
                f"{settings.model}: shorten it, or set overrides.max_positions"
            )
        self.initial_seed = torch.initial_seed()
        """Seed of the initial weights of a model that no plan shards: torch's, when the module was made."""
        self.model: Any = None
        self.runner: Any = None
        self.tokenizer: Any = None
        self.unigrams: UnigramLoss | None = None
        """Computes the unigram cross-entropy of labels, if the settings ask for it."""
        self.mixture = False
        """Whether the model that is trained has experts."""
        self.expert_paths: dict[str, Any] = {}
        """Chosen path of experts that are set to ``auto``, by shape class: see `prepare_paths`. Checkpoints keep it."""
        self._expert_choices = ExpertChoices()

    # -- the model -------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule
        if getattr(data, "tokenizer", None) is not None:
            self.use_tokenizer(data.tokenizer)
        if (unigram := self.settings.unigram) is not None and stage != "predict":
            if not hasattr(data, "unigram_counts"):
                raise MisconfigurationError(
                    f"[task.unigram] needs counts of tokens: {type(data).__name__} has no method unigram_counts()"
                )
            self.unigrams = UnigramLoss(data.unigram_counts(), unigram.smoothing)

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Set ``tokenizer`` for text in and out.

        Raises MisconfigurationError for one that the model was not made for.
        """
        size, known = tokenizer.vocab_size, self.hparams["vocab_size"]
        if known is not None and size > known:
            raise MisconfigurationError(
                f"the tokenizer has {size} tokens, the model was made for {known}: use the one it was trained with"
            )
        if self.hparams["vocabulary"] not in (None, tokenizer.digest):
            raise MisconfigurationError(
                "this is another tokenizer than the one that the model was trained with: use that one"
            )
        wanted = int(self.settings.overrides.get("vocab_size", size))
        if wanted < size:
            where = "overrides" if self.settings.weights is None else f"{self.settings.weights}, or overrides,"
            raise MisconfigurationError(
                f"vocab_size = {wanted} of {where} is less than the {size} tokens of data.tokenizer: take another tokenizer, or leave "
                "overrides.vocab_size out"
            )
        self.tokenizer = tokenizer
        for kept in (self.hparams, self.hparams_initial):
            kept["vocab_size"], kept["vocabulary"] = known or size, tokenizer.digest

    def _overrides(self, vocab_size: int | None) -> dict[str, Any]:
        if vocab_size is None or self.settings.weights is not None:  # weights that exist have a vocabulary of their own
            return dict(self.settings.overrides)
        return {"vocab_size": _padded(vocab_size), **self.settings.overrides}

    def configure_model(self) -> None:
        if self.model is not None:
            return
        overrides = self._overrides(self.hparams["vocab_size"])
        spread = torch.distributed.is_initialized() and hasattr(self.trainer.strategy, "plan")  # memory for shares only
        with torch.device("meta") if spread else SkipInit():
            self.model = build_model(self.settings.model, **overrides)
        if not next(self.model.parameters()).is_meta:
            initialize(self.model, self.initial_seed)
        _ = self.flops_per_token  # now: a stage of a pipeline keeps a part of the model

    def start_from(self, weights: Path) -> None:
        """Load the weights of a Hugging Face folder or of a checkpoint.

        Raises ValueError or CheckpointError if they are another model's, or were trained with another tokenizer.
        """
        _, digest = vocabulary_of(weights)
        if self.tokenizer is not None and digest not in (None, self.tokenizer.digest):
            raise MisconfigurationError(
                f"{weights} was trained with another tokenizer than data.tokenizer, whose tokens mean nothing to it: set data.tokenizer = "
                '{kind = "pretrained", path = "..."} to the folder of the one it was trained with'
            )
        if (weights / "config.json").is_file():
            from arclight.text.hf.read import from_hf

            from_hf(weights, self.model)
        else:
            found = load(weights, only=["model"], refuse_nan=True)["model"]
            _check_experts(self, found, weights)
            load_weights(self, found)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (B, T, V) of token ids (B, T)."""
        logits: Tensor = self.model(tokens)
        return logits

    def configure_optimizers(self) -> dict[str, Any]:
        parameters = dict(self.model.named_parameters())
        everyones = self.trainer.strategy.all_gather_object(
            list(parameters)
        )  # stages of a pipeline have different ones
        names = (name for names in everyones for name in names)
        optimizer = self.settings.optimizer.build(parameters.items(), names, self.config.rates)
        steps = self.trainer.estimated_stepping_batches
        schedule = self.settings.schedule.build(optimizer, steps, counts_tokens=True)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_callbacks(self) -> list[Callback]:
        found: list[Callback] = [TokenThroughput()]
        if self.settings.sampling is not None:
            found.append(TextSamples(self.settings.sampling))
        if self.settings.evaluation is not None:
            from arclight.text.callbacks.suite_evaluation import SuiteEvaluation

            found.append(SuiteEvaluation(self.settings.evaluation))
        return found

    def on_fit_start(self) -> None:
        """Load the given weights, unless a run is resumed, and keep the tokenizer in the run."""
        if self.settings.weights is not None and self.trainer.ckpt_path is None:
            self.start_from(self.settings.weights)
        self.mixture = any(True for _ in routers(self.model))
        strategy, tokens = self.trainer.strategy, self.settings.data.batch_size * self.sequence_length
        share_tokens(self.model, strategy)
        dtype = compute_dtype(self.trainer.precision_plugin)
        self.expert_paths = prepare_paths_for_fit(
            self.model, tokens, strategy, dtype, self.expert_paths, self.trainer.record_measured
        )
        if self.tokenizer is None or self.trainer.checkpoint_callback is None or self.trainer.fast_dev_run:
            return
        folder = self.trainer.run_folder.path  # which all ranks agree on
        if self.trainer.is_global_zero:
            self.tokenizer.save(folder / "tokenizer")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["expert_paths"] = self.expert_paths
        self._expert_choices.save(checkpoint, self.model, self.trainer.strategy)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.expert_paths = dict(checkpoint.get("expert_paths", {}))
        self._expert_choices.load(checkpoint)

    def on_train_start(self) -> None:
        self._expert_choices.restore(self.model, self.trainer.strategy, bool(self.trainer.window.count))

    # -- steps -----------------------------------------------------------------------------------------------------

    def split_batch(self, batch: dict[str, Tensor]) -> Split:
        """Split a batch into the model's inputs and the loss's targets, for pipelines.

        See `arclight.parallel.step_protocol`.
        """
        tokens = batch["tokens"]
        kwargs: dict[str, Any] = {name: batch[name] for name in ("positions", "documents") if name in batch}
        if self.runner is not None and "positions" not in kwargs:
            kwargs["positions"] = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return (tokens,), kwargs | {"logits": False}, batch["labels"]

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the cross-entropy (nats) of hidden states (B, T, D), and count the valid labels."""
        (weight,) = self.model.output.parameters(recurse=False)  # all of it, where `output.weight` shows own rows only
        if isinstance(self.model.output, RoundsOperands):
            output, weight = self.model.output.operands(output)
        total = cross_entropy(output, weight, targets, self.settings.loss_chunk, self.config.logit_cap)
        return total, (targets != IGNORED).sum()

    def batch_weight(self, batch: dict[str, Tensor]) -> Tensor:
        """Count valid labels: losses are means over all of an update's."""
        return (batch["labels"] != IGNORED).sum()

    def scale_losses(self, share: Tensor, batch: dict[str, Tensor]) -> None:
        """Scale the balance losses of a pipeline's micro-batches as the loss is scaled.

        Their backward runs on sums over valid labels times ``share``. Beside their mean counts the mean over all
        tokens, those without a label too.
        """
        valid = self.batch_weight(batch) / batch["labels"].numel()
        scale_balance_loss(self.model, share * valid.to(share), per_token=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.settings.schedule.tokens is not None:
            readers = self.trainer.strategy.distributed_sampler_kwargs["num_replicas"]
            self.lr_schedulers().advance(batch["tokens"].numel() * readers)
        total, count = batch_loss(self, batch)
        loss = total / count.clamp(min=1)
        if self.unigrams is not None:
            self.log("train/unigram_normalized_loss", self._normalized(total.detach(), count, batch), sync_dist=True)
        loss = weigh_balance_loss(loss, self.model) if self.mixture else loss
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the bias that keeps the loads of experts equal, by what all processes' tokens chose."""
        if not self.mixture:
            return
        for name, value in update_expert_bias(self.model, balance_group(self.trainer.strategy)).items():
            self.log(f"experts/{name}", value)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        total, count = batch_loss(self, batch)
        size = int(count)
        self.log(f"{stage}/loss", total / max(1, size), batch_size=size, prog_bar=True)
        if self.unigrams is not None:
            self.log(f"{stage}/unigram_normalized_loss", self._normalized(total, count, batch), batch_size=size)
        if "bytes" in batch:
            covered = int(batch["bytes"].sum())
            self.log(f"{stage}/bits_per_byte", total / math.log(2) / max(1, covered), batch_size=covered, prog_bar=True)

    def _normalized(self, total: Tensor, count: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean loss minus the unigram cross-entropy of the same labels."""
        assert self.unigrams is not None
        return ((total - self.unigrams(batch["labels"])) / count.clamp(min=1)).float()

    @cached_property
    def flops_per_token(self) -> float:
        """Floating-point operations of forward and backward for one token, in the whole model.

        The token is of a training sequence.
        """
        return flops_per_token(self.model, self.sequence_length)

    # -- text ------------------------------------------------------------------------------------------------------

    def configure_deployment(self, data: Any, batches: int) -> Deployment:
        """Return the deployment of the model, with ``batches`` of the training texts of ``data``.

        ``data``: a `TextDataModule` (default: its own). Its metric is the mean log-likelihood of the next token in
        held-out texts, nats.
        """
        from arclight.text.language_program import language_deployment, scored_texts_of

        data = self._loaded(data)
        tokens = self._texts(data, batches)
        held_out: Iterable[Tensor] = tokens
        if data.val is not None:
            held_out = (text for batch in data.val_dataloader() for text in scored_texts_of(batch))
        return language_deployment(self.model, tokens, self.tokenizer, {"model": self.settings.model}, held_out)

    def configure_example(self, data: Any) -> Tensor:
        """Refuse to train the model as one graph: MisconfigurationError."""
        raise MisconfigurationError(
            "the program of a language model keeps a cache, and is another graph than the one that is trained, so that learnt ranges of activations have no "
            "place in it: set [qat] kind to weightonly, dynamicint8 or lowbit, whose layers round by themselves"
        )

    def configure_embedding(self, data: Any, batches: int) -> Deployment:
        """Return the deployment of the model as an embedding program.

        ``data`` and ``batches``: as for `configure_deployment`.
        """
        from arclight.text.embedding_program import embedding_deployment

        tokens = self._texts(self._loaded(data), batches)
        return embedding_deployment(self.model, tokens, self.tokenizer, {"model": self.settings.model})

    def _loaded(self, data: Any) -> Any:
        from arclight.text.data.data_module import TextDataModule

        data = data or TextDataModule(self.settings.data)
        data.prepare_data()
        data.setup("fit")
        return data

    def _texts(self, data: Any, batches: int) -> list[Tensor]:
        return [batch["tokens"] for batch in itertools.islice(data.train_dataloader(), batches)]

    def generate(self, prompts: str | list[str], **options: Any) -> Any:
        """Continue ``prompts`` with text; see `arclight.text.generate`."""
        from arclight.text import generate

        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give it one with use_tokenizer(Tokenizer.load(folder))")
        return generate(self.model, self.tokenizer, prompts, **options)


def vocabulary_of(weights: Path) -> tuple[int | None, str | None]:
    """Read the vocabulary size and tokenizer digest of a Hugging Face folder or checkpoint.

    Either is None if the folder does not say.
    """
    if (weights / "config.json").is_file():
        from arclight.text.data.tokenizer import Tokenizer
        from arclight.text.hf.read import read_config

        with contextlib.suppress(FileNotFoundError):  # a folder without a tokenizer
            return read_config(weights)["vocab_size"], Tokenizer.load(weights).digest
        return read_config(weights)["vocab_size"], None
    kept = load(weights, only=["hyper_parameters"]).get("hyper_parameters", {})
    if not kept.get("vocab_size"):
        return None, None
    return kept["settings"]["fields"]["overrides"].get("vocab_size") or _padded(kept["vocab_size"]), kept["vocabulary"]


def _padded(tokens: int) -> int:
    return -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


_LOG = logging.getLogger("arclight")


class TokenThroughput(Callback):
    """Log tokens per second, model FLOPs utilisation, share of time without a batch, and memory.

    ``speed/mfu`` is the share of what this device reaches in a large matrix product, timed once when training starts;
    ``speed/mfu_nominal`` that of its data sheet, if the device is known.
    """

    def __init__(self) -> None:
        self.nominal: float | None = None
        self.measured = 0.0
        self._reset()

    def _reset(self) -> None:
        self.tokens, self.waited, self.since = 0, 0.0, time.perf_counter()
        self.free_at: float | None = None
        self.validated = False

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModel) -> None:  # type: ignore[override]
        device, dtype = trainer.strategy.root_device, compute_dtype(trainer.precision_plugin)
        self.nominal = get_available_flops(device, dtype) if device.type == "cuda" else None
        self.measured = matmul_rate(device, dtype)
        self._reset()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.validated:
            self._reset()
        if self.free_at is not None:
            self.waited += time.perf_counter() - self.free_at

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LanguageModel, outputs: Any, batch: Any, batch_idx: int  # type: ignore[override]
    ) -> None:  # fmt: skip
        self.tokens += batch["tokens"].numel()
        every = trainer.log_every_n_steps
        if every and trainer.window.count == 0 and trainer.global_step % every == 0 and self.tokens:
            self._log(trainer.strategy, pl_module)
            self._reset()
        self.free_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.validated = True  # measure from the next batch on: others still generate, evaluate and save after this

    def _log(self, strategy: Strategy, module: LanguageModel) -> None:
        seconds = time.perf_counter() - self.since
        readers = strategy.distributed_sampler_kwargs["num_replicas"]
        rate = self.tokens * readers / seconds
        of_device = rate / strategy.world_size * module.flops_per_token
        module.log("speed/tokens_per_second", rate, prog_bar=True)
        module.log("speed/mfu", of_device / self.measured)
        if self.nominal:
            module.log("speed/mfu_nominal", of_device / self.nominal)
        module.log("speed/without_batch", self.waited / seconds)
        module.log("memory/peak_gib", peak_memory(strategy.root_device) / 2**30)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the fastest of a few matmuls that fill the device, in operations per second."""
    size, best, spent = (8192 if device.type == "cuda" else 1024), float("inf"), 0.0
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    for turn in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken = time.perf_counter() - started
        best, spent = min(best, taken), spent + taken
        # a processor without bfloat16 takes half a second for each; the first product alone says little
        if turn and spent > 0.2:
            break
    return 2 * size**3 / best


def peak_memory(device: torch.device) -> int:
    """Return the bytes that tensors took at most on a GPU, or this process on the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _check_experts(module: LanguageModel, weights: Mapping[str, Any], source: Path) -> None:
    """Raise WeightsMisfitError if ``weights`` have other numbers of experts than ``module``."""
    for name, part in module.named_modules():
        if not isinstance(part, Experts | HeadMaps):
            continue
        what = "experts" if isinstance(part, Experts) else "(head, expert) pairs"
        for own_name, own in part.named_parameters(prefix=name, recurse=False):
            found = len(weights[own_name]) if own_name in weights else len(own)
            if found < len(own):
                lacking = ", ".join(map(str, range(found, len(own))))
                problem = f"lacks {what} {lacking} of {len(own)}: it has {found}"
            elif found > len(own):
                problem = f"has {found} {what}, and the model {len(own)}"
            else:
                continue
            raise WeightsMisfitError(
                f"{source}: {own_name} {problem}; set task.overrides to the experts that it was trained with"
            )


class TextSamples(Callback):
    """Callback that logs texts generated by the model after each validation.

    Texts end where the model's positions do. Nothing is generated where weights are sharded over processes.
    """

    def __init__(self, settings: Sampling) -> None:
        self.settings = settings

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModel) -> None:  # type: ignore[override]
        if trainer.sanity_checking or not trainer.is_global_zero or pl_module.tokenizer is None:
            return
        if trainer.strategy.in_stages or is_sharded(pl_module):
            return
        s = self.settings
        ids = [pl_module.tokenizer.encode(prompt) for prompt in s.prompts]
        room = pl_module.config.max_positions - max((len(prompt) for prompt in ids), default=0)
        if room < 2:
            _LOG.warning("prompts of samples fill all %d positions: nothing is written", pl_module.config.max_positions)
            return
        texts = pl_module.generate(
            list(s.prompts), max_new_tokens=min(s.new_tokens, room - 1), temperature=s.temperature, top_p=s.top_p, seed=trainer.global_step
        )  # fmt: skip
        for prompt, text in zip(s.prompts, texts, strict=True):
            _LOG.info("after step %d: %r continues: %r", trainer.global_step, prompt, text)
