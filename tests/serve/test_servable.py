"""A module is asked for an answer by a real server before it is trained."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import arclight as al
from arclight.compat.lightning.pytorch.demos.boring_classes import BoringModel
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.serving import running
from arclight.serve.servable import ServableModule, ServableModuleValidator


class Doubling(BoringModel, ServableModule):
    body: dict[str, Any] = {"x": [1, 2], "times": 3}
    expected: dict[str, Any] = {"output": [6.0, 12.0], "training": False}

    def configure_payload(self) -> dict[str, Any]:
        return {"body": self.body}

    def configure_serialization(self) -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
        return {"x": lambda x: torch.tensor(x, dtype=torch.float)}, {"output": torch.Tensor.tolist}

    def serve_step(self, x: torch.Tensor, times: int) -> dict[str, Any]:
        return {"output": 2 * times * x, "training": self.training}

    def configure_response(self) -> dict[str, Any]:
        return self.expected


def fit(model: Any, callback: al.Callback, folder: Path) -> None:
    al.Trainer(
        default_root_dir=folder, max_steps=1, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(model)  # fmt: skip


def test_a_module_that_answers_is_trained(tmp_path: Path) -> None:
    model, callback = Doubling(), ServableModuleValidator()
    assert callback.state_dict() == {"successful": None, "optimization": None, "server": "fastapi"}
    fit(model, callback, tmp_path)
    assert callback.resp is not None
    assert callback.resp.json() == Doubling.expected
    assert callback.successful
    assert model.training


def test_another_answer_than_expected_ends_the_run(tmp_path: Path) -> None:
    model = Doubling()
    model.expected = {"output": []}
    with pytest.raises(
        MisconfigurationError, match=r"expected response \{'output': \[\]\} doesn't match the generated"
    ):
        fit(model, ServableModuleValidator(), tmp_path)


def test_a_module_that_fails_ends_the_run_by_default(tmp_path: Path) -> None:
    model = Doubling()
    model.body = {"x": "text", "times": 1}
    with pytest.raises(MisconfigurationError, match="isn't servable: it answered 500"):
        fit(model, ServableModuleValidator(), tmp_path)
    callback = ServableModuleValidator(exit_on_failure=False)
    fit(model, callback, tmp_path)
    assert callback.successful is False


def test_modules_are_tried_on_the_server_that_serves_programs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, callback = Doubling(), ServableModuleValidator(exit_on_failure=False)
    model.body = {"x": "text", "times": 1}
    fit(model, callback, tmp_path)
    assert callback.resp is not None
    assert "its log has the details under" in callback.resp.json()["error"]
    (logged,) = [one for one in caplog.records if one.name == "arclight.serve" and one.exc_info]
    assert "POST" in logged.getMessage()


def test_a_payload_may_be_larger_than_requests_to_programs(tmp_path: Path) -> None:
    model, callback = Doubling(), ServableModuleValidator()
    model.body = {"x": [1, 2], "times": 3, "unused": "x" * 26_000_000}
    model.serve_step = lambda x, times, unused: {"output": 2 * times * x, "training": False}  # type: ignore[method-assign]
    fit(model, callback, tmp_path)
    assert callback.successful


def test_numbers_that_json_has_not_become_null(tmp_path: Path) -> None:
    model, callback = Doubling(), ServableModuleValidator()
    model.serve_step = lambda x, times: {"output": x, "least": -math.inf}  # type: ignore[method-assign]
    model.expected = {"output": [1.0, 2.0], "least": None}
    fit(model, callback, tmp_path)
    assert callback.successful


def test_a_module_is_tried_at_an_address_of_ipv6(tmp_path: Path) -> None:
    callback = ServableModuleValidator(host="::1")
    fit(Doubling(), callback, tmp_path)
    assert callback.successful


def test_no_proxy_gets_the_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # where nothing listens
    callback = ServableModuleValidator()
    fit(Doubling(), callback, tmp_path)
    assert callback.successful


def test_a_server_that_does_not_start_in_time_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never_started(server: Any, *_: Any, **__: Any) -> None:
        while not server.should_exit:
            time.sleep(0.01)

    monkeypatch.setattr(running, "run_server", never_started)
    threads = threading.active_count()
    with pytest.raises(TimeoutError, match="The server didn't start within 0 seconds"):
        fit(Doubling(), ServableModuleValidator(timeout=0), tmp_path)
    assert threading.active_count() == threads


def test_missing_servable_methods_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="should be subclass of ServableModule"):
        fit(BoringModel(), ServableModuleValidator(), tmp_path)

    class Empty(BoringModel, ServableModule):
        pass

    with pytest.raises(NotImplementedError, match="`configure_payload` method needs to be overridden"):
        fit(Empty(), ServableModuleValidator(), tmp_path)
    with pytest.raises(NotImplementedError, match="Only the fastapi server"):
        ServableModuleValidator(server="torchserve")
    with pytest.raises(NotImplementedError, match="optimization onnx"):
        ServableModuleValidator(optimization="onnx")
