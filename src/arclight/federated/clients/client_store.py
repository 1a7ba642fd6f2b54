"""Keep a client's state on disk: record, training checkpoints, finished updates, residuals.

    client.json             whose folder it is, and the rounds that it has started: written by the node alone
    states/                 its training: see `TrainingCheckpoints`
    finished/<round>/       update.json and its blobs, the residuals that encoding left, and `taken` once the server has it
    residuals/<slot>/       those that the next encoding of the slot goes on from: see `Residuals`

The executor puts a finished round there with all its files by one rename: it is there or it is not, and nothing
else has to be written down. From then on the node owns it, sends and removes it, maybe while the next round is trained.
``states/`` are synced to disk. An update is not, unless its codec may leave residuals or rounds overlap: one that a power
failure has damaged is computed again from the client's state when the server asks for it.

`node`, `job_queue` and `reporter` use a `ClientStore`, `executor` `FinishedUpdates` and `Residuals`. A node that is updated and started again finds
these files: names stay, or `VERSION` rises, which refuses older folders.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from arclight import checkpoint as checkpoints
from arclight.fabric import atomic_replace
from arclight.fabric.atomic_replace import replace_text
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.errors import FederatedError, ProtocolError
from arclight.federated.protocol import HeldRound, Update, read

if TYPE_CHECKING:
    import torch

    from arclight.federated.protocol import Fit


log = logging.getLogger(__name__)

VERSION = 2
_FILE, _UPDATE, _TAKEN = "client.json", "update.json", "taken"
_STARTED = "begun"
"""Key of `ClientRecord.started_rounds` in ``client.json``."""


@dataclass(frozen=True)
class ClientRecord:
    """The content of ``client.json``."""

    client: str
    run: str
    started_rounds: tuple[int, ...] = ()
    """Rounds that the client was asked for and that are not finished."""
    version: int = VERSION
    about: str = field(
        default="the state of a client of an arclight federation; its files are explained in arclight.federated.clients.client_store"
    )


class FinishedUpdates:
    """Keep a client's finished rounds, each in a folder.

    The process that trains the client adds them, its node sends and removes them.
    """

    def __init__(self, folder: Path) -> None:
        """Initialise the updates in the client's ``folder``."""
        self._folder = folder / "finished"
        self._residuals = folder / "residuals"

    def rounds(self) -> list[int]:
        """List them, oldest first."""
        entries = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted(int(path.name) for path in entries if path.name.isdigit())

    def of(self, order: Fit) -> Update | None:
        """Return the update of that round, from those weights, if there is one."""
        if not (self._place(order.round) / _UPDATE).exists():
            return None
        update = self.update(order.round)
        return update if (update.manifest.base, update.fragment) == (order.base, order.fragment) else None

    @contextmanager
    def making(self, order: Fit, *, durable: bool) -> Iterator[Path]:
        """Yield a folder for ``update.json``, ``blobs`` and ``residuals/<slot>``.

        Publish it at the end.

        durable: whether a power failure may not lose it: residuals cannot be made again once the server has the update, nor anything
        once the client is at its next round.
        """
        place = self._place(order.round)
        staging = atomic_replace.make_staging(place)
        try:
            yield staging
            atomic_replace.replace_folder(staging, place, durable=durable)
        finally:
            atomic_replace.discard(staging)

    def residuals(self, slot: int) -> Residuals:
        """Return the residuals of a slot."""
        return Residuals(self._residuals / str(slot))

    def update(self, round: int) -> Update:
        """Read a finished update. Raises FederatedError if it is missing or damaged."""
        path = self._place(round) / _UPDATE
        try:
            update = read(path.read_bytes(), stored=True)
        except (OSError, ProtocolError) as error:
            raise FederatedError(f"{path} cannot be read ({error})") from error
        if not isinstance(update, Update):
            raise FederatedError(f"{path} is not an update but a message {update.kind!r}")
        return update

    def blobs(self, round: int) -> FolderStore:
        return FolderStore(self._place(round) / "blobs", durable="none")

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def is_accepted(self, round: int) -> bool:
        """Return True if the server has it; it is kept until the round is committed all the same."""
        return (self._place(round) / _TAKEN).exists()

    def is_in_doubt(self, round: int, session: str) -> bool:
        """Return True if the server may have lost an accepted update whose residuals later ones add.

        It may have, if it acknowledged the update in another session than ``session``.
        """
        try:
            return (self._place(round) / _TAKEN).read_text() != session and any(
                slot.has(round) for slot in self._slots()
            )
        except FileNotFoundError:
            return False

    def accept(self, round: int, session: str) -> None:
        """Record that the server, in that session, has the update; commit its residuals.

        They become the slot's.
        """
        place = self._place(round)
        for slot in (place / "residuals").iterdir() if (place / "residuals").is_dir() else ():
            self.residuals(int(slot.name)).accept(slot, round)
        with suppress(FileNotFoundError):  # it is over already
            # lost, the update is sent once more, and the server says that it has it
            (place / _TAKEN).write_text(session)

    def drop(self, round: int) -> None:
        """Delete an update that the server does not want, and the residuals that it has left."""
        for slot in self._slots():
            slot.revert(round)
        self._remove(round)

    def commit(self, round: int, session: str) -> list[int]:
        """Drop rounds up to this one, which are committed.

        Return those that the server is to be asked about.
        """
        over = [one for one in self.rounds() if one <= round and self._is_over(one)]
        in_doubt = [one for one in over if self.is_in_doubt(one, session)]
        for one in over:
            if one not in in_doubt:
                for slot in self._slots():
                    slot.delete_older(one)
                self._remove(one)
        return in_doubt

    def _is_over(self, committed: int) -> bool:
        try:
            return self.is_accepted(committed) or self.update(committed).secure
        except FederatedError:  # it was dropped just now, or is damaged
            return True

    def _slots(self) -> list[Residuals]:
        return [Residuals(slot) for slot in self._residuals.iterdir()] if self._residuals.is_dir() else []

    def _remove(self, round: int) -> None:
        with suppress(FileNotFoundError):
            atomic_replace.retire(self._place(round), durable=False)

    def sweep(self) -> None:
        """Remove unfinished files of killed processes, and files damaged by a power failure."""
        atomic_replace.sweep(self._folder)
        for round in self.rounds():
            try:
                needed, blobs = self.update(round).manifest.blobs, self.blobs(round)
                lost = "".join(
                    [f"blob {digest[:12]}" for digest, size in needed.items() if blobs.size(digest) != size][:1]
                )
            except FederatedError as error:
                lost = str(error)
            if lost:
                log.warning("round %d in %s is lost here: %s", round, self._folder, lost)
                self._remove(round)  # the server may have it

    def _place(self, round: int) -> Path:
        return self._folder / f"{round:06d}"


class ClientStore:
    """One client's folder for one run, as its node sees it.

    Used by one node at a time. All methods may be called from any thread.
    """

    def __init__(self, folder: Path, client: str, run: str) -> None:
        self.folder, self.finished = folder, FinishedUpdates(folder)
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        atomic_replace.sweep(folder)
        self.finished.sweep()
        found = self._read(client, run)
        self._account = found or ClientRecord(client=client, run=run)
        if found is None:
            self._write()

    def start(self, round: int) -> None:
        """Record that a round was requested of the client, to resume it after a restart.

        Its node offers that.
        """
        with self._lock:
            if round not in self._account.started_rounds:
                self._account = replace(self._account, started_rounds=(*self._account.started_rounds, round))
                self._write()

    def end(self, round: int) -> None:
        """Record that the client's round has ended.

        Written with the next one: until then a restart offers one too many.
        """
        with self._lock:
            self._account = replace(
                self._account, started_rounds=tuple(one for one in self._account.started_rounds if one != round)
            )

    def commit(self, round: int, session: str) -> list[int]:
        """Commit as `FinishedUpdates.commit`."""
        in_doubt = self.finished.commit(round, session)
        with self._lock:
            self._account = replace(
                self._account, started_rounds=tuple(one for one in self._account.started_rounds if one > round)
            )
        return in_doubt

    def held(self) -> list[HeldRound]:
        """List the rounds of this client that its node reports when it joins."""
        with self._lock:
            client, started = self._account.client, self._account.started_rounds
        done = self.finished.rounds()
        held = [HeldRound(client=client, round=round, finished=True) for round in done]
        return held + [
            HeldRound(client=client, round=round, finished=False) for round in sorted(set(started) - set(done))
        ]

    # -- client.json ---------------------------------------------------------------------------------------------------

    def _read(self, client: str, run: str) -> ClientRecord | None:
        path = self.folder / _FILE
        try:
            table = json.loads(path.read_bytes())
            version = table["version"]
            if version != VERSION:
                raise FederatedError(
                    f"{path} is of version {version}, this arclight writes {VERSION}: use that which wrote it"
                )
            account = ClientRecord(started_rounds=tuple(map(int, table.pop(_STARTED))), **table)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s is damaged (%r): what this client had started may go to others", path, error)
            return None
        if (account.client, account.run) != (client, run):
            raise FederatedError(
                f"{path} belongs to client {account.client!r} of run {account.run!r}, not to {client!r} of {run!r}: choose another folder"
            )
        return account

    def _write(self) -> None:
        table = asdict(self._account)
        table[_STARTED] = table.pop("started_rounds")
        replace_text(self.folder / _FILE, json.dumps(table, indent=1), durable=False)


def folder_name(name: str) -> str:
    """Quote a name as part of a path."""
    return quote(name, safe="").replace(".", "%2E") or "%"


def list_clients(folder: Path) -> list[str]:
    """List the names of the clients whose folders lie in ``folder``."""
    return (
        [unquote(path.name) for path in sorted(folder.iterdir()) if (path / _FILE).exists()] if folder.is_dir() else []
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a small JSON object; empty if there is no file.

    Raises FederatedError for a damaged one.
    """
    try:
        table = json.loads(path.read_bytes())
        if not isinstance(table, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FederatedError(f"{path} is damaged ({error}): remove it") from error
    return table


_ENTRY = "residuals"


class Residuals:
    """Error-feedback residuals of one slot, in ``<folder>/<round>``.

    Each is the quantization error of that round's update, which the server has accepted.

    The newest counts. The one before it is kept until it is known that the update is part of the server's weights: a server that
    has lost it, and went on without it, leaves no trace of it here either.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, round: int) -> dict[str, torch.Tensor]:
        """Load the residuals that the update of a round adds, by key; none before there are any.

        Raises FederatedError if they are damaged.
        """
        former = [one for one in self._rounds() if one < round]
        if not former:
            return {}
        newest = self._of(former[-1])
        try:
            found: dict[str, torch.Tensor] = checkpoints.load(newest, only=_ENTRY)[_ENTRY]
        except checkpoints.CheckpointError as error:
            raise FederatedError(
                f"{error}. Without {newest} the client's next update leaves out what its last one could not say; remove that "
                "folder to accept it"
            ) from error
        return found

    @staticmethod
    def save(folder: Path, left: Mapping[str, torch.Tensor]) -> None:
        """Save residuals beside an update; nothing is written if nothing is left."""
        if left:
            checkpoints.save(folder, {_ENTRY: dict(left)})

    def accept(self, folder: Path, round: int) -> None:
        """Make those beside an accepted update the slot's newest, by one rename.

        A crash anywhere here changes nothing.
        """
        self.revert(round)  # it was made again
        self.folder.mkdir(parents=True, exist_ok=True)
        folder.rename(self._of(round))
        atomic_replace.sync_folder(self.folder)
        atomic_replace.sync_folder(folder.parent)

    def has(self, round: int) -> bool:
        return self._of(round).exists()

    def revert(self, round: int) -> None:
        """Drop the residuals of a round whose update does not count.

        The next update adds what this one has added.
        """
        with suppress(FileNotFoundError):
            atomic_replace.retire(self._of(round))

    def delete_older(self, round: int) -> None:
        """Drop older ones once the round's update counts."""
        for former in self._rounds():
            if former < round and self.has(round):
                with suppress(FileNotFoundError):  # a heartbeat's answer and an update's delete them side by side
                    atomic_replace.retire(self._of(former), durable=False)

    def _of(self, round: int) -> Path:
        return self.folder / str(round)

    def _rounds(self) -> list[int]:
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(path.name) for path in entries if path.name.isdigit())
