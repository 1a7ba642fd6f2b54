"""Several models by name: tensors by the Open Inference Protocol, photos by YOLOv5's address."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import numpy as np
import onnx
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.conftest import LOOPBACK, running
from tests.serve.programs import Affine

from arclight import cli
from arclight.deploy import Program, export
from arclight.deploy.programs.session import TensorSpec
from arclight.fabric.serving.listening import reserve_address
from arclight.serve import Limits, models
from arclight.serve.admission import LatencyWindow, Refusal
from arclight.serve.app import ServedModel, build_app
from arclight.serve.middleware import Access
from arclight.serve.tasks import tensors

SERVE = """
import argparse
from arclight.cli import main
parser = argparse.ArgumentParser()
parser.add_argument("--port")
parser.add_argument("--limits")
options, models = parser.parse_known_args()
raise SystemExit(main(["serve", *models, "--port", options.port, "--limits.queue", "4"]))
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory, one_box_path, affine_path):
    folder = tmp_path_factory.mktemp("two")
    (folder / "serve.py").write_text(SERVE)
    with running(f"codes={one_box_path}", f"affine={affine_path}", program=str(folder / "serve.py")) as server:
        yield server


def infer(server, content: bytes, model: str = "affine", **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v2/models/{model}/infer", content=content, headers=headers, **LOOPBACK)


def tensor(**changes: object) -> dict[str, object]:
    return {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [0, 1, 2, 3, 4, 0.5]} | changes


def test_json_tensors_are_computed(two):
    answer = infer(two, json.dumps({"id": "a", "inputs": [tensor()]}).encode())
    assert answer.status_code == 200, answer.text
    [output] = answer.json()["outputs"]
    assert output == {"name": "y", "datatype": "FP32", "shape": [2, 3], "data": [1, 3, 5, 7, 9, 2]}
    assert (answer.json()["id"], answer.json()["model_name"]) == ("a", "affine")


def test_binary_tensors_are_computed(two):
    x = np.random.default_rng(0).standard_normal((4, 3), np.float32)
    item = {"name": "x", "datatype": "FP32", "shape": [4, 3], "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
    answer = infer(two, head + x.tobytes(), **{"Inference-Header-Content-Length": str(len(head))})
    size = int(answer.headers["inference-header-content-length"])
    [output] = json.loads(answer.content[:size])["outputs"]
    assert output["shape"] == [4, 3]
    assert output["parameters"] == {"binary_data_size": x.nbytes}
    np.testing.assert_allclose(np.frombuffer(answer.content[size:], np.float32).reshape(4, 3), 2 * x + 1, rtol=1e-6)


def test_numbers_in_json_have_the_bits_of_the_output(two):
    x = np.random.default_rng(0).standard_normal(30, np.float32)
    answer = infer(two, json.dumps({"inputs": [tensor(shape=[10, 3], data=x.tolist())]}).encode())
    assert np.array_equal(np.array(answer.json()["outputs"][0]["data"], np.float32), 2 * x + 1)


def test_infinite_outputs_are_null_in_json(two):
    answer = infer(two, json.dumps({"inputs": [tensor(shape=[1, 3], data=[3e38, 0, 1e300])]}).encode())
    assert answer.json()["outputs"][0]["data"] == [None, 1, None]


BAD = {
    "not JSON": b"{",
    "deep": b"[" * 100_000,
    "NaN, which JSON has not": {"inputs": [tensor(data=[float("nan")] * 6)]},
    "a float beyond all types": json.dumps({"inputs": [tensor()]}).replace("0.5", "1e400").encode(),
    "no inputs": b"{}",
    "another name": {"inputs": [tensor(name="z")]},
    "twice": {"inputs": [tensor(), tensor()]},
    "missing": {"inputs": []},
    "another datatype": {"inputs": [tensor(datatype="FP64")]},
    "unknown datatype": {"inputs": [tensor(datatype="BYTES")]},
    "too few": {"inputs": [tensor(data=[1])]},
    "texts": {"inputs": [tensor(data=["1"] * 6)]},
    "a long text among numbers": {"inputs": [tensor(data=["a" * 1_000_000] + [0] * 100_000)]},
    "a boolean among numbers": {"inputs": [tensor(data=[True, 1, 2, 3, 4, 5])]},
    "a number beyond all types": {"inputs": [tensor(data=[10**400] * 6)]},
    "lists of another depth": {"inputs": [tensor(data=[[1, 2, 3], [4, 5, [6]]])]},
    "outputs that are not a list": {"inputs": [tensor()], "outputs": 0},
    "ragged": {"inputs": [tensor(data=[[1, 2, 3], [4]])]},
    "another shape": {"inputs": [tensor(shape=[3, 2])]},
    "negative shape": {"inputs": [tensor(shape=[-2, -3])]},
    "an empty shape beyond what NumPy counts": {"inputs": [tensor(shape=[0, *[2**31 - 1] * 5], data=[])]},
    "too many dimensions": {"inputs": [tensor(shape=[1] * 99 + [6])]},
    "unknown output": {"inputs": [tensor()], "outputs": [{"name": "z"}]},
    "bytes that are not there": {"inputs": [tensor(parameters={"binary_data_size": 24})]},
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_tensors_are_refused_in_one_sentence(two, name):
    content = BAD[name] if isinstance(BAD[name], bytes) else json.dumps(BAD[name]).encode()
    answer = infer(two, content)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"].endswith(".")
    assert "\n" not in answer.json()["error"]


def test_empty_tensors_have_no_sizes_beyond_those_of_full_ones():
    """Outputs may be as large as these sizes, such as the sums of rows without elements."""
    program = SimpleNamespace(inputs=(TensorSpec("x", "float32", ("rows", "columns")),), outputs=())

    def decoded(*shape: int) -> tuple[int, ...]:
        body = json.dumps({"inputs": [tensor(shape=shape, data=[])]}).encode()
        return tensors.decode(body, None, program, Limits()).inputs[0].shape

    assert decoded(1000, 0) == (1000, 0)
    with pytest.raises(Refusal, match="'x' is empty, and its other sizes are too large"):
        decoded(2**31 - 1, 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["name", "data", "x"]), inner),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(["name", "datatype", "shape", "data", "parameters"]), value=JSON, tail=st.binary(max_size=9),
    size=st.none() | st.integers(-2, 300),
)  # fmt: skip
def test_no_request_is_a_fault_of_the_server(two, key, value, tail, size):
    content = json.dumps({"inputs": [tensor(**{key: value})]}).encode() + tail
    headers = {} if size is None else {"Inference-Header-Content-Length": str(size)}
    assert infer(two, content, **headers).status_code in (200, 400)


WIDTHS = {"INT16": np.int16, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "INT8": np.int8}


@pytest.mark.parametrize("datatype", WIDTHS)
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_integers_of_every_width_are_answered_as_they_were_sent(datatype, runtime, tmp_path):
    dtype = np.dtype(WIDTHS[datatype])
    kind, bounds = onnx.helper.np_dtype_to_tensor_dtype(dtype), np.iinfo(dtype)
    x, y = (onnx.helper.make_tensor_value_info(name, kind, ["n"]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Unsqueeze", ["x", "axis"], ["z"]),
                                    onnx.helper.make_node("Squeeze", ["z", "axis"], ["y"])],
                                   "same", [x], [y], [onnx.numpy_helper.from_array(np.array([0]), "axis")])  # fmt: skip
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9),
        tmp_path / "p.onnx",
    )
    program, values = Program.load(tmp_path / "p.onnx", runtime=runtime), [bounds.min, 7, bounds.max]
    item = {"name": "x", "datatype": datatype, "shape": [3], "data": values}

    def answered(content: bytes, size: bytes | None) -> tuple[bytes, int | None]:
        request = tensors.decode(content, size, program, Limits())
        return tensors.encode(request, tensors.compute(program, request.inputs), program, "m", "1")

    content, _ = answered(json.dumps({"inputs": [item]}).encode(), None)
    assert json.loads(content)["outputs"] == [item | {"name": "y"}]
    held = np.array(values, dtype).tobytes()
    sent = item | {"parameters": {"binary_data_size": len(held)}}
    del sent["data"]
    head = json.dumps({"inputs": [sent], "parameters": {"binary_data_output": True}}).encode()
    content, size = answered(head + held, b"%d" % len(head))
    assert content[size:] == held
    for wrong in (bounds.min - 1, bounds.max + 1, 1.5, True):
        with pytest.raises(Refusal, match=f"numbers that {dtype} can hold"):
            answered(json.dumps({"inputs": [item | {"data": [0, 1, wrong]}]}).encode(), None)


def test_models_are_described_and_unknown_ones_are_404(two):
    assert two.get("/v2/health/ready").json() == {"ready": True}
    assert two.get("/v2/models/affine").json()["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    for path in ("/v2/models/none", "/v2/models/none/ready"):
        assert two.get(path).status_code == 404
    assert infer(two, b"{}", model="none").json() == {
        "error": "There is no model 'none' here; there are codes, affine."
    }


@pytest.mark.parametrize(
    ("file", "format", "runtime", "platform"),
    [
        ("a.onnx", None, None, "onnxruntime_onnx"), ("a.onnx", None, "openvino", "openvino_onnx"),
        ("a", "openvino", None, "openvino_ir"),
    ],
)  # fmt: skip
def test_the_platform_of_a_model_names_its_runtime_and_format(file, format, runtime, platform, tmp_path):
    export(Affine(), tmp_path / file, format=format, example_inputs=torch.rand(2, 3))
    program = Program.load(tmp_path / file, runtime=runtime)
    assert tensors.described(program, "1", "m")["platform"] == platform


def test_answers_are_counted_by_model(two):
    before = two.metrics()
    for content in (json.dumps({"inputs": [tensor()]}).encode(), b"{"):
        infer(two, content)
    infer(two, b"{}", model="made-up")
    after = two.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after if "/v2/models/{model}/infer" in name}
    assert grown["arclight_requests_total", "affine", "/v2/models/{model}/infer", "200"] == 1
    assert grown["arclight_requests_total", "affine", "/v2/models/{model}/infer", "400"] == 1
    assert grown["arclight_request_seconds_count", "affine", "/v2/models/{model}/infer"] == 1
    assert not [name for name in after if "made-up" in name]


def test_programs_are_warmed_up_before_the_server_is_ready(affine_path, monkeypatch):
    program = Program.load(affine_path)
    ready: list[tuple[int, ...]] = []
    compute = Program.__call__

    def watched(self: Program, *inputs: np.ndarray) -> object:
        ready.append(inputs[0].shape)
        return compute(self, *inputs)

    monkeypatch.setattr(Program, "__call__", watched)
    app = build_app([ServedModel(name="affine", program=program)], Limits(), Access())

    async def start() -> None:
        async with app.router.lifespan_context(app):
            assert set(ready) == {(1, 3)}

    asyncio.run(start())


def test_long_json_is_refused_before_it_is_read(two):
    bomb = b'{"inputs":[' + b"[]," * 8_000_000 + b"[]]}"
    answer = infer(two, bomb)
    assert answer.status_code == 413
    assert "send the tensors as bytes behind it" in answer.json()["error"]


def test_metrics_come_in_some_format_whatever_is_asked_for(two):
    for accept in (
        "application/openmetrics-text; version=x.y",
        "application/openmetrics-text; version=1.0.0",
        "image/png",
    ):
        answer = httpx.get(f"{two.url}/metrics", headers={"Accept": accept}, **LOOPBACK)
        assert (answer.status_code, "arclight_requests" in answer.text) == (200, True)


def test_no_refusal_of_tensors_speaks_of_photos(two):
    refused = [
        infer(two, b""),
        infer(two, bytes(25_000_001)),
        infer(two, b"{}", **{"Content-Encoding": "br"}),
        two.get("/v2/models/affine/infer"),
    ]
    assert [answer.status_code for answer in refused] == [400, 413, 415, 405]
    assert [answer.text for answer in refused if "photo" in answer.text or "image" in answer.text] == []


def test_photos_are_answered_as_yolov5_does(two, sample):
    url = f"{two.url}/v1/object-detection/codes"
    form = {"image": ("photo.jpg", sample("counter"), "image/jpeg")}
    [box] = httpx.post(url, files=form, **LOOPBACK).json()
    assert (box["name"], box["class"]) == ("qr_code", 0)
    assert [box[key] for key in ("xmin", "ymin", "xmax", "ymax")] == pytest.approx([150, 330, 330, 630], abs=0.2)
    assert len(two.detect(sample("counter")).json()["boxes"]) == 1
    refused = httpx.post(url.replace("codes", "affine"), content=sample("counter"), **LOOPBACK)
    assert refused.status_code == 404


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name the programs to serve"),
        (["a=x.onnx", "y.onnx"], "y.onnx has no name"),
        (["a=x.onnx", "a=y.onnx"], "a names two programs"),
        (["x.onnx", "--limits.workers", "0"], "limits.workers must be above 0, not 0"),
        (["a/b=x.onnx"], "cannot name a model"),
    ],
)
def test_wrong_commands_are_refused_in_one_line(capsys, words, sentence):
    assert cli.main(["serve", *words]) != 0
    assert sentence in capsys.readouterr().err


def test_limits_are_in_the_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["serve", "--help"])
    assert "--limits.queue" in capsys.readouterr().out


def test_answers_on_kept_connections_do_not_wait_for_acknowledgements():
    """With Nagle's algorithm the body of every answer waits for the client's delayed acknowledgement of its headers."""

    async def no_delay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with reserve_address("127.0.0.1", 0) as reserved:
            server = await asyncio.start_server(connected, sock=reserved)  # as uvicorn does
            _, writer = await asyncio.open_connection(*reserved.getsockname())
            writer.close()
            async with server:
                return await found

    assert asyncio.run(no_delay()) != 0


def test_programs_share_the_cores_among_the_workers(affine_path):
    threads = [
        models.load("affine", affine_path, limits).loaded.threads
        for limits in (Limits(workers=1), Limits(workers=1000), Limits(workers=1, threads=3))
    ]
    assert threads == [len(psutil.Process().cpu_affinity()), 1, 3]


def test_threads_depend_on_how_a_runtime_computes_several_requests():
    limits, given = Limits(workers=1000), Limits(threads=3)
    assert models.threads_of("onnxruntime", {}, limits) == 1
    assert models.threads_of("openvino", {}, limits) is models.threads_of("torch", {}, limits) is None
    assert models.threads_of("openvino", {}, given) == models.threads_of("torch", {}, given) == 3
    assert models.threads_of("onnxruntime", {"task": "language"}, given) is None


def test_the_threads_of_models_are_listed(two):
    threads = {model["name"]: model["threads"] for model in two.get("/models").json()}
    assert threads["affine"] == max(1, len(psutil.Process().cpu_affinity()) // Limits().workers)


def test_a_model_is_quick_by_the_median_of_its_recent_requests():
    latency = LatencyWindow()
    assert not latency.is_quick()
    for _ in range(LatencyWindow.RECENT):
        latency.timed(lambda: None)
    assert latency.is_quick()
    latency.timed(lambda: time.sleep(2 * LatencyWindow.QUICK_S))  # such as of a machine that was busy
    assert latency.is_quick()
    for _ in range(LatencyWindow.RECENT):
        latency.timed(lambda: time.sleep(2 * LatencyWindow.QUICK_S))
    assert not latency.is_quick()


@pytest.mark.parametrize(
    ("rows", "slow", "is_here"),
    [(1, False, True), (2000, False, False), (1, True, False)],
    ids=["small", "large", "slow"],
)
def test_only_small_requests_to_quick_models_are_computed_on_the_loop(affine_path, rows, slow, is_here, monkeypatch):
    if not slow:
        monkeypatch.setattr(LatencyWindow, "QUICK_S", 10.0)  # a call waits for its turn on a busy machine
    program, threads = Program.load(affine_path), []

    class Watched(Program):
        def __call__(self, *inputs: np.ndarray) -> object:
            threads.append(threading.current_thread() is threading.main_thread())
            time.sleep(0.003 if slow else 0)
            return program(*inputs)

    watched = Watched.__new__(Watched)
    watched.__dict__ = program.__dict__
    app = build_app([ServedModel(name="affine", program=watched)], Limits(), Access())
    content = json.dumps({"inputs": [tensor(shape=[rows, 3], data=[0.25] * rows * 3)]}).encode()

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t") as client,
        ):
            threads.clear()
            for _ in range(2):
                answer = await client.post("/v2/models/affine/infer", content=content)
                assert answer.json()["outputs"][0]["data"] == [1.5] * rows * 3

    asyncio.run(ask())
    assert threads == [is_here] * 2


def test_many_clients_get_their_own_answers(two):
    def ask(number: int) -> tuple[int, list[float]]:
        wrong = number % 7 == 3
        content = json.dumps({"inputs": [tensor(data=[number] * (5 if wrong else 6))]}).encode()
        while (answer := infer(two, content)).status_code == 429:
            time.sleep(0.05)
        assert answer.status_code == (400 if wrong else 200)
        return number, [] if wrong else answer.json()["outputs"][0]["data"]

    with ThreadPoolExecutor(8) as pool:
        for number, data in pool.map(ask, range(48)):
            assert data == ([] if number % 7 == 3 else [2 * number + 1] * 6)


def test_refusals_of_a_full_server_are_held_back_and_others_are_not(affine_path, monkeypatch):
    model, going, slept = models.load("affine", affine_path, Limits()), threading.Event(), []
    begun = threading.Event()
    app = build_app([model], Limits(workers=1, queue=0, refusal_s=0.25), Access())
    content = {"inputs": [tensor(shape=[2000, 3], data=[0.25] * 6000)]}  # too large for the loop, which must go on
    sleep, compute = asyncio.sleep, Program.__call__

    async def watched(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    def gated(self: Program, *inputs: np.ndarray) -> object:
        begun.set()
        assert going.wait(20)
        return compute(self, *inputs)

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t") as client,
        ):
            monkeypatch.setattr(Program, "__call__", gated)
            monkeypatch.setattr("arclight.serve.app.asyncio.sleep", watched)
            first = asyncio.create_task(client.post("/v2/models/affine/infer", json=content))
            while not begun.is_set():
                await sleep(0.01)
            slept.clear()
            wrong = await client.post("/v2/models/affine/infer", headers={"Content-Encoding": "gzip"})
            assert 0.25 not in slept
            second = await client.post("/v2/models/affine/infer", json=content)
            going.set()
            return [(await first).status_code, wrong.status_code, second.status_code]

    assert asyncio.run(ask()) == [200, 415, 429]
    assert slept.count(0.25) == 1
