"""Build the web application: routes for photos, tensors (Open Inference Protocol), texts (OpenAI's API), health, metrics, the page.

``arclight serve`` (`server`) calls `build_app` for the models that it loaded; `create_app` serves any function that detects. Addresses,
field names and status codes are public, and those under /v1 and /v2 belong to the protocols: do not change them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from arclight import __version__
from arclight.serve.admission import TEXT, Buffered, Refusal, Turn, Workers, image_bytes, read_body
from arclight.serve.metrics import Address, Metrics
from arclight.serve.middleware import PAGE, Access, Admittance, Envelope, Lingering
from arclight.serve.models import Models, ServedModel, proof, start
from arclight.serve.request_log import Record, RequestLog, record_of
from arclight.serve.settings import Limits, check_keys
from arclight.serve.tasks.batching import BatchCost, Encoded, Job
from arclight.serve.tasks.detection import Answer, Detect, answer, records
from arclight.serve.tasks.tensors import JSON_SIZE, described

if TYPE_CHECKING:
    from arclight.deploy import Program
    from arclight.serve.tasks.scheduler import Scheduler
    from arclight.serve.tasks.text import ChatRequest, CompletionRequest
    from arclight.text.embedding_program import Embedder

T = TypeVar("T")
OBJECT_DETECTION = "/v1/object-detection/{model}"
INFER = "/v2/models/{model}/infer"
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
    threads: int | None
    """CPU threads that compute a request; null if the runtime decides."""
    proof: list[str]
    """Measurements that the exporter stored in the program; empty for programs of other exporters."""
    batch: BatchCost | None
    """Measured costs of batching requests for tensors; null if they are computed one by one."""

    @classmethod
    def of(cls, model: ServedModel) -> ModelDescription:
        return cls(
            name=model.name,
            version=model.version,
            task=model.task,
            precision=model.precision,
            threads=None if model.loaded is None else model.loaded.threads,
            proof=proof(model),
            batch=model.batcher.measured,
        )


@dataclass(frozen=True, kw_only=True)
class Error:
    error: str


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "No image in the request, or a malformed form"},
    408: {"model": Error, "description": "The upload stalled"},
    413: {"model": Error, "description": "The upload is too large"},
    415: {"model": Error, "description": "The body is compressed"},
    422: {"model": Error, "description": "Not an image, damaged, or too many pixels"},
    429: {"model": Error, "description": "The server is full; see Retry-After"},
    503: {"model": Error, "description": "No worker was free before the deadline; see Retry-After"},
}
PHOTO = {"type": "string", "format": "binary"}
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "image/*": {"schema": PHOTO},
            "application/octet-stream": {"schema": PHOTO},
            "multipart/form-data": {
                "schema": {"type": "object", "properties": {"file": PHOTO}, "required": ["file"]},
            },
        },
    }
}


TENSORS = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"type": "object", "required": ["inputs"]}},
            "application/octet-stream": {"schema": PHOTO},
        },
    }
}


def create_app(
    detector: Detect,
    *,
    program: str = "detector",
    precision: str = "unknown",
    limits: Limits | None = None,
    api_key: str | Sequence[str] | None = None,
    insecure: bool = False,
    request_log: str | Path | None = None,
) -> FastAPI:
    """Build the application that answers photos with ``detector``'s detections and the codes read in them.

    ``detector`` takes an RGB uint8 (H, W, 3) array and returns Detections; it is called from ``limits.workers``
    threads at once, and with a blank image at start-up so that the first client does not wait for warm-up.

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
    load: Callable[[str, Path], ServedModel] | None = None,
    request_log: str | Path | None = None,
) -> FastAPI:
    """Build the application of several models; ``/detect`` and the page are those of the first detector.

    With ``load``, a function of a model's name and its program's path, programs that are replaced on disk are loaded again.
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

    # The interactive documentation of FastAPI loads its scripts from a CDN, so only the schema is offered.
    app = FastAPI(
        title="Arclight", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )  # fmt: skip
    app.add_exception_handler(Refusal, refuse)
    app.add_exception_handler(HTTPException, refuse_address)

    add_server_routes(app, service, metrics)
    add_photo_routes(app, service)
    add_tensor_routes(app, service)
    if any(model.task in TEXT_TASKS for model in models):
        add_text_routes(app, service)
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    app.add_middleware(Admittance, access=access, requests_per_s=limits.requests_per_s)
    app.add_middleware(Lingering, linger_s=limits.linger_s)
    app.add_middleware(
        Envelope, metrics=metrics, addresses=addresses(service), is_draining=lambda: service.is_draining, request_log=lines
    )  # fmt: skip
    app.state.drain = service.drain
    return app


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

    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        """Return the metrics in a text format of Prometheus."""
        content, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(content, media_type=content_type)


def addresses(service: Service) -> dict[str, Address]:
    """Map the paths with metrics of their own to the labels of these."""
    found = {path: Address(path) for path in ("/", "/health", "/metrics", "/models", "/openapi.json")}
    found["/detect"] = Address("/detect", service.main.name)
    for path in (OBJECT_DETECTION, INFER):
        found |= {path.format(model=name): Address(path, name) for name in service.models}
    for paths, task, several in ((TEXT[:2], "language", "text"), (TEXT[2:], "embedding", "embeddings")):
        names = [model.name for model in service.models.all() if model.task == task]
        name = names[0] if len(names) == 1 else several  # the body of a request names the model
        found |= {path: Address(path, name) for path in paths} if names else {}
    return found


class Service:
    """All models, with one pool of workers and one limit on the memory of request bodies."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: Limits,
        load: Callable[[str, Path], ServedModel] | None,
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
        """Return the model of ``/detect`` and the page."""
        return self.models[self._main]

    def start(self) -> None:
        """Report readiness from now on."""
        self.ready = True

    def drain(self) -> None:
        """Report that the server is not ready; requests are still answered, and their connections closed afterwards."""
        self.ready, self.is_draining = False, True

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
        """Return the scheduler that generates a model's texts, and record the model; raises Refusal 404."""
        if (scheduler := self._model(name, record).text) is None:
            raise Refusal(404, f"{name} generates no text; GET /v1/models lists the models that do.")
        return scheduler

    def embedder(self, name: str, record: Record) -> Embedder:
        """Return the embedder of a model, and record the model; raises Refusal 404, and 400 for a model without embeddings."""
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
        """Run ``work(body, turn)`` in a worker; raises Refusal for an invalid body, or if the server is full."""
        async with self._body(request) as body:
            turn = Turn(self.limits.deadline_s)
            return await self.workers.run(
                model, lambda: work(bytes(body), turn), turn=turn, left=lambda: disconnected(request)
            )

    async def infer(self, request: Request, name: str) -> Encoded:
        """Answer a request for tensors; raises Refusal like `run`, and 400, 404 and 413.

        Small requests of a fast model are computed in the event loop while a worker is idle: passing them on would take longer.
        """
        program, version = self.tensors(name, record_of(request.scope))
        model, json_size = self.models[name], request.headers.get(JSON_SIZE)
        together = model.batcher if model.batcher.rows > 1 else None
        async with self._body(request) as body:
            job = Job(body, json_size, program, name, version, self.limits)
            pace, small = model.pace, len(body) <= model.pace.SMALL_BYTES
            if small and self.workers.has_idle and pace.is_quick():
                if together is not None:
                    return await together.run_here(job)
                return self.workers.run_here(name, lambda: pace.timed(job))
            work = job if together is not None or not small else lambda: pace.timed(job)
            turn = Turn(self.limits.deadline_s)
            return await self.workers.run(name, work, turn=turn, left=lambda: disconnected(request), together=together)

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Read a body, whose memory counts until the block ends; delay refusals of a full server, so that clients do not retry at once."""
        try:
            with self.buffered.upload() as body:
                await read_body(request, body, self.buffered, self.limits)
                yield body
        except Refusal as refusal:
            if refusal.status == 429:
                await asyncio.sleep(self.limits.refusal_s)
            raise


async def disconnected(request: Request) -> None:
    """Wait until the client disconnects; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def add_photo_routes(app: FastAPI, service: Service) -> None:
    """Add ``/detect``, and YOLOv5's address by model."""

    @app.post("/detect", responses={200: {"model": Answer}, **REFUSALS}, openapi_extra=BODY)
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

    @app.post(OBJECT_DETECTION, responses={404: {"model": Error}, **REFUSALS}, openapi_extra=BODY)
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

    @app.get("/v2/health/ready", responses={503: {}})
    async def ready() -> JSONResponse:
        """Report whether all models are ready, else 503."""
        return JSONResponse({"ready": service.ready}, status_code=200 if service.ready else 503)

    @app.get("/v2/models/{model}", responses={404: {"model": Error}})
    async def model_metadata(request: Request, model: str) -> dict[str, Any]:
        """Describe the inputs and outputs of a model."""
        return described(*service.tensors(model, record_of(request.scope)), model)

    @app.get("/v2/models/{model}/ready", responses={404: {"model": Error}, 503: {}})
    async def model_ready(request: Request, model: str) -> JSONResponse:
        """Report whether a model is ready, else 503."""
        service.tensors(model, record_of(request.scope))
        return JSONResponse({"name": model, "ready": service.ready}, status_code=200 if service.ready else 503)

    @app.post(INFER, responses={404: {"model": Error}, **REFUSALS}, openapi_extra=TENSORS)
    async def inferred(request: Request, model: str) -> Response:
        """Compute a model's outputs for plain tensors, in JSON or as bytes after it."""
        content, size = await service.infer(request, model)
        if size is None:
            return Response(content, media_type="application/json")
        return Response(content, media_type="application/octet-stream", headers={JSON_SIZE: str(size)})

    # FastAPI's own route is for /openapi.json: what it does around each request costs as much as a small program
    app.router.routes.insert(0, Route(INFER, TensorEndpoint(inferred), methods=["POST"], include_in_schema=False))


class TensorEndpoint:
    """Answer a model's requests as an application of ASGI."""

    def __init__(self, respond: Callable[[Request, str], Awaitable[Response]]) -> None:
        self.respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.respond(Request(scope, receive), scope["path_params"]["model"])
        await response(scope, receive, send)


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
            return await text.answer(texts, Turn(service.limits.deadline_s), lambda: disconnected(request))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the models that generate or embed text."""
        return text.listed({model.name: model.created for model in service.models.all() if model.task in TEXT_TASKS})

    @app.get("/v1/models/{model}", responses={404: {}})
    async def model_of_text(request: Request, model: str) -> dict[str, Any]:
        """Describe a model that generates or embeds text."""
        if model not in service.models or service.models[model].task not in TEXT_TASKS:
            service.text(model, record_of(request.scope))
        return text.described(model, service.models[model].created)

    @app.post(TEXT[0], responses=TEXT_REFUSALS, openapi_extra=text.openapi(text.CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue texts, whole or streamed by server-sent events."""
        return await answered(request, text.CompletionRequest)

    @app.post(TEXT[1], responses=TEXT_REFUSALS, openapi_extra=text.openapi(text.ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat by the model's template, whole or streamed by server-sent events."""
        return await answered(request, text.ChatRequest)

    @app.post(TEXT[2], responses=TEXT_REFUSALS, openapi_extra=text.openapi(embeddings.EmbeddingRequest))
    async def embedding(request: Request) -> Response:
        """Give the vectors of texts."""
        record = record_of(request.scope)
        content = await service.run(
            request,
            "embeddings",
            lambda body, turn: embeddings.answer(
                body, lambda name: service.embedder(name, record), service.limits, turn
            ),
        )
        return Response(content, media_type="application/json")


TEXT_REFUSALS: dict[int | str, dict[str, Any]] = {status: {} for status in (400, 404, 408, 413, 415, 429, 500, 503)}


async def refuse(request: Request, refusal: Exception) -> Response:
    """Answer a refused request, in the form of its protocol."""
    assert isinstance(refusal, Refusal)
    return refusal.response(request.scope)


async def refuse_address(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown address or method."""
    assert isinstance(error, HTTPException)
    what = {404: "There is nothing at this address", 405: f"{request.method} is not possible at this address"}
    sentence = f"{what.get(error.status_code, error.detail)}; GET /openapi.json lists the addresses."
    return Refusal(error.status_code, sentence, headers=error.headers).response(request.scope)
