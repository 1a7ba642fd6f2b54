"""Read and write payloads of QRIS, Indonesia's payment code, and codes in photos and scenes.

Text comes in through `payload`, photos through `reading`; `verification` compares codes with a registry of places, and
`scenes` draws photos; `poster` lays out a printable sheet, for ``arclight data poster``. ``arclight scan`` and the server read by these. Open
`reading.scanner` first. The names below are public and must stay.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.vision.qris.payload.codec import Account as Account
    from arclight.vision.qris.payload.codec import Payload as Payload
    from arclight.vision.qris.payload.codec import Tip as Tip
    from arclight.vision.qris.payload.codec import build as build
    from arclight.vision.qris.payload.codec import classify as classify
    from arclight.vision.qris.payload.codec import is_qris as is_qris
    from arclight.vision.qris.payload.codec import parse as parse
    from arclight.vision.qris.payload.codec import to_dynamic as to_dynamic
    from arclight.vision.qris.payload.tlv import Problem as Problem
    from arclight.vision.qris.payload.tlv import QrisError as QrisError
    from arclight.vision.qris.reading.scanner import Code as Code
    from arclight.vision.qris.reading.scanner import scan as scan
    from arclight.vision.qris.verification.verifier import verify as verify

_PAYLOAD = "arclight.vision.qris.payload.codec"
__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        **dict.fromkeys(["Account", "Payload", "Tip", "build", "classify", "is_qris", "parse", "to_dynamic"], _PAYLOAD),
        **dict.fromkeys(["Code", "scan"], "arclight.vision.qris.reading.scanner"),
        "verify": "arclight.vision.qris.verification.verifier",
        **dict.fromkeys(["Problem", "QrisError"], "arclight.vision.qris.payload.tlv"),
    },
)
