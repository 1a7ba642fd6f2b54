"""Build the web application of any detector: ``/detect``, ``/health``, ``/metrics``, the page."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from arclight import __version__
from arclight.serve.admission import Buffered, Refusal, Workers, image_bytes, read_body
from arclight.serve.middleware import CONTENT_TYPE, Envelope, Lingering, Metrics
from arclight.serve.settings import Limits

if TYPE_CHECKING:
    from arclight.vision.data.images import Image
    from arclight.vision.results.detections import Detections


PAGE = Path(__file__).parent / "page"


Detect: TypeAlias = "Callable[[Image], Detections]"


@dataclass(frozen=True, kw_only=True)
class Size:
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class Box:
    xyxy_px: tuple[float, float, float, float]
    """Left, top, right, bottom in pixels of the photo as it is shown (after its EXIF rotation)."""
    confidence: float
    """In [0, 1]."""
    label: str


@dataclass(frozen=True, kw_only=True)
class Milliseconds:
    decode: float
    detect: float
    scan: float
    total: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Boxes found in a photo, and the codes read in it."""

    image: Size
    boxes: list[Box]
    codes: list[dict[str, Any]]
    """One object per code: corners_px, box_xyxy_px, confidence, text, kind, payload, problems."""
    milliseconds: Milliseconds


def answer(photo: bytes, detector: Detect, limits: Limits) -> Answer:
    """Decode, detect and read the codes; raises Refusal 422 if ``photo`` is no readable image."""
    from arclight.vision.data.images import ImageError, decode_image
    from arclight.vision.qris import scan

    started = time.perf_counter()
    try:
        image = decode_image(photo, max_pixels=limits.pixels)
    except ImageError as error:
        raise Refusal(422, one_sentence(error)) from None
    decoded = time.perf_counter()
    detections = detector(image)
    detected = time.perf_counter()

    codes = scan(image, lambda _: top_k(detections, limits.codes))
    scanned = time.perf_counter()
    return Answer(
        image=Size(width=image.shape[1], height=image.shape[0]),
        boxes=boxes(detections),
        codes=[code.to_json() for code in codes],
        milliseconds=Milliseconds(
            decode=milliseconds(started, decoded),
            detect=milliseconds(decoded, detected),
            scan=milliseconds(detected, scanned),
            total=milliseconds(started, scanned),
        ),
    )


def top_k(detections: Detections, most: int) -> Detections:
    """Keep the ``most`` boxes of highest confidence."""
    found = detections.boxes
    kept = np.argsort(-found.conf, kind="stable")[:most]
    return type(detections).from_arrays(found.xyxy[kept], found.conf[kept], found.cls[kept], names=detections.names)


def boxes(detections: Detections) -> list[Box]:
    found = detections.boxes
    return [
        Box(
            xyxy_px=(round(left, 1), round(top, 1), round(right, 1), round(bottom, 1)),
            confidence=round(confidence, 4),
            label=detections.names[int(category)],
        )
        for (left, top, right, bottom), confidence, category in zip(
            found.xyxy.tolist(), found.conf.tolist(), found.cls.tolist(), strict=True
        )
    ]


def milliseconds(start: float, end: float) -> float:
    return round((end - start) * 1000, 2)


def one_sentence(error: Exception) -> str:
    """Format an error's message for a client: one line, a capital first and a full stop last."""
    text = " ".join(str(error).split())
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


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
    """Build the application that answers photos with ``detector``'s detections and the codes read in them.

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
        """Report if the server is up (live) and takes photos (ready, else 503)."""
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
    """Answer a request that was turned down."""
    assert isinstance(refusal, Refusal)
    return refusal.response()


async def refuse_address(request: Request, error: Exception) -> Response:
    """Answer a request for something that is not there."""
    assert isinstance(error, HTTPException)
    what = {404: "There is nothing at this address", 405: f"{request.method} is not possible at this address"}
    sentence = f"{what.get(error.status_code, error.detail)}; photos go to POST /detect."
    return Refusal(error.status_code, sentence, headers=error.headers).response()
