"""Generate several texts at once by one language program: each joins the batch and leaves it on its own (continuous batching).

One thread calls the program. Caches of all texts in progress lie in one array for each of the program's, ended by their newest token
and padded at the left, as `arclight.text.generate` pads prompts. A new prompt is read in chunks between the steps of the others.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
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
"""Tokens of a prompt read between two steps of the texts in progress."""
Array = np.ndarray[Any, Any]


class Piece(NamedTuple):
    """Text that a step added; ``tokens`` counts all so far. The last piece says why it is the last."""

    text: str
    tokens: int
    finish: Literal["stop", "length", "error"] | None = None


class Generation:
    """One text to generate: ``tell`` gets its pieces, in the scheduler's thread, until `cancel`."""

    def __init__(
        self, prompt: list[int], new: int, settings: GenerationSettings, tell: Callable[[Piece], None]
    ) -> None:
        self.prompt, self.new, self.settings, self.tell = prompt, new, settings, tell
        self.is_cancelled = False
        self.last = 0
        """The newest token, which the program has not read."""
        self.tokens = 0
        self.began = 0.0
        self._random = torch.Generator()
        self._random.seed() if settings.seed is None else self._random.manual_seed(settings.seed)

    def cancel(self) -> None:
        """Generate no more: nobody reads it."""
        self.is_cancelled = True

    def choose(self, logits_V: Array) -> int:
        """Choose the next token as `generate` does."""
        settings, chance = self.settings, torch.rand(1, generator=self._random)
        logits = torch.from_numpy(np.ascontiguousarray(logits_V[None]))
        return int(choose(logits, settings.temperature, settings.top_k, settings.top_p, chance))


class Scheduler:
    """The texts of one program: at most ``streams`` in progress, and ``queue`` that wait."""

    def __init__(self, program: Program, *, streams: int, queue: int) -> None:
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
        self._begins_waiting = False
        self._batch = _Batch(program)
        self._answers: dict[Generation, AnswerText] = {}
        self._thread = threading.Thread(target=self._work, name="arclight-text", daemon=True)

    def start(self) -> None:
        """Generate a token, so that the first client does not wait for warm-up, and take texts from now on."""
        self.program(np.zeros((1, 1), np.int64), np.zeros(1, np.int64), *self._batch.empty())
        self._thread.start()

    def close(self, *, waiting: bool = False) -> None:
        """Finish what is in progress, and end; what waits is begun only if ``waiting``."""
        with self._changed:
            self._is_closed = True
            self._begins_waiting = waiting
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def check(self, prompts: list[list[int]], new: int) -> None:
        """Raise ValueError for prompts that the model cannot continue by ``new`` tokens."""
        check_lengths(prompts, self.run, new)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue texts; raises Refusal 429 where they are more than may wait, 400 where they always are."""
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
        """Return whole seconds, at least one, after which the texts that are here now will have ended."""
        return max(1, math.ceil(self.times.of("text") * len(self._held) / self.streams))

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        reading: _Reading | None = None
        while True:
            with self._changed:
                while not (self._waiting or reading or self._batch.rows or self._is_closed):
                    self._changed.wait()
                begins = bool(self._waiting) and (self._begins_waiting or not self._is_closed)
                if self._is_closed and not (reading or self._batch.rows or begins):
                    while self._waiting:
                        self._leave(self._waiting.popleft(), "error")
                    return
                self._drop_cancelled()
                if reading is None and begins and self._waiting and len(self._batch.rows) < self.streams:
                    reading = _Reading(self._waiting.popleft(), self._batch.empty())
            try:
                if reading is not None and reading.generation.is_cancelled:
                    self._leave(reading.generation, None)
                    reading = None
                elif reading is not None and self._read(reading):
                    reading = None
                if self._batch.rows:
                    self._step()
            except Exception:  # whatever failed: the thread must live, for nobody else answers the next texts
                log.exception("%s failed on a step; the texts in progress end", self.program.path.name)
                for generation in [*self._batch.rows, *([reading.generation] if reading else [])]:
                    self._leave(generation, "error")
                reading, self._batch = None, _Batch(self.program)

    def _drop_cancelled(self) -> None:
        for generation in [one for one in self._waiting if one.is_cancelled]:
            self._waiting.remove(generation)
            self._held.discard(generation)
        kept = [not one.is_cancelled for one in self._batch.rows]  # read once: clients leave at any moment
        for generation, stays in zip(self._batch.rows, kept, strict=True):
            if not stays:
                self._leave(generation, None)
        self._batch.keep(kept)

    def _read(self, reading: _Reading) -> bool:
        """Read a chunk of a prompt; return True once it has been read, and its text is in the batch or has ended."""
        logits = reading.step(self.program)
        if logits is None:
            return False
        generation = reading.generation
        generation.began = time.monotonic()
        self._answers[generation] = AnswerText(self.tokenizer, generation.settings.stop, generation.prompt)
        if self._add(generation, logits[0]):
            self._batch.join(generation, reading.past)
        return True

    def _step(self) -> None:
        logits_BV = self._batch.step()
        self._batch.keep([self._add(one, logits) for one, logits in zip(self._batch.rows, logits_BV, strict=True)])

    def _add(self, generation: Generation, logits_V: Array) -> bool:
        """Add a token to a text; return False if it was the last."""
        logits_V = logits_V[: self.tokenizer.vocab_size]
        if never := [token for token in self.run.placeholders if token < len(logits_V)]:
            logits_V = logits_V.copy()
            logits_V[never] = -np.inf
        try:
            token = generation.choose(logits_V)
        except FloatingPointError:
            log.exception("%s gave logits that are not numbers", self.program.path.name)
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
            generation.tell(Piece(text, generation.tokens))
            return True
        self.times.add("text", time.monotonic() - generation.began)
        self._leave(generation, finish, text)
        return False

    def _leave(self, generation: Generation, finish: Literal["stop", "length", "error"] | None, text: str = "") -> None:
        """Free the place of a text that ends, once; without ``finish`` nobody is told."""
        with self._changed:
            if generation not in self._held:  # it had ended before another text failed on the same step
                return
            self._held.discard(generation)
        self._answers.pop(generation, None)
        if finish is not None:
            generation.tell(Piece(text, generation.tokens, finish))


class _Reading:
    """A prompt that is being read, alone, chunk by chunk."""

    def __init__(self, generation: Generation, past: list[Array]) -> None:
        self.generation, self.past = generation, past
        self._begun = 0

    def step(self, program: Program) -> Array | None:
        """Read a chunk; return the logits (1, V) behind the prompt once it has been read."""
        chunk = self.generation.prompt[self._begun : self._begun + CHUNK]
        logits, *self.past = program(np.array([chunk], np.int64), np.zeros(1, np.int64), *self.past)
        self._begun += len(chunk)
        return logits if self._begun == len(self.generation.prompt) else None


class _Batch:
    """Texts in progress, and what the program holds of them: (B, K, P, C), padded at the left by ``padding`` (B,)."""

    def __init__(self, program: Program) -> None:
        self.rows: list[Generation] = []
        self._program = program
        self._padding = np.zeros(0, np.int64)
        self._past: list[Array] = []

    def empty(self) -> list[Array]:
        """Return what is held of one text that has no tokens."""
        specs = self._program.inputs[2:]
        return [np.empty((1, int(spec.shape[1]), 0, int(spec.shape[3])), spec.dtype) for spec in specs]

    def join(self, generation: Generation, past: list[Array]) -> None:
        """Add a text: the shorter ones are padded to the longest."""
        if not self.rows:
            self._past, self._padding = past, np.zeros(1, np.int64)
        else:
            more = past[0].shape[2] - self._past[0].shape[2]
            self._padding = np.append(self._padding + max(more, 0), max(-more, 0))
            held = zip(self._past, past, strict=True)
            self._past = [np.concatenate((_padded(a, more), _padded(b, -more))) for a, b in held]
        self.rows.append(generation)

    def keep(self, kept: Sequence[bool]) -> None:
        """Keep only these texts, and no more padding than the longest needs."""
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


def _padded(held: Array, more: int) -> Array:
    return held if more <= 0 else np.pad(held, ((0, 0), (0, 0), (more, 0), (0, 0)))
