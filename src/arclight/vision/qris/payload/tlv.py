"""Parse tag-length-value text: two digits of tag, two digits of length, the value.

Lengths are in characters.

`codec` parses and builds payloads with these functions, `rules` checks the fields; `Problem` and `QrisError` are public in
``arclight.vision.qris``. Messages may change; offsets and tags in a `Problem` must stay exact.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One violation: its ``tag`` ("26.01" is tag 01 inside 26), its offset, and a message.

    ``tolerable``: readers of printed codes may note it and go on, because what the code says is beyond doubt.
    """

    tag: str
    offset: int
    message: str
    tolerable: bool = False

    def __str__(self) -> str:
        return f"tag {self.tag or '?'} at {self.offset}: {self.message}"


class QrisError(ValueError):
    """A payload breaks the rules; ``problems`` holds every violation found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, self.problems)))


@dataclass(frozen=True)
class Field:
    """One data object: ``offset`` is the position of its tag in the whole text, in characters."""

    tag: str
    value: str
    offset: int

    @property
    def value_offset(self) -> int:
        return self.offset + 4


def is_digits(text: str) -> bool:
    """Return True if ``text`` is one or more of 0-9; other scripts' digits are not."""
    return text.isascii() and text.isdigit()


def split(text: str, *, offset: int = 0, inside: str = "") -> tuple[list[Field], list[Problem]]:
    """Split ``text`` into its data objects, and list problems of its structure.

    ``offset`` is where ``text`` starts in the whole payload, ``inside`` the tag of the template that holds it.
    A damaged object ends the reading, because nothing after it can be located; every other fault is only noted.
    """
    fields: list[Field] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    at = 0
    while at < len(text):
        tag, length = text[at : at + 2], text[at + 2 : at + 4]
        name = f"{inside}.{tag}" if inside else tag
        if len(length) < 2 or not is_digits(tag) or not is_digits(length):
            message = f"expected two digits of tag and two of length, found {text[at : at + 4]!r}"
            problems.append(Problem(inside, offset + at, message))
            break
        size = int(length)
        value = text[at + 4 : at + 4 + size]
        if len(value) < size:
            problems.append(Problem(name, offset + at, f"length says {size} characters, only {len(value)} follow"))
            break
        if size == 0:
            problems.append(Problem(name, offset + at, "is empty"))
        if tag in seen:
            problems.append(Problem(name, offset + at, "appears more than once"))
        seen.add(tag)
        fields.append(Field(tag, value, offset + at))
        at += 4 + size
    return fields, problems


def join(pairs: Iterable[tuple[str, str]]) -> str:
    """Join ``(tag, value)`` pairs to tag-length-value text.

    Raises QrisError that names each value that two digits of length cannot describe.
    """
    parts: list[str] = []
    problems: list[Problem] = []
    at = 0
    for tag, value in pairs:
        if not is_digits(tag) or len(tag) != 2:
            problems.append(Problem(tag, at, "is not a tag: two digits are"))
        if not 1 <= len(value) <= 99:
            problems.append(Problem(tag, at, f"has {len(value)} characters; 1 to 99 can be written"))
        parts.append(f"{tag}{len(value):02d}{value}")
        at += len(parts[-1])
    if problems:
        raise QrisError(problems)
    return "".join(parts)


def crc_of_text(text: str) -> str:
    """Return the four hexadecimal digits that follow ``text``, which ends with ``6304``.

    CRC-16 with polynomial 0x1021, start 0xFFFF, no reflection, no final xor (EMVCo, ISO 13239).
    """
    return f"{crc_hqx(text.encode('utf-8', 'surrogatepass'), 0xFFFF):04X}"
