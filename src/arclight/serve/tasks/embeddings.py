"""Answer requests for embeddings by OpenAI's API (POST /v1/embeddings).

`app` calls `answer` for each request, on a worker. Fields and the form of errors are OpenAI's and stay; other fields are refused. A vector
must not depend on the other texts of its batch, beyond rounding: tests compare.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from arclight.serve.admission import Refusal, Turn, busy, one_sentence
from arclight.serve.settings import Limits
from arclight.serve.tasks.text import MAX_ERRORS, AtLeastOne, read_json, wrong_field
from arclight.text.data.tokenizer import TokenizerError
from arclight.text.embedding_program import BATCH, Embedder

MAX_TEXTS = 2048
"""Most texts of a request, as in OpenAI's API."""
# fail_fast: a million wrong elements, each with an error of its own, would take gigabytes
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
Tokens = Annotated[list[int], Field(min_length=1, fail_fast=True)]
SeveralTokens = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]


class EmbeddingRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    input: str | Texts | Tokens | SeveralTokens
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: AtLeastOne | None = None
    user: str | None = None

    def texts(self) -> list[str] | list[list[int]]:
        """Return the input as a list of texts, or of lists of token ids."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]
        return self.input


def answer(body: bytes, model: Callable[[str], Embedder], limits: Limits, turn: Turn) -> bytes:
    """Answer a request for embeddings.

    Raises Refusal 400 for texts that the model cannot embed, 404 for an unknown model, 413 for long JSON, 503 after the deadline, and 500 for
    vectors that are NaN or infinite.
    """
    request = read_json(body, EmbeddingRequest, limits, _describe)
    embedder = model(request.model)
    if request.dimensions not in (None, embedder.dimensions):
        raise Refusal(
            400,
            f"The model's embeddings have {embedder.dimensions} dimensions, not {request.dimensions}; leave the field 'dimensions' out.",
        )
    try:
        texts = [embedder.encode(text) for text in request.texts()]
    except (ValueError, TokenizerError) as error:
        raise Refusal(400, one_sentence(error)) from None
    vectors = embed(embedder, texts, turn)
    data = [
        {"object": "embedding", "index": index, "embedding": _encode(vector, request.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    count = sum(map(len, texts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json.dumps(
        {"object": "list", "data": data, "model": request.model, "usage": usage}, allow_nan=False
    ).encode()


def embed(embedder: Embedder, texts: list[list[int]], turn: Turn) -> list[np.ndarray[Any, Any]]:
    """Return the vectors of texts, batched by length; raises Refusal 503 once ``turn`` is over."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: dict[int, np.ndarray[Any, Any]] = {}
    for start in range(0, len(order), BATCH):
        if turn.is_over():
            raise busy(f"The deadline came after {len(found)} of {len(texts)} texts; send fewer at once", 1, status=503)
        indices = order[start : start + BATCH]
        found |= zip(indices, embedder.embed([texts[index] for index in indices]), strict=True)
    vectors = [found[index] for index in range(len(texts))]
    if not all(np.isfinite(vector).all() for vector in vectors):
        raise Refusal(500, "The model gave an embedding that is NaN or infinite.")
    return vectors


def _encode(vector: np.ndarray[Any, Any], form: str | None) -> str | list[float]:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.astype(np.float64).tolist()
    return numbers


def _describe(error: ValidationError) -> str:
    """Describe a request's errors in one sentence; for ``input``, name the forms it may have."""
    if error.error_count() > MAX_ERRORS:
        return wrong_field(error)
    fields = {
        str(one["loc"][0])
        for one in error.errors(include_url=False, include_context=False, include_input=False)
        if one["loc"]
    }
    if fields == {"input"}:  # pydantic has an error for each of its forms
        return (
            f"The field 'input' must be a text, a list of texts, a list of token ids or a list of such lists, of at most {MAX_TEXTS} "
            "texts, none of them empty."
        )
    return wrong_field(error)
