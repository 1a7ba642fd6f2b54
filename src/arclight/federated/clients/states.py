"""A client's saved states: checkpoints in the order in which they were made, of which the newest sound one counts."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from arclight import checkpoint as checkpoints
from arclight.fabric import replacing
from arclight.federated.errors import FederatedError

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<number>\d{6,})-.+")
_KEPT = 2
"""The newest, and the one before it in case that the newest turns out to be damaged."""


class States:
    """Checkpoint folders ``<number>-<what>`` in ``folder``, which is made when there is something to keep.

    Numbers count saves. (Steps would not do: a client that is set back to the run's clock has fewer later than before.)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._damaged: set[Path] = set()
        self._next = max((number for number, _ in self._all()), default=0) + 1

    def newest(self) -> Path | None:
        """The newest whose files are all sound; None where there never was one.

        Tells of newer ones that are damaged. Raises FederatedError where there are some and none is sound.
        """
        found = self._all()
        for _, path in reversed(found):
            problems = checkpoints.verify(path)
            if not problems:
                return path
            self._damaged.add(path)
            log.warning("a saved state is damaged, an older one is looked for: %s", problems[0])
        if found:
            raise FederatedError(
                f"none of the {len(found)} saved states in {self.folder} is sound: put one back from a backup, or remove that folder "
                "to let the client begin anew"
            )
        return None

    def next(self, what: str) -> Path:
        """Where the next state is to be saved. Every process of a client asks as often as the others."""
        path = self.folder / f"{self._next:06d}-{what}"
        self._next += 1
        return path

    def moved_on(self) -> bool:
        """Whether another process has saved a state since this one last saved or looked."""
        newest = max((number for number, _ in self._all()), default=0)
        moved, self._next = newest >= self._next, max(self._next, newest + 1)
        return moved

    def prune(self) -> None:
        """Remove all but the newest sound ones, and what killed processes left."""
        if self.folder.is_dir():
            replacing.sweep(self.folder)
        sound = [path for _, path in self._all() if path not in self._damaged]
        for path in (*sound[:-_KEPT], *self._damaged):
            replacing.retire(path)
        self._damaged.clear()

    def _all(self) -> list[tuple[int, Path]]:
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((int(match["number"]), path) for path in entries if (match := _NAME.fullmatch(path.name)))
