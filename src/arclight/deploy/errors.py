"""Errors of quantizing, exporting and running programs."""

from __future__ import annotations


class QuantizeError(ValueError):
    """A model cannot be quantized as asked."""


class ProgramError(ValueError):
    """A program file, its inputs or its kernels are not what they should be."""


class ExportError(ProgramError):
    """A model could not be exported, or its program does not compute what the model computes."""


class ComparisonError(ProgramError):
    """Two networks cannot be compared."""


class VerificationError(QuantizeError):
    """A quantizer does not do what was expected of it; ``report`` holds what was measured until then."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
