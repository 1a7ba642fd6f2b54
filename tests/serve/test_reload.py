"""Programs replaced at their paths: no request fails, a bad program is refused, and the others are left alone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from onnx import TensorProto, helper, save
from tests.exports import compare_here
from tests.serve.conftest import LOOPBACK, SAMPLES, running
from tests.serve.programs import language_model, write_detector
from tests.serve.test_tensors import SERVE
from tests.serve.test_text import expected, post
from tests.waiting import wait_until
from torch import nn

from arclight.deploy import Program, ProgramError, export
from arclight.fabric.signing import SigningKey
from arclight.serve.models import Models, ServedModel, check_replacement
from arclight.serve.tasks.scheduler import Generation, Scheduler
from arclight.text.data.tokenizer import ByteTokenizer
from arclight.text.generation import GenerationSettings
from arclight.text.language_program import described

PHOTO = (SAMPLES / "counter.jpg").read_bytes()


class Times(nn.Module):
    """A model whose outputs tell which one it is."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(factor)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


class NaNAtZero(Times):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x * (x / x)


class Wide(Times):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.factor * x, x), 1)


def times(path: Path, model: nn.Module, **options: object) -> Path:
    names = {"input_names": ["x"], "output_names": ["y"]}
    export(model, path, example_inputs=torch.rand(2, 3), dynamic={"x": {0: "batch"}}, **names, **options)
    return path


def put(new: Path, at: Path) -> None:
    """Replace a program as a careful operator does: under its name it is whole at every moment."""
    if new.is_dir():
        shutil.copytree(new, at.with_suffix(".new"))
        at.rename(at.with_suffix(".old"))
        at.with_suffix(".new").rename(at)
        shutil.rmtree(at.with_suffix(".old"))
    else:
        shutil.copy(new, at.with_suffix(".new"))
        os.replace(at.with_suffix(".new"), at)


@pytest.fixture(scope="module", autouse=True)
def _in_this_process():
    """Compare what is written here in this process."""
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reload")
    (path / "serve.py").write_text(SERVE)
    for factor in (2, 3, 4):
        times(path / f"times-{factor}.onnx", Times(factor))
    times(path / "wide.onnx", Wide(2))
    times(path / "nan.onnx", NaNAtZero(2))
    return path


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[object]:
    program = str(folder / "serve.py")
    with running(*words, "--limits.reload_s=0.05", "--limits.queue=64", program=program) as server:
        yield server


def infer(server, name: str, client: httpx.Client) -> httpx.Response:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 1, 1]}]}
    return client.post(f"{server.url}/v2/models/{name}/infer", content=json.dumps(body))


def factor(server, name: str) -> float:
    with httpx.Client(**LOOPBACK) as client:
        return infer(server, name, client).json()["outputs"][0]["data"][0]


@pytest.mark.slow
def test_no_request_fails_while_programs_are_replaced_under_load(folder, one_box_path, tmp_path):
    put(folder / "times-2.onnx", tmp_path / "a.onnx")
    put(folder / "times-2.onnx", tmp_path / "b.onnx")
    put(one_box_path, tmp_path / "codes.onnx")
    write_detector(tmp_path / "other.onnx", task="detect", note="another file")
    stop, seen, failed = threading.Event(), Counter(), []

    def ask(name: str) -> None:
        with httpx.Client(**LOOPBACK, timeout=60) as client:
            while not stop.is_set():
                if name == "codes":
                    answer = client.post(f"{server.url}/detect", content=PHOTO)
                else:
                    answer = infer(server, name, client)
                if answer.status_code != 200:
                    failed.append((name, answer.status_code, answer.text))
                elif name != "codes":
                    data = answer.json()
                    seen[name, data["outputs"][0]["data"][0], data["model_version"]] += 1
                else:
                    seen[name] += 1

    words = [f"codes={tmp_path / 'codes.onnx'}", f"a={tmp_path / 'a.onnx'}", f"b={tmp_path / 'b.onnx'}"]
    with serving(folder, *words) as server, ThreadPoolExecutor(5) as clients:
        asked = [clients.submit(ask, name) for name in ("a", "a", "a", "b", "codes")]
        try:
            wait_until(lambda: factor(server, "a") == 2, "the first program answers")
            for new in (3, 4):
                put(folder / f"times-{new}.onnx", tmp_path / "a.onnx")
                wait_until(lambda new=new: factor(server, "a") == new, f"program {new} answers")
            put(tmp_path / "other.onnx", tmp_path / "codes.onnx")
            wait_until(
                lambda: server.metrics()["arclight_reloads_total", "codes", "replaced"] == 1, "the detector is replaced"
            )
        finally:
            stop.set()
        for one in asked:
            one.result()
        metrics = server.metrics()
    assert failed == []
    versions = {value: version for (name, value, version) in (key for key in seen if key != "codes") if name == "a"}
    assert sorted(versions) == [2, 3, 4]
    assert versions[3] == Program.load(folder / "times-3.onnx").digest[:12]
    assert len({version for name, _, version in (key for key in seen if key != "codes") if name == "a"}) == 3
    assert {value for name, value, _ in (key for key in seen if key != "codes") if name == "b"} == {2}
    assert metrics["arclight_reloads_total", "a", "replaced"] == 2
    assert metrics["arclight_reloads_total", "b", "replaced"] == 0


def bare(path: Path) -> None:
    """A model from elsewhere: nobody has compared it with anything."""
    y, x = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "yx")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", [x], [y])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


BAD = [
    "truncated",
    "NaN",
    "other task",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gone", "other outputs", "never compared")),
]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_program_is_refused_and_the_old_one_goes_on(folder, one_box_path, tmp_path, name):
    path = tmp_path / "a.onnx"
    put(folder / "times-2.onnx", path)
    with serving(folder, f"a={path}") as server:
        before = server.get("/v2/models/a").json()
        assert len(before["versions"][0]) == 12
        if name == "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        elif name == "gone":
            path.unlink()
        elif name == "other outputs":
            put(folder / "wide.onnx", path)
        elif name == "NaN":
            put(folder / "nan.onnx", path)
        elif name == "never compared":
            bare(tmp_path / "bare.onnx")
            os.replace(tmp_path / "bare.onnx", path)
        else:
            put(one_box_path, path)
        wait_until(lambda: server.metrics()["arclight_reloads_total", "a", "refused"] == 1, "it is refused")
        assert factor(server, "a") == 2
        assert server.get("/v2/models/a").json() == before
        put(folder / "times-4.onnx", path)
        wait_until(lambda: factor(server, "a") == 4, "a good one is taken afterwards")
        said = server.stop()
    assert f"a: the new program is refused, version {before['versions'][0]} goes on: " in said
    assert "Traceback" not in said


def test_only_programs_of_trusted_keys_replace_each_other(folder, tmp_path):
    key = SigningKey.make(tmp_path / "key.pem")
    for number in (2, 3):
        times(tmp_path / f"signed-{number}", Times(number), sign=tmp_path / "key.pem", format="onnx")
    unsigned = times(tmp_path / "unsigned", Times(4), format="onnx")
    path = tmp_path / "a"
    shutil.copytree(tmp_path / "signed-2", path)
    with serving(folder, f"a={path}", "--trust", key.public) as server:
        put(unsigned, path)
        wait_until(lambda: server.metrics()["arclight_reloads_total", "a", "refused"] == 1, "it is refused")
        assert factor(server, "a") == 2
        put(tmp_path / "signed-3", path)
        wait_until(lambda: factor(server, "a") == 3, "the signed one answers")
        assert "is not signed" in server.stop()


@pytest.fixture(scope="module")
def lm(language_path):
    return Program.load(language_path)


def test_no_text_fails_while_its_program_is_replaced(folder, lm, tmp_path):
    path = tmp_path / "lm.onnx"
    put(lm.path, path)
    stop, wrong, count = threading.Event(), [], Counter()
    wanted = expected(Program.load(lm.path, threads=1), "hello", 40)

    def ask(stream: bool) -> None:
        while not stop.is_set():
            answer = post(server, {"prompt": "hello", "max_tokens": 40, "temperature": 0, "stream": stream})
            got = streamed(answer.text) if stream else answer.json()["choices"][0]["text"]
            count[stream] += 1
            if got != wanted:
                wrong.append((answer.status_code, answer.text))

    with serving(folder, f"lm={path}", "--limits.streams=2") as server, ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(ask, stream) for stream in (True, True, False, False)]
        try:
            wait_until(lambda: count[True] and count[False], "texts are generated")
            for number in (1, 2):
                put(lm.path, path)
                wait_until(
                    lambda number=number: server.metrics()["arclight_reloads_total", "lm", "replaced"] == number,
                    "the program is replaced",
                )
        finally:
            stop.set()
        for one in asked:
            one.result()
    assert wrong == []


class Logits(nn.Module):
    """Computes what a language program does, but for the language; the vocabulary's first token gives 1 / ``offset``."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.tensor(offset))

    def forward(self, tokens, padding, past):
        logits = torch.ones(259) / (tokens[:, -1:] + self.offset + 0 * padding[:, None])
        return logits, torch.cat([past, tokens[:, None, :, None].float()], 2)


def language(path: Path, offset: float = 1.0, **metadata: object) -> ServedModel:
    """A model whose program says of itself what the one of ``lm`` does, but for ``metadata``."""
    kept = described(language_model(), ByteTokenizer())
    dynamic = {"tokens": {0: "batch", 1: "time"}, "padding": {0: "batch"}, "past": {0: "batch", 2: "past"}}
    inputs = (torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1, 4, 1))
    empty = (*inputs[:2], torch.zeros(2, 1, 0, 1))
    comparisons = {"empty": empty, "one": tuple(value[:1] for value in inputs)}
    export(
        Logits(offset), path, example_inputs=inputs, comparisons=comparisons, dynamic=dynamic, metadata=kept | metadata
    )
    return ServedModel(name="lm", text=Text(), loaded=Program.load(path))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"offset": 0.0}, "logits are NaN or infinite after one token"),
        ({"max_positions": 200}, "at most 200 tokens, and those that are served have 256"),
    ],
)
def test_a_language_program_that_breaks_its_clients_is_refused(lm, tmp_path, given, sentence):
    old = ServedModel(name="lm", text=Text(), loaded=lm)
    check_replacement(old, language(tmp_path / "same.onnx"))
    with pytest.raises(ProgramError, match=sentence):
        check_replacement(old, language(tmp_path / "new.onnx", **given))


def streamed(text: str) -> str:
    *lines, _ = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


def test_texts_that_wait_when_their_program_leaves_are_begun_and_finished(lm):
    scheduler, ended = Scheduler(lm, streams=1, queue=3, prefix_cache_bytes=0), []
    generations = [
        Generation(
            [65 + number], 8, GenerationSettings(temperature=0), lambda piece: piece.finish and ended.append(piece)
        )
        for number in range(4)
    ]
    scheduler.submit(generations)
    scheduler.start()
    scheduler.close(waiting=True)
    assert [(piece.tokens, piece.finish) for piece in ended] == [(8, "length")] * 4


class Text:
    """A scheduler that is asked to end."""

    def __init__(self) -> None:
        self.ended = False

    def close(self, *, waiting: bool = False) -> None:
        self.ended = True


def test_a_program_that_is_replaced_waits_for_requests_that_have_not_queued_their_texts():
    old = ServedModel(name="lm", text=Text())

    async def scenario() -> None:
        models = Models({"lm": old})
        with models.text_request():
            retiring = asyncio.create_task(models._retire(old))
            await asyncio.sleep(0.05)
            with models.text_request():  # of the new program, which the old one need not wait for
                await asyncio.sleep(0)
            assert not old.text.ended
        await retiring
        assert old.text.ended

    asyncio.run(scenario())


def test_a_program_that_is_loaded_as_the_server_ends_is_ended_too(lm, monkeypatch):
    old = ServedModel(name="lm", text=Text(), loaded=lm)
    new = ServedModel(name="lm", text=Text(), loaded=lm)
    monkeypatch.setattr("arclight.serve.models.start", lambda _: None)

    async def scenario() -> None:
        models = Models({"lm": old}, lambda old: new)
        await models.close()
        models._prepared(old)

    asyncio.run(scenario())
    assert new.text.ended
