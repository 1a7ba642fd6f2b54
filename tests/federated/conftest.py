"""Fail tests whose assertions are raised inside a node, which reports what its learners raise and goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


class _Assertions(logging.Handler):
    """Keeps the assertions that were logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.raised: list[AssertionError] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], AssertionError):
            self.raised.append(record.exc_info[1])


@pytest.fixture(autouse=True)
def assertions() -> Iterator[list[AssertionError]]:
    """Those that learners of this test have raised; a test that expects one takes it out."""
    kept, log = _Assertions(), logging.getLogger("arclight.federated")
    log.addHandler(kept)
    try:
        yield kept.raised
    finally:
        log.removeHandler(kept)
    if kept.raised:
        raise kept.raised[0]
