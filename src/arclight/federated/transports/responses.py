"""What a server's refusals mean to a node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from arclight.federated.errors import ProtocolError, SessionError
from arclight.federated.transports.retrying import UnavailableError

if TYPE_CHECKING:
    import httpx


def words_of(response: httpx.Response) -> str:
    """What the server says about a refusal; the response has been read."""
    try:
        return str(json.loads(response.content)["error"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300] or f"status {response.status_code}"


def raise_passing(response: httpx.Response) -> None:
    """Raise for what may pass, and for a session that is gone."""
    status = response.status_code
    if status == 401:
        raise SessionError(words_of(response))
    if status in (408, 423, 429, 500, 502, 503, 504):
        after = response.headers.get("retry-after", "0")
        raise UnavailableError(
            f"it says {status}: {words_of(response)}", after=float(after) if after.isdigit() else 0.0
        )


def error_of(response: httpx.Response) -> ProtocolError:
    """The error for a refusal that will not pass."""
    if response.headers.get("content-type", "").partition(";")[0] != "application/json":
        return ProtocolError(
            f"{response.url} is nothing that an arclight server has ({response.status_code} {response.reason_phrase}): see that "
            "the address and its port are the server's"
        )
    return ProtocolError(f"the server refuses with {response.status_code}: {words_of(response)}")
