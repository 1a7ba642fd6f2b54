"""Define categories of warnings, so that each can be silenced or made an error by itself.

Users filter by these classes; the names are Lightning's and stay.
"""

from __future__ import annotations

import os
import warnings

from arclight.fabric.rank_zero import rank_zero_warn


class PossibleUserWarning(UserWarning):
    """Warning of something that is often a mistake, but may be intended."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Silence :class:`PossibleUserWarning`, everywhere or in modules that match ``module``.

    The environment variable ``POSSIBLE_USER_WARNINGS=off`` does the same from the start.
    """
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)


if os.environ.get("POSSIBLE_USER_WARNINGS", "").lower() in ("0", "off"):
    disable_possible_user_warnings()


class WarningCache(set[str]):
    """Warn of each message once, on rank 0."""

    def warn(self, message: str, stacklevel: int = 5, category: type[Warning] = UserWarning) -> None:
        if message not in self:
            self.add(message)
            rank_zero_warn(message, stacklevel=stacklevel, category=category)
