"""CRC-16/CCITT-FALSE, the check value that ends every EMVCo merchant-presented payload."""

from __future__ import annotations


def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        value = byte << 8
        for _ in range(8):
            value = ((value << 1) ^ 0x1021 if value & 0x8000 else value << 1) & 0xFFFF
        rows.append(value)
    return tuple(rows)


_TABLE = _table()


def crc16(data: bytes) -> int:
    """CRC of ``data``: polynomial 0x1021, start 0xFFFF, no reflection, no final xor (EMVCo, ISO 13239)."""
    value = 0xFFFF
    for byte in data:
        value = ((value << 8) & 0xFFFF) ^ _TABLE[(value >> 8) ^ byte]
    return value


def crc_of_text(text: str) -> str:
    """The four upper-case hexadecimal digits that follow ``text``, which ends with the tag and length ``6304``."""
    return f"{crc16(text.encode('utf-8', 'surrogatepass')):04X}"
