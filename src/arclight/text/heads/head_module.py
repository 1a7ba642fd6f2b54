"""Fine-tune a language model with a linear head: classify, tag words, extract answers.

The tasks of recipes (`heads.head_settings`) call `build_head`; the Trainer runs the `HeadModule` that it returns. A new kind of head
overrides `predictions` and `score` (and ``loss`` if it has another), and is added to `build_head` and to `HeadData`. Names ``model.`` and
``head.`` of weights are in checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arclight.checkpoint import find_last
from arclight.data.token_samples import IGNORED
from arclight.fabric.errors import MisconfigurationError
from arclight.parallel import initialize
from arclight.text.data.tokenizer import ByteTokenizer, Tokenizer
from arclight.text.families.zoo import build_model
from arclight.text.heads.rows import HeadData, HeadRows
from arclight.text.heads.squad import Span, answer_of, best_span, exact_match, f1
from arclight.text.model.balance import (
    ExpertChoices,
    balance_group,
    count_tokens,
    share_tokens,
    update_expert_bias,
    weigh_balance_loss,
)
from arclight.text.model.expert_paths import prepare_paths_for_fit
from arclight.trainer import Module
from arclight.trainer.throughput import compute_dtype


def build_head(
    rows: HeadRows, optimizer: Any, schedule: Any, *, weights: Path | None, tokenizer: Path | None, model: str, overrides: dict[str, Any]
) -> tuple[HeadModule, HeadData]:  # fmt: skip
    """Build module and data of a head task from its fields.

    See `arclight.text.heads.head_settings.HeadTask`. Raises MisconfigurationError for weights, tokenizer and lengths
    that do not fit each other.
    """
    kind = {"sequence": SequenceClassifier, "token": TokenClassifier, "answer": AnswerExtractor}[rows.kind]
    start = None if weights is None else _checkpoint_in(weights)
    data = HeadData(rows, _tokenizer(tokenizer, start))
    return kind(data, _trunk(start, data.tokenizer, model, overrides), optimizer, schedule), data


class HeadModule(Module):
    """Base of the three heads: logits (B, T, labels) of each token.

    They are computed from the hidden states after the trunk's last norm. Batches are those of
    `arclight.text.heads.rows.collate`. Experts of the trunk are balanced as in `LanguageModel`, without counting
    padding. Validation gathers the predictions of all sequences (rows, or windows of answers) from all processes by
    number and scores them together, so that none counts twice.
    """

    def __init__(self, data: HeadData, trunk: Any, optimizer: Any, schedule: Any) -> None:
        super().__init__()
        self.data, self.optimizer_settings, self.schedule_settings = data, optimizer, schedule
        self.predicted: dict[int, Any] = {}
        """Predictions of this process in the running evaluation, with the truth that `score` needs, by number of the sequence."""
        self.expert_paths: dict[str, Any] = {}
        """See `LanguageModel.expert_paths`."""
        self._expert_choices = ExpertChoices()
        self.model: Any = trunk
        if data.task.max_length > self.model.config.max_positions:
            raise MisconfigurationError(
                f"max_length = {data.task.max_length} is more than the model's {self.model.config.max_positions} positions"
            )
        self.head = nn.Linear(self.model.config.dim, len(data.labels))
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (B, T, labels) of token ids (B, T)."""
        out: Tensor = self.head(self.model(tokens).to(self.head.weight.dtype))
        return out

    def configure_optimizers(self) -> dict[str, Any]:
        parameters = dict(self.named_parameters())
        optimizer = self.optimizer_settings.build(parameters.items(), iter(parameters), self.model.config.rates)
        schedule = self.schedule_settings.build(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        """Prepare experts: groups that share tokens, and paths, measured for ``auto``."""
        strategy, tokens = self.trainer.strategy, self.data.task.batch_size * self.data.task.max_length
        share_tokens(self.model, strategy)
        dtype = compute_dtype(self.trainer.precision_plugin)
        self.expert_paths = prepare_paths_for_fit(
            self.model, tokens, strategy, dtype, self.expert_paths, self.trainer.record_measured
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["expert_paths"] = self.expert_paths
        self._expert_choices.save(checkpoint, self.model, self.trainer.strategy)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.expert_paths = dict(checkpoint.get("expert_paths", {}))
        self._expert_choices.load(checkpoint)

    def on_train_start(self) -> None:
        self._expert_choices.restore(self.model, self.trainer.strategy, bool(self.trainer.window.count))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        positions = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
        count_tokens(self.model, positions < batch["lengths"][:, None])
        loss = weigh_balance_loss(self.loss(self(batch["tokens"]), batch), self.model)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        count_tokens(self.model, None)

    def batch_weight(self, batch: dict[str, Tensor]) -> Tensor:
        """Count the labels that `loss` averages over, as the weight of the batch in an update."""
        return (batch["labels"] != IGNORED).sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the bias that balances the loads of experts."""
        for name, value in update_expert_bias(self.model, balance_group(self.trainer.strategy)).items():
            self.log(f"experts/{name}", value)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: dict[str, Tensor]) -> None:
        logits = self(batch["tokens"])
        self.log(f"{stage}/loss", self.loss(logits, batch), batch_size=len(logits), sync_dist=True)
        self.predicted |= self.predictions(logits.float(), batch)

    def on_validation_epoch_end(self) -> None:
        self._score("val")

    def on_test_epoch_end(self) -> None:
        self._score("test")

    def _score(self, stage: str) -> None:
        rows: dict[int, Any] = {}
        for part in self.trainer.strategy.all_gather_object(self.predicted):
            rows |= part
        self.predicted = {}
        for name, value in self.score([rows[number] for number in sorted(rows)]).items():
            self.log(f"{stage}/{name}", value, prog_bar=True)

    # -- overridden by each head ----------------------------------------------------------------------------------------

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Average the cross-entropy over labelled tokens."""
        labels = batch["labels"].flatten()
        total = cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum().clamp(min=1)

    def predictions(self, logits: Tensor, batch: dict[str, Tensor]) -> dict[int, Any]:
        """Return what `score` needs of each sequence: its prediction and truth, by its number."""
        raise NotImplementedError(type(self).__name__)

    def score(self, predictions: list[Any]) -> dict[str, float]:
        """Compute metrics from the predictions of all sequences."""
        raise NotImplementedError(type(self).__name__)


class SequenceClassifier(HeadModule):
    """Classifier of texts, by the logits of their last token.

    Logs ``accuracy`` and ``f1``, the mean over labels.
    """

    def predictions(self, logits: Tensor, batch: dict[str, Tensor]) -> dict[int, Any]:
        last = batch["lengths"] - 1
        rows = torch.arange(len(last), device=last.device)
        predicted, true = logits[rows, last].argmax(-1).tolist(), batch["labels"][rows, last].tolist()
        return dict(zip(batch["items"].tolist(), zip(predicted, true, strict=True), strict=True))

    def score(self, predictions: list[tuple[int, int]]) -> dict[str, float]:
        f1_of_labels = []
        for label in range(len(self.data.labels)):
            hits = sum(predicted == true == label for predicted, true in predictions)
            total = sum((predicted == label) + (true == label) for predicted, true in predictions)
            if total:
                f1_of_labels.append(2 * hits / total)
        return {
            "accuracy": sum(predicted == true for predicted, true in predictions) / len(predictions),
            "f1": sum(f1_of_labels) / len(f1_of_labels),
        }


class TokenClassifier(HeadModule):
    """Tagger of words.

    Logs ``accuracy`` over words and ``f1`` over whole entities if labels are B-X, I-X and O.
    """

    def predictions(self, logits: Tensor, batch: dict[str, Tensor]) -> dict[int, Any]:
        found = {}
        for number, item in enumerate(batch["items"].tolist()):
            here = batch["labels"][number] != IGNORED
            found[item] = (logits[number][here].argmax(-1).tolist(), batch["labels"][number][here].tolist())
        return found

    def score(self, predictions: list[tuple[list[int], list[int]]]) -> dict[str, float]:
        names = self.data.labels
        words = [pair for predicted, true in predictions for pair in zip(predicted, true, strict=True)]
        values = {"accuracy": sum(predicted == true for predicted, true in words) / max(1, len(words))}
        if all(name == "O" or name[:2] in ("B-", "I-") for name in names):
            pairs = [
                (entities([names[n] for n in predicted]), entities([names[n] for n in true]))
                for predicted, true in predictions
            ]
            total = sum(len(predicted) + len(true) for predicted, true in pairs)
            values["f1"] = 2 * sum(len(predicted & true) for predicted, true in pairs) / max(1, total)
        return values


def entities(tags: list[str]) -> set[tuple[str, int, int]]:
    """Return the entities (kind, from, to) of BIO tags, as CoNLL's script does.

    I-X begins an entity unless one of kind X precedes it.
    """
    found, kind, begin = set(), "", 0
    for position, tag in enumerate([*tags, "O"]):
        if kind and tag != f"I-{kind}":
            found.add((kind, begin, position))
            kind = ""
        if tag != "O" and not kind:
            kind, begin = tag[2:], position
    return found


class AnswerExtractor(HeadModule):
    """Extractor of answers, by logits of their first and last token.

    Logs SQuAD's ``exact_match`` and ``f1``, in [0, 1].
    """

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Average the cross-entropies of start and end over the tokens of each window."""
        labels = batch["labels"]
        starts, ends = ((labels == 0) | (labels == 2)).int().argmax(1), ((labels == 1) | (labels == 2)).int().argmax(1)
        scores = self._mask_padding(logits, batch)
        return (cross_entropy(scores[..., 0], starts) + cross_entropy(scores[..., 1], ends)) / 2

    def batch_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(len(batch["labels"]))  # windows

    @staticmethod
    def _mask_padding(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        positions = torch.arange(logits.shape[1], device=logits.device)
        return logits.float().masked_fill((positions >= batch["lengths"][:, None])[..., None], -torch.inf)

    def predictions(self, logits: Tensor, batch: dict[str, Tensor]) -> dict[int, Span]:
        logits, found = logits.cpu(), {}
        for number, item in enumerate(batch["items"].tolist()):
            window = self.data.val_windows[item]
            found[item] = best_span(window, logits[number, :, 0], logits[number, :, 1], self.data.task.max_answer)
        return found

    def score(self, predictions: list[Span]) -> dict[str, float]:
        rows, by_row = self.data.val_rows, dict[int, list[Span]]()
        for span in predictions:
            by_row.setdefault(span.row, []).append(span)
        may_be_none = any(not row.answers for row in rows)
        texts = {row: answer_of(spans, rows[row].context, may_be_none) for row, spans in by_row.items()}
        return {
            name: sum(measure(text, rows[row].answers) for row, text in texts.items()) / len(texts)
            for name, measure in (("exact_match", exact_match), ("f1", f1))
        }


def _checkpoint_in(weights: Path) -> Path:
    """Return the newest checkpoint of a run folder, or ``weights`` itself.

    The latter for a checkpoint or a Hugging Face folder.
    """
    if not weights.exists():
        raise MisconfigurationError(f"weights: {weights} does not exist")
    if not (weights / "checkpoints").is_dir():
        return weights
    if (found := find_last(weights / "checkpoints")) is None:
        raise MisconfigurationError(f"weights: the run {weights} has no checkpoint yet")
    return Path(found)


def _tokenizer(given: Path | None, start: Path | None) -> Tokenizer:
    if given is not None:
        return Tokenizer.load(given)
    if start is None:
        return ByteTokenizer()
    return Tokenizer.load(start if (start / "config.json").is_file() else start.parent.parent / "tokenizer")


def _trunk(start: Path | None, tokenizer: Tokenizer, name: str, overrides: dict[str, Any]) -> Any:
    """Build the model without output layer, from a run's or folder's weights, or fresh."""
    if start is not None and (start / "config.json").is_file():
        from arclight.text.hf.read import from_hf

        model: Any = from_hf(start)
    elif start is not None:
        from arclight.text.language_model import LanguageModel

        trained: Any = LanguageModel.load_from_checkpoint(start)
        if trained.hparams["vocabulary"] not in (None, tokenizer.digest):
            raise MisconfigurationError(
                f"{start} was trained with another tokenizer: leave tokenizer out, or name that one"
            )
        model = trained.model
    else:
        model = build_model(name, **{"vocab_size": -(-tokenizer.vocab_size // 64) * 64, **overrides})
        initialize(model, torch.initial_seed())
    if tokenizer.vocab_size > model.config.vocab_size:
        raise MisconfigurationError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model knows {model.config.vocab_size}: name the one it was trained with"
        )
    model.output = None
    return model.train()
