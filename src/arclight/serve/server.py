"""The server process: load a program, bind, answer until told to stop."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from arclight.fabric.extras import require
from arclight.serve.settings import Limits

if TYPE_CHECKING:
    from fastapi import FastAPI


def serve(program_path: str | Path, *, host: str = "127.0.0.1", port: int = 8000, limits: Limits | None = None) -> None:
    """Serve a deployed detector until SIGINT or SIGTERM; requests in progress are finished first.

    Raises ProgramError where ``program_path`` is not a detector's program. Anyone who reaches ``host`` may use the
    server: it has no accounts and no TLS, so an address other than loopback is for a trusted network or behind a proxy.
    """
    require("fastapi", extra="serve")
    from arclight.deploy import Program, ProgramError
    from arclight.serve.app import create_app

    limits = limits or Limits()
    program = Program.load(program_path)
    if (task := program.metadata.get("task")) != "detect":
        raise ProgramError(f"{program_path} is not a detector (its task is {task!r}): serve answers photos with boxes")
    app = create_app(
        lambda image: program.predict([image])[0],
        program=Path(program_path).stem,
        precision=program.precision,
        limits=limits,
    )
    run(app, host=host, port=port, limits=limits)


def run(app: FastAPI, *, host: str, port: int, limits: Limits) -> None:
    """Block while uvicorn serves ``app``; warns on standard error where ``host`` is not this machine alone."""
    if not is_loopback(host):
        sys.stderr.write(f"warning: other machines can reach {host}, and the server asks nobody who they are\n")
    require("uvicorn", extra="serve").run(
        app,
        host=host,
        port=port,
        access_log=False,
        server_header=False,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=max(1, round(limits.shutdown_s)),
    )


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach ``host``; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
