"""Texts by OpenAI's protocol: the tokens of `generate`, together or streamed, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
from starlette.testclient import TestClient
from tests.serve.conftest import LOOPBACK, running
from tests.serve.programs import write_language_program
from tests.serve.test_tensors import SERVE
from tests.shared import made_once
from tests.waiting import wait_until

from arclight.deploy import DynamicInt8, Program, ProgramError
from arclight.serve import Limits
from arclight.serve.admission import Refusal
from arclight.serve.app import ServedModel, build_app
from arclight.serve.middleware import Access
from arclight.serve.tasks import scheduler
from arclight.serve.tasks.scheduler import Generation, Piece, Scheduler
from arclight.serve.tasks.text import ChatRequest, decode
from arclight.text import generate
from arclight.text.data.tokenizer import ByteTokenizer
from arclight.text.generation import GenerationSettings
from arclight.text.language_program import tokenizer_of

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('roles are user and assistant') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
PROMPTS = ["hello", "a", "The quick brown fox", "x" * 40, "zz"]
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    (path / "serve.py").write_text(SERVE)
    return path


@pytest.fixture(scope="module")
def program(language_path):
    return Program.load(language_path, threads=1)


@pytest.fixture(scope="module")
def lm(folder, language_path):
    with running(f"lm={language_path}", "--limits.streams=3", program=str(folder / "serve.py")) as server:
        yield server


def expected(program: Program, prompt: str, new: int = NEW, **options: object) -> str:
    return generate(program, tokenizer_of(program), prompt, new, **{"temperature": 0, **options})


def post(server, body: dict[str, object], path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(server.url + path, json={"model": "lm"} | body, **LOOPBACK, timeout=60)


def events(server, body: dict[str, object], path: str = "/v1/completions") -> list[dict[str, object]]:
    answer = post(server, body | {"stream": True}, path)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


def test_completions_have_the_tokens_of_generate(lm, program):
    answer = post(lm, {"prompt": PROMPTS[2], "max_tokens": NEW, "temperature": 0}).json()
    [choice] = answer["choices"]
    assert choice == {"index": 0, "text": expected(program, PROMPTS[2]), "logprobs": None, "finish_reason": "length"}
    assert answer["usage"] == {"prompt_tokens": 19, "completion_tokens": NEW, "total_tokens": 19 + NEW}
    assert (answer["object"], answer["model"]) == ("text_completion", "lm")


def test_texts_that_join_and_leave_each_other_have_the_tokens_of_generate(lm, program):
    def one(place: int) -> str:
        time.sleep(0.01 * place)
        return post(lm, {"prompt": PROMPTS[place], "max_tokens": NEW - place, "temperature": 0}).json()["choices"][0][
            "text"
        ]

    with ThreadPoolExecutor(5) as threads:
        texts = [*threads.map(one, range(5))]
    assert texts == [expected(program, prompt, NEW - place) for place, prompt in enumerate(PROMPTS)]
    several = post(lm, {"prompt": PROMPTS, "max_tokens": NEW, "temperature": 0}).json()
    assert [choice["text"] for choice in several["choices"]] == [expected(program, prompt) for prompt in PROMPTS]


def test_seeds_sample_as_generate_does(lm, program):
    body = {
        "prompt": "hello",
        "max_tokens": float(NEW),
        "temperature": 0.9,
        "top_p": 0.8,
        "seed": 7.0,
    }  # integers of JSON Schema
    text = post(lm, body).json()["choices"][0]["text"]
    assert text == expected(program, "hello", temperature=0.9, top_p=0.8, seed=7)


def test_a_stream_has_the_same_text_and_its_usage(lm, program):
    body = {"prompt": "hello", "max_tokens": NEW, "temperature": 0, "stream_options": {"include_usage": True}}
    *pieces, usage = events(lm, body)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected(program, "hello")
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-2:] == [None, "length"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], NEW)
    assert len({piece["id"] for piece in pieces}) == 1


def test_a_text_of_stop_ends_a_text_and_is_not_in_it(lm, program):
    whole = expected(program, PROMPTS[2])
    stop = whole[len(whole) // 2 :][:2]
    assert len(stop) == 2
    body = {"prompt": PROMPTS[2], "max_tokens": NEW, "temperature": 0, "stop": [stop]}
    [choice] = post(lm, body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert "".join(event["choices"][0]["text"] for event in events(lm, body)) == choice["text"]


def test_token_ids_are_prompts_too(lm, program):
    body = {"prompt": [list(b"hello"), list(b"a")], "max_tokens": 5, "temperature": 0}
    texts = [choice["text"] for choice in post(lm, body).json()["choices"]]
    assert texts == [expected(program, prompt, 5) for prompt in ("hello", "a")]


def test_models_are_listed(lm):
    [model] = lm.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("lm", "model")
    assert lm.get("/v1/models/lm").json() == model
    assert lm.get("/v1/models/none").json()["error"]["message"].startswith("There is no model 'none' here")


def test_a_language_program_takes_no_tensors(lm):
    answer = httpx.post(f"{lm.url}/v2/models/lm/infer", content=b"{}", **LOOPBACK)
    assert (answer.status_code, "texts go to POST /v1/completions" in answer.text) == (404, True)


BAD = {
    "no prompt": {"prompt": None},
    "no prompts": {"prompt": []},
    "a number": {"prompt": 5},
    "mixed prompts": {"prompt": ["a", 5]},
    "a token that is none": {"prompt": [[999]]},
    "a negative token": {"prompt": [-1]},
    "a huge token": {"prompt": [10**30]},
    "no tokens": {"max_tokens": 0},
    "a text for a number": {"max_tokens": "5"},
    "more tokens than positions": {"max_tokens": 300},
    "a prompt longer than the positions": {"prompt": "x" * 300},
    "another temperature": {"temperature": -1},
    "a temperature that is NaN": {"temperature": float("nan")},
    "top_p of 0": {"top_p": 0},
    "an empty stop": {"stop": ""},
    "a long stop": {"stop": "x" * 257},
    "many stops": {"stop": ["x"] * 17},
    "a huge seed": {"seed": 2**63},
    "a broken seed": {"seed": 7.5},
    "a seed that is true": {"seed": True},
    "several answers": {"n": 2},
    "a penalty": {"presence_penalty": 0.5},
    "log probabilities": {"logprobs": 3},
    "a number for false": {"echo": 0},
    "an unknown field": {"tools": []},
    "a lone surrogate": {"prompt": "\ud800"},
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_are_refused_by_name(lm, name, stream):
    content = json.dumps({"model": "lm", "prompt": "a", "max_tokens": 3, "stream": stream} | BAD[name])
    answer = httpx.post(f"{lm.url}/v1/completions", content=content, **LOOPBACK)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", 400), answer.text
    assert error["message"].endswith(".")


def test_a_field_with_several_forms_is_refused_by_each_of_them(lm):
    answer = post(lm, {"model": "lm", "prompt": "a", "stop": ["x"] * 17})
    message = answer.json()["error"]["message"]
    assert message.startswith("The field 'stop' has none of its forms: input should be a valid string, or list should ")
    assert "at most 16 items" in message


def test_a_request_for_too_many_tokens_is_refused_by_its_own_field(lm):
    completion = post(lm, {"prompt": "a", "max_tokens": 300})
    assert (completion.status_code, "shorten it, or lower max_tokens to " in completion.text) == (400, True)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"model": "lm"}'])
def test_malformed_requests_are_refused(lm, content):
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert httpx.post(lm.url + path, content=content, **LOOPBACK).status_code == 400


def test_models_and_routes_that_are_not_there_are_refused_by_name(lm):
    assert post(lm, {"model": "none", "prompt": "a"}).status_code == 404
    assert "lm gives no embeddings" in post(lm, {"input": "a"}, "/v1/embeddings").text
    chat = post(lm, {"messages": [{"role": "user", "content": "a"}]}, "/v1/chat/completions")
    assert (chat.status_code, "has no chat template" in chat.text) == (400, True)


def test_a_client_that_leaves_frees_its_place(lm):
    for stream in (True, False):
        body = json.dumps(
            {"model": "lm", "prompt": "a", "max_tokens": 250, "temperature": 0, "stream": stream}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with lm.connect() as connection:
            connection.sendall(head + body)
        begun = time.monotonic()
        assert post(lm, {"prompt": "b", "max_tokens": 2}).status_code == 200
        assert time.monotonic() - begun < 60
    wait_until(lambda: lm.in_flight() == 0, "nobody is waited for")


class Texts:
    """A scheduler, and what it has told about each generation."""

    def __init__(self, program: Program, **sizes: int) -> None:
        self.scheduler = Scheduler(program, **({"streams": 2, "queue": 3, "prefix_cache_bytes": 10**6} | sizes))
        self.scheduler.start()
        self.told: list[list[Piece]] = []
        self.step = threading.Semaphore(0)

    def ask(self, prompt: str, new: int = NEW, *, count: int = 1) -> list[Generation]:
        asked = []
        for _ in range(count):
            pieces: list[Piece] = []
            self.told.append(pieces)
            settings = GenerationSettings(temperature=0.0)
            asked.append(Generation(list(prompt.encode()), new, settings, pieces.append))
        self.scheduler.submit(asked)
        return asked

    def accepts_another(self) -> bool:
        """Ask for a text; return False if there is no place for it yet."""
        try:
            self.ask("a")
        except Refusal:
            self.told.pop()
            return False
        return True

    def ended(self) -> bool:
        return all(pieces and pieces[-1].finish for pieces in self.told)


@pytest.fixture
def texts(program):
    texts = Texts(program)
    yield texts
    texts.scheduler.close()


def test_more_texts_than_may_wait_are_refused(texts):
    texts.ask("a", 200, count=5)
    with pytest.raises(Refusal, match="All places for texts are taken") as refused:
        texts.ask("b")
    assert (refused.value.status, int(refused.value.headers["Retry-After"]) >= 1) == (429, True)
    with pytest.raises(Refusal, match="The request has 6 prompts; send at most 5"):
        texts.ask("b", count=6)
    del texts.told[5:]
    wait_until(texts.ended, "all five have been generated")
    assert [len(pieces) for pieces in texts.told] == [200] * 5


def test_cancelled_texts_leave_their_places_and_the_others_alone(texts, program):
    first, _, *waiting = texts.ask("hello", 200, count=5)
    wait_until(lambda: texts.told[0] and texts.told[1], "two texts are in progress")
    for one in (first, *waiting):
        one.cancel()
    del texts.told[2:], texts.told[0]
    wait_until(texts.accepts_another, "the places are free")
    wait_until(texts.ended, "what is left has been generated")
    for pieces, prompt, new in zip(texts.told, ("hello", "a"), (200, NEW), strict=True):
        assert "".join(piece.text for piece in pieces) == expected(program, prompt, new)


def test_a_text_that_is_cancelled_by_its_first_piece_leaves_once(texts, program):
    [asked] = texts.ask("hello")
    asked.on_piece = lambda _: asked.cancel()
    texts.told.clear()
    texts.ask("a", count=4)
    wait_until(texts.ended, "the others have been generated")
    assert {"".join(piece.text for piece in pieces) for pieces in texts.told} == {expected(program, "a")}
    texts.ask("a", count=5)  # every place is free again
    wait_until(texts.ended, "all have been generated")


def test_a_fault_of_the_program_ends_the_texts_and_not_the_scheduler(texts, monkeypatch, program):
    monkeypatch.setattr(Program, "__call__", lambda *_: (_ for _ in ()).throw(ProgramError("no memory")))
    texts.ask("a", count=2)
    wait_until(texts.ended, "both have ended")
    assert {pieces[-1].finish for pieces in texts.told} == {"error"}
    monkeypatch.undo()
    texts.told.clear()
    texts.ask("a")
    wait_until(texts.ended, "the next is generated")
    assert "".join(piece.text for piece in texts.told[0]) == expected(program, "a")


def test_a_closed_scheduler_ends_what_waits(program):
    texts = Texts(program, streams=1)
    texts.ask("a", 100, count=3)
    texts.scheduler.close()
    assert texts.ended()
    with pytest.raises(Refusal, match="The server stops"):
        texts.ask("a")


def test_a_closed_scheduler_begins_nothing_beside_what_goes_on(program):
    texts = Texts(program, streams=2)
    texts.ask("a", 10)
    texts.ask("a", 200)
    wait_until(lambda: texts.told[0] and texts.told[1], "two texts are in progress")
    texts.ask("a", 20, count=2)
    texts.scheduler.close()
    assert [pieces[-1].finish for pieces in texts.told] == ["length", "length", "error", "error"]


def test_a_finished_text_is_unaffected_by_the_error_of_another(texts, monkeypatch):
    """The first text ends on the step on which the second fails."""
    texts.told = [[], []]
    settings = GenerationSettings(temperature=0.0)
    first, second = (
        Generation(list(b"a"), new, settings, told.append) for new, told in zip((4, 100), texts.told, strict=True)
    )
    add = Scheduler._add

    def faulty(self, generation, logits):
        if generation is second and first.tokens == 4:
            raise MemoryError
        return add(self, generation, logits)

    monkeypatch.setattr(Scheduler, "_add", faulty)
    texts.scheduler.submit([first, second])
    wait_until(texts.ended, "both have ended")
    assert [piece.finish for piece in texts.told[0]] == [None, None, None, "length"]
    assert texts.told[1][-1].finish == "error"
    texts.told.clear()
    texts.ask("a", 2, count=5)  # every place is free, and there are no more of them
    with pytest.raises(Refusal, match="All places for texts are taken"):
        texts.ask("a", 2)


class Leaving(Generation):
    """A text whose client leaves between two looks at it."""

    looks = 0

    @property
    def is_cancelled(self) -> bool:
        self.looks += 1
        return self.looks % 2 == 0 and self.tokens > 0

    @is_cancelled.setter
    def is_cancelled(self, value: bool) -> None:
        pass


def test_a_client_that_leaves_at_any_moment_frees_its_place(texts):
    left = [Leaving(list(b"a"), 50, GenerationSettings(temperature=0.0), lambda _: None) for _ in range(5)]
    for one in left:
        texts.scheduler.submit([one])
    wait_until(lambda: not texts.scheduler._held, "every place is free")
    assert all(0 < one.tokens < 50 for one in left), "none was generated to its end"


def test_a_long_prompt_is_read_in_chunks_between_the_steps_of_others(texts, program, monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 16)
    texts.ask("hello", 100)
    texts.ask("y" * 100, 20)
    wait_until(texts.ended, "both have been generated")
    assert ["".join(piece.text for piece in pieces) for pieces in texts.told] == [
        expected(program, "hello", 100),
        expected(program, "y" * 100, 20),
    ]


@pytest.mark.parametrize(("padding", "most"), [(60, 2), (1000, 3)])
def test_texts_of_very_different_length_are_computed_apart(program, monkeypatch, padding, most):
    monkeypatch.setattr(scheduler, "MAX_PADDING", padding)
    shapes, call = set(), Program.__call__

    def noted(self, tokens, *inputs):
        shapes.add((len(tokens), inputs[1].shape[2]))
        return call(self, tokens, *inputs)

    prompts = ["hello", "y" * 150, "a" * 20]
    want = [expected(program, prompt, 90) for prompt in prompts]
    monkeypatch.setattr(Program, "__call__", noted)
    texts = Texts(program, streams=3)
    for prompt in prompts:
        texts.ask(prompt, 90)
    wait_until(texts.ended, "all have been generated")
    texts.scheduler.close()
    assert max(rows for rows, _ in shapes) == most
    assert (max(rows for rows, held in shapes if held > 150) == 1) == (most == 2)
    assert ["".join(piece.text for piece in pieces) for pieces in texts.told] == want


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Return how many tokens of one text the program has read in each call for more than one."""
    lengths, call = [], Program.__call__

    def counted(self, tokens, *inputs):
        lengths.extend([tokens.shape[1]] * (tokens.shape[1] > 1))
        return call(self, tokens, *inputs)

    monkeypatch.setattr(Program, "__call__", counted)
    return lengths


def answered(texts: Texts, prompts: list[str]) -> list[str]:
    """Return the texts after prompts, each asked for once the one before has ended."""
    del texts.told[:]
    for prompt in prompts:
        texts.ask(prompt)
        wait_until(texts.ended, "the text has been generated")
    return ["".join(piece.text for piece in pieces) for pieces in texts.told]


@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [
        (["y" * 60 + "abc", "y" * 60 + "dz", "y" * 60 + "abc" + "x" * 20], [63, 2, 20]),
        (["y" * 60, "z" * 40, "y" * 70], [60, 40, 10]),
        (["y" * 60] * 3, [60]),  # from the last token, whose logits are needed
        (["y" * 31 + "abc", "y" * 31 + "dz"], [34, 33]),  # too few to look for
    ],
)
def test_the_beginning_that_prompts_share_is_read_once(texts, program, read, prompts, lengths):
    found = answered(texts, prompts)
    assert read == lengths
    assert found == [expected(program, prompt) for prompt in prompts]


@pytest.mark.parametrize(("held", "lengths"), [(0, [60, 60]), (2, [60, 40, 50, 60]), (3, [60, 40, 50])])
def test_least_recently_used_prompts_leave_a_full_prefix_cache(program, read, held, lengths):
    prompts = ["y" * 60, "z" * 40, "x" * 50, "y" * 60] if held else ["y" * 60] * 2
    texts = Texts(program, prefix_cache_bytes=held * 60 * token_bytes(program))
    answered(texts, prompts)
    texts.scheduler.close()
    assert read == lengths


def test_a_prompt_beyond_the_prefix_cache_drives_no_other_out(program, read):
    texts = Texts(program, prefix_cache_bytes=70 * token_bytes(program))
    answered(texts, ["y" * 60, "y" * 60 + "z" * 20, "y" * 65])
    texts.scheduler.close()
    assert read == [60, 20, 5]


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory) -> Program:
    path = made_once(tmp_path_factory, "lm-dynamic.onnx", lambda path: write_language_program(path, DynamicInt8()))
    return Program.load(path, threads=1)


def test_texts_of_a_program_that_rounds_them_together_do_not_depend_on_each_other(dynamic, read):
    prompts = [*PROMPTS, "y" * 60 + "abc", "y" * 60 + "dz"]
    want = [expected(dynamic, prompt) for prompt in prompts]
    del read[:]
    texts = Texts(dynamic, streams=len(prompts))
    for prompt in prompts:
        texts.ask(prompt)
    wait_until(texts.ended, "all have been generated")
    texts.scheduler.close()
    assert ["".join(piece.text for piece in pieces) for pieces in texts.told] == want
    assert sorted(read) == sorted(len(prompt) for prompt in prompts if len(prompt) > 1)


def test_a_fault_of_the_prefix_cache_ends_a_text_and_not_the_scheduler(texts, program, monkeypatch):
    answered(texts, ["y" * 60])
    monkeypatch.setattr(np, "ascontiguousarray", lambda _: (_ for _ in ()).throw(MemoryError))
    texts.ask("y" * 70)
    wait_until(texts.ended, "the text has ended")
    assert texts.told[-1][-1].finish == "error"
    monkeypatch.undo()
    assert answered(texts, ["y" * 70]) == [expected(program, "y" * 70)]


def token_bytes(program: Program) -> int:
    """Return the size of what a program caches of one token."""
    return sum(4 * int(spec.shape[1]) * int(spec.shape[3]) for spec in program.inputs[2:])


def test_chats_are_written_by_the_template(program):
    tokenizer = ByteTokenizer()
    tokenizer.chat_templates = {"default": TEMPLATE}
    body = {"model": "lm", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    asked = decode(json.dumps(body).encode(), ChatRequest, lambda _: Chatting(program, tokenizer), Limits())
    assert asked.prompts == [[256, *b"[user] hi\n[assistant] "]]
    assert asked.new == 256 - len(asked.prompts[0])
    body["messages"][0]["role"] = "tool"
    with pytest.raises(Refusal, match="refuses these messages: roles are user and assistant"):
        decode(json.dumps(body).encode(), ChatRequest, lambda _: Chatting(program, tokenizer), Limits())


@pytest.mark.parametrize(
    "wrong", ["{{ messages[0].content + 1 }}", "{{ 1 / messages[0].content | int }}", "{{ range(messages[0].content | length * 100001) }}"]
)  # fmt: skip
def test_messages_that_a_template_fails_on_are_refused(program, wrong):
    tokenizer = ByteTokenizer()
    tokenizer.chat_templates = {"default": wrong}
    body = {"model": "lm", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(Refusal, match="chat template refuses these messages: ") as caught:
        decode(json.dumps(body).encode(), ChatRequest, lambda _: Chatting(program, tokenizer), Limits())
    assert caught.value.status == 400


class Chatting(Scheduler):
    """A scheduler whose tokenizer has a template of chats."""

    def __init__(self, program: Program, tokenizer: ByteTokenizer) -> None:
        super().__init__(program, streams=1, queue=1, prefix_cache_bytes=0)
        self.tokenizer = tokenizer


def test_a_chat_is_answered_and_streamed(program):
    tokenizer = ByteTokenizer()
    tokenizer.chat_templates = {"default": TEMPLATE}
    app = build_app([ServedModel(name="chat", text=Chatting(program, tokenizer))], Limits(), Access())
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "temperature": 0,
    }
    with TestClient(app) as client:
        answer = client.post("/v1/chat/completions", json=body).json()
        streamed = client.post("/v1/chat/completions", json=body | {"stream": True}).text
    [text] = expected(program, [[256, *b"[user] hi\n[assistant] "]], 9)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert answer["object"] == "chat.completion"
    *pieces, last = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    deltas = [json.loads(piece)["choices"][0]["delta"] for piece in pieces]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert ("".join(delta["content"] for delta in deltas), last) == (text, "[DONE]")


def test_clients_that_do_not_read_lose_their_connections(folder, affine_path):
    words = [f"a={affine_path}", "--limits.reader_stall_s=1"]
    item = {"name": "x", "datatype": "FP32", "shape": [2_000_000, 3], "parameters": {"binary_data_size": 24_000_000}}
    head = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
    request = (
        f"POST /v2/models/a/infer HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: {len(head)}\r\n"
        f"Content-Length: {len(head) + 24_000_000}\r\n\r\n"
    ).encode()
    with running(*words, program=str(folder / "serve.py")) as server, server.connect() as stalled:
        stalled.sendall(request + head + bytes(24_000_000))
        assert stalled.recv(15) == b"HTTP/1.1 200 OK"

        def open_connections() -> int:
            held = psutil.Process(server.process.pid).net_connections("tcp")
            return sum(one.status == psutil.CONN_ESTABLISHED for one in held)

        assert open_connections() == 1
        wait_until(lambda: open_connections() == 0, "the connection has been closed")
