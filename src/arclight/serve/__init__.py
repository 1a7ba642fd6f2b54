"""Serve programs over HTTP.

In: photos, tensors and texts; out: answers, a web page (the folder ``page``) and metrics. ``arclight serve`` and users call `serve`.

`server` takes programs and an address; `models` loads the programs, and reloads them when they are replaced. A request comes by `protocol`,
passes `middleware` (whose first lines give the way of a small one) and `admission` (limits, queue), and is answered in `app` by one of the
`tasks`, within the limits of `settings`; `metrics` counts it, `request_log` identifies it and writes a line about it. `openapi` describes
requests and answers to clients. `draining` ends the server without failing requests in progress. `servable` tries Lightning's servable
modules. Open `app` first.
"""

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
