"""Run functions on rank zero only: write, warn, send to a service.

Loggers decorate methods with `rank_zero_only`, most rooms warn by `rank_zero_warn`. ``lightning.fabric.utilities.rank_zero`` has these
names, so they stay.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_LOG = logging.getLogger("arclight")

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Variables in which launchers set the rank, before any process group exists."""

Function = TypeVar("Function", bound=Callable[..., Any])


def known_rank() -> int | None:
    """Return the global rank of this process, or None if it is not known."""
    distributed = sys.modules.get("torch.distributed")  # not imported: then there is no group either
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), None)


class RankZeroOnly:
    """Decorator that runs a function on rank 0 only (:data:`rank_zero_only`).

    On other ranks it returns ``default`` (None). The rank is looked up at each call, so that a function that was decorated before the
    processes were started is right in each of them; a process whose rank is not known counts as rank 0.
    """

    def __init__(self) -> None:
        self._rank: int | None = None

    @property
    def rank(self) -> int:
        """Global rank of this process; assign a number to fix it, None to have it looked up again."""
        return self._rank if self._rank is not None else known_rank() or 0

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._rank = rank

    @rank.deleter
    def rank(self) -> None:
        self._rank = None

    def __call__(self, function: Function, default: Any = None) -> Function:
        @wraps(function)
        def on_rank_zero(*arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options) if self.rank == 0 else default

        return on_rank_zero  # type: ignore[return-value]


rank_zero_only = RankZeroOnly()


@rank_zero_only
def rank_zero_info(message: object, *arguments: Any, **options: Any) -> None:
    """Log at level INFO on rank 0."""
    _LOG.info(message, *arguments, **options)


@rank_zero_only
def rank_zero_debug(message: object, *arguments: Any, **options: Any) -> None:
    """Log at level DEBUG on rank 0."""
    _LOG.debug(message, *arguments, **options)


@rank_zero_only
def rank_zero_warn(message: str, stacklevel: int = 4, category: type[Warning] = UserWarning, **options: Any) -> None:
    """Call ``warnings.warn`` on rank 0.

    ``stacklevel`` counts from here, so that the caller's caller is shown.
    """
    warnings.warn(message, category, stacklevel=stacklevel, **options)


class LightningDeprecationWarning(DeprecationWarning):
    """Warning of something that will be removed, shown to users too."""


warnings.simplefilter("default", category=LightningDeprecationWarning)


@rank_zero_only
def rank_zero_deprecation(message: str, stacklevel: int = 5, **options: Any) -> None:
    """Issue a :class:`LightningDeprecationWarning` on rank 0."""
    warnings.warn(message, LightningDeprecationWarning, stacklevel=stacklevel, **options)
