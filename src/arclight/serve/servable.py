"""Define Lightning's ``ServableModule``, and a callback that tries one before training.

Users reach it as ``pytorch.serve`` of `compat.lightning`, and `ServableModuleValidator` starts a server by `server.make_server`; programs are
not served here. Names, messages and the keys of `state_dict`, which are in checkpoints, are Lightning's and stay.
"""

from __future__ import annotations

import copy
import json
import logging
import urllib.error
import urllib.request
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter
from torch import nn

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_only
from arclight.fabric.serving.listening import reserve_address
from arclight.fabric.serving.running import BackgroundServer
from arclight.serve.server import make_server, require_packages, url_of
from arclight.serve.settings import Limits, is_loopback
from arclight.trainer import Callback, Module, Trainer

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

    from arclight.serve.app import Application, Service

_LOG = logging.getLogger("arclight")
_NAME = "servable"
_REQUEST_SECONDS = 60.0


class ServableModule(nn.Module):
    """Interface of a Module that can be served: a second base class beside `Module`."""

    @abstractmethod
    def configure_payload(self) -> dict[str, Any]:
        """Return a sample request: ``{"body": {name: plain data}}``."""
        raise NotImplementedError("The `configure_payload` method needs to be overridden.")

    @abstractmethod
    def configure_serialization(self) -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
        """Return deserializers of :meth:`serve_step`'s arguments, and serializers of its outputs.

        Both are by name.
        """
        raise NotImplementedError("The `configure_serialization` method needs to be overridden.")

    @abstractmethod
    def serve_step(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the outputs by name, for deserialized arguments by name."""
        raise NotImplementedError("The `serve_step` method needs to be overridden.")

    def configure_response(self) -> dict[str, Any]:
        """Return the response expected for :meth:`configure_payload`.

        If not overridden, any is accepted.
        """
        return {}


@dataclass
class Reply:
    """Status and text of a server's reply."""

    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class ServableModuleValidator(Callback):
    """Serve a copy of the module when training starts, send its payload, compare the answer.

    ``port`` 0 takes a free one; ``timeout``: seconds in which the server must start, else TimeoutError. A response other than that of
    `configure_response` ends the run with MisconfigurationError, and with ``exit_on_failure`` a module that cannot answer does. Raises
    MissingExtraError without the extra ``serve``.
    """

    def __init__(
        self, optimization: str | None = None, server: str = "fastapi", host: str = "127.0.0.1", port: int = 0,
        timeout: float = 20, exit_on_failure: bool = True,
    ) -> None:  # fmt: skip
        if optimization is not None:
            raise NotImplementedError(
                f"The optimization {optimization} is currently not supported: export with arclight.deploy and serve that"
            )
        if server != "fastapi":
            raise NotImplementedError(f"Only the fastapi server is currently supported, not {server!r}.")
        require_packages()
        self.optimization, self.server, self.host, self.port = optimization, server, host, port
        self.timeout, self.exit_on_failure = timeout, exit_on_failure
        self.resp: Reply | None = None

    @property
    def successful(self) -> bool | None:
        """Return True if the module answered; None before the request."""
        return None if self.resp is None else self.resp.status_code == 200

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if not isinstance(pl_module, ServableModule):
            raise TypeError(f"The provided model should be subclass of {ServableModule.__qualname__}.")
        for name in ("configure_payload", "configure_serialization", "serve_step"):
            if getattr(type(pl_module), name) is getattr(ServableModule, name):
                raise NotImplementedError(f"The `{name}` method needs to be overridden.")
        payload = pl_module.configure_payload()
        if "body" not in payload:
            raise MisconfigurationError(f'Your provided payload {payload} should have a field named "body".')
        served = copy.deepcopy(pl_module).eval()  # a copy: training must not see the server's mode
        self.resp = self._ask(served, json.dumps(payload).encode())
        if type(pl_module).configure_response is not ServableModule.configure_response and self.successful:
            expected, given = pl_module.configure_response(), self.resp.json()
            if given != expected:
                raise MisconfigurationError(
                    f"The expected response {expected} doesn't match the generated one {given}."
                )
        if self.exit_on_failure and not self.successful:
            raise MisconfigurationError(
                f"The model isn't servable: it answered {self.resp.status_code}. Investigate the traceback and try again."
            )
        if self.successful:
            _LOG.info("Your model is servable and the received payload was %s.", self.resp.text)

    def _ask(self, served: ServableModule, content: bytes) -> Reply:
        """Return the reply of a server of ``served``; raises TimeoutError if it starts too late."""
        # nothing is larger than the module's own payload, which may be of any size
        limits = Limits(body_bytes=len(content), buffered_bytes=len(content), workers=1)
        with reserve_address(self.host, self.port) as listening:
            url = url_of(self.host, listening.getsockname()[1])
            server = make_server(_application(served, self.host, limits), limits=limits)
            with BackgroundServer(server, listening, start_s=self.timeout, name="servable", handshake_s=limits.head_s):
                return _post(f"{url}/serve", content)

    def state_dict(self) -> dict[str, Any]:
        return {"successful": self.successful, "optimization": self.optimization, "server": self.server}


def _application(module: ServableModule, host: str, limits: Limits) -> Application:
    """Build `app`'s application with ``POST /serve`` for ``module``."""
    from fastapi.responses import Response

    from arclight.serve.app import build_app
    from arclight.serve.middleware import Access
    from arclight.serve.models import ServedModel

    makers, writers = module.configure_serialization()
    written: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])

    def answer(content: bytes) -> bytes:
        body = json.loads(content)["body"]
        arguments = {name: makers[name](value) if name in makers else value for name, value in body.items()}
        with torch.no_grad():
            outputs = module.serve_step(**arguments)
        if not isinstance(outputs, dict):
            raise TypeError(f"serve_step must return a dict of outputs by name, it gave a {type(outputs).__name__}")
        return written.dump_json(
            {name: writers[name](value) if name in writers else value for name, value in outputs.items()}
        )

    def add_route(app: FastAPI, service: Service) -> None:
        async def serve(request: Request) -> Response:
            content = await service.run(request, _NAME, lambda body, _: answer(body))
            return Response(content, media_type="application/json")

        app.add_route("/serve", serve, methods=["POST"])

    access = Access(loopback_only=is_loopback(host))
    return build_app([ServedModel(name=_NAME)], limits, access, add_routes=add_route)


def _post(url: str, content: bytes) -> Reply:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})  # noqa: S310 - our own server
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # not by a proxy of the environment: it is this process
    try:
        with direct.open(request, timeout=_REQUEST_SECONDS) as response:
            return Reply(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read().decode())
