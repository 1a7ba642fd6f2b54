"""Verification: what contradicts the registry is a mismatch, what agrees with it a match, and a pasted sticker shows."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
segno = pytest.importorskip("segno")
pytest.importorskip("zxingcpp")

from arclight.vision.qris import Account, build, to_dynamic, verify  # noqa: E402
from arclight.vision.qris.payload.codec import close  # noqa: E402
from arclight.vision.qris.scenes.fraud import Pair, draw_pair  # noqa: E402
from arclight.vision.qris.verification.registry import Place, Registry, RegistryError  # noqa: E402
from arclight.vision.qris.verification.report import MAX_PICTURES, VerificationReport  # noqa: E402
from arclight.vision.qris.verification.tampering import calibrated, fit, measure  # noqa: E402
from arclight.vision.qris.verification.verifier import (  # noqa: E402
    CheckedCode,
    Evidence,
    Verification,
    has_check_digit,
    passes_luhn,
)  # fmt: skip
from arclight.vision.results.detections import Boxes, Detections  # noqa: E402

PAN = "936000091000000001"
PLACE = {"name": "KOPI SENJA", "nmid": "ID1020012345678", "guids": ["COM.CONTOHPAY.WWW"], "pan": PAN, "city": "BANDUNG"}


def text_of(**changed: Any) -> str:
    account = Account("26", guid=changed.pop("guid", "COM.CONTOHPAY.WWW"), fields={"01": changed.pop("pan", PAN)})
    usual = {"merchant_name": "KOPI SENJA", "city": "BANDUNG", "mcc": "5814", "nmid": "ID1020012345678"}
    return build(accounts=[account], **usual | changed)


def photo_of(*texts: str) -> np.ndarray:
    """Plain codes side by side on a white sheet, RGB."""
    tiles = []
    for text in texts:
        made = segno.make(text, error="m", micro=False, boost_error=False)
        dark = np.pad(np.array(made.matrix, np.uint8), ((14, 14), (14, 14)))
        tiles.append(
            cv2.resize(np.where(dark > 0, 20, 245).astype(np.uint8), (560, 560), interpolation=cv2.INTER_NEAREST)
        )
    return np.repeat(np.hstack(tiles)[..., None], 3, axis=2)


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    file = tmp_path / "places.json"
    file.write_text(json.dumps([PLACE, {"name": "SATE MELATI", "nmid": "ID1020099999999", "city": "MEDAN"}]))
    return file


def checks(one: CheckedCode) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for evidence in one.evidence:
        found.setdefault(evidence.check, []).append(evidence.weight)
    return found


def test_the_registered_code_is_a_match(registry: Path) -> None:
    found = verify(photo_of(text_of()), registry)
    (one,) = found.checked
    assert (found.verdict, one.verdict) == ("match", "match")
    assert one.place is not None
    assert one.place.name == "KOPI SENJA"
    assert one.score < 0.2
    assert {"NMID", "PAN", "acquirer", "name", "city", "check value"} <= set(checks(one))
    assert all(weight <= 0 for weights in checks(one).values() for weight in weights)


@pytest.mark.parametrize(
    ("text", "check"),
    [
        (text_of(pan="936000091000000002"), "PAN"),
        (text_of(guid="ID.CO.EXAMPLEBANK.WWW"), "acquirer"),
        (text_of(nmid="ID1020077777777"), "NMID"),
        (text_of(nmid="ID1020077777777", pan="936000091000000002"), "name"),
        (to_dynamic(text_of(), 5000), "kind"),
        (text_of(amount=Decimal(5000), is_dynamic=False), "amount"),
    ],
)
def test_contradictions_of_the_registered_place_are_mismatches(registry: Path, text: str, check: str) -> None:
    found = verify(photo_of(text), registry)
    (one,) = found.checked
    assert found.verdict == "mismatch"
    assert found.score > 0.9
    assert one.place is not None
    assert one.place.nmid == PLACE["nmid"]
    assert max(checks(one)[check]) >= 6


def test_an_account_that_nobody_registered_is_unknown_until_a_place_is_named(registry: Path) -> None:
    stranger = photo_of(
        text_of(merchant_name="BENGKEL JAYA", city="MALANG", nmid="ID1020055555555", pan="936000091000000009")
    )
    found = verify(stranger, registry)
    assert (found.verdict, found.checked[0].place) == ("unknown", None)
    named = verify(stranger, registry, place="ID1020012345678")
    assert named.verdict == "mismatch"
    assert max(checks(named.checked[0])["NMID"]) >= 6
    with pytest.raises(RegistryError, match="no place has"):
        verify(stranger, registry, place="ID1020055555555")


def test_a_registered_account_under_another_name_is_noted(registry: Path) -> None:
    (one,) = verify(photo_of(text_of(merchant_name="KOPI PAGI")), registry).checked
    assert max(checks(one)["name"]) > 0
    assert one.verdict == "match", "the account is the registered one"


def test_a_name_nearly_that_of_a_registered_place_speaks_against_a_code(registry: Path) -> None:
    alike = text_of(merchant_name="KOPI SENJAA", nmid="ID1020077777777", pan="936000091000000002")
    (one,) = verify(photo_of(alike), registry).checked
    assert one.place is not None
    assert one.place.name == "KOPI SENJA"
    assert max(checks(one)["name"]) > 0
    elsewhere = text_of(merchant_name="KOPI SENJAA", city="MEDAN", nmid="ID1020077777777", pan="936000091000000002")
    assert verify(photo_of(elsewhere), registry).checked[0].place is None


def test_two_accounts_in_one_photo_speak_against_the_stranger(registry: Path) -> None:
    stranger = text_of(merchant_name="BENGKEL JAYA", city="MALANG", nmid="ID1020055555555", pan="936000091000000009")
    found = verify(photo_of(text_of(), stranger), registry)
    by_nmid = {one.code.payload.nmid: one for one in found.checked if one.code.payload}
    assert by_nmid["ID1020012345678"].verdict == "match"
    assert checks(by_nmid["ID1020055555555"])["codes"] == [3.0]
    twice = verify(photo_of(text_of(), text_of()), registry)
    assert twice.verdict == "match"
    assert all("codes" not in checks(one) for one in twice.checked), "one account, printed twice"


OTHER_PAN = "936000091000000666"
USUAL = {"merchant_name": "KOPI SENJA", "city": "BANDUNG", "mcc": "5814", "nmid": "ID1020012345678"}


def account(tag: str, fields: dict[str, str], guid: str = "COM.CONTOHPAY.WWW") -> Account:
    return Account(tag, guid=guid, fields=fields)


@pytest.mark.parametrize(
    "extra",
    [
        account("26", {"01": OTHER_PAN}),
        account("26", {"02": "123456789"}),
        account("26", {"01": OTHER_PAN}, "ID.CO.EXAMPLEBANK.WWW"),
        Account("02", value="4111111111111111"),
    ],
)
def test_an_account_beside_the_registered_one_is_a_mismatch(extra: Account) -> None:
    text = build(accounts=[extra, account("27", {"01": PAN})], **USUAL)
    for guids in (("COM.CONTOHPAY.WWW",), ()):
        place = Place(name="KOPI SENJA", nmid="ID1020012345678", guids=guids, pan=PAN)
        found = verify(photo_of(text), Registry((place,)))
        assert found.verdict == "mismatch"
        assert max(checks(found.checked[0])["PAN"]) >= 6


def test_a_print_of_several_registered_accounts_is_a_match() -> None:
    guids = ("COM.CONTOHPAY.WWW", "ID.CO.EXAMPLEBANK.WWW")
    rows = tuple(Place(name="KOPI SENJA", nmid="ID1020012345678", guids=guids, pan=pan) for pan in (PAN, OTHER_PAN))
    text = build(accounts=[account("26", {"01": PAN}), account("27", {"01": OTHER_PAN}, guids[1])], **USUAL)
    assert verify(photo_of(text), Registry(rows)).verdict == "match"


def test_a_row_without_a_number_does_not_excuse_another_number() -> None:
    rows = (
        Place(name="KOPI SENJA", nmid="ID1020012345678", pan=PAN),
        Place(name="KOPI SENJA", nmid="ID1020012345678", terminal="A02"),
    )
    assert verify(photo_of(text_of(pan=OTHER_PAN)), Registry(rows)).verdict == "mismatch"
    assert verify(photo_of(text_of()), Registry(rows)).verdict == "match"


@pytest.mark.parametrize("place", [None, "KOPI SENJA"])
@pytest.mark.parametrize("guids", [(), ("COM.CONTOHPAY.WWW",)])
def test_a_place_without_a_number_vouches_for_no_code(guids: tuple[str, ...], place: str | None) -> None:
    """Whoever copies the NMID, names and acquirer of a place may name another account of that acquirer."""
    table = Registry((Place(name="KOPI SENJA", nmid="ID1020012345678", guids=guids, city="BANDUNG"),))
    for pan in (PAN, OTHER_PAN):
        found = verify(photo_of(text_of(pan=pan)), table, place=place)
        assert found.verdict == "unknown"
        assert any("nothing shows whom it pays" in evidence.message for evidence in found.checked[0].evidence)


@pytest.mark.parametrize("before", ["\ufeff", "\u00a0", "PAY "])
def test_a_payload_behind_other_characters_is_damaged(registry: Path, before: str) -> None:
    found = verify(photo_of(text_of(), before + text_of(pan=OTHER_PAN)), registry)
    assert (found.verdict, len(found.checked)) == ("mismatch", 2)


def test_a_photo_with_a_code_that_was_not_read_is_no_match(registry: Path) -> None:
    photo = photo_of(text_of(), text_of(pan=OTHER_PAN))
    photo[100:460, 660:1020] = cv2.GaussianBlur(photo[100:460, 660:1020], (0, 0), 25)
    boxes = Boxes(np.array([[600.0, 60, 1100, 500]]), np.array([0.9]), np.zeros(1))
    found = verify(photo, registry, detector=lambda image: Detections(boxes, names=["qr_code"]))
    assert (found.verdict, [one.verdict for one in found.checked], len(found.others)) == ("unknown", ["match"], 1)


def test_photos_of_one_channel_are_verified(registry: Path) -> None:
    photo = photo_of(text_of())
    assert verify(photo[..., :1], registry).verdict == verify(photo[..., 0], registry).verdict == "match"


def test_a_registered_picture_that_cannot_be_read_is_evidence(tmp_path: Path) -> None:
    (tmp_path / "poster.png").write_bytes(b"no picture")
    place = Place(name="KOPI SENJA", nmid="ID1020012345678", pan=PAN, poster=tmp_path / "poster.png")
    (one,) = verify(photo_of(text_of()), Registry((place,))).checked
    assert any("poster.png cannot be read: not an image" in evidence.message for evidence in one.evidence)


def test_names_of_files_that_are_no_text_are_reported(tmp_path: Path) -> None:
    report = VerificationReport("places.csv")
    report.add("a\udcff.jpg", np.zeros((8, 8, 3), np.uint8), Verification("unknown"))
    assert "a\\udcff.jpg" in report.write(tmp_path / "page.html").read_text()


def test_a_damaged_payload_is_evidence(registry: Path) -> None:
    forged = photo_of(text_of().replace("KOPI SENJA", "KOPI SENYA"))
    (one,) = verify(forged, registry).checked
    assert one.verdict == "mismatch"
    assert any("check value" in evidence.message for evidence in one.evidence if evidence.weight >= 6)


def test_photos_without_payment_codes_are_unknown(registry: Path) -> None:
    empty = verify(np.full((300, 300, 3), 200, np.uint8), registry)
    assert (empty.verdict, empty.checked, empty.score) == ("unknown", (), 0.0)
    link = verify(photo_of("https://example.org/menu"), registry)
    assert (link.verdict, len(link.others)) == ("unknown", 1)
    with pytest.raises(ValueError, match="need an image"):
        verify(np.zeros((4, 4)), registry)


def test_a_code_of_another_network_or_currency_is_doubted(registry: Path) -> None:
    foreign = close([("00", "01"), ("01", "11"), ("02", "4111111111111112"), ("52", "5814"), ("53", "840"), ("58", "US"),
                     ("59", "COFFEE"), ("60", "BOSTON")])  # fmt: skip
    (one,) = verify(photo_of(foreign), registry).checked
    assert {"network", "country", "currency", "check digit"} <= {e.check for e in one.evidence if e.weight > 0}


@pytest.mark.parametrize(
    ("pan", "scheme", "has", "passes"),
    [
        ("4111111111111111", True, True, True),
        ("4111111111111112", True, True, False),
        ("5500005555555559", True, True, True),
        (PAN, False, False, False),  # 18 digits: printed without the last one
        ("9360000910000000014", False, True, False),
        ("12345678901", True, False, False),
        ("41111111ABCD1111", True, False, False),
    ],
)
def test_check_digits_are_tried_where_there_are_any(pan: str, scheme: bool, has: bool, passes: bool) -> None:
    assert has_check_digit(pan, card_scheme=scheme) == has
    if has:
        assert passes_luhn(pan) == passes
        others = [pan[:-1] + digit for digit in "0123456789" if digit != pan[-1]]
        assert sum(map(passes_luhn, others)) == (not passes), "exactly one last digit fits"


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return [draw_pair(np.random.default_rng([5, number])) for number in range(8)]


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_pairs_differ_by_the_sticker_alone(count: int) -> None:
    pairs = [draw_pair(np.random.default_rng([5, number])) for number in range(count)]
    for pair in pairs:
        assert pair.clean.codes[0].content == pair.own
        assert pair.forged.codes[0].content == pair.sticker
        assert pair.own.nmid != pair.sticker.nmid
        changed = np.abs(pair.clean.image.astype(int) - pair.forged.image).max(2) > 8
        assert 0.002 < changed.mean() < 0.5
    again = draw_pair(np.random.default_rng([5, 0]))
    assert np.array_equal(again.forged.image, pairs[0].forged.image)


@pytest.mark.slow
def test_stickers_score_above_the_prints_that_they_cover(pairs: list[Pair]) -> None:
    def odds(pair: Pair) -> list[float]:
        scenes = (pair.clean, pair.forged)
        return [calibrated().log_odds(measure(scene.image, scene.codes[0].corners)) for scene in scenes]

    scores = np.array([odds(pair) for pair in pairs])
    assert (scores[:, 1] > scores[:, 0]).mean() >= 0.75
    assert (scores[:, 0] < calibrated().threshold).all()


def test_calibration_learns_from_measurements_and_is_repeatable() -> None:
    draw = np.random.default_rng(0)
    pasted = [number % 2 == 1 for number in range(200)]
    measured = [{"seam": draw.normal() + 4 * label, "noise": draw.normal()} for label in pasted]
    model, again = (fit(measured, pasted) for _ in range(2))
    odds = np.array([model.log_odds(row) for row in measured])
    assert odds[1::2].min() > odds[0::2].mean()
    assert (odds[0::2] > model.threshold).mean() <= 0.03
    assert np.array_equal(model.weights, again.weights)


def test_the_report_shows_photos_and_escapes_texts_of_codes(tmp_path: Path, registry: Path) -> None:
    report = VerificationReport("places.json")
    for name, text in (
        ("good.jpg", text_of()),
        ("<b>.jpg", text_of(merchant_name="<script>KOPI", nmid="ID1020077777777")),
    ):
        photo = photo_of(text)
        report.add(name, photo, verify(photo, registry))
    page = report.write(tmp_path / "deep" / "page.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 2
    assert page.index("&lt;b&gt;.jpg") < page.index("good.jpg"), "mismatches come first"
    assert "<script>" not in page
    assert "&lt;script&gt;KOPI" in page
    assert "http://" not in page
    assert "https://" not in page
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "page.html"]


def test_a_report_of_a_large_folder_lists_the_rest(tmp_path: Path) -> None:
    report = VerificationReport("places.csv")
    photo = np.zeros((8, 8, 3), np.uint8)
    for number in range(MAX_PICTURES + 3):
        report.add(f"{number}.jpg", photo, Verification("unknown"))
    report.add("late.jpg", photo, Verification("mismatch"))  # is shown, however many others came before
    page = report.write(tmp_path / "page.html").read_text()
    assert page.count("data:image/jpeg") == MAX_PICTURES + 1
    assert page.count("<article") == MAX_PICTURES + 4


def test_documents_are_plain_json(registry: Path) -> None:
    found = verify(photo_of(text_of(nmid="ID1020077777777")), Registry.read(registry))
    document = json.loads(json.dumps(found.to_json()))
    assert set(document) == {"verdict", "score", "checked", "others"}
    assert document["checked"][0]["evidence"][0].keys() == Evidence("a", "b", 1.0).to_json().keys()
