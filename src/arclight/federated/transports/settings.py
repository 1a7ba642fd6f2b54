"""Define settings of a server's address, limits and Flower apps, without torch or a server.

``arclight federate serve``, `server_process` and users of `Server.serve` make a `Listening`; `http_server` and `uploads` enforce its `Limits`.
`flower`, `server_process` and ``arclight federate flower`` read `FLOWER_DEFAULTS`. Field names and its keys are configuration of users: they stay.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from arclight._intervals import Checked, Interval, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Limits(Checked):
    """The most that nodes can ask of the server.

    ``uploads``, ``held`` and ``connections`` count those of all nodes together.
    """

    message_bytes: PositiveInt = 64 << 20
    """Largest message, if the run's model does not need less; an update's manifest has some 250 bytes for each tensor."""
    join_bytes: PositiveInt = 256 << 10
    """Largest message of a node that has not joined yet: names of some 10,000 clients."""
    blob_bytes: PositiveInt = 64 << 30
    """Largest blob, if a node's updates do not need less."""
    uploads: PositiveInt = 64
    """Blobs that are received at the same time; further ones are asked to come back."""
    held: PositiveInt = 256
    """Work requests that are held until there is work; further ones are answered with a time to retry."""
    connections: PositiveInt = 4096
    """Open connections; further ones are refused."""
    silence: PositiveFloat = 30.0
    """Seconds without a byte after which a request is given up; what came of a blob is kept."""
    slowest: PositiveInt = 1024
    """Bytes a second that a request must reach on average, once it has taken ``silence`` seconds."""


@dataclass(frozen=True, kw_only=True)
class Listening(Checked):
    """The address of a server, and whom it trusts.

    Off loopback certificate, key and nodes are required.
    """

    host: str = "127.0.0.1"
    """Name or address of an interface; "0.0.0.0" is all of them."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """0 takes a free one."""
    certificate: Path | None = None
    """PEM file with the server's certificate, and those that vouch for it."""
    private_key: Path | None = None
    """PEM file with the certificate's key."""
    nodes: Path | None = None
    """File with the keys of the nodes that may join; none: whoever reaches the server may."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("a certificate and its private key belong together: give both or none")
        if not is_loopback(self.host) and (self.certificate is None or self.nodes is None):
            raise ValueError(
                f"other machines can reach {self.host}: a server listens there only with TLS and registered nodes, so that "
                "nobody reads or joins the training on the way. `arclight federate keys server <folder> <host name>` makes a "
                "certificate and its key, `arclight federate keys node <file> <name> --client <number>` a node's key and the line to put into "
                "the file of nodes; then give certificate, private_key and nodes. On this machine alone 127.0.0.1 needs neither"
            )


def is_loopback(host: str) -> bool:
    """Return True if only programs on this machine reach ``host``.

    A name other than localhost counts as reachable.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


FLOWER_DEFAULTS: dict[str, str | int | float | bool] = {
    "folder": "",  # the run's; empty: runs/flower/<run id>. One that is there is gone on with
    "host": "127.0.0.1",  # where the server listens
    "port": 0,  # 0: a free one
    "known-as": "",  # how sites reach it, if that is not ``host``
    "days": 30.0,  # the longest that a run, and with it a session, may take
    "patience": 3600.0,  # seconds for which a node tries to reach a server that does not answer
}
"""Run config of a Flower app (flat and scalar, as Flower wants it)."""
