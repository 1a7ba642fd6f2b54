"""Define the errors of quantizing, exporting, comparing and running programs.

All of ``deploy`` raises these; ``serve``, ``text`` and ``vision`` raise `ProgramError`, too. ``arclight.deploy`` exports the first three, whose names
stay; `ComparisonError` and `VerificationError` are imported from here. All are ValueErrors.
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
    """Error of a quantizer that does not do what was expected.

    ``report``: the `Verification`; None if it was raised before the checks came to their end.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
