"""Exporters talk a lot; nobody wants to hear it unless something went wrong."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

_LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, what is printed, warned and logged by exporters is held back; an error carries it along as a note."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    with warnings.catch_warnings(record=True) as warned, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        stack.enter_context(contextlib.redirect_stdout(heard))
        stack.enter_context(contextlib.redirect_stderr(heard))
        for logger in loggers:
            logger.handlers, logger.propagate = [handler], False
        try:
            yield
        except Exception as error:
            lines = [*heard.getvalue().splitlines(), *(f"{w.category.__name__}: {w.message}" for w in warned)]
            if lines:
                error.add_note("\n".join(["What the exporter said before it failed:", *lines[-40:]]))
            raise
        finally:
            for logger, (handlers, propagate) in zip(loggers, before):
                logger.handlers, logger.propagate = handlers, propagate
