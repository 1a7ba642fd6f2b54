"""An answer that says no: a status and one sentence that tells the client what to do."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import JSONResponse


class Refusal(Exception):  # noqa: N818 (it is an answer, not a fault of ours)
    """An answer other than 200, with the sentence for the client."""

    def __init__(self, status: int, sentence: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = headers

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.sentence}, status_code=self.status, headers=self.headers)


def busy(sentence: str) -> Refusal:
    """429: nothing is wrong with the request, the server is full; the client may come back in a second."""
    return Refusal(429, sentence, headers={"Retry-After": "1"})
