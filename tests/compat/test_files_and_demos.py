"""Hyper-parameter files, and the small language models of Lightning's examples."""

from __future__ import annotations

from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import arclight.compat.lightning.pytorch as pl
from arclight.compat.lightning.pytorch.core.saving import (
    load_hparams_from_tags_csv,
    load_hparams_from_yaml,
    save_hparams_to_tags_csv,
    save_hparams_to_yaml,
    update_hparams,
)
from arclight.compat.lightning.pytorch.demos import SequenceSampler, Transformer, WikiText2
from arclight.compat.lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from arclight.compat.lightning.pytorch.demos.transformer import LightningTransformer


class Switch(Enum):
    ON = "on it is"


VALUES: dict[str, Any] = {"size": 32, "rate": 3e-4, "folder": "./any/where", "deep": {"n": 1, "s": ["ab", None]}}


@pytest.mark.parametrize("given", [VALUES, Namespace(**VALUES)])
def test_yaml_gives_back_what_was_written(tmp_path: Path, given: Any) -> None:
    path = tmp_path / "hparams.yaml"
    save_hparams_to_yaml(path, given)
    assert load_hparams_from_yaml(path, use_omegaconf=False) == VALUES
    assert yaml.safe_load(path.read_text()) == VALUES


def test_values_yaml_cannot_express_are_skipped_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "hparams.yaml"
    with pytest.warns(UserWarning, match="Skipping 'kind' parameter"):
        save_hparams_to_yaml(path, {"kind": torch.float32, "switch": Switch.ON})
    assert load_hparams_from_yaml(path, use_omegaconf=False) == {"switch": "ON"}


def test_a_yaml_file_makes_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "hparams.yaml"
    path.write_text("a: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(yaml.YAMLError):
        load_hparams_from_yaml(path)


def test_tags_keep_numbers_and_truth_values(tmp_path: Path) -> None:
    path = tmp_path / "tags.csv"
    values = {"size": 32, "rate": 0.5, "on": True, "none": None, "text": "1, two"}
    save_hparams_to_tags_csv(path, values)
    assert load_hparams_from_tags_csv(path) == values


@pytest.mark.parametrize("load", [load_hparams_from_yaml, load_hparams_from_tags_csv])
def test_a_missing_file_is_empty_with_a_warning(tmp_path: Path, load: Any) -> None:
    with pytest.warns(RuntimeWarning, match="Missing Tags"):
        assert load(tmp_path / "none") == {}


@pytest.mark.parametrize("save", [save_hparams_to_yaml, save_hparams_to_tags_csv])
def test_a_missing_folder_is_an_error(tmp_path: Path, save: Any) -> None:
    with pytest.raises(RuntimeError, match="Missing folder"):
        save(tmp_path / "none" / "file", {})


def test_updates_are_merged() -> None:
    values = {"a": {"b": 4}, "c": 4}
    update_hparams(values, {"a": {"d": 2}, "c": {"e": 1}})
    assert values == {"a": {"b": 4, "d": 2}, "c": {"e": 1}}


def test_sequences_go_on_in_the_same_row() -> None:
    batches = list(SequenceSampler(range(103), batch_size=4))
    assert len(batches) == 25
    assert batches[:2] == [[0, 25, 50, 75], [1, 26, 51, 76]]


def test_a_decoder_does_not_see_what_comes() -> None:
    model = Transformer(vocab_size=8, ninp=16, nhid=16).eval()
    words = torch.randint(8, (1, 6))
    changed = words.clone()
    changed[0, 4:] = (changed[0, 4:] + 1) % 8
    before, after = model(words, words), model(words, changed)
    torch.testing.assert_close(before[:4], after[:4])
    assert not torch.allclose(before[4:], after[4:])
    torch.testing.assert_close(before.exp().sum(-1), torch.ones(6))


@pytest.mark.parametrize("kind", [LightningLSTM, LightningTransformer])
def test_language_models_learn_from_a_text_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext-2.txt").write_text("the cat sat on the mat\n" * 120)
    monkeypatch.chdir(tmp_path)
    text = WikiText2()
    inputs, targets = text[0]
    assert torch.equal(inputs[1:], targets[:-1])
    model = kind(vocab_size=text.vocab_size)
    if kind is LightningLSTM:
        model.model = SimpleLSTM(text.vocab_size, 8, 8, 1, 0.0)
    else:
        model.model = Transformer(text.vocab_size, 8, 2, 8, 1, 0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pl.Trainer(max_steps=2, logger=False, enable_checkpointing=False, enable_model_summary=False).fit(model)
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_no_text_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        WikiText2(tmp_path, download=True)
