"""Run functions on a Ray cluster, with results in order. Ray is imported when used.

``arclight data tokenize``, ``retokenize`` and ``pack`` use it with ``--engine ray`` (``text.data.corpus``, `packing`). Results must be those of the local
engine, in the same order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from arclight.fabric.extras import require

Engine = Literal["local", "ray"]
"""Engine that makes corpora; the results are equal bit for bit."""
_RETRIES = 16
"""Retries by Ray of a function whose node was lost."""


def on_ray(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, shared: tuple[Any, ...] = (), together: int = 1
) -> Iterator[Any]:
    """Call ``function(*shared, *call)`` for each call on a Ray cluster.

    The cluster is the one that this process has joined, that RAY_ADDRESS names, or one that is started here; another that happens to run
    on this machine is left alone. Results come in the order of the calls. No more calls are taken ahead than the cluster has CPUs, or
    ``together`` if that is more. Calls of a lost node are repeated elsewhere. An error of a function is raised here as it was there;
    OSError is raised for a call that Ray gives up.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody, unless the user says so
    ray = require("ray", extra="ray")
    mine = not ray.is_initialized()
    if mine:
        named = os.environ.get("RAY_ADDRESS")  # without an address Ray joins any cluster that it finds
        ray.init(
            log_to_driver=False, **({"address": named} if named else {"address": "local", "include_dashboard": False})
        )

    def result(task: Any) -> Any:
        try:
            return ray.get(task)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            raise OSError(
                f"Ray gave up {function.__name__} after {_RETRIES} attempts: {error}; look at the nodes with ray status"
            ) from error

    try:
        given = [ray.put(one) for one in shared]
        remote = ray.remote(max_retries=_RETRIES)(function)
        ahead = max(together, int(ray.cluster_resources().get("CPU", 1)))
        running: deque[Any] = deque()
        for call in calls:
            running.append(remote.remote(*given, *call))
            if len(running) > ahead:
                yield result(running.popleft())
        while running:
            yield result(running.popleft())
    finally:
        if mine:
            ray.shutdown()
