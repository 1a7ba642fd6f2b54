"""Describe requests and responses for the OpenAPI document.

`app` gives these to its routes: bodies are read by hand, within limits, and errors are raised at every depth, so FastAPI finds neither. It
finds what a route returns as a dataclass. ``tests/serve/test_openapi.py`` sends requests drawn from the document and compares the responses
with it, so a change of a route's body or error responses needs one here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from arclight.serve.admission import TEXT
from arclight.serve.tasks.tensors import DATATYPES, JSON_SIZE

Responses = dict[int | str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Error:
    error: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    message: str
    type: str
    param: str | None
    code: int


@dataclass(frozen=True, kw_only=True)
class TextError:
    """An error response in the form of OpenAI's API."""

    error: Failure


MEANINGS = {
    400: "The request is malformed, or asks for what the model cannot do",
    401: "The API key is missing or wrong",
    403: "The request comes from a page of another site",
    404: "There is no such model, or it answers no such requests",
    408: "The upload stalled",
    413: "The upload is too large",
    415: "The body is compressed",
    421: "The Host header names another machine",
    422: "Not an image, damaged, or too many pixels",
    429: "The server is full, or the API key was used too often; see Retry-After",
    500: "The server failed; its log has the details",
    503: "No worker was free before the deadline; see Retry-After",
}


def _error_responses(model: type, *statuses: int) -> Responses:
    return {status: {"model": model, "description": MEANINGS[status]} for status in statuses}


ALWAYS = (401, 403, 421, 429, 500)
"""Statuses of errors that any request may get."""
UPLOAD = (*ALWAYS, 400, 408, 413, 415, 503)
"""Statuses of errors that a request with a body may get."""
EVERYWHERE = _error_responses(Error, *ALWAYS)
UNKNOWN_MODEL = _error_responses(Error, 404)
PHOTO_ERRORS = _error_responses(Error, *UPLOAD, 404, 422)
TENSOR_ERRORS = _error_responses(Error, *UPLOAD, 404)
TEXT_ERRORS = _error_responses(TextError, *UPLOAD, 404)
TEXT_MODEL_ERRORS = _error_responses(TextError, *ALWAYS)
UNKNOWN_TEXT_MODEL = _error_responses(TextError, *ALWAYS, 404)
UNREADY: Responses = {503: {"description": "The server starts or ends"}}


def _objects(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "array", "items": _object(properties, *required)}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _success(content: dict[str, Any]) -> Responses:
    return {200: {"content": content}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


_TEXT, _NUMBER, _PARAMETERS = {"type": "string"}, {"type": "integer"}, {"type": "object"}
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_TENSOR = {
    "name": _TEXT, "datatype": {"enum": sorted(DATATYPES.values())}, "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "data": {"type": "array"}, "parameters": _PARAMETERS,
}  # fmt: skip
_USAGE = _object(
    {"prompt_tokens": _NUMBER, "total_tokens": _NUMBER, "completion_tokens": _NUMBER}, "prompt_tokens", "total_tokens"
)
_REASON = {"enum": ["stop", "length"]}

METRICS = _success({kind: {"schema": _TEXT} for kind in ("text/plain", "application/openmetrics-text")})
_OUTPUTS = _objects(
    {**_TENSOR, "datatype": _TEXT}, "name", "datatype", "shape"
)  # a program may give what no request can hold
_TENSORS = _object(
    {"model_name": _TEXT, "model_version": _TEXT, "id": _TEXT, "outputs": _OUTPUTS}, "model_name", "model_version", "outputs"
)  # fmt: skip
TENSOR_RESPONSES = _success({**_json(_TENSORS), "application/octet-stream": _BYTES})
_VECTOR = {"anyOf": [{"type": "array", "items": {"type": "number"}}, _TEXT]}
_VECTORS = _objects({"object": {"const": "embedding"}, "index": _NUMBER, "embedding": _VECTOR})
VECTOR_RESPONSES = _success(
    _json(_object({"object": {"const": "list"}, "model": _TEXT, "data": _VECTORS, "usage": _USAGE}))
)


def text_responses(kind: str, **choice: dict[str, Any]) -> Responses:
    """Describe answers with texts, whole or streamed.

    ``kind``: value of the field ``object``; ``choice``: fields of each choice.
    """
    choices = _objects({"index": _NUMBER, "finish_reason": _REASON, **choice})
    head = {"id": _TEXT, "object": {"const": kind}, "created": _NUMBER, "model": _TEXT}
    return _success({**_json(_object({**head, "choices": choices, "usage": _USAGE})), "text/event-stream": {}})


COMPLETION_RESPONSES = text_responses("text_completion", text=_TEXT)
CHAT_RESPONSES = text_responses("chat.completion", message=_object({"role": {"const": "assistant"}, "content": _TEXT}))


def photo_body(field: str) -> dict[str, Any]:
    """Describe a photo as the body, or as a ``field`` of a form."""
    photo = {"type": "string", "format": "binary", "minLength": 1}
    form = {"type": "object", "properties": {field: photo}, "required": [field]}
    kinds = {"image/*": photo, "application/octet-stream": photo, "multipart/form-data": form}
    return _body({kind: {"schema": schema} for kind, schema in kinds.items()})


def tensor_body() -> dict[str, Any]:
    """Describe tensors in JSON, or as bytes behind it."""
    fields = {
        "id": _TEXT, "parameters": _PARAMETERS, "inputs": _objects(_TENSOR, "name", "datatype", "shape"),
        "outputs": _objects({"name": _TEXT, "parameters": _PARAMETERS}, "name"),
    }  # fmt: skip
    size = {
        "name": JSON_SIZE, "in": "header", "required": False, "schema": {"type": "integer", "minimum": 0},
        "description": "Bytes of JSON before the tensors' bytes; none follow without it",
    }  # fmt: skip
    return _body({**_json(_object(fields, "inputs")), "application/octet-stream": _BYTES}) | {"parameters": [size]}


def text_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Describe a request for text or embeddings, without references to other places."""
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(parts[value["$ref"].rpartition("/")[2]])
        return {key: inlined(item) for key, item in value.items()}

    return _body(_json(inlined(schema)))


def _body(content: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": content}}


def name_models(document: dict[str, Any], names: Callable[[str], Sequence[str]]) -> None:
    """Name in an OpenAPI document the models that each path takes, in itself or in the body.

    ``names`` returns those of a path.
    """
    for path, operations in document["paths"].items():
        for operation in operations.values():
            places = [one["schema"] for one in operation.get("parameters", ()) if one["name"] == "model"]
            if path in TEXT:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                places.append(schema["properties"]["model"])
            for place in places if (found := names(path)) else ():
                place["enum"] = list(found)
            # FastAPI adds it to each path with a name in it, and any text is one
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
