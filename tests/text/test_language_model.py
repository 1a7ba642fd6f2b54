"""The language model as a module under the trainer: its loss, its bits per byte, its vocabulary, its run."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import arclight as al
from arclight.fabric.errors import MisconfigurationError
from arclight.optim import ADOPT, SGD, Linear
from arclight.text import ByteTokenizer, LanguageModel, to_hf
from arclight.text.data.data_settings import Text
from arclight.text.language_model import TokenThroughput
from arclight.text.model.decoder import active_parameters, flops_per_token
from arclight.text.settings import LanguageTask
from arclight.text.training_settings import Sampling, Unigram

SMALL = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 96}
TEXT = "the cat sat on the mat and the dog sat on the log; " * 200


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of bytes; the first label of each odd window is not to be predicted."""

    def __init__(self, text: str, length: int = 32) -> None:
        self.ids, self.length = torch.tensor(list(text.encode())), length

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index * self.length : (index + 1) * self.length + 1]
        labels = ids[1:].clone()
        labels[: index % 2 * 20] = -100
        return {"tokens": ids[:-1], "labels": labels, "bytes": (labels >= 0).sum()}


class Data(al.DataModule):
    tokenizer = ByteTokenizer()

    def __init__(self, batch_size: int = 8) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Windows(TEXT), self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Windows(TEXT[:700]), 5)


def fit(
    tmp_path: Path, steps: int = 30, ckpt: Any = None, batch_size: int = 8, settings: LanguageTask | None = None, **options: Any
) -> Any:  # fmt: skip
    al.seed_everything(5)
    model = LanguageModel(settings or LanguageTask(overrides=SMALL, sampling=None), ByteTokenizer().vocab_size)
    options = {"val_check_interval": 10, "log_every_n_steps": 5, "gradient_clip_val": 1.0} | options
    trainer = al.Trainer(
        max_steps=steps, default_root_dir=tmp_path, enable_progress_bar=False, accelerator="cpu", **options
    )
    trainer.fit(model, datamodule=Data(batch_size), ckpt_path=ckpt)
    return trainer, model


def test_predictions_need_no_counts_of_tokens(tmp_path: Path) -> None:
    """A model that was trained with [task.unigram] predicts on any loader."""
    task = LanguageTask(overrides=SMALL, sampling=None, unigram=Unigram())
    trainer = al.Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_progress_bar=False)
    (logits,) = trainer.predict(LanguageModel(task, 256), [torch.zeros(1, 4, dtype=torch.int64)])
    assert logits.shape[:2] == (1, 4)
    with pytest.raises(MisconfigurationError, match="needs counts of tokens"):
        trainer.validate(LanguageModel(task, 256), [{}])


def test_it_learns_and_counts_bits_per_byte(tmp_path: Path) -> None:
    trainer, model = fit(tmp_path)
    assert float(trainer.callback_metrics["val/loss"]) < 0.7 * math.log(256)
    model.eval()
    nats = labels = 0.0
    for batch in Data().val_dataloader():
        logits = model(batch["tokens"]).double()
        nats += float(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").detach())
        labels += float((batch["labels"] >= 0).sum())
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(nats / labels, rel=1e-5)
    assert float(trainer.callback_metrics["val/bits_per_byte"]) == pytest.approx(nats / labels / math.log(2), rel=1e-5)
    rows = (trainer.run_folder.path / "metrics.csv").read_text()
    for name in ("speed/tokens_per_second", "speed/mfu", "speed/without_batch", "memory/peak_gib"):
        assert name in rows
    assert (trainer.run_folder.path / "tokenizer").is_dir()


def test_a_window_of_batches_equals_one_large_batch(tmp_path: Path) -> None:
    """Though batches have unequal numbers of valid labels: the loss is a mean over all of an update's."""
    _, whole = fit(tmp_path / "1", 3, batch_size=16, val_check_interval=None, check_val_every_n_epoch=None)
    _, parts = fit(
        tmp_path / "2", 3, batch_size=4, accumulate_grad_batches=4, val_check_interval=None, check_val_every_n_epoch=None
    )  # fmt: skip
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(parts.model.state_dict()[name], value, rtol=0, atol=2e-5)


def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    _, whole = fit(tmp_path / "1", 20)
    fit(tmp_path / "2", 20, limit_train_batches=20, callbacks=[StopAt(13)])
    found = sorted((tmp_path / "2").rglob("at13.ckpt"))
    _, resumed = fit(tmp_path / "3", 20, ckpt=found[0])
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


class StopAt(al.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "at13.ckpt")
            trainer.should_stop = True


def test_a_checkpoint_opens_alone_and_refuses_another_vocabulary(tmp_path: Path) -> None:
    trainer, model = fit(tmp_path, 2)
    trainer.save_checkpoint(tmp_path / "alone.ckpt")
    opened = LanguageModel.load_from_checkpoint(tmp_path / "alone.ckpt")
    tokens = torch.arange(12)[None]
    assert torch.equal(opened.eval()(tokens), model.eval()(tokens))
    assert opened.model.config.vocab_size % 64 == 0

    class Other(ByteTokenizer):
        vocab_size = 300

    with pytest.raises(ValueError, match="has 300 tokens, the model was made for"):
        opened.use_tokenizer(Other())
    with pytest.raises(ValueError, match=r"vocab_size = 100 of overrides"):
        LanguageModel(LanguageTask(overrides={"vocab_size": 100})).use_tokenizer(ByteTokenizer())


def test_operations_by_hand() -> None:
    model = LanguageModel(LanguageTask(overrides=SMALL), vocab_size=256)
    model.configure_model()
    attention, forward = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 96
    multiplied = 2 * (attention + forward + 2 * 64) + 64 + 256 * 64
    assert active_parameters(model.model, embeddings=False) == multiplied
    assert active_parameters(model.model) == multiplied + 256 * 64 == sum(p.numel() for p in model.parameters())
    assert flops_per_token(model.model, 32) == 6 * multiplied + 12 * 2 * 64 * 32


@pytest.mark.slow
def test_experts_are_balanced_while_a_model_trains(tmp_path: Path) -> None:
    overrides = {"layers": 3, "dim": 64, "heads": 4, "hidden": 96, "q_lora_rank": 32}
    settings = LanguageTask(model="deepseek-v3-debug", overrides=overrides, sampling=None)
    trainer, model = fit(tmp_path, settings=settings, accumulate_grad_batches=2)
    routers = [model.model.layers[str(number)].feed_forward.router for number in (1, 2)]
    for router in routers:
        assert not router.counts.any()
        assert 5e-3 < router.expert_bias.abs().max() < 30 * 2e-3
        assert abs(router.expert_bias.mean()) < 1e-6
        assert (
            float(router.loss_scale) == 8 * 32 / 2 - 4 * 10
        )  # what the loss was multiplied by: its labels, two batches a step
    assert 0 < float(trainer.callback_metrics["experts/max_violation"]) < 3
    assert 0.8 < float(trainer.callback_metrics["experts/entropy"]) < 1


def test_it_starts_from_weights_that_exist(tmp_path: Path) -> None:
    trainer, model = fit(tmp_path, 2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    to_hf(model.model, tmp_path / "hf")
    for weights in (tmp_path / "run.ckpt", tmp_path / "hf"):
        al.seed_everything(9)
        settings = LanguageTask(
            overrides=SMALL, weights=weights, sampling=None, optimizer=SGD(lr=1e-30, weight_decay=0.0)
        )
        other = LanguageModel(settings, ByteTokenizer().vocab_size)
        runner = al.Trainer(max_steps=1, accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path)
        runner.fit(other, datamodule=Data())
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name


def test_weights_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    trainer, model = fit(tmp_path, 1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    to_hf(model.model, tmp_path / "hf", tokenizer=ByteTokenizer())

    class Other(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.names = [f"another {name}" for name in self.names]

    class OtherData(Data):
        tokenizer = Other()

    for weights in (tmp_path / "run.ckpt", tmp_path / "hf"):
        other = LanguageModel(LanguageTask(overrides=SMALL, weights=weights, sampling=None), 259)
        runner = al.Trainer(max_steps=1, accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path)
        with pytest.raises(MisconfigurationError, match="another tokenizer"):
            runner.fit(other, datamodule=OtherData())
    larger = LanguageModel(LanguageTask(overrides=SMALL, weights=tmp_path / "hf"), 259)
    larger.hparams["vocab_size"] = None
    OtherData.tokenizer.names *= 2
    with pytest.raises(MisconfigurationError, match=r"vocab_size = 320 of .*hf, or overrides, is less than the 518"):
        larger.use_tokenizer(OtherData.tokenizer)


def test_sequences_and_samples_keep_to_the_positions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = SMALL | {"max_positions": 40}
    with pytest.raises(MisconfigurationError, match=r"sequence_length = 48 is more than the 40 positions"):
        LanguageModel(LanguageTask(overrides=few, data=Text(sequence_length=48)), 259)
    settings = LanguageTask(overrides=few, data=Text(sequence_length=32), sampling=Sampling(prompts=("the cat",)))
    with caplog.at_level("INFO", "arclight"):
        fit(tmp_path, 10, settings=settings)
    assert "after step 10: 'the cat' continues" in caplog.text


def test_speed_is_measured_over_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, int]] = []
    monkeypatch.setattr(
        TokenThroughput, "_log", lambda self, strategy, module: measured.append((module.global_step, self.tokens))
    )
    fit(tmp_path, 4, log_every_n_steps=2, accumulate_grad_batches=3, limit_val_batches=0)
    assert measured == [(step, 2 * 3 * 8 * 32) for step in (2, 4)]


def test_speed_is_measured_without_what_follows_a_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: LanguageModel, prompts: list[str], **_: Any) -> list[str]:
        now[0] += 1000
        return prompts

    now = [0.0]
    monkeypatch.setattr(LanguageModel, "generate", slow)
    monkeypatch.setattr("arclight.text.language_model.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("arclight.text.language_model.matmul_rate", lambda *_: 1.0)
    measured: list[float] = []

    def log(self: TokenThroughput, *_: Any) -> None:
        measured.append(now[0] - self.since)

    monkeypatch.setattr(TokenThroughput, "_log", log)
    settings = LanguageTask(overrides=SMALL | {"layers": 1})
    fit(tmp_path, 4, settings=settings, val_check_interval=2, log_every_n_steps=1)
    assert now[0] == 2000
    assert measured == [0.0] * 4


def test_a_schedule_over_tokens_counts_all_micro_batches_and_resumes_with_the_same_rates(tmp_path: Path) -> None:
    settings = LanguageTask(
        overrides=SMALL | {"layers": 1},
        sampling=None,
        optimizer=ADOPT(lr=1e-3),
        schedule=Linear(tokens=4096, warmup=1024),
    )
    options: dict[str, Any] = {"settings": settings, "accumulate_grad_batches": 2, "limit_val_batches": 0}
    whole, model = fit(tmp_path / "whole", 6, **options)
    kept = al.ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=3)
    fit(tmp_path / "first", 3, callbacks=[kept], **options)
    resumed, again = fit(tmp_path / "second", 6, ckpt=kept.best_model_path, **options)
    schedules = [trainer.lr_scheduler_configs[0].scheduler for trainer in (whole, resumed)]
    assert [schedule.position for schedule in schedules] == [6 * 2 * 8 * 32] * 2
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr() == pytest.approx([1e-3 * (1 - 2048 / 3072)] * 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


class SaveAt(al.Callback):
    """Saves once, after the batch ``batches`` of the run, and keeps the state in memory as well."""

    state: dict[str, Any]

    def __init__(self, path: Path, batches: int) -> None:
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer: al.Trainer, *_: Any) -> None:
        if trainer.progress.batches == self.batches:
            trainer.save_checkpoint(self.path)
            self.state = copy.deepcopy(trainer.capture())


def test_a_run_saved_within_a_window_resumes_with_the_same_rates_and_expert_biases(tmp_path: Path) -> None:
    settings = LanguageTask(
        model="qwen3-moe-debug",
        overrides={"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "hidden": 32},
        sampling=None,
        optimizer=SGD(lr=0.1),
        schedule=Linear(tokens=8192, warmup=0),
    )
    options: dict[str, Any] = {"settings": settings, "accumulate_grad_batches": 3, "limit_val_batches": 0}
    whole, model = fit(tmp_path / "whole", 3, callbacks=[SaveAt(tmp_path / "within.ckpt", 5)], **options)
    resumed, again = fit(tmp_path / "resumed", 3, ckpt=tmp_path / "within.ckpt", **options)
    assert whole.callback_metrics["experts/entropy"] == resumed.callback_metrics["experts/entropy"]
    assert whole.optimizers[0].param_groups[0]["lr"] == resumed.optimizers[0].param_groups[0]["lr"]
    for (name, tensor), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name


def test_a_window_that_other_processes_had_begun_counts_its_tokens_once(tmp_path: Path) -> None:
    settings = LanguageTask(
        overrides=SMALL | {"layers": 1}, sampling=None, optimizer=SGD(lr=0.1), schedule=Linear(tokens=8192)
    )
    options: dict[str, Any] = {"settings": settings, "accumulate_grad_batches": 3, "limit_val_batches": 0}
    kept = SaveAt(tmp_path / "within.ckpt", 5)
    whole, model = fit(tmp_path / "whole", 3, callbacks=[kept], **options)
    for part in ("rng", "window"):
        kept.state["loops"][part] *= 2  # as of two processes
    resumed, again = fit(tmp_path / "resumed", 3, ckpt=kept.state, **options)
    assert [t.lr_scheduler_configs[0].scheduler.position for t in (whole, resumed)] == [3 * 3 * 8 * 32] * 2
    assert whole.optimizers[0].param_groups[0]["lr"] == resumed.optimizers[0].param_groups[0]["lr"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
