"""What clients and server exchange: messages, and manifests of tensors."""

from arclight.federated.protocol.manifest import Entry, Manifest, digest_of
from arclight.federated.protocol.messages import (
    VERSION,
    Ask,
    Beat,
    Close,
    Doing,
    Evaluate,
    Evaluated,
    Failed,
    Fit,
    Held,
    Join,
    Leave,
    Message,
    Receipt,
    Secure,
    Secured,
    Update,
    Wait,
    Welcome,
    keys_text,
    read,
)
