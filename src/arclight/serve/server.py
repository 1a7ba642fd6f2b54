"""The server process: load a program, bind, answer until told to stop."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from arclight.serve.app import create_app
from arclight.serve.settings import Limits


def serve(program_path: str | Path, *, host: str = "127.0.0.1", port: int = 8000, limits: Limits | None = None) -> None:
    """Serve a deployed detector until SIGINT or SIGTERM; requests in progress are finished first.

    Raises ProgramError where ``program_path`` is not a program. Anyone who reaches ``host`` may use the server: it
    has no accounts and no TLS, so an address other than loopback is for a trusted network or behind a proxy.
    """
    from arclight.deploy import Program

    limits = limits or Limits()
    program = Program.load(program_path)
    app = create_app(
        lambda image: program.predict([image])[0],
        program=Path(program_path).stem,
        precision=program.metadata.precision,
        limits=limits,
    )
    run(app, host=host, port=port, limits=limits)


def run(app: FastAPI, *, host: str, port: int, limits: Limits) -> None:
    """Block while uvicorn serves ``app``; warns on standard error where ``host`` is not this machine alone."""
    if not is_loopback(host):
        sys.stderr.write(f"warning: {host} can be reached by other machines, and the server asks nobody who they are\n")
    uvicorn.run(
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
