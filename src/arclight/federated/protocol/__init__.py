"""Define the messages that nodes and server exchange, and manifests of tensors.

In: JSON; out: frozen dataclasses, and back. ``messages`` has a class for each message, ``manifest`` names tensors in blobs. Open ``messages``
first.
"""

from arclight.federated.protocol.manifest import Entry as Entry
from arclight.federated.protocol.manifest import Manifest as Manifest
from arclight.federated.protocol.manifest import digest_of as digest_of
from arclight.federated.protocol.messages import VERSION as VERSION
from arclight.federated.protocol.messages import ActiveWork as ActiveWork
from arclight.federated.protocol.messages import Close as Close
from arclight.federated.protocol.messages import Evaluate as Evaluate
from arclight.federated.protocol.messages import Evaluated as Evaluated
from arclight.federated.protocol.messages import Failed as Failed
from arclight.federated.protocol.messages import Fit as Fit
from arclight.federated.protocol.messages import Heartbeat as Heartbeat
from arclight.federated.protocol.messages import HeldRound as HeldRound
from arclight.federated.protocol.messages import Join as Join
from arclight.federated.protocol.messages import Leave as Leave
from arclight.federated.protocol.messages import Message as Message
from arclight.federated.protocol.messages import Receipt as Receipt
from arclight.federated.protocol.messages import SecureSumReply as SecureSumReply
from arclight.federated.protocol.messages import SecureSumRequest as SecureSumRequest
from arclight.federated.protocol.messages import Update as Update
from arclight.federated.protocol.messages import Wait as Wait
from arclight.federated.protocol.messages import Welcome as Welcome
from arclight.federated.protocol.messages import WorkRequest as WorkRequest
from arclight.federated.protocol.messages import keys_text as keys_text
from arclight.federated.protocol.messages import read as read
