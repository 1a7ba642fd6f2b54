"""Run the server process: check access, reserve the address, load programs, answer requests.

``arclight serve`` and users call `serve`; `servable` uses `make_server` for Lightning's servable modules. In: programs by model name, limits,
keys, TLS; `app` answers, `draining` ends it. Arguments of `serve` and the exit status `STARTUP_FAILED` are public and stay. An address that
other machines reach needs a key, and TLS or a proxy that speaks it, unless ``insecure``.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from arclight.fabric.extras import require
from arclight.fabric.serving.certificates import check_certificate
from arclight.fabric.serving.listening import AddressError, reserve_address
from arclight.fabric.serving.running import run_server
from arclight.serve.protocol import direct_protocol
from arclight.serve.settings import Limits, check_keys, is_loopback

if TYPE_CHECKING:
    from arclight.deploy.programs.folder import Trusted
    from arclight.deploy.settings import FastestRuntime, Runtime
    from arclight.serve.app import Application
    from arclight.serve.draining import DrainingServer
    from arclight.serve.models import ServedModel

STARTUP_FAILED = 3
"""Exit status if the application does not start, as uvicorn's own command has it."""


@dataclass(frozen=True)
class Tls:
    """PEM files of a server's TLS."""

    certificate: Path
    private_key: Path


MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Pattern of the names of models, which are in addresses and metrics; ``arclight serve`` checks them by it, too."""


def serve(
    program_path: str | Path | Mapping[str, str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    api_key: str | Sequence[str] | None = None,
    insecure: bool = False,
    tls: Tls | None = None,
    proxied: bool = False,
    trusted: Trusted | None = None,
    runtime: Runtime | FastestRuntime | Mapping[str, Runtime | FastestRuntime] | None = None,
    request_log: str | Path | None = None,
) -> None:
    """Serve deployed programs until SIGINT or SIGTERM.

    Requests in progress then have ``limits.shutdown_s`` to finish. After SIGTERM the server first reports that it is not ready, and takes
    requests for ``limits.drain_s`` more.

    A mapping of names to paths serves several programs, of any task: detectors answer photos, language programs texts by
    OpenAI's protocol, every other program tensors at ``/v2/models/NAME/infer``, detectors as well. Raises ProgramError if a
    program cannot be loaded, or a lone ``program_path`` neither detects nor generates nor embeds text; ValueError for no program, a name that
    no address can have, or the runtime of a model that is not there; AddressError if ``host`` and ``port`` cannot be listened on.

    With ``api_key``, requests other than for health need ``Authorization: Bearer KEY`` with it, or one of several; an address that
    other machines reach needs a key and ``tls``, or ``proxied`` if a proxy before it speaks TLS, or ``insecure`` for neither,
    else ValueError. On loopback the Host header must name loopback, so that no web page reaches the server under a name of its
    own. ``trusted`` and ``runtime``: as for ``Program.load``; a mapping has runtimes by the names of models.
    A line of JSON about each request is appended to ``request_log``; with "-" it goes to standard output, and the server's
    address to standard error. OSError if it cannot be opened.
    """
    keys = check_access(host, api_key, insecure=insecure, tls=tls, proxied=proxied)
    require_packages()
    from arclight.serve.app import build_app
    from arclight.serve.middleware import Access
    from arclight.serve.models import load

    limits = limits or Limits()
    several = isinstance(program_path, Mapping)
    paths, runtimes = _named(program_path, runtime)
    with reserve_address(host, port) as listening:  # before the program is loaded, which a port in use would make vain

        def loaded(name: str, path: Path, old: ServedModel | None = None) -> ServedModel:
            return load(name, path, limits, lone=not several, trusted=trusted, runtime=runtimes.get(name), old=old)

        def replaced(old: ServedModel) -> ServedModel:
            assert old.loaded is not None  # others have no path, and are not watched
            return loaded(old.name, old.loaded.path, old)

        models = [loaded(name, Path(path)) for name, path in paths.items()]
        access = Access(loopback_only=is_loopback(host), keys=keys)
        app = build_app(models, limits, access, load=replaced, request_log=request_log)
        address_to = sys.stderr if str(request_log) == "-" else sys.stdout
        run(
            app, host=host, port=port, limits=limits, listening=listening, has_key=bool(keys), tls=tls, address_to=address_to,
        )  # fmt: skip


def require_packages() -> None:
    """Raise MissingExtraError if a package of the extra ``serve`` is missing."""
    for package in ("fastapi", "prometheus_client", "httptools", "orjson", "uvicorn"):
        require(package, extra="serve")


def _named(
    program_path: str | Path | Mapping[str, str | Path],
    runtime: Runtime | FastestRuntime | Mapping[str, Runtime | FastestRuntime] | None,
) -> tuple[dict[str, str | Path], dict[str, Runtime | FastestRuntime]]:
    """Return paths and runtimes by the names of models.

    Raises ValueError for no program, for a name that no address can have, and for the runtime of a model that is not there.
    """
    if isinstance(program_path, Mapping):
        paths = dict(program_path)
        for name in paths:
            if not re.fullmatch(MODEL_NAME, name):
                raise ValueError(
                    f"{name!r} cannot name a model: use up to 64 letters, digits, dots, dashes and underscores"
                )
    else:
        paths = {Path(program_path).resolve().stem: program_path}
    if not paths:
        raise ValueError("there is no program to serve: name one")
    if not isinstance(runtime, Mapping):
        return paths, {} if runtime is None else dict.fromkeys(paths, runtime)
    if unknown := sorted(runtime.keys() - paths.keys()):
        raise ValueError(
            f"there is no model {unknown[0]!r} to run in {runtime[unknown[0]]}: there are {', '.join(paths)}"
        )
    return paths, dict(runtime)


def check_access(
    host: str, api_key: str | Sequence[str] | None, *, insecure: bool, tls: Tls | None = None, proxied: bool = False
) -> tuple[str, ...]:
    """Return the keys, if they and the address may be used.

    Raises ValueError for an address beyond loopback without a key, or with neither ``tls`` nor ``proxied``, unless ``insecure``; for a key
    that is easily guessed; and for a certificate that a server cannot show.
    """
    if api_key is None and not insecure and not is_loopback(host):
        raise ValueError(
            f"other machines can reach {host}: give an API key (--api-key-file FILE), or --insecure if all of them may "
            "use the server"
        )
    keys = check_keys(api_key)
    if tls is None and not insecure and not proxied and not is_loopback(host):
        raise ValueError(
            f"other machines can reach {host}, and keys and photos would travel readable: give a certificate and its key "
            "(--tls-cert FILE --tls-key FILE; `arclight federate keys server` makes both), --behind-proxy if a proxy before the server "
            "speaks TLS, or --insecure"
        )
    if tls is not None:
        check_certificate(tls.certificate, tls.private_key, extra="deploy")
    return keys


def run(
    app: Application,
    *,
    host: str,
    port: int,
    limits: Limits,
    listening: socket.socket | None = None,
    has_key: bool = False,
    tls: Tls | None = None,
    address_to: TextIO | None = None,
) -> None:
    """Serve ``app`` by uvicorn until it ends, and print its address to ``address_to``.

    ``listening``: a reserved address, else ``host`` and ``port`` are reserved. ``address_to``: by default standard output. Warns on standard
    error if other machines reach ``host`` and the application asks for no key. Ends the process with `STARTUP_FAILED` if it does not start.
    """
    if not is_loopback(host) and not has_key:
        sys.stderr.write(f"warning: other machines can reach {host}, and the server asks nobody who they are\n")
    server = make_server(app, limits=limits, tls=tls)
    with listening or reserve_address(host, port) as reserved:
        number = reserved.getsockname()[1]
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux; connections inherit it
            reserved.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(limits.reader_stall_s * 1000))
        try:
            reserved.listen()  # who connects before the application has started waits for it
        except OSError as error:  # two that start at once may both reserve an address; one of them listens first
            raise AddressError.of(host, number, error) from error
        address_to = address_to or sys.stdout
        address_to.write(f"open {url_of(host, number, tls)} (ctrl-C ends the server)\n")
        address_to.flush()
        with suppress(KeyboardInterrupt):  # which has ended the server as it should
            run_server(server, reserved, handshake_s=limits.head_s)
    if not server.started:
        raise SystemExit(STARTUP_FAILED)


def make_server(app: Application, *, limits: Limits, tls: Tls | None = None) -> DrainingServer:
    """Return the uvicorn server that answers by ``app`` within ``limits``."""
    uvicorn = require("uvicorn", extra="serve")
    from arclight.serve.draining import DrainingServer

    return DrainingServer(
        uvicorn.Config(
            app,
            http=direct_protocol(head_s=limits.head_s, take=app.take),
            ws="none",
            access_log=False,
            server_header=False,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.private_key,
            log_level="warning",
            limit_concurrency=limits.connections,
            timeout_keep_alive=limits.keep_alive_s,  # uvicorn declares whole seconds, and takes any
            timeout_graceful_shutdown=max(1, round(limits.shutdown_s)),
        ),
        on_drain=app.state.drain,
        drain_s=limits.drain_s,
    )


def url_of(host: str, port: int, tls: Tls | None = None) -> str:
    """Return the address at which this machine reaches a server."""
    place = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"{'http' if tls is None else 'https'}://{place}:{port}"
