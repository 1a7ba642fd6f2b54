"""A detector behind HTTP: an address for photos, a page to look at the answers, the counters an operator needs."""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.serve.app import create_app as create_app
    from arclight.serve.server import serve as serve
    from arclight.serve.settings import Limits as Limits

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Limits": "arclight.serve.settings",
        "create_app": "arclight.serve.app",
        "serve": "arclight.serve.server",
    },
)
