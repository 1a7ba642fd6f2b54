"""Define a program's pre- and postprocessing: users' inputs to tensors, tensors to results.

``vision.tasks`` implements `Processing`; `deployment` stores class and fields in the program, `Program.load` checks the name, and
`Program.processing` calls `resolve` at its first use. Names are in programs: a class that moves needs an entry in ``_stored_names``. They come from
files that anyone may have written, so only classes of this package are loaded.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from arclight._stored_names import current
from arclight.deploy.errors import ProgramError

_NAME = re.compile(r"arclight(\.[A-Za-z]\w*)+:[A-Za-z]\w*")


@runtime_checkable
class Processing(Protocol):
    """Pre- and postprocessing of ``Program.predict``."""

    def preprocess(self, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Return the program's input for ``inputs``, and a context for `postprocess`.

        The input is an array or a tuple of them, batch first.
        """

    def postprocess(self, outputs: Any, context: Any) -> Sequence[Any]:
        """Return one result per input, from outputs and the context of `preprocess`."""


def check_name(name: object) -> str:
    """Return ``name`` if it has the form arclight.module:Class, else raise ProgramError.

    The name comes from a file that anyone may have written: nothing outside this package is imported for it.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ProgramError(
            f"the file names {name!r} as its processing; only classes of the arclight package (arclight.module:Class) "
            "are loaded from a file. Pass your own with Program.load(path, processing=...)"
        )
    return name


def resolve(name: str, arguments: dict[str, Any]) -> Processing:
    """Instantiate the processing class ``name``.

    Raises ProgramError if it is unknown, not a `Processing`, or takes other arguments.
    """
    module, _, attribute = current(check_name(name)).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the error for a missing extra names it
        raise ProgramError(
            f"this arclight has no {module}, which the file names as its processing: update it"
        ) from error
    if not isinstance(found, type) or not found.__module__.startswith("arclight.") or not issubclass(found, Processing):
        raise ProgramError(
            f"the file names {name!r} as its processing, which is not a class with preprocess and postprocess"
        )
    try:
        return found(**arguments)
    except (TypeError, ValueError) as error:
        raise ProgramError(f"the file's processing_args {arguments} do not fit {name}: {error}") from error
