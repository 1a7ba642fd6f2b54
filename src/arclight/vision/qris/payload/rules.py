"""Check each field of a payment payload by the rules of EMVCo and QRIS.

EMVCo: QR Code Specification for Payment Systems, merchant-presented mode 1.1.

`codec` calls `check`; the scanner, the registry and the verifier read the constants. Patterns are those of the standards: only wording may
change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from arclight.vision.qris.payload.tlv import Field, Problem, crc_of_text, split

QRIS_TAG = "51"
"""Merchant account template of the national switch: a payload that carries it is a QRIS, one without it is not."""
QRIS_GUID = "ID.CO.QRIS.WWW"
"""The name of the national switch inside tag 51. Older prints that say ID.OR.QRNPG.WWW are EMVCo payloads, not QRIS."""
MAX_LENGTH = 512
"""Longest payload, characters (EMVCo 3.2)."""
ACCOUNTS = range(2, 52)
ACCOUNT_TEMPLATES = range(26, 52)
UNRESERVED_TEMPLATES = range(80, 100)
ADDITIONAL_TEMPLATES = range(50, 100)

_AMOUNT = r"(?=.{1,13}$)[0-9]+(\.[0-9]*)?"
_PRINTABLE = r"[ -~]"  # EMVCo "ans": the printable characters of ASCII
_UNICODE = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]"  # EMVCo "S": any text


class Rule(NamedTuple):
    """Pattern of a field's value, and what a message says it expects."""

    pattern: str
    expects: str
    required: bool = False
    identifies_account: bool = False
    """Whether the value identifies an account: letters that only look alike would name another one, and are never tolerable."""

    def problem(self, field: Field, tag: str) -> Problem | None:
        """Return the problem of a field's value, or None.

        It is tolerable if only letters of other scripts or lower-case digits are wrong. Invisible characters, and those
        that turn the reading direction, are never tolerable.
        """
        if not field.value or re.fullmatch(self.pattern, field.value, re.DOTALL):
            return None
        wider = self.pattern.replace(_PRINTABLE, _UNICODE).replace("[0-9A-F]", "[0-9A-Fa-f]")
        visible = field.value.isprintable() and not self.identifies_account
        tolerable = visible and re.fullmatch(wider, field.value, re.DOTALL) is not None
        return Problem(tag, field.offset, f"expected {self.expects}, found {field.value!r}", tolerable)


TOP = {
    "00": Rule(r"01", "01, the payload format", required=True),
    "01": Rule(r"1[12]", "11 (static) or 12 (dynamic)"),
    "52": Rule(r"[0-9]{4}", "a merchant category code of 4 digits"),
    "53": Rule(r"[0-9]{3}", "an ISO 4217 currency code of 3 digits", required=True),
    "54": Rule(_AMOUNT, "an amount of up to 13 characters: digits and at most one point"),
    "55": Rule(r"0[123]", "01 (ask for a tip), 02 (fixed) or 03 (percentage)"),
    "56": Rule(_AMOUNT, "an amount of up to 13 characters: digits and at most one point"),
    "57": Rule(r"(?=.{1,5}$)[0-9]{1,2}(\.[0-9]{0,2})?", "a percentage of at most two digits and two decimals"),
    "58": Rule(r"[A-Z]{2}", "an ISO 3166 country code of 2 capital letters", required=True),
    "59": Rule(_PRINTABLE + "{1,25}", "a merchant name of 1 to 25 printable characters", required=True),
    "60": Rule(_PRINTABLE + "{1,15}", "a merchant city of 1 to 15 printable characters", required=True),
    "61": Rule(_PRINTABLE + "{1,10}", "a postal code of 1 to 10 printable characters"),
    "63": Rule(r"[0-9A-F]{4}", "a check value of 4 upper-case hexadecimal digits", required=True),
}
GUID = Rule(
    _PRINTABLE + "{1,32}", "a globally unique identifier of 1 to 32 printable characters", True, identifies_account=True
)
TEXT = Rule(_PRINTABLE + "{1,99}", "printable characters", identifies_account=True)
ADDITIONAL = {f"{tag:02d}": Rule(_PRINTABLE + "{1,25}", "1 to 25 printable characters") for tag in range(1, 9)}
ADDITIONAL["09"] = Rule(r"(?!.*(.).*\1)[AME]{1,3}", "letters of A (address), M (mobile number), E (e-mail), each once")
LANGUAGE = {
    "00": Rule(r"[A-Za-z]{2}", "an ISO 639 language of 2 letters", required=True),
    "01": Rule(_UNICODE + "{1,25}", "a merchant name of 1 to 25 characters", required=True),
    "02": Rule(_UNICODE + "{1,15}", "a merchant city of 1 to 15 characters"),
}
_EVERY_TAG = [f"{tag:02d}" for tag in range(1, 100)]
ACCOUNT = dict.fromkeys(_EVERY_TAG, TEXT) | {"00": GUID}
UNRESERVED = dict.fromkeys(_EVERY_TAG, Rule(_UNICODE + "{1,99}", "text without control characters")) | {"00": GUID}
QRIS = {
    "00": Rule(re.escape(QRIS_GUID), QRIS_GUID, required=True),
    "02": Rule(r"ID[0-9]{13}", "a national merchant identifier (NMID): ID and 13 digits", required=True),
}


def check(text: str, fields: list[Field]) -> Iterator[Problem]:
    """Yield every violation among the top-level ``fields`` of ``text``, in order of discovery."""
    by_tag = {field.tag: field for field in fields}
    yield from apply(TOP, fields, end=len(text))
    if fields and fields[0].tag != "00":
        yield Problem(fields[0].tag, 0, "comes first; the payload format, tag 00, must")
    yield from _check_crc(text, fields)
    if not any(int(field.tag) in ACCOUNTS for field in fields):
        yield Problem("26", len(text), "no merchant account: one of the tags 02 to 51 is required")
    for field in fields:
        yield from _check_template(field)
    yield from _check_amounts(by_tag, end=len(text))
    if is_qris(by_tag):
        yield from _check_qris(by_tag)


def apply(rules: Mapping[str, Rule], fields: list[Field], *, end: int, inside: str = "") -> Iterator[Problem]:
    """Yield violations of ``rules`` (tag -> rule) among ``fields``.

    ``end`` is where a missing field could have been.
    """
    prefix = f"{inside}." if inside else ""
    present = {field.tag for field in fields}
    for tag, rule in rules.items():
        if rule.required and tag not in present:
            yield Problem(prefix + tag, end, f"is missing: {rule.expects}")
    for field in fields:
        if (field_rule := rules.get(field.tag)) and (problem := field_rule.problem(field, prefix + field.tag)):
            yield problem


def nested(field: Field) -> tuple[list[Field], list[Problem]]:
    """Split a template into its data objects, their offsets counted in the whole text."""
    return split(field.value, offset=field.value_offset, inside=field.tag)


def is_qris(by_tag: Mapping[str, Field]) -> bool:
    """Return True if tag 51 names the national switch."""
    switch = by_tag.get(QRIS_TAG)
    return switch is not None and any(f.tag == "00" and f.value == QRIS_GUID for f in nested(switch)[0])


def _check_crc(text: str, fields: list[Field]) -> Iterator[Problem]:
    for field in fields:
        if field.tag != "63":
            continue
        if field is not fields[-1]:
            yield Problem("63", field.offset, "the check value must come last")
        expected = crc_of_text(text[: field.value_offset])
        if field.value.upper() != expected:
            yield Problem("63", field.offset, f"check value is {field.value!r}, the text before it gives {expected}")


def _check_template(field: Field) -> Iterator[Problem]:
    """Yield the violations inside a top-level field that holds further fields, or free text."""
    number = int(field.tag)
    end = field.value_offset + len(field.value)
    if number in ACCOUNT_TEMPLATES or number in UNRESERVED_TEMPLATES:
        inner, problems = nested(field)
        yield from problems
        yield from apply(ACCOUNT if number in ACCOUNT_TEMPLATES else UNRESERVED, inner, end=end, inside=field.tag)
    elif field.tag in {"62", "64"}:
        inner, problems = nested(field)
        yield from problems
        yield from apply(ADDITIONAL if field.tag == "62" else LANGUAGE, inner, end=end, inside=field.tag)
        for template in inner if field.tag == "62" else ():
            if int(template.tag) in ADDITIONAL_TEMPLATES:
                name = f"62.{template.tag}"
                deeper, problems = split(template.value, offset=template.value_offset, inside=name)
                yield from problems
                yield from apply({"00": GUID}, deeper, end=template.value_offset + len(template.value), inside=name)
    elif number in ACCOUNTS:
        yield from apply({field.tag: TEXT}, [field], end=end)


def _check_amounts(by_tag: Mapping[str, Field], *, end: int) -> Iterator[Problem]:
    for tag in ("54", "56", "57"):
        field = by_tag.get(tag)
        if field and field.value and not field.value.strip("0."):
            yield Problem(tag, field.offset, "must not be zero")
    tip = by_tag["55"].value if "55" in by_tag else None
    for tag, wanted_by, what in (("56", "02", "fixed tip"), ("57", "03", "percentage tip")):
        if tip == wanted_by and tag not in by_tag:
            yield Problem(tag, end, f"is missing: tag 55 announces a {what}")
        if tip != wanted_by and tag in by_tag:
            yield Problem(tag, by_tag[tag].offset, f"gives a {what} that tag 55 does not announce")


def _check_qris(by_tag: Mapping[str, Field]) -> Iterator[Problem]:
    switch = by_tag[QRIS_TAG]
    yield from apply(QRIS, nested(switch)[0], end=switch.value_offset + len(switch.value), inside=QRIS_TAG)
    if "52" not in by_tag:  # EMVCo demands it of all, but codes of other networks that work in shops lack it
        yield Problem("52", switch.value_offset + len(switch.value), f"is missing: {TOP['52'].expects}")
    for tag, wanted, what in (("53", "360", "rupiah"), ("58", "ID", "Indonesia")):
        field = by_tag.get(tag)
        if field and field.value != wanted:
            yield Problem(tag, field.offset, f"a QRIS says {wanted} ({what}), found {field.value!r}")
