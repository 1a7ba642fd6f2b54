"""What a person wants to see of a language model in training: how fast it goes, and what it writes."""

from __future__ import annotations

import logging
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from arclight.text.settings import Sampling
from arclight.trainer import Callback
from arclight.trainer.throughput import compute_dtype, get_available_flops

if TYPE_CHECKING:
    from arclight.text.language_model import LanguageModel
    from arclight.trainer import Trainer

_LOG = logging.getLogger("arclight")


class Speed(Callback):
    """Logs with each row of the training: tokens per second, model FLOPs utilisation, share of time without a batch, memory.

    ``speed/mfu`` is the share of what this device reaches in a large matrix product, timed once when training starts;
    ``speed/mfu_nominal`` that of its data sheet, where the device is known.
    """

    def __init__(self) -> None:
        self.nominal: float | None = None
        self.measured = 0.0
        self._reset()

    def _reset(self) -> None:
        self.tokens, self.waited, self.since = 0, 0.0, time.perf_counter()
        self.free_at: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModel) -> None:  # type: ignore[override]
        device, dtype = trainer.strategy.root_device, compute_dtype(trainer.precision_plugin)
        self.nominal = get_available_flops(device, dtype) if device.type == "cuda" else None
        self.measured = matmul_rate(device, dtype)
        self._reset()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.free_at is not None:
            self.waited += time.perf_counter() - self.free_at

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LanguageModel, outputs: Any, batch: Any, batch_idx: int  # type: ignore[override]
    ) -> None:  # fmt: skip
        self.tokens += batch["tokens"].numel()
        every = trainer.log_every_n_steps
        if every and trainer.window.count == 0 and trainer.global_step % every == 0 and self.tokens:
            self._log(trainer, pl_module)
            self._reset()
        self.free_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._reset()  # what was measured so far has a validation in it

    def _log(self, trainer: Trainer, module: LanguageModel) -> None:
        strategy, seconds = trainer.strategy, time.perf_counter() - self.since
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
    """Floating-point operations per second of the fastest of five square products, large enough to fill the device."""
    size, best = (8192 if device.type == "cuda" else 1024), float("inf")
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on a GPU, or that this process took on the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Samples(Callback):
    """Lets the model write after each validation, into the run's log, as far as its positions go.

    Where weights are spread over processes it does not.
    """

    def __init__(self, settings: Sampling) -> None:
        self.settings = settings

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModel) -> None:  # type: ignore[override]
        if trainer.sanity_checking or not trainer.is_global_zero or pl_module.tokenizer is None:
            return
        from arclight.parallel.strategy import PlanStrategy

        in_stages = isinstance(trainer.strategy, PlanStrategy) and trainer.strategy.in_stages
        if in_stages or any(hasattr(parameter, "to_local") for parameter in pl_module.parameters()):
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
            _LOG.info("after step %d: %r goes on: %r", trainer.global_step, prompt, text)
