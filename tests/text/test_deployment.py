"""Exporting a language model leaves the model as it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from arclight.text import LanguageModel
from arclight.text.data.data_settings import Bytes, Text
from arclight.text.language_program import export_language_model
from arclight.text.settings import LanguageTask


def test_export_leaves_mode_and_device_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        "arclight.deploy.deployment.export_one",
        lambda cached, *_, **__: given.append(cached.decoder) or SimpleNamespace(),
    )
    moved: list[Any] = []
    apply = nn.Module._apply
    model = LanguageModel(LanguageTask(model="llama3-debug"), vocab_size=32)
    model.configure_model()
    model.train()
    monkeypatch.setattr(
        nn.Module, "_apply", lambda self, *args, **kw: (moved.append(self), apply(self, *args, **kw))[1]
    )
    export_language_model(model, tmp_path / "model.onnx", [torch.zeros(2, 4, dtype=torch.int64)])
    (exported,) = given
    assert type(exported) is type(model.model)
    assert exported is not model.model
    assert model.model.training
    assert not set(model.model.modules()) & set(moved)


@torch.no_grad()
def test_held_out_texts_are_scored_without_what_fills_batches_up(tmp_path: Path) -> None:
    texts = ["the cat sat on the mat", "a dog"]
    for name, documents in (("train", ["seven birds sang " * 9]), ("val", texts)):
        (tmp_path / name).mkdir()
        for number, text in enumerate(documents):
            (tmp_path / name / f"{number}.txt").write_text(text)
    data = Text(
        data=str(tmp_path / "train"), val=str(tmp_path / "val"), tokenizer=Bytes(), sequence_length=24, batch_size=16,
        packing="pack", cache=tmp_path / "cache",
    )  # fmt: skip
    sizes = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "hidden": 32}
    module = LanguageModel(LanguageTask(overrides=sizes, data=data, sampling=None), vocab_size=259)
    module.configure_model()
    module.use_tokenizer(data.build().tokenizer)
    deployment = module.configure_deployment(None, 1)
    found = deployment.evaluation.scored(deployment.model)["log_likelihood"]
    likelihoods = []
    for text in texts:
        ids = torch.tensor([[256, *text.encode()]])  # its last token predicts the end of the text, which is not scored
        likelihoods += module.model(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert found == pytest.approx(sum(likelihoods) / len(likelihoods), rel=1e-5)
