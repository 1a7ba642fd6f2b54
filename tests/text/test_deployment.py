"""Exporting a language model leaves the model as it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from arclight.text import LanguageModel
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
