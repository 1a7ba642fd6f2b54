"""Extract final answers from texts, and compare them as the authors of each set do.

`suite` extracts them from generated texts, `questions` from the authors' solutions. A function is one set's rule: another rule gives scores
that cannot be compared with published ones.
"""

from __future__ import annotations

import re

_LETTER = (
    re.compile(r"answer is \(?([A-J])\)?"),
    re.compile(r".*[aA]nswer:\s*([A-J])"),
    re.compile(r"\b([A-J])\b(?!.*\b[A-J]\b)", re.DOTALL),
)


def letter(text: str, choices: int) -> str | None:
    """Extract the letter of a choice by MMLU-Pro's three rules; None if none applies.

    Wang et al. 2024. They are, in order: "answer is (X)", "answer: X", and the last single letter of the text. If
    the authors would guess then, the question counts as not answered, as it does for a letter beyond the first
    ``choices``.
    """
    for pattern in _LETTER:
        if (found := pattern.search(text)) is not None:
            return found.group(1) if ord(found.group(1)) - ord("A") < choices else None
    return None


def after_answer_is(text: str) -> str | None:
    """Extract the text after "answer is" of a BBH answer, without its full stop.

    Suzgun et al. 2022. Text without these words is an answer by itself, up to the end of its first line. None for an
    empty one.
    """
    _, found, rest = text.partition("answer is ")
    lines = (rest if found else text).strip().splitlines()
    answer = lines[0].strip().removesuffix(".") if lines else ""
    return answer or None


def after_hashes(text: str) -> str | None:
    """Extract the number after "####" of a GSM8K answer, without commas; None without one.

    Cobbe et al. 2021.
    """
    found = re.search(r"#### (\-?[0-9\.\,]+)", text)
    return None if found is None else found.group(1).replace(",", "")


def boxed(text: str) -> str | None:
    r"""Extract the content of the last ``\boxed{...}`` (or ``\fbox``) of a MATH answer.

    Hendrycks et al. 2021. None if there is no box. ``\boxed 5`` holds what follows up to a dollar sign; a box that is
    never closed holds nothing.
    """
    start = text.rfind(r"\boxed")
    if start < 0:
        start = text.rfind(r"\fbox")
        if start < 0:
            return None
    rest = text[start:].removeprefix(r"\boxed").removeprefix(r"\fbox")
    if rest.startswith(" "):
        return rest[1:].partition("$")[0]
    depth = 0
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0 and character == "}":
            return rest[1:place] if rest.startswith("{") else None
    return None


def same_mathematics(one: str, other: str) -> bool:
    """Return True if two LaTeX answers are equal after MATH's normalisation.

    It unifies spaces, units, fractions and roots.
    """
    return _normalised(one) == _normalised(other)


_DROPPED = ("\n", r"\!", r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$")


def _normalised(text: str) -> str:
    for spelling in _DROPPED[:2]:
        text = text.replace(spelling, "")
    text = text.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for spelling in _DROPPED[2:]:
        text = text.replace(spelling, "")
    text = text.partition(r"\text{ ")[0]  # a unit behind the number
    text = text.replace(r"\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:  # "k = 3"
        text = value
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _braced_fractions(text)
    text = r"\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"\A(-?(?:0|[1-9]\d*))/(-?(?:0|[1-9]\d*))\Z", r"\\frac{\1}{\2}", text)


def _braced_fractions(text: str) -> str:
    r"""Write \frac12 and \frac1{72} with braces.

    All is left as it is if one has no two arguments.
    """
    head, *parts = text.split(r"\frac")
    if any(len(part) < 2 and not part.startswith("{") for part in parts):
        return text
    for part in parts:
        if not part.startswith("{"):
            bottom = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            part = f"{{{part[0]}}}{bottom}"
        head += rf"\frac{part}"
    return head
