"""What a client leaves on its site's disk: how far it is, for people and restarts, and updates until the server has them for good.

    client.json             what it does, what is finished, what the server has taken
    states/                 its training: see `States`
    finished/<round>/       update.json and its blobs, and the residuals that encoding left
    residuals/              those that the next encoding goes on from, once an update has been taken

A round is finished in one step: the folder with all of it is renamed into its place, or nothing of it is there. ``states/`` wait
for the disk. An update does not where nothing was left unsaid: one that a power failure has damaged is not there either, and is
made again from the client's state when the server asks for it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from arclight.fabric import replacing
from arclight.fabric.replacing import replace_text
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.clients.residuals import Residuals
from arclight.federated.errors import FederatedError, ProtocolError
from arclight.federated.protocol import Held, Update, read

if TYPE_CHECKING:
    from arclight.federated.protocol import Fit

log = logging.getLogger(__name__)

VERSION = 1
_FILE = "client.json"


@dataclass(frozen=True)
class Begun:
    """A round that the client has been asked for."""

    round: int
    base: str
    fragment: int | None = None

    @classmethod
    def of(cls, order: Fit) -> Begun:
        return cls(order.round, order.base, order.fragment)


@dataclass(frozen=True)
class Finished(Begun):
    """A round whose update lies here."""

    taken: bool = False
    """Whether the server has it; it is kept until the round is committed all the same."""


@dataclass(frozen=True)
class Account:
    """The content of ``client.json``."""

    client: str
    run: str
    begun: Begun | None = None
    finished: tuple[Finished, ...] = ()
    version: int = VERSION
    about: str = field(
        default="the state of a client of an arclight federation; its files are explained in arclight.federated.clients.state"
    )


class ClientFolder:
    """One client's folder for one run. One process at a time writes there; others look at it with ``writes=False``."""

    def __init__(self, folder: Path, client: str, run: str, *, writes: bool = True) -> None:
        self.folder, self.residuals = folder, Residuals(folder / "residuals")
        if not writes:
            self.account = self._read(client, run) or Account(client=client, run=run)
            return
        folder.mkdir(parents=True, exist_ok=True)
        replacing.sweep(folder)
        replacing.sweep(folder / "finished")
        found = self._read(client, run)
        self.account = found or Account(client=client, run=run)
        if found is None:
            self._write(self.account)
        there = tuple(one for one in self.account.finished if self._is_whole(one))
        if len(there) != len(self.account.finished):
            self._write(replace(self.account, finished=there))
        self._remove_unknown()

    def _is_whole(self, one: Finished) -> bool:
        try:
            needed, blobs = self.update_of(one).manifest.blobs, self.blobs_of(one)
        except FederatedError as error:
            log.warning("round %d of client %s is lost here: %s", one.round, self.account.client, error)
            return False
        if lost := [digest for digest, size in needed.items() if blobs.size(digest) != size]:
            log.warning("round %d of client %s is lost here: blob %s", one.round, self.account.client, lost[0][:12])
        return not lost

    def _remove_unknown(self) -> None:
        """What a process left that was killed just before it noted a finished round, or just after it forgot one."""
        known, rounds = {self._place(one) for one in self.account.finished}, self.folder / "finished"
        for path in sorted(rounds.iterdir()) if rounds.is_dir() else ():
            if path not in known and not path.name.startswith("."):
                replacing.retire(path)

    # -- a round -----------------------------------------------------------------------------------------------------

    def begin(self, order: Fit) -> None:
        """Note that the client works on a round: after a restart its node offers to go on with it."""
        if self.account.begun != Begun.of(order):
            self._write(replace(self.account, begun=Begun.of(order)))

    def finished(self, order: Fit) -> Update | None:
        """The update of that round, from those weights, if it is there."""
        wanted = Begun.of(order)
        for one in self.account.finished:
            if (one.round, one.base, one.fragment) == (wanted.round, wanted.base, wanted.fragment):
                return self.update_of(one)
        return None

    @contextmanager
    def finishing(self, order: Fit, *, durable: bool) -> Iterator[Path]:
        """A folder to write ``update.json``, blobs and residuals into; it is the round's when the block ends.

        durable: whether a power failure may not lose it: residuals cannot be made again once the server has the update.
        """
        done = Finished(order.round, order.base, order.fragment)
        staging = replacing.make_staging(self._place(done))
        try:
            yield staging
            replacing.publish(staging, self._place(done), durable=durable)
        finally:
            replacing.discard(staging)
        others = tuple(one for one in self.account.finished if self._place(one) != self._place(done))
        self._write(replace(self.account, begun=None, finished=(*others, done)), durable=durable)

    # -- what became of it ---------------------------------------------------------------------------------------------

    def taken(self, one: Begun) -> None:
        """The server has the update: what it left unsaid is what the next one adds."""
        self.residuals.take_over(self._place(one) / "residuals")
        changed = tuple(
            replace(f, taken=True) if self._place(f) == self._place(one) else f for f in self.account.finished
        )
        if changed != self.account.finished:
            self._write(replace(self.account, finished=changed))

    def drop(self, one: Begun) -> None:
        """Forget an update, which the server does not want or has for good."""
        rest = tuple(f for f in self.account.finished if self._place(f) != self._place(one))
        if rest != self.account.finished:
            self._write(replace(self.account, finished=rest))
        if self._place(one).exists():
            replacing.retire(self._place(one), durable=False)

    def committed(self, round: int) -> None:
        """Rounds up to this one are part of the server's weights, or never will be."""
        for one in self.account.finished:
            if one.round <= round:
                self.drop(one)

    def held(self) -> list[Held]:
        """What a node says of this client when it joins."""
        done = [Held(client=self.account.client, round=one.round, finished=True) for one in self.account.finished]
        begun = self.account.begun
        return done if begun is None else [*done, Held(client=self.account.client, round=begun.round, finished=False)]

    def update_of(self, one: Begun) -> Update:
        """An update that was finished. Raises FederatedError where it is not there, or damaged."""
        path = self._place(one) / "update.json"
        try:
            update = read(path.read_bytes())
        except (OSError, ProtocolError) as error:
            raise FederatedError(f"{path} cannot be read ({error})") from error
        if not isinstance(update, Update):
            raise FederatedError(f"{path} is no update but a message {update.kind!r}")
        return update

    def blobs_of(self, one: Begun) -> FolderStore:
        return FolderStore(self._place(one) / "blobs", durable="none")

    def _place(self, one: Begun) -> Path:
        part = "" if one.fragment is None else f"-{one.fragment}"
        return self.folder / "finished" / f"{one.round:06d}{part}"

    # -- client.json ---------------------------------------------------------------------------------------------------

    def _read(self, client: str, run: str) -> Account | None:
        path = self.folder / _FILE
        try:
            said = json.loads(path.read_bytes())
            version = said["version"]
            if version != VERSION:
                raise FederatedError(
                    f"{path} is of version {version}, this arclight writes {VERSION}: use that which wrote it"
                )
            begun = Begun(**said["begun"]) if said["begun"] else None
            account = Account(
                **{**said, "begun": begun, "finished": tuple(Finished(**one) for one in said["finished"])}
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s is damaged (%r): what this client had not sent is trained again", path, error)
            return None
        if (account.client, account.run) != (client, run):
            raise FederatedError(
                f"{path} belongs to client {account.client!r} of run {account.run!r}, not to {client!r} of {run!r}: choose another folder"
            )
        return account

    def _write(self, account: Account, *, durable: bool = False) -> None:
        replace_text(self.folder / _FILE, json.dumps(asdict(account), indent=1), durable=durable)
        self.account = account


def folder_name(name: str) -> str:
    """A name as part of a path."""
    return quote(name, safe="").replace(".", "%2E") or "%"


def clients_in(folder: Path) -> list[str]:
    """Names of the clients whose folders lie in ``folder``."""
    return (
        [unquote(path.name) for path in sorted(folder.iterdir()) if (path / _FILE).exists()] if folder.is_dir() else []
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """A small file's table; empty where there is none. Raises FederatedError for a damaged one."""
    try:
        said = json.loads(path.read_bytes())
        if not isinstance(said, dict):
            raise ValueError("it is no table")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FederatedError(f"{path} is damaged ({error}): remove it") from error
    return said
