"""Define the errors that several rooms raise: wrong settings, missing devices, SIGTERM.

Base classes stay: users catch ValueError, TypeError, RuntimeError or SystemExit.
"""

from __future__ import annotations


class MisconfigurationError(ValueError, TypeError):
    """Raised for settings, hooks or return values that contradict one another."""


class SIGTERMException(SystemExit):
    """The process was asked to end by SIGTERM: state has been saved, the exit status is 143."""

    def __init__(self, code: int = 143) -> None:
        super().__init__(code)


class MissingDeviceError(MisconfigurationError, RuntimeError):
    """A kind of device, or a way to start processes, that this machine does not have."""
