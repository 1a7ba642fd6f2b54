"""Define the messages that nodes and server exchange, and manifests of tensors.

In: JSON; out: frozen dataclasses, and back. ``messages`` has a class for each message, ``manifest`` names tensors in blobs. Open ``messages``
first.
"""

from arclight.federated.protocol.manifest import Entry as Entry
from arclight.federated.protocol.manifest import Manifest as Manifest
from arclight.federated.protocol.manifest import digest_of as digest_of
from arclight.federated.protocol.messages import VERSION as VERSION
from arclight.federated.protocol.messages import Ask as Ask
from arclight.federated.protocol.messages import Beat as Beat
from arclight.federated.protocol.messages import Close as Close
from arclight.federated.protocol.messages import Doing as Doing
from arclight.federated.protocol.messages import Evaluate as Evaluate
from arclight.federated.protocol.messages import Evaluated as Evaluated
from arclight.federated.protocol.messages import Failed as Failed
from arclight.federated.protocol.messages import Fit as Fit
from arclight.federated.protocol.messages import Held as Held
from arclight.federated.protocol.messages import Join as Join
from arclight.federated.protocol.messages import Leave as Leave
from arclight.federated.protocol.messages import Message as Message
from arclight.federated.protocol.messages import Receipt as Receipt
from arclight.federated.protocol.messages import Secure as Secure
from arclight.federated.protocol.messages import Secured as Secured
from arclight.federated.protocol.messages import Update as Update
from arclight.federated.protocol.messages import Wait as Wait
from arclight.federated.protocol.messages import Welcome as Welcome
from arclight.federated.protocol.messages import keys_text as keys_text
from arclight.federated.protocol.messages import read as read
