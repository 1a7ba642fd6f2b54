"""Generate several texts at once by one language program (continuous batching).

`models` makes one `Scheduler` for each language model; `text` submits a `Generation` for each text and cancels it when the client leaves.
After `Scheduler.start`, one thread calls the program. The KV caches of texts in progress are batched, padded at the left as
`arclight.text.generate` pads prompts; a text that would need much padding gets a batch of its own. A new prompt is read in chunks (chunked
prefill) between decoding steps of the others, and a beginning that it shares with an earlier prompt is not read again (prefix sharing).

A text must not depend on the others in its batch, nor on earlier prompts: tests compare it with `arclight.text.generate`. So texts of programs
that round all tokens of a call by one range (`Program.rounds_together`) are computed one by one, and share no prefixes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from arclight.deploy import Program
from arclight.serve.admission import Refusal, ServiceTimes, busy
from arclight.text.generation import AnswerText, GenerationSettings, check_lengths, choose
from arclight.text.language_program import ProgramRun, tokenizer_of

log = logging.getLogger("arclight.serve")

CHUNK = 256
"""Most tokens of a prompt that are read between two decoding steps."""
MIN_SHARED = 32
"""Tokens of a common prefix below which reading them again costs less than looking for them."""
MAX_PREFIXES = 64
"""Most prompts held for their prefixes, since every new prompt is compared with each."""
MAX_PADDING = 2048
"""Most tokens of padding in a batch, over all texts: more would cost more, to copy and attend over, than another call, which reads the weights
again."""
Array = np.ndarray[Any, Any]


class Piece(NamedTuple):
    """Text added by a step.

    ``tokens`` counts all tokens of the text so far; ``finish`` is why it has ended, None before.
    """

    text: str
    tokens: int
    finish: Literal["stop", "length", "error"] | None = None


class Generation:
    """One text to generate; ``on_piece`` gets its pieces in the scheduler's thread."""

    def __init__(
        self, prompt: list[int], new: int, settings: GenerationSettings, on_piece: Callable[[Piece], None]
    ) -> None:
        self.prompt, self.new, self.settings, self.on_piece = prompt, new, settings, on_piece
        self.is_cancelled = False
        self.last = 0
        """The newest token, which the program has not read yet."""
        self.tokens = 0
        self.began = 0.0
        self._random = torch.Generator()
        self._random.seed() if settings.seed is None else self._random.manual_seed(settings.seed)

    def cancel(self) -> None:
        """Stop generating: the client has left."""
        self.is_cancelled = True

    def choose(self, logits_V: Array) -> int:
        """Choose the next token as `generate` does."""
        settings, chance = self.settings, torch.rand(1, generator=self._random)
        logits = torch.from_numpy(np.ascontiguousarray(logits_V[None]))
        return int(choose(logits, settings.temperature, settings.top_k, settings.top_p, chance))


class Scheduler:
    """Schedule one program's generations: at most ``streams`` run and ``queue`` wait.

    prefix_cache_bytes: most bytes of the KV caches of past prompts, held for prompts with the same beginning.
    """

    def __init__(self, program: Program, *, streams: int, queue: int, prefix_cache_bytes: int) -> None:
        self.program = program
        self.tokenizer = tokenizer_of(program)
        self.run = ProgramRun(program)
        """Sizes of the program's model."""
        self.streams, self.queue = streams, queue
        self.times = ServiceTimes()
        self._waiting: deque[Generation] = deque()
        self._changed = threading.Condition()
        self._held: set[Generation] = set()
        """Generations waiting or in progress."""
        self._is_closed = False
        self._starts_waiting = False
        self._batches: list[_Batch] = []
        self._is_apart = program.rounds_together
        self._prefixes = _PrefixCache(0 if self._is_apart else prefix_cache_bytes)
        self._answers: dict[Generation, AnswerText] = {}
        self._thread = threading.Thread(target=self._work, name="arclight-text", daemon=True)

    def start(self) -> None:
        """Generate a token as warm-up, and accept texts from now on."""
        first_logits(self.program)
        self._thread.start()

    def close(self, *, waiting: bool = False) -> None:
        """Finish the texts in progress, and end the thread.

        Texts that wait fail; with ``waiting`` they are finished, too.
        """
        with self._changed:
            self._is_closed = True
            self._starts_waiting = waiting
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def check(self, prompts: list[list[int]], new: int, field: str) -> None:
        """Raise ValueError for prompts that the model cannot continue by ``new`` tokens.

        ``field``: the request's field that gives their number.
        """
        check_lengths(prompts, self.run, new, field)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue texts.

        Raises Refusal 429 if the queue is full, 503 if closed, 400 for more texts than ever fit.
        """
        if len(generations) > self.streams + self.queue:
            raise Refusal(400, f"The request has {len(generations)} prompts; send at most {self.streams + self.queue}.")
        with self._changed:
            if self._is_closed:
                raise busy("The server stops", 1, status=503)
            if len(self._held) + len(generations) > self.streams + self.queue:
                raise busy("All places for texts are taken and the queue is full", self.retry_after_s())
            self._held.update(generations)
            self._waiting.extend(generations)
            self._changed.notify()

    def retry_after_s(self) -> int:
        """Estimate the seconds, at least one, until the present texts have ended."""
        return max(1, math.ceil(self.times.of("text") * len(self._held) / self.streams))

    @property
    def _in_progress(self) -> list[Generation]:
        """Texts that are in a batch."""
        return [generation for batch in self._batches for generation in batch.rows]

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        prefill: _Prefill | None = None
        while True:
            with self._changed:
                while not (self._waiting or prefill or self._batches or self._is_closed):
                    self._changed.wait()
                begins = bool(self._waiting) and (self._starts_waiting or not self._is_closed)
                if self._is_closed and not (prefill or self._batches or begins):
                    while self._waiting:
                        self._leave(self._waiting.popleft(), "error")
                    return
                self._drop_cancelled()
                if prefill is None and begins and self._waiting and len(self._in_progress) < self.streams:
                    prefill = _Prefill(self._waiting.popleft(), _no_tokens(self.program))
            try:
                if prefill is not None and prefill.generation.is_cancelled:
                    self._leave(prefill.generation, None)
                    prefill = None
                elif prefill is not None and self._prefill(prefill):
                    prefill = None
                self._step()
            except Exception:  # of any kind: the thread must live to answer the next texts
                log.exception("%s failed on a step; the texts in progress end", self.program.path.name)
                for generation in [*self._in_progress, *([prefill.generation] if prefill else [])]:
                    self._leave(generation, "error")
                prefill, self._batches = None, []

    def _drop_cancelled(self) -> None:
        for generation in [one for one in self._waiting if one.is_cancelled]:
            self._waiting.remove(generation)
            self._held.discard(generation)
        for batch in self._batches:
            kept = [not one.is_cancelled for one in batch.rows]  # evaluated once, since clients leave at any moment
            for generation, stays in zip(batch.rows, kept, strict=True):
                if not stays:
                    self._leave(generation, None)
            batch.keep(kept)
        self._drop_empty()

    def _prefill(self, prefill: _Prefill) -> bool:
        """Prefill a chunk of a prompt; return True once the text has joined the batch or ended."""
        if not prefill.read:
            prefill.past = self._prefixes.longest(prefill.generation.prompt) or prefill.past
        logits = prefill.step(self.program)
        if logits is None:
            return False
        generation = prefill.generation
        self._prefixes.add(generation.prompt, prefill.past)
        generation.began = time.monotonic()
        self._answers[generation] = AnswerText(self.tokenizer, generation.settings.stop, generation.prompt)
        if self._add(generation, logits[0]):
            self._join(generation, prefill.past)
        return True

    def _join(self, generation: Generation, past: list[Array]) -> None:
        """Add a text to the batch in which it needs least padding.

        It gets a batch of its own if that is more than `MAX_PADDING`, or if texts of a batch would change each other.
        """
        length, open_to_all = past[0].shape[2], [] if self._is_apart else self._batches
        best = min(open_to_all, key=lambda batch: batch.padding_with(length), default=None)
        if best is None or best.padding_with(length) > MAX_PADDING:
            best = _Batch(self.program)
            self._batches.append(best)
        best.join(generation, past)

    def _step(self) -> None:
        for batch in self._batches:
            logits_BV = batch.step()
            batch.keep([self._add(one, logits) for one, logits in zip(batch.rows, logits_BV, strict=True)])
        self._drop_empty()

    def _drop_empty(self) -> None:
        self._batches = [batch for batch in self._batches if batch.rows]

    def _add(self, generation: Generation, logits_V: Array) -> bool:
        """Add a token to a text; return False if it was the last."""
        logits_V = logits_V[: self.tokenizer.vocab_size]
        if never := [token for token in self.run.placeholders if token < len(logits_V)]:
            logits_V = logits_V.copy()
            logits_V[never] = -np.inf
        try:
            token = generation.choose(logits_V)
        except FloatingPointError:
            log.exception("%s returned logits that are NaN or infinite", self.program.path.name)
            self._leave(generation, "error")
            return False
        answer = self._answers[generation]
        generation.tokens += 1
        generation.last = token
        text = answer.end() if token == self.tokenizer.eos else answer.push(token)
        finish: Literal["stop", "length"] | None = "stop" if answer.done else None
        if finish is None and generation.tokens == generation.new:
            text, finish = text + answer.end(), "length"
        if finish is None:
            generation.on_piece(Piece(text, generation.tokens))
            return True
        self.times.add("text", time.monotonic() - generation.began)
        self._leave(generation, finish, text)
        return False

    def _leave(self, generation: Generation, finish: Literal["stop", "length", "error"] | None, text: str = "") -> None:
        """End a text and free its place; call ``on_piece`` with ``finish`` unless that is None."""
        with self._changed:
            if generation not in self._held:  # it ended before another text failed in the same step
                return
            self._held.discard(generation)
        self._answers.pop(generation, None)
        if finish is not None:
            generation.on_piece(Piece(text, generation.tokens, finish))


class _Prefill:
    """Prompt that is read in chunks outside of a batch; ``past``: KV caches of the tokens read."""

    def __init__(self, generation: Generation, past: list[Array]) -> None:
        self.generation, self.past = generation, past

    @property
    def read(self) -> int:
        """Return how many tokens ``past`` holds."""
        return int(self.past[0].shape[2])

    def step(self, program: Program) -> Array | None:
        """Read a chunk; return the logits (1, V) after the prompt when all is read, else None."""
        chunk = self.generation.prompt[self.read : self.read + CHUNK]
        logits, *self.past = program(np.array([chunk], np.int64), np.zeros(1, np.int64), *self.past)
        return logits if self.read == len(self.generation.prompt) else None


class _PrefixCache:
    """Hold KV caches of past prompts, at most ``limit_bytes``; least recently used go first.

    The arrays may be held since nothing writes into them: the program returns new ones.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: OrderedDict[bytes, tuple[Array, list[Array]]] = OrderedDict()
        """By a prompt's tokens as bytes: its tokens, and its caches (1, K, P, C)."""

    def longest(self, prompt: list[int]) -> list[Array] | None:
        """Return the caches of the longest prefix shared with a held prompt; None if short.

        The last token of ``prompt`` is never in it, since the program has to give the logits after that token.
        """
        tokens = np.array(prompt[:-1], np.int64)
        shared = {key: _shared(tokens, held) for key, (held, _) in self._held.items()}
        best = max(shared, key=shared.__getitem__, default=b"")
        if not shared or shared[best] < MIN_SHARED:
            return None
        self._held.move_to_end(best)
        return [np.ascontiguousarray(cache[:, :, : shared[best]]) for cache in self._held[best][1]]

    def add(self, prompt: list[int], past: list[Array]) -> None:
        """Hold the caches of a prompt, in place of held prompts that are its beginning."""
        tokens = np.array(prompt, np.int64)
        if (
            len(tokens) < MIN_SHARED or _bytes(past) > self._limit_bytes
        ):  # a longer one would drive out all others for nothing
            return
        for key in [key for key, (held, _) in self._held.items() if _shared(tokens, held) == len(held)]:
            del self._held[key]
        self._held[tokens.tobytes()] = tokens, past
        while (
            len(self._held) > MAX_PREFIXES or sum(_bytes(held) for _, held in self._held.values()) > self._limit_bytes
        ):
            self._held.popitem(last=False)


def _bytes(past: list[Array]) -> int:
    return sum(cache.nbytes for cache in past)


def _shared(first: Array, second: Array) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


class _Batch:
    """Texts in progress with KV caches (B, K, P, C), left-padded by ``_padding`` (B,)."""

    def __init__(self, program: Program) -> None:
        self.rows: list[Generation] = []
        self._program = program
        self._padding = np.zeros(0, np.int64)
        self._past: list[Array] = []

    def padding_with(self, length: int) -> int:
        """Return the tokens of padding, over all texts, if one of ``length`` tokens joined."""
        more: int = length - self._past[0].shape[2]
        return int(self._padding.sum()) + max(len(self.rows) * more, -more)

    def join(self, generation: Generation, past: list[Array]) -> None:
        """Add a text; pad shorter caches to the longest."""
        if not self.rows:
            self._past, self._padding = past, np.zeros(1, np.int64)
        else:
            more = past[0].shape[2] - self._past[0].shape[2]
            self._padding = np.append(self._padding + max(more, 0), max(-more, 0))
            held = zip(self._past, past, strict=True)
            self._past = [np.concatenate((_padded(a, more), _padded(b, -more))) for a, b in held]
        self.rows.append(generation)

    def keep(self, kept: Sequence[bool]) -> None:
        """Keep only these texts, and cut padding that no text needs."""
        if all(kept):
            return
        rows = np.flatnonzero(kept)
        self.rows = [self.rows[row] for row in rows]
        self._padding = self._padding[rows]
        spare = int(self._padding.min()) if len(rows) else 0
        self._padding = self._padding - spare
        self._past = [held[rows, :, spare:] for held in self._past] if len(rows) else []

    def step(self) -> Array:
        """Read the newest token of each text; return the logits (B, V)."""
        tokens = np.array([[one.last] for one in self.rows], np.int64)
        logits, *self._past = self._program(tokens, self._padding, *self._past)
        return logits  # type: ignore[no-any-return]


def first_logits(program: Program) -> Array:
    """Return the logits (V,) of a language program after its vocabulary's first token."""
    logits, *_ = program(np.zeros((1, 1), np.int64), np.zeros(1, np.int64), *_no_tokens(program))
    first: Array = logits[0]
    return first


def _no_tokens(program: Program) -> list[Array]:
    """Return the caches of one text without tokens."""
    return [np.empty((1, int(spec.shape[1]), 0, int(spec.shape[3])), spec.dtype) for spec in program.inputs[2:]]


def _padded(held: Array, more: int) -> Array:
    return held if more <= 0 else np.pad(held, ((0, 0), (0, 0), (more, 0), (0, 0)))
