"""Requests drawn from the server's own OpenAPI document, and beside it: none is a fault of the server, which answers afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.conftest import LOOPBACK, SAMPLES, running
from tests.serve.test_tensors import SERVE

PHOTO = (SAMPLES / "counter.jpg").read_bytes()
MODELS = ("codes", "affine", "lm")
METHODS = ("get", "post", "put", "delete", "options", "head", "patch")
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
TENSORS = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}], "outputs": [{"name": "y"}], "id": "a",
    "parameters": {"binary_data_output": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def all_tasks(tmp_path_factory, one_box_path, affine_path, language_path):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "serve.py").write_text(SERVE)
    paths = (one_box_path, affine_path, language_path)
    words = [f"{name}={path}" for name, path in zip(MODELS, paths, strict=True)]
    limits = ["--limits.linger_s=0.2", "--limits.body_idle_s=1", "--limits.deadline_s=5"]
    with running(*words, *limits, program=str(folder / "serve.py")) as server:
        yield server


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A client whose connections go on from one request to the next: what one leaves behind in its own, the next meets."""
    with httpx.Client(**LOOPBACK, timeout=30) as opened:
        yield opened


@pytest.fixture(scope="module")
def routes(all_tasks) -> list[tuple[str, str, dict[str, Any]]]:
    """Every path of the document, with its method and the schema of its JSON body."""
    paths = all_tasks.get("/openapi.json").json()["paths"]
    found = []
    for path, methods in paths.items():
        for method, described in methods.items():
            content = described.get("requestBody", {}).get("content", {})
            found.append((path, method, content.get("application/json", {}).get("schema", {})))
    assert {path for path, _, _ in found} >= {"/detect", "/v2/models/{model}/infer", "/v1/chat/completions", "/metrics"}
    return found


def drawn(draw: st.DrawFn, schema: dict[str, Any]) -> Any:
    """Draw what a JSON schema allows, and now and then something else."""
    if draw(st.integers(0, 9)) == 0:
        return draw(ANY)
    if "anyOf" in schema:
        return drawn(draw, draw(st.sampled_from(schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return draw(st.sampled_from(schema.get("enum") or [schema["const"]]))
    kind = schema.get("type")
    if kind == "object":
        known = schema.get("properties", {})
        names = [name for name in known if name in schema.get("required", []) or draw(st.booleans())]
        return {name: drawn(draw, known[name]) for name in names}
    if kind == "array":
        return [drawn(draw, schema.get("items", {})) for _ in range(draw(st.integers(0, 3)))]
    simple: dict[str, st.SearchStrategy[Any]] = {
        "string": st.sampled_from(MODELS) | st.text(max_size=8),
        "integer": st.integers(-1, 9),
        "number": st.floats(-1, 3),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return draw(simple.get(kind, ANY))


@st.composite
def bodies(draw: st.DrawFn, schema: dict[str, Any]) -> bytes:
    if draw(st.booleans()):
        value = (
            drawn(draw, schema)
            if schema.get("properties")
            else {**TENSORS, draw(st.sampled_from([*TENSORS])): draw(ANY)}
        )
        if isinstance(value, dict) and "max_tokens" in schema.get("properties", {}):
            value = {"model": "lm", "max_tokens": 2, **value}
        return json.dumps(value).encode()
    photo = bytearray(PHOTO[: draw(st.sampled_from([len(PHOTO), 5000, 50]))])
    for _ in range(draw(st.integers(0, 4))):
        photo[draw(st.integers(0, len(photo) - 1))] = draw(st.integers(0, 255))
    return draw(st.binary(max_size=60) | st.just(bytes(photo)))


HEADERS = st.dictionaries(
    st.sampled_from(
        ["Content-Type", "Accept", "Content-Encoding", "Inference-Header-Content-Length", "Expect", "Origin", "Range"]
    ),
    st.sampled_from(
        ["application/json", "multipart/form-data", "multipart/form-data; boundary=x", "image/png", "gzip", "identity", "7", "-1", "*/*;q=x"]
    )
    | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12),
    max_size=3,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_no_request_is_a_fault_of_the_server(all_tasks, routes, client, data):
    path, method, schema = data.draw(st.sampled_from(routes))
    names = st.sampled_from(MODELS) | st.sampled_from(["none", "%00", "..", "a%2Fb", "%F0%9F%98%80", "{model}"])
    address = path.replace("{model}", data.draw(names))
    method = data.draw(st.just(method) | st.sampled_from(METHODS))
    content, headers = data.draw(bodies(schema)), data.draw(HEADERS)
    answer = client.request(method, all_tasks.url + address, content=content, headers=headers)
    said = (method, address, headers, content[:200], answer.text)
    assert answer.status_code < 500 or answer.status_code == 503, said
    health = client.get(f"{all_tasks.url}/health")
    assert (health.status_code, health.json()["ready"]) == (200, True)


def test_every_route_answers_nothing_and_nonsense(all_tasks, routes):
    for path, method, _ in routes:
        for content in (b"", b"{}", b"\xff\x00", b"[" * 2000):
            answer = httpx.request(
                method, all_tasks.url + path.replace("{model}", "affine"), content=content, **LOOPBACK, timeout=30
            )
            assert answer.status_code < 500, (method, path, content[:9], answer.text)
    assert all_tasks.get("/health").json()["ready"]
