"""Verify the payment codes of a photo: match, unknown or mismatch, each with evidence.

A verdict is about whom a code pays. A damaged payload, or one that contradicts the registered account, decides by itself (`DECISIVE`). Weaker
differences and a look at the print are added up, and become a mismatch above the threshold that one honest drawn photo in a hundred exceeds
by its look (see `tampering`). A code that pays the registered account, by its PAN, is a match whatever is pasted around it.

`verify` is public in ``arclight.vision.qris``; ``arclight scan`` and ``demo`` call it and `report` shows what it returns. Keys of `to_json` stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from arclight.vision.data.images import Image, ImageError, decode_image
from arclight.vision.qris.payload.codec import Payload
from arclight.vision.qris.payload.rules import QRIS_TAG
from arclight.vision.qris.reading.scanner import Code, DetectFn, scan
from arclight.vision.qris.verification.registry import Place, RegisteredPrint, Registry, compare_prints, letters
from arclight.vision.qris.verification.tampering import calibrated, measure, remarks

Verdict = Literal["match", "unknown", "mismatch"]

DECISIVE = 8.0
"""Log odds of evidence that contradicts the registry: enough for a mismatch whatever else is seen."""
NAMES_ALIKE = 0.85
"""Least similarity of two names, in [0, 1], for one to pass for the other."""
MOVED = 0.05
"""Distance of a code from its registered place, in its sides, that an honest photo seldom exceeds."""


@dataclass(frozen=True)
class Evidence:
    """One check of a code: its outcome, and the weight of that."""

    check: str
    message: str
    weight: float
    """Natural logarithm of the odds it adds that the code is not the place's: above 0 against the code, below for it."""

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and text."""
        return {"check": self.check, "message": self.message, "weight": round(self.weight, 3)}


@dataclass(frozen=True)
class CheckedCode:
    """Verdict on one payment code; ``score`` is the probability that it is not the place's."""

    code: Code
    verdict: Verdict
    score: float
    place: Place | None
    evidence: tuple[Evidence, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, numbers and text."""
        return {
            "code": self.code.to_json(),
            "verdict": self.verdict,
            "score": round(self.score, 4),
            "place": None if self.place is None else self.place.to_json(),
            "evidence": [one.to_json() for one in self.evidence],
        }


@dataclass(frozen=True)
class Verification:
    """Verdict on a photo: the worst of those on its payment codes."""

    verdict: Verdict
    checked: tuple[CheckedCode, ...] = ()
    """Payment codes, and what looks like damaged ones."""
    others: tuple[Code, ...] = field(default=())
    """Codes of other kinds, and those that were not read."""

    @property
    def score(self) -> float:
        return max((one.score for one in self.checked), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, numbers and text."""
        return {
            "verdict": self.verdict,
            "score": round(self.score, 4),
            "checked": [one.to_json() for one in self.checked],
            "others": [code.to_json() for code in self.others],
        }


def verify(
    photo: Image,
    registry: Registry | Path | str,
    *,
    place: str | None = None,
    detector: DetectFn | None = None,
) -> Verification:
    """Verify the payment codes in ``photo`` (H, W, 3) RGB uint8 against a registry of places.

    ``registry``: that, or its file. ``place`` is the NMID or name of the place the photo was taken at, where that is
    known: any other account is then a mismatch. A photo without a payment code is ``unknown``, and one that matches but
    for a code that was not read. Raises ValueError for an array that is no image and RegistryError for a registry, or a
    place, that is none.
    """
    table = registry if isinstance(registry, Registry) else Registry.read(registry)
    expected = table.named(place) if place is not None else ()
    codes = scan(photo, detector)
    if photo.ndim == 3 and photo.shape[2] == 1:
        photo = photo[..., 0]
    payments = [code for code in codes if code.payload is not None or looks_damaged(code)]
    accounts = {account_of(code.payload) for code in payments if code.payload is not None}
    checked = tuple(_checked(photo, code, table, expected, len(accounts)) for code in payments)
    verdicts = {one.verdict for one in checked}
    others = tuple(code for code in codes if code not in payments)
    certain = verdicts == {"match"} and all(code.text is not None for code in others)
    worst: Verdict = "mismatch" if "mismatch" in verdicts else "match" if certain else "unknown"
    return Verification(worst, checked, others)


def looks_damaged(code: Code) -> bool:
    """Return True for the text of a payment code that breaks the standard."""
    return code.payload is None and code.text is not None and bool(code.problems)


def account_of(payload: Payload) -> tuple[str | None, tuple[str, ...]]:
    """Return whom a payload pays: its NMID and its accounts' numbers."""
    return payload.nmid, tuple(sorted(pans_of(payload)))


def pans_of(payload: Payload) -> list[str]:
    """List the PANs of a payload's acquirers (tags 26 to 50) and card schemes (02 to 25)."""
    inner = [account.fields.get("01", "") for account in payload.accounts if account.guid and account.tag != QRIS_TAG]
    return [pan for pan in (*inner, *(account.value or "" for account in payload.accounts)) if pan]


def guids_of(payload: Payload) -> list[str]:
    """List the acquirers that a payload names."""
    return [account.guid for account in payload.accounts if account.guid and account.tag != QRIS_TAG]


def has_check_digit(pan: str, *, card_scheme: bool) -> bool:
    """Return True for numbers whose last digit is a check digit.

    ISO/IEC 7812-1 gives one to every primary account number: those of card schemes (tags 02 to 25, 12 to 19 digits), and
    Indonesia's merchant numbers of 19 digits. The 18 digits that most QRIS print (9360, the acquirer's number, the merchant's)
    are such a number without its last digit: there is nothing to check.
    """
    if not (pan.isascii() and pan.isdigit()):
        return False
    return 12 <= len(pan) <= 19 if card_scheme else len(pan) == 19 and pan.startswith("9360")


def passes_luhn(pan: str) -> bool:
    """Return True if the last digit is the check digit of the others (ISO/IEC 7812-1, annex B)."""
    doubled = [2 * int(digit) if index % 2 else int(digit) for index, digit in enumerate(reversed(pan))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


def _checked(photo: Image, code: Code, table: Registry, expected: Sequence[Place], accounts: int) -> CheckedCode:
    evidence = _of_rules(code)
    if code.payload is None:
        return _judged(code, expected[0] if expected else None, evidence, match=False)
    rows = expected or table.of_nmid(code.payload.nmid or "")
    place, registered_pans, compared = _compared(code.payload, rows, table)
    evidence += compared
    # An NMID can be copied: whom a code pays is its PAN, so a place registered without one vouches for no code.
    registered = place is not None and place.nmid == code.payload.nmid and bool(registered_pans)
    match = registered and not _contradicts(evidence)
    if accounts > 1:
        weight = 0.0 if match else 3.0
        evidence.append(Evidence("codes", f"the photo shows payment codes of {accounts} accounts", weight))
    evidence += _of_print(photo, code, place, match=match, contradicted=_contradicts(evidence))
    return _judged(code, place, evidence, match=match)


def _judged(code: Code, place: Place | None, evidence: list[Evidence], *, match: bool) -> CheckedCode:
    odds = sum(one.weight for one in evidence)
    mismatch = _contradicts(evidence) or odds >= calibrated().threshold
    verdict: Verdict = "match" if match else "mismatch" if mismatch else "unknown"
    return CheckedCode(code, verdict, float(1 / (1 + np.exp(-odds))), place, tuple(evidence))


def _contradicts(evidence: Sequence[Evidence]) -> bool:
    return any(one.weight >= DECISIVE for one in evidence)


def _compared(
    payload: Payload, rows: Sequence[Place], table: Registry
) -> tuple[Place | None, set[str], list[Evidence]]:
    """Compare a payload with its best-fitting row and PANs, else with the place it poses as."""
    if not rows:
        place, evidence = _namesake(payload, table)
        return place, set(), evidence
    every = []
    for row in rows:
        pans = _pans_for(row, rows)
        every.append((row, pans, _of_row(payload, row, pans)))
    return min(every, key=lambda compared: sum(one.weight for one in compared[2]))


def _of_print(photo: Image, code: Code, place: Place | None, *, match: bool, contradicted: bool) -> list[Evidence]:
    """Check the surroundings of a code in the photo.

    Findings about a code that pays the registered account weigh nothing, and a neat print excuses no contradiction.
    """
    measured = measure(photo, code.corners_px)
    odds = calibrated().log_odds(measured)
    if odds >= calibrated().threshold:
        message = ": ".join(filter(None, ("the code looks pasted over something", "; ".join(remarks(measured)))))
    else:
        message = (
            "the code looks printed with its surroundings"
            if odds < 0
            else "it is unclear whether the code is pasted on"
        )
    found = [Evidence("edges", message, 0.0 if match else max(odds, 0.0) if contradicted else odds)]
    if place is not None and place.poster is not None:
        found += _of_poster(photo, code, place.poster, match=match)
    return found


def _of_poster(photo: Image, code: Code, poster: Path, *, match: bool) -> list[Evidence]:
    """Compare a photo with the picture of the registered print."""
    try:
        registered = registered_print(poster)
    except (ImageError, OSError) as error:
        return [Evidence("print", f"the registered picture {poster.name} cannot be read: {error}", 0.0)]
    if registered is None:
        return [Evidence("print", f"no code can be read in the registered picture {poster.name}", 0.0)]
    seen = compare_prints(photo, code.corners_px, registered)
    if seen is None:
        return [Evidence("print", "the photo does not show the registered print", 0.0 if match else 1.0)]
    if seen.moved < MOVED:
        return [Evidence("print", "the code is where the registered print has it", 0.0 if match else -1.0)]
    message = (
        f"the code is not where the registered print has it: {seen.moved:.2f} of its side away, turned by "
        f"{abs(seen.turned_deg):.1f} degrees, {seen.scaled:.2f} times as large"
    )
    return [Evidence("print", message, 0.0 if match else 3.0)]


@lru_cache(maxsize=256)
def registered_print(poster: Path) -> RegisteredPrint | None:
    """Return the features of a registered picture; None if no code can be read in it.

    Raises ImageError and OSError as `decode_image`.
    """
    picture = decode_image(poster)
    codes = [code for code in scan(picture) if code.text is not None]
    payments = [code for code in codes if code.payload is not None] or codes
    return RegisteredPrint.of(picture, payments[0].corners_px) if payments else None


def _of_rules(code: Code) -> list[Evidence]:
    """Check a payload by itself: check value, country and currency, check digits, amounts."""
    found = [Evidence("payload", problem, DECISIVE if code.payload is None else 1.0) for problem in code.problems]
    if code.payload is None:
        return found
    found.append(Evidence("check value", "the check value fits the text", -0.1))
    payload = code.payload
    if not payload.is_qris:
        found.append(Evidence("network", "a payment code of another network: it names no NMID", 2.0))
    for name, given, usual in (("country", payload.country, "ID"), ("currency", payload.currency, "360")):
        if given != usual:
            found.append(Evidence(name, f"{name} {given}; a code of Indonesia has {usual}", 3.0))
    schemes = {account.value for account in payload.accounts if account.value}
    for pan in pans_of(payload):
        if has_check_digit(pan, card_scheme=pan in schemes) and not passes_luhn(pan):
            found.append(Evidence("check digit", f"the check digit of PAN {pan} is wrong", 3.0))
    if payload.amount is not None and not payload.is_dynamic:
        found.append(Evidence("amount", f"says it is static, and has an amount: {payload.amount}", 1.0))
    return found


def _pans_for(place: Place, rows: Sequence[Place]) -> set[str]:
    """Return the PANs that may share a print with a row.

    They are of the same account, and of acquirers (guids) that do not tell them apart.
    """
    own = set(map(str.upper, place.guids))
    shared = (row for row in rows if row.nmid == place.nmid)
    return {
        row.pan for row in shared if row.pan and not (own and row.guids and own.isdisjoint(map(str.upper, row.guids)))
    }


def _of_row(payload: Payload, place: Place, registered: set[str]) -> list[Evidence]:
    """Compare a payload with one row of the registry, field by field.

    Every PAN that it can pay must be ``registered``.
    """
    found: list[Evidence] = []

    def note(check: str, agrees: bool, given: object, registered: object, against: float) -> None:
        listed = f"{check} {given}, as registered" if agrees else f"{check} {given}; registered is {registered}"
        found.append(Evidence(check, listed, against if not agrees else -2.0 if check == "NMID" else -0.5))

    note("NMID", payload.nmid == place.nmid, payload.nmid, place.nmid, DECISIVE)
    pans = [one.value or one.fields.get("01", "") for one in payload.accounts if one.tag != QRIS_TAG]
    listed = ", ".join(pan or "none" for pan in pans) or "none"
    if registered:
        agrees = bool(pans) and registered.issuperset(pans) and (place.pan is None or place.pan in pans)
        note("PAN", agrees, listed, ", ".join(sorted(registered)), DECISIVE)
    else:
        found.append(
            Evidence("PAN", f"PAN {listed}; the registry has none for this place, so nothing shows whom it pays", 0.0)
        )
    if place.guids:
        given = guids_of(payload)
        agrees = bool(given) and set(map(str.upper, given)) <= set(map(str.upper, place.guids))
        note("acquirer", agrees, ", ".join(given) or "none", ", ".join(place.guids), DECISIVE)
    note("name", letters(payload.merchant_name) == letters(place.name), payload.merchant_name, place.name, 2.0)
    if place.city:
        note("city", letters(payload.city) == letters(place.city), payload.city, place.city, 1.0)
    if place.terminal:
        terminal = payload.additional.get("terminal_label")
        note("terminal", terminal == place.terminal, terminal or "none", place.terminal, 0.5)
    if place.kind == "static":
        if payload.is_dynamic:
            found.append(Evidence("kind", "the registered print is static; this code is dynamic", DECISIVE))
        if payload.amount is not None:
            found.append(
                Evidence("amount", f"the registered print has no amount; this code asks {payload.amount}", DECISIVE)
            )
    elif not payload.is_dynamic:
        found.append(Evidence("kind", "registered as dynamic; this code is static", 1.0))
    return found


def _namesake(payload: Payload, table: Registry) -> tuple[Place | None, list[Evidence]]:
    """Find the place that a code of an unregistered account poses as: by PAN, name and city."""
    for pan in pans_of(payload):
        if owner := table.of_pan(pan):
            message = f"PAN {pan} is registered for {owner.nmid}; this code names {payload.nmid or 'no NMID'}"
            return owner, [Evidence("NMID", message, DECISIVE)]
    for place in table.of_name(payload.merchant_name):
        if place.city is None or letters(place.city) == letters(payload.city):
            message = (
                f"names itself {payload.merchant_name}, which is registered with NMID {place.nmid}, not {payload.nmid}"
            )
            return place, [Evidence("name", message, DECISIVE if place.city else 3.0)]
    near = _nearly_named(payload, table)
    if near:
        message = f"names itself {payload.merchant_name}, nearly as the registered {near[0].name} ({near[0].nmid})"
        return near[0], [Evidence("name", message, 2.5)]
    return None, [Evidence("NMID", f"NMID {payload.nmid or 'none'} is not registered", 0.0)]


def _nearly_named(payload: Payload, table: Registry) -> list[Place]:
    """List the places of a payload's city, or of an unknown one, with similar names."""
    matcher = SequenceMatcher(b=letters(payload.merchant_name))  # what it knows of b is kept for every a
    near = []
    for place in table.places:
        if place.city is None or letters(place.city) == letters(payload.city):
            matcher.set_seq1(letters(place.name))
            if matcher.real_quick_ratio() >= NAMES_ALIKE and matcher.ratio() >= NAMES_ALIKE:
                near.append(place)
    return near
