"""QRIS, Indonesia's payment code: read and write payloads, find and decode codes in photos, draw training scenes."""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.vision.qris.payload import Account as Account
    from arclight.vision.qris.payload import Payload as Payload
    from arclight.vision.qris.payload import Tip as Tip
    from arclight.vision.qris.payload import build as build
    from arclight.vision.qris.payload import classify as classify
    from arclight.vision.qris.payload import is_qris as is_qris
    from arclight.vision.qris.payload import parse as parse
    from arclight.vision.qris.payload import to_dynamic as to_dynamic
    from arclight.vision.qris.scanner import Code as Code
    from arclight.vision.qris.scanner import scan as scan
    from arclight.vision.qris.tlv import Problem as Problem
    from arclight.vision.qris.tlv import QrisError as QrisError

_PAYLOAD = "arclight.vision.qris.payload"
__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        **dict.fromkeys(["Account", "Payload", "Tip", "build", "classify", "is_qris", "parse", "to_dynamic"], _PAYLOAD),
        **dict.fromkeys(["Code", "scan"], "arclight.vision.qris.scanner"),
        **dict.fromkeys(["Problem", "QrisError"], "arclight.vision.qris.tlv"),
    },
)
