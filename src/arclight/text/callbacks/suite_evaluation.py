"""Evaluate a suite of question files every n steps (``[task.evaluation]`` of a recipe).

`LanguageModel` adds it if the recipe has such a table; `evaluation.suite` asks and scores. Names of logged values stay: checkpoints may
monitor them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arclight.fabric.distributed.dtensor import is_sharded
from arclight.fabric.errors import MisconfigurationError
from arclight.text.evaluation.suite import load_suite, run_suite
from arclight.text.evaluation.suite_settings import Evaluation
from arclight.trainer import Callback

if TYPE_CHECKING:
    from arclight.trainer import Trainer


class SuiteEvaluation(Callback):
    """Callback that evaluates a suite after every n-th optimizer step and logs its scores.

    They are ``suite/<task>/accuracy``, its ``stderr`` and, for likelihoods, ``accuracy_normalised``. Processes that
    each hold the whole model divide the questions among them; with sharded weights all answer every question together.
    Training is not changed: the random states of the run are not used. Raises MisconfigurationError before the first
    step for a plan with pipeline stages or context parallelism and for a model without a tokenizer; the constructor
    raises whatever `load_suite` does.
    """

    def __init__(self, settings: Evaluation) -> None:
        self.settings = settings
        self._last_step = -1
        self.suite, self.tasks = load_suite(settings.suite)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        plan = getattr(trainer.strategy, "plan", None)
        if trainer.strategy.in_stages or getattr(plan, "cp", 1) > 1:
            raise MisconfigurationError(
                "a suite needs the whole model and whole sequences on each process: leave task.evaluation out under plan.pp and plan.cp, "
                "and evaluate the checkpoint with arclight test RUN --suite FILE"
            )
        if pl_module.tokenizer is None:
            raise MisconfigurationError(
                "a suite needs a tokenizer, and the model has none: call its use_tokenizer, or leave task.evaluation out"
            )
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:  # fmt: skip
        step = trainer.global_step
        if step == self._last_step or step % self.settings.every_n_steps:
            return
        self._last_step = step
        strategy = trainer.strategy
        whole = not is_sharded(pl_module)
        share = (strategy.global_rank, strategy.world_size) if whole else (0, 1)
        gather = strategy.all_gather_object if whole else (lambda own: [own])
        values = {}
        for score in run_suite(
            self.suite, self.tasks, pl_module.model, pl_module.tokenizer, share=share, gather=gather
        ):
            for name in ("accuracy", "stderr", "accuracy_normalised"):
                if (value := getattr(score, name)) is not None:
                    values[f"suite/{score.name}/{name}"] = value
                    # so that checkpoints can monitor it
                    pl_module.log(f"suite/{score.name}/{name}", value, logger=False)
        for logger in trainer.loggers:  # only in the row of this step; self.log would repeat the value in later rows
            logger.log_metrics(values, step)
