"""Payment payloads: what is valid is read and written, and everything else is refused by name."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arclight.vision.qris import Account, Problem, QrisError, Tip, build, classify, is_qris, parse, to_dynamic
from arclight.vision.qris.payload.tlv import crc_of_text, join, split
from arclight.vision.qris.reading.scanner import classify_text

# A real payload of another network (no tag 51), its check value computed by its own issuer.
SHOPEE = (
    "00020101021226380016ID.CO.SHOPEE.WWW010201020815863724530336054061440005802ID"
    "5921PT. SHOPPEE INDONESIA6007JAKARTA62180814gen by go-qris63049635"
)
STATIC = build(
    merchant_name="WARUNG BU TINI",
    city="YOGYAKARTA",
    postal_code="55111",
    mcc="5812",
    accounts=[Account("26", guid="ID.CO.EXAMPLE.WWW", fields={"01": "936000140000000001", "02": "000000001"})],
    nmid="ID1020012345678",
    criteria="UMI",
    additional={"terminal_label": "A01"},
)


def sealed(body: str) -> str:
    """``body`` with a check value that is right, computed bit by bit."""
    text = body + "6304"
    value = 0xFFFF
    for byte in text.encode("utf-8", "surrogatepass"):
        value ^= byte << 8
        for _ in range(8):
            value = ((value << 1) ^ 0x1021) & 0xFFFF if value & 0x8000 else value << 1
    return f"{text}{value:04X}"


def body_of(**changes: str | None) -> str:
    """STATIC without its check value, fields ``t54="..."`` replaced, added in order, or removed (None)."""
    fields = {field.tag: field.value for field in split(STATIC)[0] if field.tag != "63"}
    for name, value in changes.items():
        if value is None:
            del fields[name[1:]]
        else:
            fields[name[1:]] = value
    return "".join(f"{tag}{len(value):02d}{value}" for tag, value in sorted(fields.items()))


def problems_of(text: str) -> list[Problem]:
    with pytest.raises(QrisError) as caught:
        parse(text)
    assert caught.value.problems
    return list(caught.value.problems)


def refusal(function: Callable[..., object], *arguments: object, **named: object) -> QrisError | None:
    """The QrisError that a call raises, if it does; any other exception fails the test."""
    try:
        function(*arguments, **named)
    except QrisError as error:
        return error
    return None


def test_crc_has_the_check_value_of_its_catalogue_entry() -> None:
    assert crc_of_text("123456789") == "29B1"


def test_a_qris_names_the_payee() -> None:
    payload = parse(STATIC)
    assert (payload.merchant_name, payload.city, payload.postal_code) == ("WARUNG BU TINI", "YOGYAKARTA", "55111")
    assert (payload.nmid, payload.criteria, payload.mcc, payload.currency) == ("ID1020012345678", "UMI", "5812", "360")
    assert (payload.is_qris, payload.is_dynamic, payload.amount, payload.tip) == (True, False, None, None)
    assert payload.accounts[0].fields == {"01": "936000140000000001", "02": "000000001"}
    assert payload.additional == {"terminal_label": "A01"}
    document = payload.to_json()
    assert document["accounts"][1]["guid"] == "ID.CO.QRIS.WWW"
    assert document["is_qris"] is True


def test_a_payload_of_another_network_is_not_called_qris() -> None:
    payload = parse(SHOPEE)
    assert (payload.merchant_name, payload.amount, payload.is_dynamic) == (
        "PT. SHOPPEE INDONESIA",
        Decimal(144000),
        True,
    )
    assert classify(SHOPEE) == "emvco"
    assert not is_qris(SHOPEE)
    assert classify("https://link.example/qr?id=ID.CO.QRIS.WWW") == "other"
    assert classify(sealed(body_of(t51=None))) == "emvco"
    older = sealed(body_of(t51="0017ID.OR.QRNPG.WWW"))
    assert len("ID.OR.QRNPG.WWW") == 15
    assert classify(older) == "other", "a wrong inner length is damage"
    assert classify(sealed(body_of(t51="0015ID.OR.QRNPG.WWW"))) == "emvco"


def test_a_static_payload_becomes_dynamic_for_one_amount() -> None:
    dynamic = parse(to_dynamic(STATIC, 25000))
    assert (dynamic.is_dynamic, dynamic.amount) == (True, Decimal(25000))
    assert dynamic.merchant_name == "WARUNG BU TINI"
    assert parse(to_dynamic(STATIC, Decimal("1E+3"))).amount == 1000
    for wrong in (0, "-5", "1,5", "", "١٢", Decimal("NaN")):
        with pytest.raises(QrisError):
            to_dynamic(STATIC, wrong)
    with pytest.raises(QrisError):
        to_dynamic(STATIC[:-1], 100)


@pytest.mark.parametrize(
    ("changes", "tag", "word"),
    [
        ({"t00": "02"}, "00", "payload format"),
        ({"t01": "13"}, "01", "static"),
        ({"t26": "0117nothing in front"}, "26.00", "missing"),
        ({"t26": "0003abc0199ends early"}, "26.01", "99"),
        ({"t26": "0003abc0002xy"}, "26.00", "more than once"),
        ({"t51": "0014ID.CO.QRIS.WWW0303UMI"}, "51.02", "missing"),
        ({"t51": "0014ID.CO.QRIS.WWW0215ID10200123456X8"}, "51.02", "NMID"),
        ({"t52": "581"}, "52", "4 digits"),
        ({"t52": None}, "52", "missing"),
        ({"t53": "٣٦٠"}, "53", "currency"),
        ({"t53": "840"}, "53", "rupiah"),
        ({"t54": "12,50"}, "54", "amount"),
        ({"t54": "0.00"}, "54", "zero"),
        ({"t54": "1.2.3"}, "54", "amount"),
        ({"t54": "12345678901234"}, "54", "13"),
        ({"t55": "04"}, "55", "tip"),
        ({"t55": "02"}, "56", "missing"),
        ({"t55": "03", "t56": "500"}, "57", "missing"),
        ({"t55": "01", "t57": "5"}, "57", "does not announce"),
        ({"t55": "03", "t57": "100"}, "57", "percentage"),
        ({"t58": "id"}, "58", "country"),
        ({"t58": "SG"}, "58", "Indonesia"),
        ({"t59": None}, "59", "missing"),
        ({"t59": "A" * 26}, "59", "25"),
        ({"t59": "TOKO\x00"}, "59", "printable"),
        ({"t60": "JAKARTA SELATAN KOTA"}, "60", "15"),
        ({"t61": "12345678901"}, "61", "10"),
        ({"t62": "0726" + "x" * 26}, "62.07", "25"),
        ({"t62": "0904AMEA"}, "62.09", "A (address)"),
        ({"t62": "5004001x"}, "62.50", "two digits"),
        ({"t62": "500701031"}, "62.50", "7 characters"),
        ({"t64": "0002ID"}, "64.01", "missing"),
        ({"t80": "0102ab"}, "80.00", "missing"),
    ],
)
def test_every_violation_is_named_with_its_tag_and_place(changes: dict[str, str | None], tag: str, word: str) -> None:
    text = sealed(body_of(**changes))
    found = [problem for problem in problems_of(text) if problem.tag == tag]
    assert found, problems_of(text)
    assert any(word in problem.message for problem in found), found
    for problem in found:
        if "missing" in problem.message or "two digits" in problem.message:
            assert 0 <= problem.offset <= len(text)
        else:
            assert text[problem.offset : problem.offset + 2] == tag.rpartition(".")[2]


def test_a_missing_category_belongs_behind_the_account_of_the_switch() -> None:
    text = sealed(body_of(t52=None))
    (problem,) = (problem for problem in problems_of(text) if problem.tag == "52")
    assert text[problem.offset : problem.offset + 2] == "53"


def test_pairs_that_two_digits_of_length_cannot_describe_are_not_joined() -> None:
    assert join([("00", "01"), ("59", "A" * 99)]) == "000201" + "5999" + "A" * 99
    pairs = [("00", "01"), ("1", "x"), ("xx", "y"), ("59", ""), ("60", "A" * 100)]
    with pytest.raises(QrisError) as caught:
        join(pairs)
    assert [(problem.tag, problem.offset) for problem in caught.value.problems] == [
        ("1", 6), ("xx", 10), ("59", 15), ("60", 19)
    ]  # fmt: skip


def test_all_problems_are_reported_at_once_in_order() -> None:
    text = sealed(body_of(t00="02", t52="x", t59="A" * 30, t60=None))
    problems = problems_of(text)
    assert {"00", "52", "59", "60"} <= {problem.tag for problem in problems}
    assert [problem.offset for problem in problems] == sorted(problem.offset for problem in problems)
    assert "tag 52 at" in str(QrisError(problems))


def test_order_of_the_first_and_last_field_and_missing_accounts() -> None:
    assert any(problem.tag == "01" for problem in problems_of(sealed("010211" + body_of(t01=None))))
    late = sealed(body_of()) + "6503abc"
    assert any(problem.tag == "63" and "last" in problem.message for problem in problems_of(late))
    assert any("no merchant account" in problem.message for problem in problems_of(sealed(body_of(t26=None, t51=None))))
    assert problems_of("")
    assert len(problems_of("0" * 100_000)) == 1


def test_languages_and_unreserved_templates_are_allowed() -> None:
    text = build(
        merchant_name="TOKO",
        city="JAKARTA",
        mcc="5411",
        nmid="ID1020012345678",
        language={"language": "ZH", "merchant_name": "商店"},
        others={"80": "0003abc0102xy", "65": "reserved"},
    )
    payload = parse(text)
    assert payload.language == {"language": "ZH", "merchant_name": "商店"}
    assert payload.others == {"65": "reserved", "80": "0003abc0102xy"}


PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " é\u0663\ud800"


@pytest.mark.parametrize(
    "static", ["059AMa~é\ud800", pytest.param(PRINTABLE, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_no_single_substitution_passes(static: str) -> None:
    for text, characters in ((STATIC, static), (SHOPEE, "0159AFZaf "), (to_dynamic(STATIC, 12500), "0369BEYx.")):
        for place, original in enumerate(text):
            for character in characters:
                if character != original:
                    assert classify(text[:place] + character + text[place + 1 :]) == "other", (place, character)


def test_no_deletion_insertion_or_exchange_of_neighbours_passes() -> None:
    for place in range(len(STATIC)):
        assert classify(STATIC[:place] + STATIC[place + 1 :]) == "other"
        for character in "0159AZ ":
            assert classify(STATIC[:place] + character + STATIC[place:]) == "other"
        swapped = STATIC[:place] + STATIC[place : place + 2][::-1] + STATIC[place + 2 :]
        assert swapped == STATIC or classify(swapped) == "other"


ans = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1)
numerals = st.text("0123456789", min_size=1)
amounts = st.decimals("0.01", "99999999.99", places=2)
tips = st.one_of(
    st.none(),
    st.just(Tip("prompt")),
    st.builds(Tip, st.just("fixed"), st.decimals("0.01", "99999.99", places=2)),
    st.builds(Tip, st.just("percentage"), st.decimals("0.01", "99.99", places=2)),
)


@st.composite
def values(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of ``build`` that are valid."""
    tags = draw(st.lists(st.integers(26, 50).map(str), unique=True, max_size=2))
    guid, inner = ans.map(lambda text: text[:20]), ans.map(lambda text: text[:20])
    accounts = [Account(tag, guid=draw(guid), fields={"01": draw(inner)}) for tag in sorted(tags)]
    schemes = draw(st.lists(st.sampled_from(["02", "04", "15"]), unique=True, max_size=1))
    return {
        "merchant_name": draw(ans)[:25],
        "city": draw(ans)[:15],
        "mcc": draw(st.from_regex(r"[0-9]{4}", fullmatch=True)),
        "accounts": [Account(tag, value=draw(ans)[:40]) for tag in schemes] + accounts,
        "nmid": "ID" + draw(st.from_regex(r"[0-9]{13}", fullmatch=True)),
        "criteria": draw(st.sampled_from([None, "UMI", "UKE"])),
        "postal_code": draw(st.none() | st.from_regex(r"[0-9]{5}", fullmatch=True)),
        "amount": draw(st.none() | amounts),
        "tip": draw(tips),
        "additional": draw(st.dictionaries(st.sampled_from(["bill_number", "terminal_label", "purpose"]), inner)),
    }


@given(values())
@settings(max_examples=150, deadline=None)
def test_built_payloads_parse_back(given_values: dict[str, object]) -> None:
    payload = parse(build(**given_values))  # type: ignore[arg-type]
    for name in ("merchant_name", "city", "mcc", "nmid", "criteria", "postal_code", "amount", "tip", "additional"):
        assert getattr(payload, name) == given_values[name]
    accounts = list(payload.accounts)
    assert accounts[:-1] == given_values["accounts"]
    assert accounts[-1].tag == "51"
    assert payload.is_dynamic == (given_values["amount"] is not None)


@given(
    st.sampled_from(["merchant_name", "city", "mcc", "nmid", "postal_code", "currency", "country", "amount"]),
    st.text(max_size=120),
)
@settings(max_examples=200, deadline=None)
def test_build_refuses_what_parse_would_refuse(name: str, value: str) -> None:
    arguments = {"merchant_name": "TOKO", "city": "JAKARTA", "mcc": "5411", "nmid": "ID1020012345678"} | {name: value}
    error = refusal(build, **arguments)
    if error is None:
        written = getattr(parse(build(**arguments)), name)  # type: ignore[arg-type]
        assert written == (Decimal(value) if name == "amount" else value)
    else:
        assert error.problems


anything = st.text(st.characters(exclude_categories=()), max_size=300)  # surrogates and control characters too
tlv = st.lists(st.tuples(st.from_regex(r"[0-9]{2}", fullmatch=True), anything), max_size=8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"accounts": [Account("26", guid="A"), Account("26", guid="B")]}, "tag 26 at .*: appears more than once"),
        ({"accounts": [Account("26", guid="A", fields={"00": "B"})]}, r"tag 26\.00 at .*: appears more than once"),
        ({"accounts": [Account("52", value="5812")]}, "tag 52 at 0: stands where 02 to 51 belong"),
        ({"accounts": [Account("01", value="12")]}, "tag 01 at 0: stands where 02 to 51 belong"),
        ({"others": {"54": "1"}}, "tag 54 at 0: stands where 65 to 99 belong"),
        ({"others": {"59": "OTHER"}}, "tag 59 at 0: stands where 65 to 99 belong"),
        ({"tip": Tip("most")}, "tag 55 at 0: has no tip of kind 'most'"),
    ],
)  # fmt: skip
def test_values_that_would_hide_one_another_are_refused(changes: dict[str, object], said: str) -> None:
    """One of two accounts of a tag was dropped: the code paid the other one alone."""
    values: dict[str, object] = {
        "merchant_name": "WARUNG",
        "city": "YOGYAKARTA",
        "mcc": "5812",
        "nmid": "ID1020012345678",
    }
    with pytest.raises(QrisError, match=said):
        build(**values | changes)  # type: ignore[arg-type]


@given(anything | tlv.map(lambda pairs: "".join(f"{tag}{len(v):02d}{v}" for tag, v in pairs)))
@settings(max_examples=300, deadline=None)
def test_only_qris_errors_on_any_text(text: str) -> None:
    for candidate in (text, sealed(text), sealed("000201" + text), sealed(body_of() + text)):
        error = refusal(parse, candidate)
        assert error is None or all(0 <= p.offset <= max(len(candidate), 512) for p in error.problems)


@given(st.sampled_from(["26", "51", "62", "64", "80"]), anything.filter(bool))
@settings(max_examples=300, deadline=None)
def test_only_qris_errors_on_damaged_templates(tag: str, inner: str) -> None:
    text = sealed(body_of(**{f"t{tag}": inner[:99]}))
    error = refusal(parse, text)
    assert error is None or error.problems
    assert error is not None or parse(text).merchant_name == "WARUNG BU TINI"


def test_an_empty_text_is_wrong_from_its_start() -> None:
    first = problems_of("")[0]
    assert (first.tag, first.offset) == ("00", 0)
    assert "empty" in first.message


@pytest.mark.parametrize(
    ("amount", "tip", "said"),
    [
        (None, None, (None, None)),
        (Decimal("1500.50"), Tip("prompt"), ("1500.50", {"kind": "prompt", "value": None})),
        (None, Tip("percentage", Decimal("5")), (None, {"kind": "percentage", "value": "5"})),
    ],
)
def test_amounts_are_text_in_json_and_absent_ones_are_null(
    amount: Decimal | None, tip: Tip | None, said: object
) -> None:
    account = Account("26", guid="ID.CO.EXAMPLE.WWW", fields={"01": "936000140000000001"})
    text = build(
        merchant_name="W", city="Y", postal_code="55111", mcc="5812", accounts=[account], amount=amount, tip=tip
    )
    document = json.loads(json.dumps(parse(text).to_json()))
    assert (document["amount"], document["tip"]) == said


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        (STATIC[:-4] + STATIC[-4:].lower(), "upper-case"),
        (sealed(body_of(t59="CAFÉ BALI")), "merchant name"),
        (sealed(body_of(t60="ČAKUNG")), "merchant city"),
        (f" {STATIC}\n", "blanks"),
    ],
    ids=["check value in lower case", "accented name", "accented city", "blanks"],
)
def test_printing_errors_are_noted_and_the_payload_parsed(text: str, noted: str) -> None:
    kind, payload, problems = classify_text(text)
    assert (kind, payload is not None) == ("qris", True)
    assert len(problems) == 1
    assert noted in problems[0]
    assert payload is not None
    assert payload.nmid == "ID1020012345678"
    with pytest.raises(QrisError):
        parse(text)  # what is written must be right


@pytest.mark.parametrize(
    "text",
    [
        STATIC[:-4] + "0000",
        sealed(body_of(t59="CAFÉ\x00")),
        sealed(body_of(t59="CAFÉ BALI", t53="36O")),
        sealed(body_of(t59="É" * 26)),
        STATIC[:-4] + "zzzz",
        sealed(body_of(t59="WARUNG\u202eILAB")),
        sealed(body_of(t59="WAR\u200bUNG")),
        sealed(body_of().replace("ID.CO.", "ID.C\u041e.", 1)),
    ],
)
def test_doubt_is_never_tolerated(text: str) -> None:
    kind, payload, problems = classify_text(text)
    assert (kind, payload) == ("other", None)
    assert problems
