"""Write a recipe as an app that Flower starts: ``arclight federate flower``."""

from __future__ import annotations

import os
import pprint
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import problems_listed, read_as, recipe_parser
from arclight.cli.federate.federated_run import as_tables, first_weights, recorded, run_name
from arclight.cli.federate.recipe import FederatedRecipe

if TYPE_CHECKING:
    from arclight.federated.clients.client import Client
    from arclight.federated.server.server import Server

FLAGS = "ARCLIGHT_FLAGS"
"""Environment variable of a SuperNode: what is otherwise at its site, as ``--task.data.data /data/texts``."""

_BUILDING = '''\
"""What the server and each site make of the recipe that this app was written from."""

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
    from arclight.cli.federate.sites import at_site, check_devices
    from arclight.federated.transports.flower_folder import write_app

    check_devices(recipe)
    at_site(recipe, 0)
    building = _BUILDING.format(tables=pprint.pformat(as_tables(recipe), width=110, sort_dicts=False))
    folder = write_app(options.out, recipe.name.replace("_", "-"), building)
    print(
        f"wrote {folder}; its README.md explains how to start SuperLink and SuperNodes. Then:\nflwr run {folder} <connection> --stream"
    )


def server_of(tables: Mapping[str, Any], folder: Path) -> Server:
    """Build the server of a recipe, which keeps its run in ``folder``."""
    from arclight.cli.federate.sites import Measuring, client_names
    from arclight.federated.server.server import Server
    from arclight.trainer import RunFolder

    recipe = _recipe(tables)
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFolder.open(folder)
    with recorded(recipe, run):
        measuring = Measuring(recipe, folder) if recipe.federation.evaluate_on == "server" else None
        begun = (folder / "journal.jsonl").exists()
        weights = None if begun else first_weights(recipe, measuring)
    return Server(
        recipe.federation, weights, folder=folder, clients=client_names(recipe), evaluate=measuring, run=run_name(recipe, run),
        seed=recipe.seed, recipe=as_tables(recipe),
    )  # fmt: skip


def client_of(tables: Mapping[str, Any], name: str) -> Client:
    """Build the client ``name`` of a recipe, with this site's own settings."""
    from arclight.cli.federate.sites import at_site, check_devices, learner_at
    from arclight.federated.clients.client import Client

    recipe = _recipe(tables, shlex.split(os.environ.get(FLAGS, "")))
    check_devices(recipe)
    return Client(name, learner=partial(learner_at, at_site(recipe, int(name))))


def _recipe(tables: Mapping[str, Any], flags: list[str] | None = None) -> FederatedRecipe:
    from arclight.recipe import read

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with problems_listed("the app's recipe cannot be used here"):
        return read(FederatedRecipe, tables, flags or [])
