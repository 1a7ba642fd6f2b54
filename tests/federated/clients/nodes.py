"""A node that runs beside the test, and not for ever."""

from __future__ import annotations

import threading

from arclight.federated.clients.node import Node


def begin(node: Node) -> tuple[threading.Thread, list[BaseException]]:
    failed: list[BaseException] = []

    def target() -> None:
        try:
            node.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=target, daemon=True, name=node.name)
    thread.start()
    return thread, failed


def end(thread: threading.Thread, failed: list[BaseException], seconds: float = 300) -> None:
    thread.join(seconds)
    assert not thread.is_alive(), f"node {thread.name} has not ended within {seconds} s"
    if failed:
        raise failed[0]


def run(node: Node, seconds: float = 300) -> None:
    """`Node.run`, but not for ever."""
    end(*begin(node), seconds)
