"""Compute windows, best spans and scores of extracted answers, as SQuAD's script does.

`rows` cuts contexts by `windows`; `head_module` chooses answers by `best_span` and `answer_of` and scores them. Scores must be those of SQuAD's
own script.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NO_ANSWER = 0
"""Place in a window that stands for "not answered here": its first token."""


class Window(NamedTuple):
    """A part of a context behind its question, as tokens."""

    row: int
    tokens: list[int]
    first: int
    """Place of the first token of the context."""
    offsets: list[tuple[int, int]]
    """Bytes of the context that each of its tokens stands for."""
    start: int
    end: int
    """Places of the answer's first and last token; both `NO_ANSWER` if it is not wholly inside."""


def windows(
    row: int, prefix: Sequence[int], context: Sequence[int], token_bytes: Sequence[int], answer: tuple[int, int] | None,
    length: int, stride: int,
) -> list[Window]:  # fmt: skip
    """Split a context into windows of ``length`` tokens with ``prefix``, at ``stride``.

    A window has at most ``length`` tokens, and starts ``stride`` tokens after the one before.
    token_bytes: of each token of the context. answer: its bytes in the context, from and to; None for no answer. Each token is in a
    window, and none but the last window is shorter than it could be. Raises ValueError if the prefix leaves no room.
    """
    room = length - len(prefix)
    if room < 1:
        raise ValueError(f"the question has {len(prefix)} tokens, max_length = {length} leaves none for its context")
    ends = [0]
    for size in token_bytes:
        ends.append(ends[-1] + size)
    step, found, begin = min(stride, room), [], 0
    while True:
        stop = min(begin + room, len(context))
        offsets = [(ends[place], ends[place + 1]) for place in range(begin, stop)]
        inside = [] if answer is None else [
            place for place, (a, b) in enumerate(offsets) if a < answer[1] and b > answer[0]
        ]  # fmt: skip
        whole = (
            bool(inside)
            and answer is not None
            and offsets[inside[0]][0] <= answer[0]
            and offsets[inside[-1]][1] >= answer[1]
        )
        start, end = (len(prefix) + inside[0], len(prefix) + inside[-1]) if whole else (NO_ANSWER, NO_ANSWER)
        found.append(Window(row, [*prefix, *context[begin:stop]], len(prefix), offsets, start, end))
        if stop == len(context):
            return found
        begin += step


@dataclass(frozen=True)
class Span:
    """Best answer of one window."""

    row: int
    score: float
    """Logit of its start plus that of its end."""
    start: int
    stop: int
    """First byte of the answer in the context, and the byte after its last; both 0 if the window has no token of the context."""
    null: float
    """The same sum at `NO_ANSWER`, for no answer."""


def best_span(window: Window, start_T: Tensor, end_T: Tensor, max_answer: int) -> Span:
    """Return the span of at most ``max_answer`` tokens with the greatest sum of logits.

    A span does not start behind its end.
    """
    null = float(start_T[NO_ANSWER] + end_T[NO_ANSWER])
    count = len(window.offsets)
    if not count:
        return Span(window.row, -torch.inf, 0, 0, null)
    places = slice(window.first, window.first + count)
    sums_SE = start_T[places].double()[:, None] + end_T[places].double()[None]
    order = torch.arange(count, device=sums_SE.device)
    length_SE = order[None] - order[:, None]
    sums_SE = sums_SE.masked_fill((length_SE < 0) | (length_SE >= max_answer), -torch.inf)
    best = int(sums_SE.argmax())
    begin, end = divmod(best, count)
    return Span(window.row, float(sums_SE[begin, end]), window.offsets[begin][0], window.offsets[end][1], null)


def answer_of(spans: Sequence[Span], context: str, may_be_none: bool) -> str:
    """Choose the answer among the windows of a context.

    It is empty if ``may_be_none`` and no answer has more in every window.
    """
    best = max(spans, key=lambda span: span.score)
    if may_be_none and best.score < min(span.null for span in spans):
        return ""
    return context.encode()[best.start : best.stop].decode(errors="ignore").strip()


def normalised(text: str) -> str:
    """Lower a text, and drop punctuation, articles and repeated spaces."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(predicted: str, truths: Sequence[str]) -> float:
    """Return 1 if an answer equals a true one after normalisation, else 0.

    Without true ones the empty answer is right.
    """
    return float(any(normalised(predicted) == normalised(truth) for truth in _given(truths)))


def f1(predicted: str, truths: Sequence[str]) -> float:
    """Return the best F1 over the true answers, of bags of words after normalisation."""
    return max(_f1(normalised(predicted).split(), normalised(truth).split()) for truth in _given(truths))


def _given(truths: Sequence[str]) -> Sequence[str]:
    """Leave out answers that normalisation leaves empty, as SQuAD 2.0 does."""
    return [truth for truth in truths if normalised(truth)] or [""]


def _f1(predicted: list[str], truth: list[str]) -> float:
    if not predicted or not truth:
        return float(predicted == truth)
    common = sum((Counter(predicted) & Counter(truth)).values())
    return 2 * common / (len(predicted) + len(truth))
