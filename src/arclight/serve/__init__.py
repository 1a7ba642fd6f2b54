"""A detector behind HTTP: one address for photos, one page to look at the answer, and the counters an operator needs."""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.serve.app import create_app
    from arclight.serve.server import serve
    from arclight.serve.settings import Limits

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Limits": "arclight.serve.settings",
        "create_app": "arclight.serve.app",
        "serve": "arclight.serve.server",
    },
)
