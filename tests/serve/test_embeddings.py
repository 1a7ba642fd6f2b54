"""Embeddings of texts: programs that give them, and OpenAI's protocol."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from pydantic import ValidationError
from starlette.testclient import TestClient
from tests.serve.programs import language_model
from tests.serve.test_text import PROMPTS
from torch.nn import functional as F

from arclight.deploy import DynamicInt8, Program, ProgramError, WeightOnly
from arclight.deploy.programs.metadata import seal, unseal
from arclight.serve import Limits, models
from arclight.serve.admission import Refusal, Turn
from arclight.serve.app import build_app
from arclight.serve.middleware import Access
from arclight.serve.tasks.embeddings import EmbeddingRequest, embed
from arclight.serve.tasks.text import ChatRequest, CompletionRequest
from arclight.text.data.tokenizer import ByteTokenizer
from arclight.text.embedding_program import Embedder, export_embedding_model

TEXTS = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return language_model()


@pytest.fixture(scope="module")
def path(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("embeddings")
    return export_embedding_model(model, folder / "embed.onnx", [TEXTS], tokenizer=ByteTokenizer()).path


@pytest.fixture(scope="module")
def client(path, language_path):
    served = [models.load(name, one, Limits()) for name, one in (("embed", path), ("lm", language_path))]
    with TestClient(build_app(served, Limits(), Access())) as client:
        yield client


def reference(model, text: str) -> torch.Tensor:
    with torch.no_grad():
        return F.normalize(model.hidden(torch.tensor([list(text.encode())]))[0].mean(0), dim=0)


def ask(client, status: int = 200, **fields):
    answer = client.post("/v1/embeddings", json={"model": "embed"} | fields)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_embeddings_are_means_of_the_models_hidden_states(client, model):
    answer = ask(client, input=PROMPTS)
    vectors = torch.tensor([one["embedding"] for one in answer["data"]])
    torch.testing.assert_close(vectors, torch.stack([reference(model, text) for text in PROMPTS]), atol=2e-5, rtol=0)
    assert [one["index"] for one in answer["data"]] == list(range(5))
    count = sum(len(text.encode()) for text in PROMPTS)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (answer["object"], answer["model"], answer["data"][0]["object"]) == ("list", "embed", "embedding")


def test_embeddings_are_independent_of_the_batch(client):
    alone = ask(client, input="a")["data"][0]["embedding"]
    beside = ask(client, input=["a", "x" * 200])["data"][0]["embedding"]
    np.testing.assert_allclose(alone, beside, atol=1e-6)


def test_texts_and_token_ids_alone_or_several_give_the_same(client):
    forms = ["hello", ["hello"], list(b"hello"), [list(b"hello")]]
    found = [ask(client, input=form)["data"] for form in forms]
    assert all(one == found[0] for one in found)


def test_many_texts_keep_their_order(client):
    texts = [chr(97 + n % 26) * (1 + n * 7 % 23) for n in range(30)]
    together = [one["embedding"] for one in ask(client, input=texts)["data"]]
    for place in (0, 7, 29):
        np.testing.assert_allclose(together[place], ask(client, input=texts[place])["data"][0]["embedding"], atol=1e-6)


def test_base64_has_the_same_numbers_as_little_endian_floats(client):
    numbers = ask(client, input="hello", encoding_format="float")["data"][0]["embedding"]
    packed = ask(client, input="hello", encoding_format="base64", dimensions=64)["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.float32(numbers))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input": "a", "dimensions": 8}, "have 64 dimensions, not 8"),
        ({"input": ""}, "a text is empty"),
        ({"input": ["a", ""]}, "a text is empty"),
        ({"input": []}, "The field 'input' must be a text"),
        ({"input": [[]]}, "The field 'input' must be a text"),
        ({"input": ["a", 1]}, "The field 'input' must be a text"),
        ({"input": [1.5]}, "The field 'input' must be a text"),
        ({"input": ["a"] * 2049}, "of at most 2048"),
        ({}, "input"),
        ({"input": "x" * 257}, "257 tokens, and the model has 256 positions"),
        ({"input": [259]}, "259 is not a token id"),
        ({"input": [-1]}, "-1 is not a token id"),
        ({"input": "a", "encoding_format": "hex"}, "'encoding_format'"),
        ({"input": "a", "truncate": True}, "The field 'truncate' is not supported"),
        ({"input": "a"} | {f"a{n}": 1 for n in range(500)}, "500 fields of the request are wrong"),
        ({"input": "a", "model": "lm"}, "lm gives no embeddings; write a program of a language model's run that does by arclight export"),
    ],
)  # fmt: skip
def test_invalid_embedding_requests_are_refused_in_one_sentence(client, fields, sentence):
    error = ask(client, 400, **fields)["error"]
    assert sentence.lower() in error["message"].lower()
    assert error["type"] == "invalid_request_error"


def test_models_of_several_tasks_are_distinguished(client):
    assert "There is no model 'none'" in ask(client, 404, input="a", model="none")["error"]["message"]
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["embed", "lm"]
    assert client.get("/v1/models/embed").status_code == 200
    refused = client.post("/v1/completions", json={"model": "embed", "prompt": "a"})
    assert refused.status_code == 404
    assert "generates no text" in refused.json()["error"]["message"]
    assert [one["task"] for one in client.get("/models").json()] == ["embedding", "language"]
    assert "/v1/embeddings" in client.get("/v2/models/embed").json()["error"]
    assert client.post("/v1/embeddings", content=b"{" + b" " * 6_000_000).status_code == 413


def test_refusals_before_and_faults_behind_the_route_have_openais_form_too(path, monkeypatch):
    model = models.load("embed", path, Limits())
    body = {"model": "embed", "input": "a"}
    with TestClient(build_app([model], Limits(), Access(keys=("k" * 16,))), raise_server_exceptions=False) as client:
        refused = client.post("/v1/embeddings", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, 401)
        assert refused.json()["error"]["message"].startswith("The API key is missing")
        monkeypatch.setattr(model.embedder, "embed", lambda texts: 1 / 0)
        failed = client.post("/v1/embeddings", json=body, headers={"Authorization": "Bearer " + "k" * 16})
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
        assert client.get("/v1/embeddings").json()["error"]["code"] == 401
        assert isinstance(client.get("/v2").json()["error"], str)


@pytest.mark.parametrize("kind", [EmbeddingRequest, CompletionRequest, ChatRequest])
def test_a_million_wrong_elements_are_one_error_of_each_form(kind):
    items = "[" + ",".join(["1.5"] * 1000) + "]"
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(f'{{"model": "a", "input": {items}, "prompt": {items}, "messages": {items}}}')
    assert error.value.error_count() < 10


def test_the_deadline_ends_a_request_between_two_calls(path):
    embedder = Embedder(Program.load(path))
    turn = Turn(30)
    assert len(embed(embedder, [[1]] * 9, turn)) == 9
    turn.leave()
    with pytest.raises(Refusal, match="after 0 of 9 texts"):
        embed(embedder, [[1]] * 9, turn)


def test_programs_that_embed_and_that_generate_are_not_confused(path, language_path):
    with pytest.raises(ProgramError, match="is not a program of the task 'embedding'"):
        Embedder(Program.load(language_path))
    program = Program.load(path)
    program.metadata["max_positions"] = "256"
    with pytest.raises(ProgramError, match="max_positions as '256', and it is a number"):
        Embedder(program)


def test_a_new_version_keeps_its_dimensions(path, model):
    old = models.load("embed", path, Limits())
    models.check_replacement(old, old)
    new = models.load("embed", path, Limits())
    new.embedder.dimensions = 32
    with pytest.raises(ProgramError, match="have 32 dimensions"):
        models.check_replacement(old, new)


def with_weights(path, at, change):
    """The program at ``path``, written to ``at`` with the weights that ``change`` makes of its own."""
    described, graph = unseal(path)[0], onnx.load(path)
    del graph.metadata_props[:]
    for tensor in graph.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)
        if value.dtype == np.float32 and value.ndim == 2:
            tensor.CopyFrom(onnx.numpy_helper.from_array(change(value).astype(np.float32), tensor.name))
    onnx.save(graph, at)
    seal(at, {name: value for name, value in described.items() if name not in ("format", "files", "sha256")})
    return at


def rounded(weight):
    """A weight of 8 bits, a scale for each row."""
    scale = np.abs(weight).max(1, keepdims=True) / 127
    return np.round(weight / scale) * scale


def test_a_new_version_is_of_the_same_model(path, tmp_path):
    old = models.load("embed", path, Limits())
    same = with_weights(path, tmp_path / "rounded.onnx", rounded)
    models.check_replacement(old, models.load("embed", same, Limits()))
    numbers = np.random.default_rng(9)
    other = with_weights(path, tmp_path / "other.onnx", lambda weight: numbers.normal(0, 0.1, weight.shape))
    with pytest.raises(ProgramError, match=r"its vectors are another model's .* serve it by another name"):
        models.check_replacement(old, models.load("embed", other, Limits()))
    short, unlike = models.load("embed", path, Limits()), models.load("embed", other, Limits())
    for one in (old, unlike):  # no probe fits whole
        one.embedder.max_positions = 8
    with pytest.raises(ProgramError, match="its vectors are another model's"):
        models.check_replacement(old, unlike)
    short.embedder.max_positions = 7
    with pytest.raises(ProgramError, match="at most 7 tokens, and those that are served have 8"):
        models.check_replacement(old, short)


@pytest.mark.slow
def test_an_int8_version_is_of_the_same_model(path, model, tmp_path):
    same = export_embedding_model(model, tmp_path / "int8.onnx", [TEXTS], WeightOnly(), tokenizer=ByteTokenizer())
    old, new = models.load("embed", path, Limits()), models.load("embed", same.path, Limits())
    models.check_replacement(old, new)
    assert new.loaded.nbytes < old.loaded.nbytes


def test_a_program_without_vectors_embeds_nothing(path):
    program = Program.load(path)
    for shape in ((), ("batch",), ("batch", "time", 64)):
        program.outputs = (replace(program.outputs[0], shape=shape),)
        with pytest.raises(ProgramError, match="has other inputs or outputs"):
            Embedder(program)


def test_several_models_are_counted_as_embeddings(path):
    served = [models.load(name, path, Limits()) for name in ("one", "two")]
    app = build_app(served, Limits(), Access(loopback_only=False))
    with TestClient(app) as client:
        client.post("/v1/embeddings", json={"model": "one", "input": "a"})
        counted = [line for line in client.get("/metrics").text.splitlines() if '/v1/embeddings"' in line]
    assert any('model="embeddings"' in line for line in counted), counted


def test_a_vector_that_is_no_number_is_a_fault(path):
    embedder = Embedder(Program.load(path))
    embedder.embed = lambda texts: np.full((len(texts), 64), np.nan, np.float32)
    with pytest.raises(Refusal, match="NaN"):
        embed(embedder, [[1]], Turn(30))


def test_texts_of_a_program_that_rounds_a_call_together_are_computed_apart(model, tmp_path):
    program = export_embedding_model(model, tmp_path / "int8.onnx", [TEXTS], DynamicInt8(), tokenizer=ByteTokenizer())
    embedder = Embedder(program)
    together = embedder.embed([[1, 2, 3], [200, 7]])
    for vector, text in zip(together, ([1, 2, 3], [200, 7])):
        assert np.array_equal(vector, embedder.embed([text])[0])
    assert embedder.embed([]).shape == (0, 64)
