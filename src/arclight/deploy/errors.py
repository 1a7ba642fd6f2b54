"""Errors of quantizing, exporting and running programs.

All of ``deploy``, and code that runs programs, raises these; they are public in ``arclight.deploy``. A message says what to change in
model or recipe.
"""

from __future__ import annotations


class QuantizeError(ValueError):
    """A model cannot be quantized as asked."""


class ProgramError(ValueError):
    """Error of a program: its file, its inputs or its kernels are not as they should be."""


class ExportError(ProgramError):
    """Error of a model that cannot be exported, or whose program does not agree with it."""


class ComparisonError(ProgramError):
    """Two networks cannot be compared."""


class VerificationError(QuantizeError):
    """Error of a quantizer that does not do what was expected; ``report`` holds measurements."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
