"""Make and read Ed25519 private keys, sign bytes, verify signatures.

``deploy`` signs programs with these, ``federated.transports`` messages of nodes; ``serving.certificates`` writes its keys by them. Formats
are public and stay: keys are PEM (PKCS8, no password), signatures and public keys base64.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from arclight.fabric.extras import require

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


class SigningError(ValueError):
    """A file holds no private key that may be used."""


class SigningKey:
    """A private key."""

    extra: ClassVar[str] = "deploy"
    """What to install if cryptography is missing."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def make(cls, path: str | Path) -> Self:
        """Make a key and write it to ``path``, readable by its owner alone.

        Raises FileExistsError if a file is there.
        """
        key = _cryptography("hazmat.primitives.asymmetric.ed25519", cls.extra).Ed25519PrivateKey.generate()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_new(Path(path), private_pem(key), secret=True)
        return cls(key)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the key in ``path``, a PEM file without password.

        Raises FileNotFoundError if there is none, SigningError for a file that holds none, or that others can read.
        """
        serialization = _cryptography("hazmat.primitives.serialization", cls.extra)
        kind = _cryptography("hazmat.primitives.asymmetric.ed25519", cls.extra).Ed25519PrivateKey
        try:
            key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
        except (ValueError, TypeError) as error:
            raise SigningError(f"{path} holds no private key: {error}") from error
        if not isinstance(key, kind):
            raise SigningError(f"{path} holds another kind of key, not Ed25519")
        check_private(path)
        return cls(key)

    @property
    def public(self) -> str:
        """Return the public key, base64."""
        return base64.b64encode(self._key.public_key().public_bytes_raw()).decode()

    def sign(self, text: bytes) -> str:
        """Return the signature of ``text``, base64."""
        return base64.b64encode(self._key.sign(text)).decode()


def is_signed(text: bytes, signature: str, public: str) -> bool:
    """Return True if ``signature`` is the one of ``text`` by the key ``public``.

    `is_public_key` must hold for the key.
    """
    invalid = _cryptography("exceptions").InvalidSignature
    key = _cryptography("hazmat.primitives.asymmetric.ed25519").Ed25519PublicKey.from_public_bytes(
        base64.b64decode(public)
    )
    try:
        key.verify(base64.b64decode(signature, validate=True), text)
    except (invalid, ValueError):
        return False
    return True


def is_public_key(text: str) -> bool:
    """Return True for 32 bytes in base64."""
    try:
        return len(base64.b64decode(text, validate=True)) == 32
    except ValueError:
        return False


def check_private(path: str | Path) -> None:
    """Raise SigningError for a private key of ours that others on this machine can read."""
    found = os.stat(path)
    if hasattr(os, "getuid") and found.st_uid == os.getuid() and found.st_mode & 0o077:
        raise SigningError(
            f"{path} is a private key that others on this machine may read or write: `chmod 600 {path}`, and if they may have "
            "done so, make a new one"
        )


def private_pem(key: Any) -> bytes:
    """Encode a private key as PEM, without password."""
    serialization = _cryptography("hazmat.primitives.serialization")
    made: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made


def write_new(path: Path, content: bytes, *, secret: bool) -> None:
    """Write a new file, readable by its owner alone if ``secret``.

    Raises FileExistsError if it exists.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(file, "wb") as opened:
        opened.write(content)


def _cryptography(module: str, extra: str = "deploy") -> Any:
    return require(f"cryptography.{module}", extra=extra)
