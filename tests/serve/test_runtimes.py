"""Programs that are served in another runtime than they were exported for."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.serve.test_text import NEW, PROMPTS, expected

from arclight.cli.arguments import UsageError
from arclight.cli.commands.serve import _runtimes
from arclight.deploy import Program, ProgramError
from arclight.serve import Limits, models, serve
from arclight.serve.app import build_app
from arclight.serve.middleware import Access


def test_texts_and_tensors_are_computed_in_the_runtime_that_is_named(language_path, affine_path):
    served = [
        models.load(name, path, Limits(), runtime=runtime)
        for name, path, runtime in (
            ("lm", language_path, "openvino"), ("other", affine_path, "openvino"), ("affine", affine_path, None),
        )
    ]  # fmt: skip
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [0, 1, 2]}
    with TestClient(build_app(served, Limits(), Access())) as client:
        lm, other, affine = client.get("/models").json()
        body = {"model": "lm", "prompt": PROMPTS[2], "max_tokens": NEW, "temperature": 0}
        [choice] = client.post("/v1/completions", json=body).json()["choices"]
        answers = [
            client.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]}).json()["outputs"][0]["data"]
            for name in ("other", "affine")
        ]
    assert choice["text"] == expected(Program.load(language_path, threads=1), PROMPTS[2])
    assert answers == [[1, 3, 5]] * 2
    assert [one["runtime"] for one in (lm, other, affine)] == ["openvino", "openvino", "onnxruntime"]
    for one in (lm, other):
        assert one["proof"][-1].startswith("It runs in OpenVINO, and agrees with itself in ONNX Runtime, which it was ")
    assert not any("ONNX Runtime" in sentence for sentence in affine["proof"])


def test_a_runtime_that_cannot_take_a_program_is_refused_before_anything_listens(affine_path):
    with pytest.raises(ProgramError, match="which torch does not run: take onnxruntime, openvino"):
        serve({"affine": affine_path}, port=0, runtime="torch")
    with pytest.raises(ValueError, match="there is no model 'b' to run in openvino: there are affine"):
        serve({"affine": affine_path}, port=0, runtime={"b": "openvino"})


def test_runtimes_are_named_for_all_programs_or_one():
    two = {"a": Path("a.onnx"), "b": Path("b.onnx")}
    assert _runtimes(None, two) is None
    assert _runtimes(["openvino"], two) == _runtimes(["openvino"], Path("a.onnx")) == "openvino"
    assert _runtimes(["b=fastest"], two) == {"b": "fastest"}
    assert _runtimes(["openvino", "b=torch"], two) == {"a": "openvino", "b": "torch"}
    for words, programs, said in (
        (["cuda"], two, "there is no runtime 'cuda': take onnxruntime"),
        (["c=openvino"], two, "there is no model 'c'; there are a, b"),
        (["a=openvino"], Path("a.onnx"), "there is no model 'a'; there is only one, which needs no name"),
        (["a=openvino", "a=torch"], two, "was named before"),
    ):
        with pytest.raises(UsageError, match=said):
            _runtimes(words, programs)
