"""The Trainer that keeps Lightning's habits."""

from __future__ import annotations

from arclight.trainer import Trainer as _Trainer


class Trainer(_Trainer):
    """Our Trainer for code that was written for Lightning's."""
