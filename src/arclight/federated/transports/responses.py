"""What a server's refusals mean to a node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from arclight.federated.errors import ProtocolError, SessionError
from arclight.federated.transports.retrying import UnavailableError

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse


def words_of(response: BaseHTTPResponse) -> str:
    """What the server says about a refusal."""
    try:
        return str(json.loads(response.data)["error"])
    except (ValueError, KeyError, TypeError):
        return response.data[:300].decode(errors="replace") or f"status {response.status}"


def raise_passing(response: BaseHTTPResponse) -> None:
    """Raise for what may pass, and for a session that is gone."""
    status = response.status
    if status == 401:
        raise SessionError(words_of(response))
    if status in (408, 423, 429, 500, 502, 503, 504):
        after = response.headers.get("retry-after", "0")
        raise UnavailableError(
            f"it says {status}: {words_of(response)}", after=float(after) if after.isdigit() else 0.0
        )


def is_json(response: BaseHTTPResponse) -> bool:
    """Whether it is an answer as our servers give them."""
    return response.headers.get("content-type", "").partition(";")[0] == "application/json"


def error_of(response: BaseHTTPResponse, address: str) -> ProtocolError:
    """The error for a refusal that will not pass."""
    if not is_json(response):
        return ProtocolError(
            f"{address} is nothing that an arclight server has ({response.status} {response.reason}): see that "
            "the address and its port are the server's"
        )
    return ProtocolError(f"the server refuses with {response.status}: {words_of(response)}")
