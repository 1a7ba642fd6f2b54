"""Decode and encode merchant-presented payment payloads; tell QRIS from other codes.

The text of a payment code is a list of data objects (EMVCo QR Code Specification for Payment Systems,
merchant-presented mode 1.1) closed by a CRC. QRIS, Indonesia's national standard, is the payloads whose
tag 51 names the national switch. Offsets and lengths count characters, as printed payloads do.

Most functions are public in ``arclight.vision.qris``. `poster` and ``scenes.fraud`` call `parse`, ``reading.scanner`` `read_printed`,
``scenes.contents`` `build`, ``arclight data poster`` `to_dynamic`. Keys of `Payload.to_json` are in answers of the server and files of scans:
they stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any, Literal

from arclight.vision.qris.payload import rules
from arclight.vision.qris.payload.tlv import Field, Problem, QrisError, crc_of_text, is_digits, join, split

Kind = Literal["qris", "emvco", "other"]

_ADDITIONAL_NAMES = {
    "01": "bill_number",
    "02": "mobile_number",
    "03": "store_label",
    "04": "loyalty_number",
    "05": "reference_label",
    "06": "customer_label",
    "07": "terminal_label",
    "08": "purpose",
    "09": "consumer_data_request",
}
_OTHERS = range(65, 100)
_TIP_KINDS: dict[str, Literal["prompt", "fixed", "percentage"]] = {"01": "prompt", "02": "fixed", "03": "percentage"}


@dataclass(frozen=True)
class Account:
    """Merchant account (tags 02 to 51).

    Card schemes have a ``value``, tags from 26 on ``guid`` and ``fields``.
    """

    tag: str
    value: str | None = None
    guid: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tip:
    """Convenience fee: asked of the payer, a fixed amount, or a percentage.

    A fixed amount is in the payload's currency.
    """

    kind: Literal["prompt", "fixed", "percentage"]
    value: Decimal | None = None


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Content of a valid payment code; amounts are in ``currency`` (ISO 4217, 360 is rupiah)."""

    merchant_name: str
    city: str
    country: str
    currency: str
    accounts: tuple[Account, ...]
    mcc: str | None = None
    """Merchant category code (ISO 18245); a QRIS always has one."""
    is_dynamic: bool = False
    amount: Decimal | None = None
    tip: Tip | None = None
    postal_code: str | None = None
    nmid: str | None = None
    """National merchant identifier of a QRIS; None if the payload is not a QRIS."""
    criteria: str | None = None
    """Merchant size class of a QRIS, such as UMI (micro)."""
    additional: Mapping[str, str] = field(default_factory=dict)
    """Tag 62 by name (``terminal_label`` ...); fields without a standard name under their tag."""
    language: Mapping[str, str] = field(default_factory=dict)
    """Tag 64: ``language``, ``merchant_name`` and ``city`` in another language."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Tags 65 to 99 as they stand."""

    @property
    def is_qris(self) -> bool:
        return self.nmid is not None

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, text, booleans and None; amounts are text, exact."""
        document = asdict(self)
        document["amount"] = None if self.amount is None else str(self.amount)
        if self.tip:
            document["tip"]["value"] = None if self.tip.value is None else str(self.tip.value)
        document["accounts"] = [asdict(account) for account in self.accounts]
        return document | {"is_qris": self.is_qris}


def parse(text: str) -> Payload:
    """Parse ``text``; raises QrisError that names every violation with its tag and offset."""
    payload, problems = read_printed(text)
    if problems:
        raise QrisError(problems)
    return payload


def read_printed(text: str) -> tuple[Payload, tuple[Problem, ...]]:
    """Parse the text of a printed code, tolerating printing faults, which are returned too.

    Tolerated: a check value in lower case and letters of other scripts in names, both of codes that work in shops.
    Raises QrisError that names every violation, if one of them cannot be tolerated.
    """
    if len(text) > rules.MAX_LENGTH:
        message = f"the payload has {len(text)} characters; at most {rules.MAX_LENGTH} are allowed"
        raise QrisError([Problem("", rules.MAX_LENGTH, message)])
    fields, problems = split(text)
    if not fields and not problems:
        problems.append(Problem("00", 0, "the payload is empty"))
    problems.extend(rules.check(text, fields))
    problems.sort(key=lambda problem: problem.offset)
    if not all(problem.tolerable for problem in problems):
        raise QrisError(problems)
    return _payload({field.tag: field for field in fields}), tuple(problems)


def is_qris(text: str) -> bool:
    """Return True for a valid payload whose tag 51 names the national switch."""
    return classify(text) == "qris"


def classify(text: str) -> Kind:
    """Classify text as ``qris``, ``emvco`` (of another network) or ``other``.

    A damaged payload is ``other``.
    """
    try:
        return "qris" if parse(text).is_qris else "emvco"
    except QrisError:
        return "other"


def build(
    *,
    merchant_name: str,
    city: str,
    mcc: str | None = None,
    accounts: Iterable[Account] = (),
    nmid: str | None = None,
    criteria: str | None = None,
    amount: Decimal | int | str | None = None,
    is_dynamic: bool | None = None,
    tip: Tip | None = None,
    country: str = "ID",
    currency: str = "360",
    postal_code: str | None = None,
    additional: Mapping[str, str] | None = None,
    language: Mapping[str, str] | None = None,
    others: Mapping[str, str] | None = None,
) -> str:
    """Build the payload text for these values; raises QrisError exactly where ``parse`` would.

    The fields are those of ``Payload``. ``nmid`` and ``criteria`` write tag 51 unless ``accounts`` has it already;
    ``is_dynamic`` defaults to whether there is an amount.
    """
    dynamic = amount is not None if is_dynamic is None else is_dynamic
    every = list(accounts)
    _check_tags((account.tag for account in every), rules.ACCOUNTS)
    _check_tags(others or (), _OTHERS)
    if nmid is not None and rules.QRIS_TAG not in {account.tag for account in every}:
        fields = {"02": nmid} | ({"03": criteria} if criteria is not None else {})
        every.append(Account(rules.QRIS_TAG, guid=rules.QRIS_GUID, fields=fields))
    # A list: of a tag given twice parsing complains, where one would take the place of the other here.
    pairs = [("00", "01"), ("01", "12" if dynamic else "11")]
    pairs += [(account.tag, _account_text(account)) for account in sorted(every, key=lambda account: account.tag)]
    optional = {
        "52": mcc,
        "53": currency,
        "54": _number(amount),
        **_tip_fields(tip),
        "58": country,
        "59": merchant_name,
        "60": city,
        "61": postal_code,
        "62": _template(additional, {name: tag for tag, name in _ADDITIONAL_NAMES.items()}),
        "64": _template(language, {"language": "00", "merchant_name": "01", "city": "02"}),
        **(others or {}),
    }
    return close([*pairs, *((tag, value) for tag, value in optional.items() if value is not None)])


def _check_tags(tags: Iterable[str], known: range) -> None:
    """Raise QrisError for tags that are not among the ``known`` ones."""
    strange = [tag for tag in tags if not (is_digits(tag) and len(tag) == 2 and int(tag) in known)]
    if strange:
        raise QrisError(Problem(tag, 0, f"stands where {known[0]:02d} to {known[-1]} belong") for tag in strange)


def close(pairs: Iterable[tuple[str, str]]) -> str:
    """Join ``(tag, value)`` pairs to a payload closed by its CRC; QrisError if it breaks a rule."""
    body = join(pairs) + "6304"
    text = body + crc_of_text(body)
    parse(text)
    return text


def to_dynamic(
    text: str,
    amount: Decimal | int | str,
    *,
    tip: Tip | None = None,
    bill: str | None = None,
    reference: str | None = None,
) -> str:
    """Make a valid payload dynamic, for one payment of ``amount``.

    ``tip`` takes the place of the payload's own, if it has one; ``bill`` and ``reference`` go to tag 62, beside what it
    says already. Raises QrisError if either is not valid.
    """
    payload = parse(text)
    pairs = {field.tag: field.value for field in split(text)[0] if field.tag != "63"}
    pairs |= {"01": "12", "54": _number(amount) or ""}
    if tip is not None:
        pairs = {tag: value for tag, value in pairs.items() if tag not in {"55", "56", "57"}}
        pairs |= {tag: value for tag, value in _tip_fields(tip).items() if value is not None}
    added = {
        name: value for name, value in (("bill_number", bill), ("reference_label", reference)) if value is not None
    }
    if added:
        tags = {name: tag for tag, name in _ADDITIONAL_NAMES.items()}
        every = {tags.get(name, name): value for name, value in (dict(payload.additional) | added).items()}
        pairs["62"] = join(sorted(every.items()))
    return close(sorted(pairs.items()))


def _payload(by_tag: dict[str, Field]) -> Payload:
    """Return the typed view of fields that passed every check."""

    def value(tag: str) -> str | None:
        return by_tag[tag].value if tag in by_tag else None

    def inside(tag: str) -> dict[str, str]:
        return {inner.tag: inner.value for inner in rules.nested(by_tag[tag])[0]} if tag in by_tag else {}

    accounts = tuple(_account(entry) for tag, entry in by_tag.items() if int(tag) in rules.ACCOUNTS)
    switch = inside(rules.QRIS_TAG) if rules.is_qris(by_tag) else {}
    amount, tip = value("54"), value("55")
    tip_value = value("56") or value("57")
    names = {"00": "language", "01": "merchant_name", "02": "city"}
    return Payload(
        merchant_name=by_tag["59"].value,
        city=by_tag["60"].value,
        country=by_tag["58"].value,
        mcc=value("52"),
        currency=by_tag["53"].value,
        accounts=accounts,
        is_dynamic=value("01") == "12",
        amount=None if amount is None else Decimal(amount),
        tip=None if tip is None else Tip(_TIP_KINDS[tip], None if tip_value is None else Decimal(tip_value)),
        postal_code=value("61"),
        nmid=switch.get("02"),
        criteria=switch.get("03"),
        additional={_ADDITIONAL_NAMES.get(tag, tag): text for tag, text in inside("62").items()},
        language={names.get(tag, tag): text for tag, text in inside("64").items()},
        others={tag: entry.value for tag, entry in by_tag.items() if int(tag) in _OTHERS},
    )


def _account(entry: Field) -> Account:
    if int(entry.tag) not in rules.ACCOUNT_TEMPLATES:
        return Account(entry.tag, value=entry.value)
    inner = {nested.tag: nested.value for nested in rules.nested(entry)[0]}
    return Account(entry.tag, guid=inner.pop("00"), fields=inner)


def _account_text(account: Account) -> str:
    if account.value is not None:
        return account.value
    return join([*([] if account.guid is None else [("00", account.guid)]), *account.fields.items()])


def _tip_fields(tip: Tip | None) -> dict[str, str | None]:
    if tip is None:
        return {}
    tag = {kind: tag for tag, kind in _TIP_KINDS.items()}.get(tip.kind)
    if tag is None:
        raise QrisError(
            [Problem("55", 0, f"has no tip of kind {tip.kind!r}: there are {', '.join(_TIP_KINDS.values())}")]
        )
    return {"55": tag, {"fixed": "56", "percentage": "57"}.get(tip.kind, "56"): _number(tip.value)}


def _template(values: Mapping[str, str] | None, tags: Mapping[str, str]) -> str | None:
    if not values:
        return None
    return join((tags.get(name, name), value) for name, value in values.items())


def _number(value: Decimal | int | str | None) -> str | None:
    """Format a number as digits and a point, without exponent.

    What is not a number is left for the checks to name.
    """
    return format(value, "f") if isinstance(value, Decimal) else None if value is None else str(value)
