"""Build the learners of a recipe's clients and server, the same on every machine.

`federated_run` (one process), `network` (machines) and `flower` build learners and check recipes here. From a recipe and a site's number every
machine must build the same module and data. A task takes part by the methods that are called here, such as ``site`` and ``with_data``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import UsageError
from arclight.cli.run_setup import build_task, check_plan, make_trainer
from arclight.recipe import Imported, imported

if TYPE_CHECKING:
    import torch

    from arclight.cli.federate.recipe import FederatedRecipe
    from arclight.federated.clients import Learner
    from arclight.federated.clients.node import Node
    from arclight.federated.transports.link import ServerApi
    from arclight.trainer import Callback, DataModule, Module, Trainer

NEVER = 10**9
"""Batches between validations of a client: none comes, as the server requests evaluations."""
MEASURING = "server"
"""Name of the client in the server's own evaluations."""


def client_names(recipe: FederatedRecipe) -> tuple[str, ...]:
    """Name the clients by the number of their site."""
    return tuple(str(number) for number in range(recipe.federation.clients))


# -- data ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnSite:
    """A user's module on one site's data.

    Its method ``site`` gives the data, or the module and them.
    """

    task: Imported
    number: int
    count: int

    def build(self) -> tuple[Module, DataModule]:
        module = self.task.build()
        given = module.site(self.number, self.count)
        return given if isinstance(given, tuple) else (module, given)


def recipe_at_site(recipe: FederatedRecipe, number: int) -> FederatedRecipe:
    """Return the recipe with the data of site ``number`` only.

    Raises UsageError if the task's data cannot be divided.
    """
    task: Any = recipe.task
    count = recipe.federation.clients
    given = {} if recipe.partition is None else {"partition": recipe.partition}
    if isinstance(task, Imported):
        if not callable(getattr(imported(task.target), "site", None)):
            raise UsageError(f"{task.target} has no method site(number, count) that gives one site's data")
        if given:
            raise UsageError(
                f"[partition] divides texts and images; the data of {task.target} are divided by its method site"
            )
        return replace(recipe, task=OwnSite(task, number, count))  # type: ignore[arg-type]
    if not callable(getattr(task, "site", None)):
        raise UsageError(
            f"{type(task).__name__} has no method site(number, count) that gives the task with one site's data"
        )
    if given and "partition" not in inspect.signature(task.site).parameters:
        raise UsageError(
            f"[partition] divides texts and images; {type(task).__name__} divides its own data by its method site"
        )
    try:
        return replace(recipe, task=task.site(number, count, **given))
    except ValueError as error:
        raise UsageError(f"partition: {error}") from error


def check_division(recipe: FederatedRecipe, or_else: str = "") -> None:
    """Raise UsageError if the task's data cannot be divided among all sites.

    or_else: ends the message. A user's own task must find that out itself, in its method ``site``.
    """
    recipe_at_site(recipe, 0)
    check = getattr(recipe.task, "check_sites", None)
    if isinstance(recipe.task, Imported) or not callable(check):
        return
    count = recipe.federation.clients
    try:
        check(count) if recipe.partition is None else check(count, recipe.partition)
    except ValueError as error:
        raise UsageError(f"the data cannot be divided among federation.clients = {count}: {error}{or_else}") from error


def check_vocabularies(recipe: FederatedRecipe, sites: Mapping[str, FederatedRecipe]) -> None:
    """Raise UsageError if the sites' texts do not match the required vocabulary.

    sites: recipes by client.
    """
    from arclight.federated.masks.settings import matches

    check = getattr(recipe.task, "check_vocabularies", None)
    if isinstance(recipe.task, Imported) or not callable(check):
        return
    masks = recipe.federation.masks
    try:
        check(
            {name: site.task for name, site in sites.items()},
            lambda name: matches(name, masks.personal),
            personal_from_client=masks.personal_from == "client",
            complete=len(sites) == recipe.federation.clients,
        )
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(f"task: {error}") from error


def check_masks(recipe: FederatedRecipe) -> None:
    """Raise UsageError for masks that do not fit the model, before anything is built."""
    from arclight.federated.errors import SettingsError
    from arclight.federated.masks.settings import Masks
    from arclight.federated.masks.transfer_mask import ServerMasks

    shapes = getattr(recipe.task, "weight_shapes", None)
    if isinstance(recipe.task, Imported) or not callable(shapes) or recipe.federation.masks == Masks():
        return
    try:
        ServerMasks(recipe.federation, recipe.seed, lambda client: None).whole_of(shapes())
    except SettingsError as error:
        raise UsageError(f"federation.{error}") from error


def with_vocabulary(recipe: FederatedRecipe) -> FederatedRecipe:
    """Return the recipe with the vocabulary of all sites, unless they may have their own."""
    pinned = getattr(recipe.task, "with_vocabulary", None)
    own = recipe.federation.masks.personal_from == "client"
    if own or isinstance(recipe.task, Imported) or not callable(pinned):
        return recipe
    try:
        return replace(recipe, task=pinned())
    except FileNotFoundError:  # a resumed server needs no text, nor its tokenizer
        return recipe


def recipe_with_data(recipe: FederatedRecipe, data: str) -> FederatedRecipe:
    """Return the recipe on a site's own data, all of them.

    Raises UsageError if the task cannot.
    """
    task: Any = recipe.task
    if not callable(getattr(task, "with_data", None)):
        name = task.target if isinstance(task, Imported) else type(task).__name__
        raise UsageError(f"--data: {name} has no method with_data(data) that gives the task with other data")
    try:
        return replace(recipe, task=task.with_data(data))
    except ValueError as error:
        raise UsageError(f"--data: {error}") from error


def check_devices(recipe: FederatedRecipe) -> None:
    """Raise UsageError for a recipe with several devices, which only `join` gives a client."""
    if recipe.trainer.devices not in ("auto", 1):
        raise UsageError(
            f"trainer.devices = {recipe.trainer.devices}: a server, a run in one process and clients under Flower use one device; a site "
            f"with more joins by itself: arclight federate join ... --trainer.devices {recipe.trainer.devices}"
        )


# -- training ------------------------------------------------------------------------------------------------------


def learner_at(recipe: FederatedRecipe, folder: Path, devices: int = 1) -> Learner:
    """Build the learner of the client whose data the recipe's task has (see `recipe_at_site`).

    devices: processes that train it together, of which this is one.
    """
    from arclight.federated.clients.trainer_learner import TrainerLearner

    module, data = build_task(recipe)
    if recipe.plan is not None:
        check_plan(recipe.plan, module)
    return TrainerLearner(module, data, trainer_maker(recipe, folder, devices), folder)


def trainer_maker(recipe: FederatedRecipe, folder: Path, devices: int = 1) -> Callable[[list[Callback], Path], Trainer]:
    """Return a maker of trainers that write into ``folder`` and go by the whole run's schedule."""
    from arclight.trainer import RunFolder

    settings = replace(
        recipe.trainer, devices=devices, max_steps=recipe.steps, max_epochs=-1, enable_progress_bar=False, val_check_interval=NEVER,
        check_val_every_n_epoch=None, num_sanity_val_steps=0,
    )  # fmt: skip

    def make(given: list[Callback], _: Path) -> Trainer:
        folder.mkdir(parents=True, exist_ok=True)
        own = [part.build() for part in (recipe.guard, recipe.diloco) if part is not None]
        return make_trainer(
            replace(recipe.plain(), trainer=settings), callbacks=[*own, *given], run_folder=RunFolder.open(folder),
            logger=False, enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip

    return make


# -- the server's own ----------------------------------------------------------------------------------------------


class ServerEvaluation:
    """Give a run's initial weights, evaluate those of its rounds, and keep the last ones.

    folder: the run's folder.
    """

    def __init__(self, recipe: FederatedRecipe, folder: Path) -> None:
        from arclight.federated.clients.trainer_learner import TrainerLearner

        self._recipe, self._folder = recipe, folder
        self.module, self.data = build_task(recipe)
        if recipe.plan is not None:
            check_plan(recipe.plan, self.module)
        apart = folder / "server"
        self._learner = TrainerLearner(self.module, self.data, trainer_maker(recipe, apart), apart)

    def begin(self) -> Module:
        """Return the module with the initial weights of a centralised run of the same seed.

        What a fit does before its first step has been done, such as loading the weights that the recipe names.
        """
        self._fit_nothing()
        return self.module

    def __call__(self, weights: Mapping[str, torch.Tensor]) -> tuple[int, dict[str, float]]:
        """Return the number of samples, and the metrics of ``weights`` over them."""
        from arclight.federated.protocol import Evaluate, Manifest

        nothing = Manifest(kind="weights", tensors={}, blobs={})
        order = Evaluate(run="", client=MEASURING, round=0, base="", weights=nothing)
        measured = self._learner.evaluate(order, {f"model/{name}": weight for name, weight in weights.items()})
        return measured.samples, measured.metrics

    def keep(self, weights: Mapping[str, torch.Tensor], steps: int) -> Path:
        """Write ``weights`` as the run's last checkpoint, which other verbs read."""
        from arclight.trainer.checkpoint.named_state import load_parameters

        trainer = self._fit_nothing()
        load_parameters(self.module, weights)
        trainer.progress.set_step(steps)
        path = self._folder / "checkpoints" / "last.ckpt"
        trainer.save_checkpoint(path, weights_only=True)
        return path

    def _fit_nothing(self) -> Trainer:
        """Run a fit that ends before its first step."""
        from arclight.trainer import RunFolder
        from arclight.trainer.callbacks import ModelCheckpoint

        settings = replace(self._recipe.trainer, devices=1, max_steps=0, max_epochs=-1, enable_progress_bar=False)
        trainer = make_trainer(
            replace(self._recipe.plain(), trainer=settings), callbacks=[ModelCheckpoint(save_top_k=0)], logger=False,
            run_folder=RunFolder.open(self._folder), enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(self.module, datamodule=self.data)
        return trainer


# -- nodes ---------------------------------------------------------------------------------------------------------


def in_process_node(recipe: FederatedRecipe, server: ServerApi, folder: Path) -> Node:
    """Build the one node of a run in this process: it answers for all clients, one at a time."""
    from arclight.federated.clients.client import Client
    from arclight.federated.clients.node import Node
    from arclight.federated.transports.link import InProcessLink

    def made(number: int, place: Path) -> Learner:
        return learner_at(recipe_at_site(recipe, number), place)

    names = client_names(recipe)
    clients = [Client(name, learner=partial(made, number)) for number, name in enumerate(names)]
    return Node(InProcessLink(server), clients, folder / "node", "here")
