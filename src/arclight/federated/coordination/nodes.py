"""Nodes, their work, and what changes about them without being kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from arclight.federated.coordination.events import Note


class Work(NamedTuple):
    """Something that one client is to do."""

    kind: Literal["fit", "evaluate"]
    round: int
    client: str


@dataclass(slots=True)
class Task:
    """Work that a node has."""

    work: Work
    seen: float
    """When it was given, or last named by the node."""
    steps: int = -1
    """Done, as the node says; -1: it has not named this yet, so that nobody knows whether it has the order."""


@dataclass(slots=True)
class Node:
    name: str
    session: str
    process: str
    clients: tuple[str, ...]
    speed: float | None
    heard: float
    progress: float
    """When it last did something: a step, an update, a question."""
    lost: float | None = None
    tasks: dict[Work, Task] = field(default_factory=dict)
    queue: dict[Work, None] = field(default_factory=dict)
    measures: dict[Work, None] = field(default_factory=dict)
    asks: dict[str, None] = field(default_factory=dict)
    stopping: dict[Work, None] = field(default_factory=dict)
    """Work that is not wanted any more, until the node does not name it."""

    def of(self, client: str) -> list[Task]:
        """What a client of this node is at, oldest first."""
        return [task for work, task in self.tasks.items() if work.client == client]


class Departed(NamedTuple):
    """A client's data went with its node."""

    at: float
    why: str
    """What the node has said of that."""


class Timer(NamedTuple):
    at: float
    number: int
    kind: Literal[
        "silence", "stall", "lease", "ask", "home", "deadline", "grace", "settle", "join", "measure", "say"
    ]  # fmt: skip
    key: object


@dataclass(frozen=True, kw_only=True)
class Rang(Note):
    """The first timer was heard; ``again``: when it is to ring next."""

    again: float | None = None


@dataclass(frozen=True, kw_only=True)
class Dropped(Note):
    """A lost node was waited for long enough."""

    node: str


@dataclass(frozen=True, kw_only=True)
class Skipped(Note):
    """Nobody measures this any more."""

    work: Work


@dataclass(frozen=True, kw_only=True)
class Stranded(Note):
    """Nobody is here for this; somebody may come until then."""

    work: Work
    until: float


@dataclass(frozen=True, kw_only=True)
class Again(Note):
    """Work has failed in a way that may pass: it is given anew, or the node that has it sends its result once more."""

    work: Work
    keep: bool = False


@dataclass(frozen=True, kw_only=True)
class Over(Note):
    """A round's deadline or grace has passed, or nodes have had their time to come back."""

    what: tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class Challenged(Note):
    """A second process has offered itself under the name of a node that is here."""

    node: str
    process: str
