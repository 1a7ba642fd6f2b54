"""Requests beside what the OpenAPI document describes (`test_openapi`): none is a fault of the server, which answers afterwards.

Photos and tensors with something wrong in them, headers and names of models that no client sends, at every address.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.conftest import LOOPBACK, SAMPLES

PHOTO = (SAMPLES / "counter.jpg").read_bytes()
MODELS = ("codes", "affine", "lm", "embed")
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
def client() -> Iterator[httpx.Client]:
    """A client whose connections go on from one request to the next: what one leaves behind in its own, the next meets."""
    with httpx.Client(**LOOPBACK, timeout=30) as opened:
        yield opened


@pytest.fixture(scope="module")
def routes(all_tasks) -> list[tuple[str, str]]:
    """Every path of the document, with its methods."""
    paths = all_tasks.get("/openapi.json").json()["paths"]
    assert paths.keys() >= {"/detect", "/v2/models/{model}/infer", "/v1/chat/completions", "/v1/embeddings", "/metrics"}
    return [(path, method) for path, methods in paths.items() for method in methods]


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        return json.dumps({**TENSORS, draw(st.sampled_from([*TENSORS])): draw(ANY)}).encode()
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
    path, method = data.draw(st.sampled_from(routes))
    names = st.sampled_from(MODELS) | st.sampled_from(["none", "%00", "..", "a%2Fb", "%F0%9F%98%80", "{model}"])
    address = path.replace("{model}", data.draw(names))
    method = data.draw(st.just(method) | st.sampled_from(METHODS))
    content, headers = data.draw(bodies()), data.draw(HEADERS)
    answer = client.request(method, all_tasks.url + address, content=content, headers=headers)
    said = (method, address, headers, content[:200], answer.text)
    assert answer.status_code < 500 or answer.status_code == 503, said
    health = client.get(f"{all_tasks.url}/health")
    assert (health.status_code, health.json()["ready"]) == (200, True)


def test_every_route_answers_nothing_and_nonsense(all_tasks, routes):
    for path, method in routes:
        for content in (b"", b"{}", b"\xff\x00", b"[" * 2000):
            answer = httpx.request(
                method, all_tasks.url + path.replace("{model}", "affine"), content=content, **LOOPBACK, timeout=30
            )
            assert answer.status_code < 500, (method, path, content[:9], answer.text)
    assert all_tasks.get("/health").json()["ready"]
