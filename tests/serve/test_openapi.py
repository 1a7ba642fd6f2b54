"""The OpenAPI document: requests that are drawn from it are answered as it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient
from tests.serve.conftest import LOOPBACK, Server

from arclight.serve import create_app
from arclight.serve.settings import Limits

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "missing_required_header", "unsupported_method", "allow_header_conformance",
)  # fmt: skip
"""All but that what the schemas allow is accepted: they cannot say what an image is, how many tokens a text has, or which inputs a model."""


@pytest.mark.slow
def test_requests_drawn_from_the_document_are_answered_as_it_says(all_tasks: Server, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="the extra dev brings it: make setup")
    words = [
        f"{all_tasks.url}/openapi.json", f"--checks={','.join(CHECKS)}", "--phases=coverage,fuzzing", "--max-examples=25", "--seed=1",
        "--continue-on-failure", "--no-shrink", "--generation-database=none", "--no-color",
    ]  # fmt: skip
    before = all_tasks.metrics()
    found = subprocess.run(
        [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    paths = all_tasks.get("/openapi.json").json()["paths"]
    assert f"Tested: {len(paths)}" in found.stdout
    after = all_tasks.metrics()
    for key in (("lm", "/v1/completions"), ("embed", "/v1/embeddings")):  # not only refusals were compared
        [answered] = [name for name in after if name[0] == "arclight_requests_total" and {*key, "200"} <= {*name}]
        assert after[answered] - before.get(answered, 0) > 0
    assert all_tasks.get("/health").json()["ready"]


def test_the_document_names_the_models_of_each_address(all_tasks: Server) -> None:
    paths = all_tasks.get("/openapi.json").json()["paths"]

    def at(path: str, method: str = "get") -> list[str]:
        [place] = [one for one in paths[path][method]["parameters"] if one["name"] == "model"]
        return place["schema"]["enum"]

    def inside(path: str) -> list[str]:
        return paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]["model"][
            "enum"
        ]

    assert at("/v1/object-detection/{model}", "post") == ["codes"]
    assert at("/v2/models/{model}") == at("/v2/models/{model}/infer", "post") == ["codes", "affine"]
    assert at("/v1/models/{model}") == ["lm", "embed"]
    assert inside("/v1/completions") == inside("/v1/chat/completions") == ["lm"]
    assert inside("/v1/embeddings") == ["embed"]


def test_another_method_is_refused_with_those_that_there_are(all_tasks: Server) -> None:
    for path, methods in all_tasks.get("/openapi.json").json()["paths"].items():
        [method] = methods
        other = "GET" if method == "post" else "POST"
        answer = httpx.request(other, all_tasks.url + path.replace("{model}", "affine"), **LOOPBACK)
        assert (answer.status_code, answer.headers["allow"]) == (405, method.upper()), path


def test_a_path_with_nothing_at_it_is_not_found_by_any_method() -> None:
    client = TestClient(create_app(lambda image: None, limits=Limits()), base_url="http://localhost")  # type: ignore[arg-type, return-value]
    for path in ("/detect/", "/v2/models/", "/samples", "/none.js"):
        for method in ("GET", "POST", "DELETE"):
            answer = client.request(method, path)
            assert answer.status_code == 404, (method, path)
            assert answer.json()["error"].startswith("There is nothing at this address"), (method, path)
    assert [client.post(path).status_code for path in ("/", "/app.js")] == [405, 405]


def test_without_models_of_a_kind_the_document_names_none() -> None:
    app = create_app(lambda image: None, limits=Limits())  # type: ignore[arg-type, return-value]
    paths = app.openapi()["paths"]
    assert "enum" not in paths["/v2/models/{model}"]["get"]["parameters"][0]["schema"]
