"""The text data module: prepared once, found again, every byte of text counted once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import arclight as al
from arclight import recipe
from arclight.data import ResumableLoader
from arclight.data.token_shards import TokenShardError
from arclight.fabric.errors import MisconfigurationError
from arclight.text import Text, TextDataModule
from arclight.text.data.corpus import held_out, with_tails, write_corpus
from arclight.text.data.data_settings import BPE, Bytes, Pretrained
from arclight.text.data.sources import Document, documents
from arclight.text.data.tokenizer import ByteTokenizer, TokenizerError

pytest.importorskip("tokenizers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prose").mkdir()
    (tmp_path / "code").mkdir()
    for number in range(40):
        (tmp_path / "prose" / f"{number:02}.txt").write_text(f"The story {number} of a fox. " * (3 + number % 5))
        (tmp_path / "code" / f"{number:02}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 4)
    return tmp_path


def ready(folder: Path, **settings: Any) -> TextDataModule:
    defaults = {"data": str(folder / "prose"), "tokenizer": Bytes(), "sequence_length": 16, "batch_size": 4}
    data = TextDataModule(Text(**defaults | {"cache": folder / "cache", "held_out": 0.2} | settings))
    data.prepare_data()
    data.setup("fit")
    return data


def batches(loader: Any, epoch: int = 0) -> list[dict[str, torch.Tensor]]:
    return list(ResumableLoader(loader, seed=1).batches(epoch))


@pytest.mark.parametrize("packing", ["concat", "pack"])
@pytest.mark.parametrize("tokenizer", [Bytes(), BPE(vocab_size=300)])
def test_every_byte_is_predicted_once(folder: Path, packing: Any, tokenizer: Any) -> None:
    """The marks of beginning have room for the first byte, so that train and val together predict all of the text."""
    data = ready(folder, packing=packing, tokenizer=tokenizer)
    found = [batches(loader) for loader in (data.train_dataloader(), data.val_dataloader())]
    assert all(batch["tokens"].shape == (4, 16) for loader in found for batch in loader)
    assert all(found)
    total = sum(document.bytes for document in documents(folder / "prose"))
    assert sum(int(batch["bytes"].sum()) for loader in found for batch in loader) == total
    assert {"positions", "documents"} < set(found[0][0])


def test_the_second_time_nothing_is_written(folder: Path) -> None:
    settings: dict[str, Any] = {"tokenizer": BPE(vocab_size=280), "packing": "pack"}
    first = ready(folder, **settings)
    before = {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")}
    second = ready(folder, **settings)
    assert {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")} == before
    assert sorted(path.name.partition("-")[0] for path in (folder / "cache").iterdir()) == ["prose", "tokenizer"]
    assert second.tokenizer.digest == first.tokenizer.digest
    assert first.vocab_size == first.tokenizer.vocab_size == 280
    same = zip(batches(first.train_dataloader()), batches(second.train_dataloader()), strict=True)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in same)


def test_changed_text_and_changed_settings_are_another_corpus(folder: Path) -> None:
    ready(folder)
    (folder / "prose" / "00.txt").write_text("something else")
    changed = ready(folder)
    ready(folder, held_out=0.3)
    ready(folder, sequence_length=8)
    assert len(list((folder / "cache").iterdir())) == 3
    texts = [
        changed.tokenizer.decode(row)
        for batch in batches(changed.train_dataloader())
        for row in batch["tokens"].tolist()
    ]
    held = [
        changed.tokenizer.decode(row) for batch in batches(changed.val_dataloader()) for row in batch["tokens"].tolist()
    ]
    assert "something el" in "".join(texts + held)


def test_damaged_tokens_are_refused_before_training(folder: Path) -> None:
    data = ready(folder)
    (path,) = data.train.layouts[0].shards.folder.glob("*.tokens")
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    with pytest.raises(TokenShardError, match="is damaged"):
        ready(folder)


def test_a_mixture_has_its_shares(folder: Path) -> None:
    sources = {"prose": str(folder / "prose"), "code": str(folder / "code")}
    weights = {"prose": (0.0, 1.0), "code": (1.0, 0.0)}
    data = ready(folder, data=sources, mixture=weights, mixture_at=(0.0, 2.0), epoch_samples=4096)
    border = len(data.train.layouts[0])
    order = data.train_dataloader().sampler
    for epoch in range(2):
        drawn = order.sample_ids(torch.arange(4096).numpy(), epoch=epoch, seed=1)
        assert (drawn < border).mean() == pytest.approx(0.25 + 0.5 * epoch, abs=0.02)
    assert len(batches(data.train_dataloader())) == 1024
    plain = ready(folder, data=sources)
    counts = Counter(
        (
            plain.train_dataloader().sampler.sample_ids(torch.arange(len(plain.train)).numpy(), epoch=0, seed=1)
            < border
        ).tolist()
    )
    assert counts[True] == pytest.approx(border, abs=0.02 * len(plain.train) + 2)


def test_tokens_that_are_there_are_used_as_they_are(folder: Path) -> None:
    """With their own tokenizer and split; the cache stays empty."""
    made = folder / "tokens"
    tokenizer = ready(folder, tokenizer=BPE(vocab_size=280)).tokenizer
    write_corpus(made, documents(folder / "prose"), tokenizer, split=held_out(0.3))
    data = ready(folder, data=str(made), cache=folder / "unused", packing="pack")
    assert data.vocab_size == 280
    assert data.tokenizer.digest == tokenizer.digest
    found = [batch for loader in (data.train_dataloader(), data.val_dataloader()) for batch in batches(loader)]
    assert sum(int(b["bytes"].sum()) for b in found) == sum(d.bytes for d in documents(folder / "prose"))
    assert not (folder / "unused").exists()
    mixed = ready(folder, data={"a": str(made), "b": str(folder / "code")})
    assert {part.shards.facts[0].tokenizer for part in mixed.train.layouts} == {tokenizer.digest}
    with pytest.raises(MisconfigurationError, match="cannot stand in a list"):
        TextDataModule(Text(data=(str(made), str(folder / "code"))))


def test_other_text_to_validate_with(folder: Path) -> None:
    data = ready(folder, val=str(folder / "code"))
    found = sum(int(batch["bytes"].sum()) for batch in batches(data.val_dataloader()))
    assert found == sum(document.bytes for document in documents(folder / "code"))
    assert sum(int(b["bytes"].sum()) for b in batches(data.train_dataloader())) == sum(
        document.bytes for document in documents(folder / "prose")
    )
    assert ready(folder, held_out=0.0).val_dataloader() == []


def test_too_little_text_to_hold_any_out(folder: Path) -> None:
    (folder / "one").mkdir()
    (folder / "one" / "a.txt").write_text("x")  # which cannot be cut
    with pytest.raises(MisconfigurationError, match="of 1 document leaves none"):
        ready(folder, data=str(folder / "one"))
    (folder / "one" / "a.txt").write_text("x" * 5000)
    with pytest.raises(MisconfigurationError, match=r"held_out = 0\.9999 leaves no documents to train with"):
        ready(folder, data=str(folder / "one"), held_out=0.9999)
    write_corpus(folder / "tokens", documents(folder / "prose"), ByteTokenizer())
    with pytest.raises(MisconfigurationError, match=r"tokens has no split val: tokenize with --held-out"):
        ready(folder, data=str(folder / "tokens"))


@pytest.mark.parametrize("files", [1, 3])
def test_of_few_documents_the_ends_are_held_out(folder: Path, files: int) -> None:
    (folder / "few").mkdir()
    texts = [f"line {number} of text {file}\n" * 200 for number, file in enumerate("abc"[:files])]
    for name, text in zip("abc", texts):
        (folder / "few" / f"{name}.txt").write_text(text)
    data = ready(folder, data=str(folder / "few"), held_out=0.2, tokenizer=Bytes())
    sizes = {}
    for split, loader in (("train", data.train_dataloader()), ("val", data.val_dataloader())):
        sizes[split] = sum(int(batch["bytes"].sum()) for batch in batches(loader))
    whole = sum(map(len, texts))
    assert sum(sizes.values()) == whole
    assert 0.17 * whole < sizes["val"] < 0.25 * whole


def test_few_documents_are_cut_at_lines_and_many_are_not_cut() -> None:
    (head, tail) = with_tails([Document("a", "one line\n" * 100, 900)], 0.25)
    assert (head.text, tail.text) == ("one line\n" * (n := len(head.text) // 9), "one line\n" * (100 - n))
    assert [held_out(0.25)(part) for part in (head, tail)] == ["train", "val"]
    many = [Document(str(n), f"text {n}", 6) for n in range(300)]
    assert list(with_tails(many, 0.05)) == many
    assert list(with_tails(many, 0.0)) == many


def test_a_checkpoint_of_another_tokenizer_is_refused(folder: Path) -> None:
    data, other = ready(folder), ready(folder, tokenizer=BPE(vocab_size=280))
    data.load_state_dict(data.state_dict())
    with pytest.raises(TokenizerError, match="trained with another tokenizer"):
        other.load_state_dict(data.state_dict())
    code = ready(folder, data=str(folder / "code"))
    with pytest.warns(UserWarning, match="not what the checkpoint was trained on"):
        code.load_state_dict(data.state_dict())


def test_an_order_that_differs_from_the_checkpoints_warns(folder: Path) -> None:
    before = ready(folder).state_dict()
    for changed in ({"sequence_length": 32}, {"packing": "pack"}):
        with pytest.warns(UserWarning, match=f"{next(iter(changed))} is not what the checkpoint was trained with"):
            ready(folder, **changed).load_state_dict(before)
    del before["order"]["shuffle_window"]  # as of a version that had no windows
    ready(folder).load_state_dict(before)
    with pytest.warns(UserWarning, match="shuffle_window is not what the checkpoint was trained with"):
        ready(folder, shuffle_window=4).load_state_dict(before)


def test_settings_that_would_do_nothing_are_refused() -> None:
    for wrong, message in (
        ({"epoch_samples": 4}, "epoch_samples needs a mixture of named sources"),
        ({"epoch_samples": 0, "data": {"a": "x"}}, "epoch_samples: need int >= 1"),
        ({"prepare_workers": 0}, "prepare_workers: need int >= 1"),
        ({"workers": -1}, "workers: need int >= 0"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            Text(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"data": ""}, {"data": ()}, {"data": {}}, {"data": {"a": " "}}, {"val": ""}])
def test_empty_places_are_refused_and_not_the_current_folder(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="names no text"):
        Text(**given)


def test_names_of_sources_lead_to_no_other_folder(folder: Path) -> None:
    text = folder / "text.txt"
    text.write_text("one two three " * 20)
    module = ready(folder, data={"../outside/a": str(text)})
    (made,) = (path for path in (folder / "cache").iterdir() if "outside" in path.name)
    assert made.name.startswith(".._outside_a-")
    assert len(module.train or ()) > 0


def test_a_tokenizer_that_exists(folder: Path) -> None:
    learned = ready(folder, tokenizer=BPE(vocab_size=280)).tokenizer
    data = ready(folder, tokenizer=Pretrained(path=learned.save(folder / "tok")))
    assert data.tokenizer.digest == learned.digest
    assert data.vocab_size == 280
    with pytest.raises(FileNotFoundError, match="learns the tokenizer first"):
        TextDataModule(Text(data=str(folder / "prose"), cache=folder / "elsewhere")).tokenizer.encode("")
    with pytest.raises(RuntimeError, match="come first"):
        TextDataModule(Text(data=str(folder / "prose"))).train_dataloader()


class Count(al.Module):
    """Learns how often each token comes."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(259))
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += int(batch["bytes"].sum())
        logits = self.logits.expand(*batch["labels"].shape, -1)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_in_a_trainer(folder: Path) -> None:
    """It keeps its files beside the runs, and batches of the global size."""
    data = TextDataModule(
        Text(data=str(folder / "prose"), tokenizer=Bytes(), sequence_length=32, global_batch_size=8, held_out=0.2)
    )
    module = Count()
    trainer = al.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, default_root_dir=folder / "runs", logger=False,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert module.seen == sum(document.bytes for document in documents(folder / "prose"))
    assert data.batch_size == 8
    (made,) = (folder / "runs" / "data").iterdir()
    assert made.name.startswith("prose-")
    trainer.save_checkpoint(folder / "a.ckpt")
    other = TextDataModule(
        Text(data=str(folder / "prose"), tokenizer=BPE(vocab_size=280), cache=folder / "cache", held_out=0.2)
    )
    with pytest.raises(TokenizerError, match="trained with another tokenizer"):
        trainer.fit(module, datamodule=other, ckpt_path=folder / "a.ckpt")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    text: Text = field(default_factory=Text)


def test_settings_are_read_and_written_as_recipes() -> None:
    table = {
        "data": {"code": "stdlib", "prose": "books/"},
        "mixture": {"code": 0.7, "prose": [0.3, 0.5]},
        "mixture_at": [0, 1.5],
        "tokenizer": {"kind": "bytes"},
        "cache": "somewhere",
    }
    found = recipe.read(Recipe, {"text": table})
    assert found.text == Text(
        data={"code": "stdlib", "prose": "books/"},
        mixture={"code": 0.7, "prose": (0.3, 0.5)},
        mixture_at=(0.0, 1.5),
        tokenizer=Bytes(),
        cache=Path("somewhere"),
    )
    assert recipe.read(Recipe, tomllib.loads(recipe.write(found))) == found
    assert recipe.read(Recipe, {}, ["--text.data", "a,b", "--text.tokenizer.vocab_size", "500"]).text.data == "a,b"
    assert recipe.read(Recipe, {"text": {"data": ["a", "b"]}}).text.data == ("a", "b")
    for wrong, message in [
        ({"sequence_length": 0}, "sequence_length: need int >= 1, got 0"),
        ({"held_out": 1.0}, "held_out: need number in"),
        ({"mixture": {"code": 1.0}}, "needs named sources"),
        ({"data": {"a": "x"}, "mixture": {"b": 1.0}}, "mixture names b, data has a"),
        ({"data": {"a": "x", "c": "y"}, "mixture": {"a": 1.0}}, "no weight for c"),
    ]:
        with pytest.raises(recipe.RecipeError, match=message):
            recipe.read(Recipe, {"text": wrong})


@pytest.mark.slow
@pytest.mark.skipif(os.cpu_count() == 1, reason="loads in worker processes")
def test_the_standard_library_as_it_comes(tmp_path: Path) -> None:
    data = TextDataModule(Text(tokenizer=BPE(vocab_size=1024, sample=2**21), cache=tmp_path, workers=1))
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(batches(data.train_dataloader())))
    assert batch["tokens"].shape == (16, 256)
    assert 2.0 < float(batch["bytes"].sum()) / batch["labels"].ne(-100).sum() < 4.0


@pytest.mark.slow
def test_two_processes_read_everything_once(folder: Path) -> None:
    """The first prepares while the second waits; then both have as many batches, with all the text between them."""
    script = Path(__file__).parent / "data_script.py"
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for split in ("train", "val"):
        assert len(ranks[0][split]) == len(ranks[1][split]) > 0
        assert {len(tokens) for rank in ranks for _, tokens in rank[split]} == {4}
    total = sum(size for rank in ranks for split in rank.values() for size, _ in split)
    assert total == sum(document.bytes for document in documents(folder / "prose"))
    assert sorted(p.name.partition("-")[0] for p in (folder / "runs" / "data").iterdir()) == ["prose", "tokenizer"]
