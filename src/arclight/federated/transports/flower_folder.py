"""Writes a small Flower app for `flwr run`: a project file and a few lines that import our functions. Needs no Flower."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from arclight._installed import pip_install
from arclight.federated.errors import FederatedError
from arclight.federated.transports.settings import FLOWER_DEFAULTS

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "An arclight federation under Flower"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "{publisher}"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
{config}
"""

_SERVER = '''\
"""What Flower runs beside its SuperLink."""

from arclight.federated.transports.flower import server_app

app = server_app("{package}.building:server")
'''

_CLIENT = '''\
"""What Flower runs at each SuperNode."""

from arclight.federated.transports.flower import client_app


def build(name, config):
    from {package}.building import client  # with all that it trains with, which the site's key is given without

    return client(name, config)


app = client_app(build)
'''

_README = """\
# {name}

An arclight federation for Flower 1.41. Every machine needs `{install}`, and what the recipe names.

Telemetry and update checks of Flower are on unless they are turned off, and its SuperLink installs packages at run time:

    export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
    flower-superlink --insecure --disable-runtime-dependency-installation --host 127.0.0.1 --port 8000
    flower-supernode --insecure --superlink 127.0.0.1:8000 --host 127.0.0.1 --port 9100 --node-config "client='0'"
    flower-supernode --insecure --superlink 127.0.0.1:8000 --host 127.0.0.1 --port 9101 --node-config "client='1'"
    flwr run . <connection> --stream

`<connection>` names `address = "127.0.0.1:8000"` and `insecure = true` in `config.toml` of `$FLWR_HOME`; without a name Flower starts a
SuperLink of its own that outlives the run. Off one machine: `--ssl-certfile`, `--ssl-keyfile`, `--ssl-ca-certfile` and
`--enable-supernode-auth` in the place of `--insecure`, and `--run-config "host='0.0.0.0' known-as='<name of the server>' port=8470"`.

A client that dies is missed within two seconds, and the others go on. Flower notices a killed ClientApp after about a minute, and only
then it is started again: a round waits `federation.waiting.lease_s` seconds (300) for it. A SuperLink that dies ends `flwr run`, not
the run: the server is a process of its own, whose log is `server.log` in the run's folder. `flwr stop` ends it, and `folder='<that of a
run>'` goes on where one ended.

The run config says the rest; `mode='compat'` sends weights in Flower's own messages, for clients that are not arclight's.
"""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


def write_app(
    folder: str | Path,
    name: str,
    building: str,
    *,
    files: Mapping[str, str] | None = None,
    config: Mapping[str, str | int | float | bool] | None = None,
    publisher: str = "arclight",
) -> Path:
    """An app in a new ``folder``; returns it.

    building: text of its module ``building``, with functions ``server(folder, config)`` and ``client(name, config)``. files: others that
    go beside that module, by name. config: of the run, beside what every app has; `flwr run --run-config` can change what is there.
    Raises FileExistsError where the folder is there, FederatedError for a name that Flower does not take.
    """
    if not _NAME.fullmatch(name):
        raise FederatedError(
            f"an app's name is made of letters, digits and '-', and begins with a letter, got {name!r}"
        )
    package = name.replace("-", "_").lower()
    folder = Path(folder)
    folder.mkdir(parents=True)
    inside = folder / package
    inside.mkdir()
    said = "\n".join(f"{key} = {_toml(value)}" for key, value in {**FLOWER_DEFAULTS, **(config or {})}.items())
    words = {
        "name": name,
        "package": package,
        "publisher": publisher,
        "config": said,
        "install": pip_install("federated", "flower"),
    }
    (folder / "pyproject.toml").write_text(_PROJECT.format(**words), encoding="utf-8")
    (folder / "README.md").write_text(_README.format(**words), encoding="utf-8")
    contents = {
        "__init__.py": f'"""The app {name}."""\n', "server_app.py": _SERVER.format(**words),
        "client_app.py": _CLIENT.format(**words), "building.py": building, **(files or {}),
    }  # fmt: skip
    for file, content in contents.items():
        (inside / file).write_text(content, encoding="utf-8")
    return folder


def _toml(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
