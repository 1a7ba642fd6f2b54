"""Generate the contents of codes: payloads of invented merchants, links, other texts.

`posters`, `prints`, `merchants` and `fraud` draw contents of codes here, `distractors` and `drawing` words; most of ``scenes`` uses `choose`. The
same generator must give the same content: another order of draws changes every generated data set.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, TypeVar

import numpy as np

from arclight.vision.qris.payload.codec import Account, build

T = TypeVar("T")

_SHOPS = (
    "TOKO", "WARUNG", "KEDAI", "DEPOT", "APOTEK", "BAKSO", "MIE AYAM", "KOPI", "LAUNDRY", "SALON", "BENGKEL",
    "SATE", "NASI GORENG", "ROTI", "BUTIK", "PULSA", "KIOS", "RM PADANG", "ES TEH", "FOTOKOPI", "MASJID", "PARKIR",
)  # fmt: skip
_NAMES = (
    "MAJU", "JAYA", "SEJAHTERA", "BAROKAH", "SARI", "INDAH", "MAKMUR", "BU TINI", "PAK EKO", "MBAK SRI", "BERKAH",
    "ABADI", "RASA", "SENTOSA", "MELATI", "MAWAR", "BINTANG", "NUSANTARA", "CAHAYA", "PELANGI", "KENANGA", "LESTARI",
)  # fmt: skip
_CITIES = (
    ("JAKARTA", "10110"), ("BANDUNG", "40111"), ("SURABAYA", "60119"), ("MEDAN", "20111"), ("SEMARANG", "50131"),
    ("YOGYAKARTA", "55111"), ("DENPASAR", "80111"), ("MAKASSAR", "90111"), ("MALANG", "65111"), ("PALEMBANG", "30111"),
)  # fmt: skip
_CATEGORIES = ("5411", "5812", "5814", "5499", "5912", "7230", "7538", "8661", "5999", "7523")
_ACQUIRERS = ("ID.CO.EXAMPLEBANK.WWW", "COM.CONTOHPAY.WWW", "ID.CONTOHDOMPET.WWW", "ID.CO.BANKCONTOH.WWW")
WORDS = (
    "harga", "toko", "pasar", "kopi", "susu", "gula", "teh", "roti", "nasi", "ayam", "sapi", "ikan", "buah",
    "sayur", "jalan", "rumah", "meja", "kursi", "pintu", "scan", "here", "menu", "open", "free", "the", "and",
    "your", "with", "from", "price", "sale", "new", "best", "quality", "product", "made", "in", "for", "more",
    "information", "please", "keep", "dry", "store", "cool", "place", "tablets", "mg", "ml", "batch", "exp",
    "date", "lot", "net", "weight", "ingredients", "water", "salt", "sugar", "natural",
)  # fmt: skip


@dataclass(frozen=True)
class Content:
    """Text of one code, its kind, and what a poster prints beside it."""

    text: str
    kind: Literal["qris", "other"]
    merchant: str | None = None
    nmid: str | None = None


def choose(rng: np.random.Generator, options: Sequence[T]) -> T:
    """Return one of ``options``, each as likely."""
    return options[int(rng.integers(len(options)))]


def digits(rng: np.random.Generator, count: int) -> str:
    return "".join(map(str, rng.integers(0, 10, count)))


def words(rng: np.random.Generator, count: int) -> str:
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), count))


def qris_content(
    rng: np.random.Generator, *, merchant: str | None = None, city: str | None = None, dynamic_share: float = 0.3
) -> Content:
    """Return a valid QRIS payload of an invented merchant, static or dynamic.

    ``merchant``: name of an existing one, of which another account is invented.
    """
    name = f"{choose(rng, _SHOPS)} {choose(rng, _NAMES)}"
    name = f"{name} {digits(rng, int(rng.integers(1, 4)))}" if rng.random() < 0.3 else name
    name = merchant or name
    drawn_city, postal_code = choose(rng, _CITIES)
    nmid = "ID" + digits(rng, 13)
    acquirer = {"01": "9360" + digits(rng, 14), "02": digits(rng, int(rng.integers(9, 16))), "03": "UMI"}
    text = build(
        merchant_name=name[:25],
        city=city or drawn_city,
        postal_code=postal_code,
        mcc=choose(rng, _CATEGORIES),
        accounts=[Account("26", guid=choose(rng, _ACQUIRERS), fields=acquirer)],
        nmid=nmid,
        criteria="UMI",
        amount=Decimal(int(rng.integers(2, 400))) * 500 if rng.random() < dynamic_share else None,
        additional={"terminal_label": "A01"},
    )
    return Content(text, "qris", name[:25], nmid)


def other_content(rng: np.random.Generator) -> Content:
    """Draw other contents of QR codes: links, contacts, networks, serial numbers, plain text."""
    token = "".join(string.ascii_letters[i] for i in rng.integers(0, 52, int(rng.integers(3, 60))))
    kind = int(rng.integers(7))
    if kind <= 1:
        text = f"https://{choose(rng, WORDS)}.example/{token}"
    elif kind == 2:
        name, phone = words(rng, 2), digits(rng, 10)
        text = f"BEGIN:VCARD\nVERSION:3.0\nFN:{name}\nTEL:+62{phone}\nEMAIL:{token[:12]}@example.org\nEND:VCARD"
    elif kind == 3:
        text = f"WIFI:T:WPA;S:{choose(rng, WORDS)};P:{token[:16]};;"
    elif kind == 4:
        text = f"0{digits(rng, 13)}21{digits(rng, 10)}10{token[:8].upper()}"
    elif kind == 5:
        text = words(rng, int(rng.integers(2, 40)))
    else:
        text = digits(rng, int(rng.integers(6, 40)))
    return Content(text, "other")


def any_content(rng: np.random.Generator, qris_share: float = 0.4) -> Content:
    return qris_content(rng) if rng.random() < qris_share else other_content(rng)
