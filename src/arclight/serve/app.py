"""The web application: ``/detect``, ``/health``, ``/metrics`` and the page, over any callable detector."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from arclight import __version__
from arclight.serve.answer import Answer, Detect, answer
from arclight.serve.metrics import CONTENT_TYPE, Metrics
from arclight.serve.middleware import Envelope, Lingering
from arclight.serve.refusals import Refusal
from arclight.serve.settings import Limits
from arclight.serve.uploads import Buffered, image_bytes, read_body
from arclight.serve.workers import Workers

PAGE = Path(__file__).parent / "page"


@dataclass(frozen=True, kw_only=True)
class Health:
    live: bool
    ready: bool
    program: str
    precision: str
    version: str


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


def create_app(
    detector: Detect, *, program: str = "detector", precision: str = "unknown", limits: Limits | None = None
) -> FastAPI:
    """An application that answers photos with the detections of ``detector`` and the codes read in them.

    ``detector`` takes an RGB uint8 (H, W, 3) array and returns Detections; it is called from ``limits.workers``
    threads at once, and with a blank image at start-up so that the first client does not wait for warm-up.
    """
    limits = limits or Limits()
    metrics, buffered = Metrics(), Buffered(limits.buffered_bytes)
    workers = Workers(limits.workers, limits.queue)
    ready = False

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal ready
        detector(np.full((64, 64, 3), 114, dtype=np.uint8))
        ready = True
        yield
        ready = False
        workers.close()

    # The interactive documentation of FastAPI loads its scripts from a CDN, so only the schema is offered.
    app = FastAPI(title="Arclight", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(Refusal, refuse)
    app.add_exception_handler(HTTPException, refuse_address)

    @app.post("/detect", responses={200: {"model": Answer}, **REFUSALS}, openapi_extra=BODY)
    async def detect(request: Request) -> JSONResponse:
        """Find the objects in a photo and read the payment codes among them."""
        content_type = request.headers.get("content-type", "")
        with buffered.upload() as body:
            await read_body(request, body, buffered, limits)

            def work() -> Answer:
                return answer(image_bytes(bytes(body), content_type), detector, limits)

            return JSONResponse(asdict(await workers.run(work, abandoned=request.is_disconnected)))

    @app.get("/health", responses={200: {"model": Health}, 503: {"model": Health}})
    async def health() -> JSONResponse:
        """Whether the server is up (live) and takes photos (ready, else 503)."""
        state = Health(live=True, ready=ready, program=program, precision=precision, version=app.version)
        return JSONResponse(asdict(state), status_code=200 if ready else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Counters in the Prometheus text format."""
        return Response(metrics.exposition(), media_type=CONTENT_TYPE)

    app.mount("/", StaticFiles(directory=PAGE, html=True))
    paths = frozenset({"/", "/detect", "/health", "/metrics", "/openapi.json"})
    app.add_middleware(Lingering, linger_s=limits.linger_s)
    app.add_middleware(Envelope, metrics=metrics, paths=paths)
    return app


async def refuse(_: Request, refusal: Exception) -> Response:
    """The answer to a request that was turned down."""
    assert isinstance(refusal, Refusal)
    return refusal.response()


async def refuse_address(request: Request, error: Exception) -> Response:
    """The answer to a request for something that is not there."""
    assert isinstance(error, HTTPException)
    what = {404: "There is nothing at this address", 405: f"{request.method} is not possible at this address"}
    sentence = f"{what.get(error.status_code, error.detail)}; photos go to POST /detect."
    return Refusal(error.status_code, sentence, headers=error.headers).response()
