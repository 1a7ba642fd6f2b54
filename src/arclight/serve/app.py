"""Build the web application: photos, tensors, texts, health, metrics and the page.

`server` calls `build_app` for the models that it loaded, `servable` for one of Lightning's modules; users call `create_app` for any function
that detects. A new path goes into one of the functions ``add_..._routes``, its body and error responses into `openapi`. Paths, field names
and status codes are public and stay: /v2 is the Open Inference Protocol, /v1 OpenAI's API and YOLOv5's REST example.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from arclight import __version__
from arclight.serve.admission import (
    TEXT,
    Buffered,
    HeaderValues,
    Refusal,
    Turn,
    Workers,
    headers_of,
    image_bytes,
    read_body,
)
from arclight.serve.metrics import Metrics, RouteLabels
from arclight.serve.middleware import PAGE, Access, Exchange, Front, Outcome
from arclight.serve.models import Models, ServedModel, proof, start
from arclight.serve.openapi import (
    CHAT_RESPONSES,
    COMPLETION_RESPONSES,
    EVERYWHERE,
    METRICS,
    PHOTO_ERRORS,
    TENSOR_ERRORS,
    TENSOR_RESPONSES,
    TEXT_ERRORS,
    TEXT_MODEL_ERRORS,
    UNKNOWN_MODEL,
    UNKNOWN_TEXT_MODEL,
    UNREADY,
    VECTOR_RESPONSES,
    name_models,
    photo_body,
    tensor_body,
    text_body,
)
from arclight.serve.request_log import Record, RequestLog, record_of
from arclight.serve.settings import Limits, check_keys
from arclight.serve.tasks.batching import BatchCost, Encoded, Job
from arclight.serve.tasks.detection import Answer, Detect, answer, records
from arclight.serve.tasks.pool import Pool
from arclight.serve.tasks.tensors import JSON_SIZE, described

if TYPE_CHECKING:
    from arclight.deploy import Program
    from arclight.serve.tasks.scheduler import Scheduler
    from arclight.serve.tasks.text import ChatRequest, CompletionRequest
    from arclight.text.embedding_program import Embedder

T = TypeVar("T")
OBJECT_DETECTION = "/v1/object-detection/{model}"
INFER = "/v2/models/{model}/infer"
JSON_SIZE_HEADER = JSON_SIZE.lower().encode()
TEXT_TASKS = ("language", "embedding")


@dataclass(frozen=True, kw_only=True)
class Health:
    live: bool
    ready: bool
    program: str
    precision: str
    version: str


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    name: str
    version: str
    task: str
    """detect, language, embedding, or tensors for any other."""
    precision: str
    runtime: str | None
    """onnxruntime, openvino, openvino-bf16, torch or inductor; null for a detector that is no program."""
    threads: int | None
    """CPU threads that compute a request; null if the runtime decides."""
    proof: list[str]
    """Sentences on what was measured: at the export, as the program has it, and at the load if another runtime was chosen or timed."""
    pool: Pool | None
    """How many requests are computed at once, on how many CPU threads each, and the requests per second that were measured; null where
    neither a measurement nor a setting decided that."""
    batch: BatchCost | None
    """Measured costs of batching requests for tensors; null if they are computed one by one."""

    @classmethod
    def of(cls, model: ServedModel) -> ModelDescription:
        return cls(
            name=model.name,
            version=model.version,
            task=model.task,
            precision=model.precision,
            runtime=None if model.loaded is None else model.loaded.runtime,
            threads=None if model.loaded is None else model.loaded.threads,
            proof=proof(model),
            pool=model.pool,
            batch=model.batcher.measured,
        )


def create_app(
    detector: Detect,
    *,
    program: str = "detector",
    precision: str = "unknown",
    limits: Limits | None = None,
    api_key: str | Sequence[str] | None = None,
    insecure: bool = False,
    request_log: str | Path | None = None,
) -> Application:
    """Create the application that answers photos with ``detector``'s detections, and codes.

    ``detector`` takes an RGB uint8 (H, W, 3) array and returns Detections; it is called from up to ``limits.workers``
    threads at once, and with a grey image at start-up so that the first client does not wait for warm-up.

    With an ``api_key``, or several, requests need ``Authorization: Bearer KEY`` (ValueError for a key that is easily guessed); without
    one, the Host header must name this machine, unless ``insecure`` allows every client. A line of JSON about each request is appended
    to ``request_log``, "-" for standard output.
    """
    keys = check_keys(api_key)
    access = Access(loopback_only=not keys and not insecure, keys=keys)
    model = ServedModel(name=program, precision=precision, detector=detector)
    return build_app([model], limits or Limits(), access, request_log=request_log)


def build_app(
    models: Sequence[ServedModel],
    limits: Limits,
    access: Access,
    *,
    load: Callable[[ServedModel], ServedModel] | None = None,
    request_log: str | Path | None = None,
    add_routes: Callable[[FastAPI, Service], None] | None = None,
) -> Application:
    """Build the application of several models.

    ``/detect`` answers by the first detector.

    With ``load``, which loads the program that is at the path of a model now, programs that are replaced on disk are loaded again.
    ``request_log`` as for `create_app`; raises OSError if it cannot be written.
    """
    metrics = Metrics(model.name for model in models)
    service = Service(models, limits, load, metrics.batch)
    lines = None if request_log is None else RequestLog(request_log)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for model in models:
            start(model)
        service.start()
        watch = asyncio.create_task(service.models.watch(limits.reload_s, metrics.reloaded))
        yield
        watch.cancel()
        service.drain()
        service.workers.close()
        await service.models.close()
        if lines is not None:
            lines.close()

    front = Front(
        direct={INFER.format(model=name): TensorEndpoint(service, name) for name in service.models}, access=access, limits=limits,
        metrics=metrics, route_labels=route_labels(service), is_draining=lambda: service.is_draining, request_log=lines,
    )  # fmt: skip
    app = Application(front, lifespan, service.names)
    app.add_exception_handler(Refusal, refuse)
    app.add_exception_handler(HTTPException, refuse_path)

    add_server_routes(app, service, metrics)
    add_photo_routes(app, service)
    add_tensor_routes(app, service)
    if any(model.task in TEXT_TASKS for model in models):
        add_text_routes(app, service)
    if add_routes is not None:
        add_routes(app, service)
    app.state.drain = service.drain
    return app


class Application(FastAPI):
    """FastAPI application behind a `Front`, which answers requests for tensors directly.

    They go through FastAPI if somebody has added middleware that must see them.
    """

    def __init__(
        self,
        front: Front,
        lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
        names: Callable[[str], Sequence[str]],
    ) -> None:
        """``names`` gives the models that a path of the document takes."""
        # The interactive documentation of FastAPI loads its scripts from a CDN, so only the schema is offered.
        super().__init__(
            title="Arclight", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False,
            telemetry={"tracing": False, "metrics": False, "logs": False}, responses=EVERYWHERE,
        )  # fmt: skip
        self.front = front
        self._names = names
        self.add_middleware(front.around)
        # no route: it would answer other methods of the API's paths, too, as if there were none
        self.router.default = Page(directory=PAGE, html=True)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with the names of the models."""
        if self.openapi_schema is None:
            name_models(super().openapi(), self._names)
        return super().openapi()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.user_middleware) == 1 and self.front.endpoint(scope) is not None:
            await self.front.answer(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def take(self, scope: Scope, body: bytes, by_task: Callable[[ASGIApp], None]) -> bool:
        """Answer a quick request for tensors without a task; see `protocol.Take`."""
        return len(self.user_middleware) == 1 and self.front.take(scope, body, by_task)


class Page(StaticFiles):
    """The files of the page; without a file at a path, every method gets a 404."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            await super().get_response(path, {**scope, "method": "GET"})  # raises 404 before the 405
        return await super().get_response(path, scope)


def add_server_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    """Add the routes about the server itself: health, models, metrics."""

    @app.get("/health", responses={200: {"model": Health}, 503: {"model": Health}})
    async def health() -> JSONResponse:
        """Report whether the server is up (live) and takes photos (ready, else 503)."""
        main = service.main
        state = Health(live=True, ready=service.ready, program=main.name, precision=main.precision, version=app.version)
        return JSONResponse(asdict(state), status_code=200 if service.ready else 503)

    @app.get("/models")
    async def described_models() -> list[ModelDescription]:
        """List the models, with the measurements of their export."""
        return [ModelDescription.of(model) for model in service.models.all()]

    @app.get("/metrics", response_class=Response, responses=METRICS)
    async def prometheus(request: Request) -> Response:
        """Return the metrics in a text format of Prometheus."""
        content, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(content, media_type=content_type)


def route_labels(service: Service) -> dict[str, RouteLabels]:
    """Map the paths with metrics of their own to the labels of these."""
    found = {path: RouteLabels(path) for path in ("/", "/health", "/metrics", "/models", "/openapi.json")}
    found["/detect"] = RouteLabels("/detect", service.main.name)
    for path in (OBJECT_DETECTION, INFER):
        found |= {path.format(model=name): RouteLabels(path, name) for name in service.models}
    for paths, task, several in ((TEXT[:2], "language", "text"), (TEXT[2:], "embedding", "embeddings")):
        names = [model.name for model in service.models.all() if model.task == task]
        name = names[0] if len(names) == 1 else several  # the body of a request names the model
        found |= {path: RouteLabels(path, name) for path in paths} if names else {}
    return found


class Service:
    """All models, with one pool of workers and one limit on the memory of request bodies."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: Limits,
        load: Callable[[ServedModel], ServedModel] | None,
        batch: Callable[[str, int], None],
    ) -> None:
        self.models = Models({model.name: model for model in models}, load, batch)
        self._main = next((model for model in models if model.detector is not None), models[0]).name
        self.limits = limits
        self.workers = Workers(limits.workers, limits.queue)
        self.buffered = Buffered(limits.buffered_bytes, self.workers.retry_after_s)
        self.ready = False
        self.is_draining = False

    @property
    def main(self) -> ServedModel:
        """Return the model of ``/detect`` and ``/health``: the first detector, else the first model."""
        return self.models[self._main]

    def start(self) -> None:
        """Report readiness from now on."""
        self.ready = True

    def drain(self) -> None:
        """Report the server as not ready, and close each connection after its next answer."""
        self.ready, self.is_draining = False, True

    def names(self, path: str) -> list[str]:
        """Return the models that answer at ``path``, which has a model in itself or in the body."""
        takes: Callable[[ServedModel], bool] = {
            OBJECT_DETECTION: lambda model: model.detector is not None,
            TEXT[0]: lambda model: model.text is not None,
            TEXT[1]: lambda model: model.text is not None,
            TEXT[2]: lambda model: model.embedder is not None,
            "/v1/models/{model}": lambda model: model.task in TEXT_TASKS,
        }.get(path, lambda model: model.program is not None)
        return [model.name for model in self.models.all() if takes(model)]

    def detector(self, name: str, record: Record) -> Detect:
        """Return the detector of a model, and record the model; raises Refusal 404."""
        if (detector := self._model(name, record).detector) is None:
            raise Refusal(404, f"{name} answers no photos; its tensors go to POST /v2/models/{name}/infer.")
        return detector

    def tensors(self, name: str, record: Record) -> tuple[Program, str]:
        """Return the program of a model and its version, and record the model; raises Refusal 404."""
        model = self._model(name, record)
        if model.program is None:
            where = "photos go to POST /detect"
            if model.text is not None or model.embedder is not None:
                where = f"texts go to POST {TEXT[0] if model.text is not None else TEXT[2]}"
            raise Refusal(404, f"{name} takes no tensors; {where}.")
        return model.program, model.version

    def text(self, name: str, record: Record) -> Scheduler:
        """Return the scheduler of a model's texts, and record the model.

        Raises Refusal 404.
        """
        if (scheduler := self._model(name, record).text) is None:
            raise Refusal(404, f"{name} generates no text; GET /v1/models lists the models that do.")
        return scheduler

    def embedder(self, name: str, record: Record) -> Embedder:
        """Return the embedder of a model, and record the model.

        Raises Refusal 404, and 400 for a model without embeddings.
        """
        if (embedder := self._model(name, record).embedder) is None:
            raise Refusal(
                400,
                f"{name} gives no embeddings; write a program of a language model's run that does by arclight export RUN --embedding "
                "--out FILE, and serve that.",
            )
        return embedder

    def _model(self, name: str, record: Record) -> ServedModel:
        if name not in self.models:
            raise Refusal(404, f"There is no model {name[:40]!r} here; there are {', '.join(self.models)}.")
        model = self.models[name]
        record.model, record.version = name, model.version
        return model

    async def run(self, request: Request, model: str, work: Callable[[bytes, Turn], T]) -> T:
        """Run ``work(body, turn)`` in a worker.

        Raises Refusal for an invalid body, or if the server is full.
        """
        try:
            with self.buffered.upload() as upload:
                await read_body(headers_of(request.scope), request.receive, upload, self.limits)
                turn, body = Turn(self.limits.deadline_s), upload.body
                return await self.workers.run(
                    model, lambda: work(bytes(body), turn), turn=turn, left=lambda: disconnected(request.receive)
                )
        except Refusal as refusal:
            await self._hold_back(refusal)
            raise

    async def infer(self, name: str, headers: HeaderValues, receive: Receive, record: Record) -> Encoded:
        """Answer a request for tensors; raises Refusal like `run`, and 400, 404 and 413.

        Small requests to a fast model are computed in the event loop while a worker is idle: a thread would cost more.
        """
        upload = self.buffered.upload()
        job, model = self.job(name, headers, upload.body, record), self.models[name]
        try:
            with upload:
                await read_body(headers, receive, upload, self.limits)
                together, latency = model.batcher if model.batcher.rows > 1 else None, model.latency
                small = len(upload.body) <= latency.SMALL_BYTES
                if self.is_quick(model, len(upload.body)):
                    if together is not None:
                        return await together.run_here(job)
                    return self.workers.run_here(name, lambda: latency.timed(job))
                work = job if together is not None or not small else lambda: latency.timed(job)
                turn = Turn(self.limits.deadline_s)
                return await self.workers.run(
                    name, work, turn=turn, left=lambda: disconnected(receive), together=together
                )
        except Refusal as refusal:
            await self._hold_back(refusal)
            raise

    def job(self, name: str, headers: HeaderValues, body: bytes | bytearray, record: Record) -> Job:
        """Return the work of a request for tensors, and record the model; raises Refusal 404."""
        program, version = self.tensors(name, record)
        return Job(body, headers.get(JSON_SIZE_HEADER, (None,))[0], program, name, version, self.limits)

    def is_quick(self, model: ServedModel, size_bytes: int) -> bool:
        """Return True if the event loop may compute a request of that size now."""
        free = model.program is None or model.program.is_free  # the loop must not wait for a turn
        return size_bytes <= model.latency.SMALL_BYTES and free and self.workers.has_idle and model.latency.is_quick()

    async def _hold_back(self, refusal: Refusal) -> None:
        """Delay a 429 by ``limits.refusal_s``, so that clients do not retry at once.

        The upload is dropped by then.
        """
        if refusal.status == 429:
            await asyncio.sleep(self.limits.refusal_s)


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def add_photo_routes(app: FastAPI, service: Service) -> None:
    """Add ``/detect``, and YOLOv5's path by model."""

    @app.post("/detect", responses={200: {"model": Answer}, **PHOTO_ERRORS}, openapi_extra=photo_body("file"))
    async def detect(request: Request) -> JSONResponse:
        """Find the objects in a photo and read the payment codes among them."""
        name, kind = service.main.name, request.headers.get("content-type", "")
        detector = service.detector(name, record_of(request.scope))
        found = await service.run(
            request,
            name,
            lambda body, turn: answer(image_bytes(body, kind), detector, service.limits, turn.is_over),
        )
        return JSONResponse(asdict(found))

    @app.post(OBJECT_DETECTION, responses=PHOTO_ERRORS, openapi_extra=photo_body("image"))
    async def object_detection(request: Request, model: str) -> JSONResponse:
        """Find the objects in a photo with one of the models, in the form of YOLOv5's REST example."""
        detector = service.detector(model, record_of(request.scope))
        kind = request.headers.get("content-type", "")
        return JSONResponse(
            await service.run(
                request,
                model,
                lambda body, _: records(image_bytes(body, kind, field="image"), detector, service.limits),
            )
        )


def add_tensor_routes(app: FastAPI, service: Service) -> None:
    """Add the Open Inference Protocol, version 2."""

    @app.get("/v2")
    async def server_metadata() -> dict[str, Any]:
        """Name the server and its extensions."""
        return {"name": "arclight", "version": app.version, "extensions": ["binary_tensor_data"]}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Report that the server is up."""
        return {"live": True}

    @app.get("/v2/health/ready", responses=UNREADY)
    async def ready() -> JSONResponse:
        """Report whether all models are ready, else 503."""
        return JSONResponse({"ready": service.ready}, status_code=200 if service.ready else 503)

    @app.get("/v2/models/{model}", responses=UNKNOWN_MODEL)
    async def model_metadata(request: Request, model: str) -> dict[str, Any]:
        """Describe the inputs and outputs of a model."""
        return described(*service.tensors(model, record_of(request.scope)), model)

    @app.get("/v2/models/{model}/ready", responses={**UNKNOWN_MODEL, **UNREADY})
    async def model_ready(request: Request, model: str) -> JSONResponse:
        """Report whether a model is ready, else 503."""
        service.tensors(model, record_of(request.scope))
        return JSONResponse({"name": model, "ready": service.ready}, status_code=200 if service.ready else 503)

    @app.post(
        INFER, response_class=Response, responses={**TENSOR_RESPONSES, **TENSOR_ERRORS}, openapi_extra=tensor_body()
    )
    async def inferred(request: Request, model: str) -> Response:
        """Compute a model's outputs for plain tensors, in JSON or as bytes after it."""
        record = record_of(request.scope)
        content, size = await service.infer(model, headers_of(request.scope), request.receive, record)
        return Response(content, headers={name.decode(): value.decode() for name, value in tensor_headers(size)})


class TensorEndpoint:
    """Endpoint for tensors of one model, called without FastAPI's routing.

    What FastAPI does around a request takes longer than a small program.
    """

    def __init__(self, service: Service, model: str) -> None:
        self.service = service
        self.model = model

    def is_quick(self, headers: HeaderValues, size_bytes: int) -> bool:
        """Return True if `add` takes the request: a quick one, of a program whose batches pay."""
        service, model = self.service, self.service.models[self.model]
        fits = size_bytes <= service.limits.body_bytes and service.buffered.has_room(size_bytes)
        is_plain = fits and b"content-encoding" not in headers
        return is_plain and model.program is not None and model.batcher.rows > 1 and service.is_quick(model, size_bytes)

    def add(self, exchange: Exchange, body: bytes, on_done: Callable[[Outcome], None]) -> None:
        """Add a quick request to the model's batcher."""
        job, buffered = self.service.job(self.model, exchange.headers, body, exchange.record), self.service.buffered
        buffered.hold(len(body))

        def encoded(outcome: Encoded | Exception) -> None:
            buffered.release(len(body))
            on_done(outcome if isinstance(outcome, Exception) else (outcome[0], tensor_headers(outcome[1])))

        self.service.models[self.model].batcher.add(job, encoded)

    async def __call__(self, exchange: Exchange) -> None:
        content, size = await self.service.infer(self.model, exchange.headers, exchange.receive, exchange.record)
        await exchange.answer(content, tensor_headers(size))


def tensor_headers(json_size: int | None) -> Sequence[tuple[bytes, bytes]]:
    """Return the headers of a tensor response.

    ``json_size``: bytes of JSON before binary tensors; None for JSON alone.
    """
    if json_size is None:
        return _JSON_ALONE
    return [(b"content-type", b"application/octet-stream"), (JSON_SIZE_HEADER, b"%d" % json_size)]


_JSON_ALONE = [(b"content-type", b"application/json")]


def add_text_routes(app: FastAPI, service: Service) -> None:
    """Add OpenAI's protocol."""
    from arclight.serve.tasks import embeddings, text  # they import torch

    async def answered(request: Request, kind: type[CompletionRequest | ChatRequest]) -> Response:
        record = record_of(request.scope)
        with service.models.text_request():
            texts = await service.run(
                request,
                "text",
                lambda body, _: text.decode(body, kind, lambda name: service.text(name, record), service.limits),
            )
            return await text.answer(texts, Turn(service.limits.deadline_s), lambda: disconnected(request.receive))

    @app.get("/v1/models", responses=TEXT_MODEL_ERRORS)
    async def models() -> dict[str, Any]:
        """List the models that generate or embed text."""
        return text.listed({model.name: model.created for model in service.models.all() if model.task in TEXT_TASKS})

    @app.get("/v1/models/{model}", responses=UNKNOWN_TEXT_MODEL)
    async def model_of_text(request: Request, model: str) -> dict[str, Any]:
        """Describe a model that generates or embeds text."""
        if model not in service.models or service.models[model].task not in TEXT_TASKS:
            service.text(model, record_of(request.scope))
        return text.described(model, service.models[model].created)

    @app.post(
        TEXT[0],
        response_class=Response,
        responses={**COMPLETION_RESPONSES, **TEXT_ERRORS},
        openapi_extra=text_body(text.CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        """Continue texts, whole or streamed by server-sent events."""
        return await answered(request, text.CompletionRequest)

    @app.post(
        TEXT[1],
        response_class=Response,
        responses={**CHAT_RESPONSES, **TEXT_ERRORS},
        openapi_extra=text_body(text.ChatRequest),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat by the model's template, whole or streamed by server-sent events."""
        return await answered(request, text.ChatRequest)

    @app.post(
        TEXT[2], responses={**VECTOR_RESPONSES, **TEXT_ERRORS}, openapi_extra=text_body(embeddings.EmbeddingRequest)
    )
    async def embedding(request: Request) -> Response:
        """Return the embeddings of texts."""
        record = record_of(request.scope)
        content = await service.run(
            request,
            "embeddings",
            lambda body, turn: embeddings.answer(
                body, lambda name: service.embedder(name, record), service.limits, turn
            ),
        )
        return Response(content, media_type="application/json")


async def refuse(request: Request, refusal: Exception) -> Response:
    """Answer a refused request, in the form of its protocol."""
    assert isinstance(refusal, Refusal)
    return refusal.response(request.scope)


async def refuse_path(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path or method."""
    assert isinstance(error, HTTPException)
    what = {404: "There is nothing at this address", 405: f"{request.method} is not possible at this address"}
    sentence = f"{what.get(error.status_code, error.detail)}; GET /openapi.json lists the addresses."
    return Refusal(error.status_code, sentence, headers=error.headers).response(request.scope)
