"""Write a recipe as an app that Flower starts: ``arclight federate flower``.

`federated_run` calls `flower`, which writes a folder; the app in it calls `server_of` and `client_of` when ``flwr run`` starts it. These names and
the variable ``ARCLIGHT_FLAGS`` are in written apps and at sites: they must stay. ``benchmarks/federated_flower.py`` writes its own by `write_app`.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import pprint
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight._installed import pip_install
from arclight.cli.arguments import problems_listed, read_as, recipe_parser
from arclight.cli.federate.federated_run import as_tables, first_weights, record_run, run_name
from arclight.cli.federate.recipe import FederatedRecipe
from arclight.federated.errors import FederatedError
from arclight.federated.transports.settings import FLOWER_DEFAULTS

if TYPE_CHECKING:
    from arclight.federated.clients.client import Client
    from arclight.federated.server.server import Server

FLAGS = "ARCLIGHT_FLAGS"
"""Environment variable of a SuperNode: flags that override the recipe at its site, as ``--task.data.data /data/texts``."""

_BUILDING = '''\
"""Build the server and the clients of the recipe that this app was written from."""

from arclight.cli.federate import flower

RECIPE = {tables}


def server(folder, config):
    return flower.server_of(RECIPE, folder)


def client(name, config):
    return flower.client_of(RECIPE, name)
'''


def flower(arguments: list[str]) -> None:
    about = f"Write a Flower app that runs a recipe: `flwr run` starts it. A SuperNode's {FLAGS} holds the local settings of its site."
    parser = recipe_parser("federate flower", about)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the app, which must not exist"
    )
    recipe, options = read_as(FederatedRecipe, parser, arguments)
    write(recipe, options)


def write(recipe: FederatedRecipe, options: Namespace) -> None:
    from arclight.cli.federate.sites import check_devices, recipe_at_site, with_vocabulary

    check_devices(recipe)
    recipe_at_site(recipe, 0)
    building = _BUILDING.format(tables=pprint.pformat(as_tables(with_vocabulary(recipe)), width=110, sort_dicts=False))
    folder = write_app(options.out, recipe.name.replace("_", "-"), building)
    print(
        f"wrote {folder}; its README.md explains how to start SuperLink and SuperNodes. Then:\nflwr run {folder} <connection> --stream"
    )


def server_of(tables: Mapping[str, Any], folder: Path) -> Server:
    """Build the server of a recipe, which keeps its run in ``folder``."""
    from arclight.cli.federate.sites import ServerEvaluation, client_names
    from arclight.federated.coordination.run_database import has_begun
    from arclight.federated.server.server import Server
    from arclight.trainer import RunFolder

    recipe = _recipe(tables)
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFolder.open(folder)
    with record_run(recipe, run):
        evaluation = ServerEvaluation(recipe, folder) if recipe.federation.evaluate_on == "server" else None
        begun = has_begun(folder)
        weights = None if begun else first_weights(recipe, evaluation)
    return Server(
        recipe.federation, weights, folder=folder, clients=client_names(recipe), evaluate=evaluation, run=run_name(recipe, run),
        seed=recipe.seed, recipe=as_tables(recipe),
    )  # fmt: skip


def client_of(tables: Mapping[str, Any], name: str) -> Client:
    """Build the client ``name`` of a recipe, with this site's own settings."""
    from arclight.cli.federate.sites import check_devices, check_vocabularies, learner_at, recipe_at_site
    from arclight.federated.clients.client import Client

    recipe = _recipe(tables, shlex.split(os.environ.get(FLAGS, "")))
    check_devices(recipe)
    site = recipe_at_site(recipe, int(name))
    check_vocabularies(recipe, {name: site})
    return Client(name, learner=partial(learner_at, site))


def _recipe(tables: Mapping[str, Any], flags: list[str] | None = None) -> FederatedRecipe:
    from arclight.recipe import read

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with problems_listed("the app's recipe cannot be used here"):
        return read(FederatedRecipe, tables, flags or [])


def write_app(
    folder: str | Path, name: str, building: str, *, files: Mapping[str, str] | None = None,
    config: Mapping[str, str | int | float | bool] | None = None, publisher: str = "arclight",
) -> Path:  # fmt: skip
    """Write an app for `flwr run` into a new ``folder`` and return that; needs no Flower.

    building: text of its module ``building``, with functions ``server(folder, config)`` and ``client(name, config)``. files: others that
    go beside that module, by name. config: of the run, beside what every app has; `flwr run --run-config` can change what is there.
    Raises FileExistsError if the folder is there, FederatedError for a name that Flower does not take.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
        raise FederatedError(
            f"an app's name is made of letters, digits and '-', and begins with a letter, got {name!r}"
        )
    package, folder = name.replace("-", "_").lower(), Path(folder)
    # what a basic string of TOML may hold is written as in JSON
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {**FLOWER_DEFAULTS, **(config or {})}.items())
    words = {
        "name": name,
        "package": package,
        "publisher": publisher,
        "config": settings,
        "install": pip_install("federated", "flower"),
    }
    inside = folder / package
    folder.mkdir(parents=True)
    inside.mkdir()
    templates = importlib.resources.files(__package__) / "flower_app"
    for place, template in (
        (folder, "pyproject.toml"),
        (folder, "README.md"),
        (inside, "server_app.py"),
        (inside, "client_app.py"),
    ):
        (place / template).write_text((templates / f"{template}.in").read_text().format(**words), encoding="utf-8")
    for file, content in {"__init__.py": f'"""The app {name}."""\n', "building.py": building, **(files or {})}.items():
        (inside / file).write_text(content, encoding="utf-8")
    return folder
