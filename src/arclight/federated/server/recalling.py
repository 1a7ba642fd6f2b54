"""What a run's folder says at a start: what its journal has led to, and whether what that speaks of is still there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.coordination import records as r
from arclight.federated.coordination.coordinator import Coordinator
from arclight.federated.coordination.journal import Journal
from arclight.federated.coordination.state import StateSaved
from arclight.federated.errors import BlobError, FederatedError
from arclight.federated.server.history import History
from arclight.federated.server.shelf import manifest_of

log = logging.getLogger(__name__)


def recall(
    journal: Journal, coordinator: Coordinator, history: History, is_here: Callable[[r.UpdateAccepted], bool]
) -> bool:
    """Bring back the lasting state and what is told of its rounds; False where nothing has been committed yet.

    ``is_here``: whether an accepted update is. It does not wait for the disk: a power failure loses it, and it is asked for again.
    """
    said = list(journal.records())
    coordinator.replay(said)
    state = coordinator.state
    if state.committed < 0:
        return False
    lost = _lost(coordinator, is_here)
    journal.append(lost)
    coordinator.replay(lost)
    history.take_up(state.oldest, state.opened, [number for record in said for number in _told(record)])
    for record in (*said, *lost):
        history.note(record)
    return True


def has_blobs(blobs: FolderStore, update: r.UpdateAccepted) -> bool:
    """Return whether an update's manifest and blobs are here; what is of another size is removed, so that it can come again.

    What has its size and was damaged by a power failure was removed when the folder was opened.
    """
    try:
        needed = manifest_of(blobs, update.digest).blobs
    except (FederatedError, OSError):
        blobs.remove(update.digest)
        return False
    wrong = [blob for blob, size in needed.items() if blobs.size(blob) != size]
    for blob in wrong:
        blobs.remove(blob)
    return not wrong


def remove_damaged(blobs: FolderStore, updates: Iterable[r.UpdateAccepted]) -> None:
    """Read updates that could not be folded once more, and remove what the disk does not give back as it was put there."""
    for update in updates:
        for digest in (update.digest, *_needed(blobs, update)):
            try:
                if blobs.size(digest) is not None:
                    blobs.check(digest)
            except (BlobError, OSError) as error:
                log.error("update of %s for round %d: %s", update.client, update.round, error)


def _needed(blobs: FolderStore, update: r.UpdateAccepted) -> Collection[str]:
    """Digests of an update's blobs; none where its manifest is not here as a whole."""
    try:
        return manifest_of(blobs, update.digest).blobs
    except (FederatedError, OSError):
        return ()


def _lost(coordinator: Coordinator, is_here: Callable[[r.UpdateAccepted], bool]) -> list[r.Record]:
    found: list[r.Record] = []
    for open in coordinator.state.open.values():
        gone = tuple(client for client, update in open.accepted.items() if not is_here(update))
        if gone:
            log.warning("updates of round %d are gone, and asked for again: %s", open.round, ", ".join(gone))
            found += coordinator.lost(open.round, gone)
    return found


def _told(record: r.Record) -> list[int]:
    """Rounds of which a record tells all that is known of them at that time."""
    if isinstance(record, StateSaved):
        return [told["round"] for told in record.told]
    return [record.round] if isinstance(record, r.RoundCommitted) else []
