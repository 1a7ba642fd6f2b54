"""Generate text token by token with a KV cache, greedily or by sampling, or as a stream.

`generate` is public as ``arclight.text.generate``; `LanguageModel.generate`, ``arclight predict`` and `evaluation.suite` call it with a
`Decoder` or a language program. The server's scheduler batches requests by itself and shares `choose`, `AnswerText`,
`GenerationSettings` and `check_lengths`. A seed gives the same answer after an update: the order of random draws must stay.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from arclight.deploy.programs.program import Program
from arclight.fabric.modules import evaluating
from arclight.text.data.tokenizer import Tokenizer
from arclight.text.language_program import ProgramRun
from arclight.text.model.decoder import Decoder
from arclight.text.model.kv_cache import KVCache


class Options(TypedDict, total=False):
    """Options of :func:`generate`: how tokens are chosen, and when generation ends."""

    temperature: float
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None
    """Choose among this many of the likeliest tokens."""
    top_p: float | None
    """Choose among the likeliest tokens that together have at least this probability."""
    stop: str | Sequence[str]
    """Texts that end an answer and do not belong to it."""
    seed: int | None
    """Seed of the random draws; None: other answers each time."""
    bos: bool
    """Whether prompts begin with the token that begins documents."""
    inputs: dict[str, Any]
    """What the model is given beside tokens when it reads the prompts, as ``images``."""


@overload
def generate(model: Decoder | Program, tokenizer: Tokenizer, prompts: str, max_new_tokens: int = ..., *, stream: Literal[False] = ..., **options: Unpack[Options]) -> str: ...  # noqa: E501  # fmt: skip
@overload
def generate(model: Decoder | Program, tokenizer: Tokenizer, prompts: list[str] | list[list[int]] | Tensor, max_new_tokens: int = ..., *, stream: Literal[False] = ..., **options: Unpack[Options]) -> list[str]: ...  # noqa: E501  # fmt: skip
@overload
def generate(model: Decoder | Program, tokenizer: Tokenizer, prompts: str, max_new_tokens: int = ..., *, stream: Literal[True], **options: Unpack[Options]) -> Iterator[str]: ...  # noqa: E501  # fmt: skip
@overload
def generate(model: Decoder | Program, tokenizer: Tokenizer, prompts: list[str] | list[list[int]] | Tensor, max_new_tokens: int = ..., *, stream: Literal[True], **options: Unpack[Options]) -> Iterator[list[str]]: ...  # noqa: E501  # fmt: skip
def generate(
    model: Decoder | Program, tokenizer: Tokenizer, prompts: str | list[str] | list[list[int]] | Tensor, max_new_tokens: int = 128, *, stream: bool = False,
    **options: Unpack[Options],
) -> Any:  # fmt: skip
    """Generate continuations of one or several prompts (texts or token ids).

    Several are computed together; prompts are not repeated in the answers. ``model`` is a model, or a language program
    (`arclight.text.language_program`), whose tokenizer `tokenizer_of` returns.

    An answer ends with the tokenizer's ``eos``, a text of ``stop``, or ``max_new_tokens`` tokens. See `Options`; by default tokens are
    drawn with the model's own probabilities (temperature 1). Ids may be a tensor (B, T). With ``stream`` an iterator of pieces comes back,
    for several prompts one of lists with a piece for each; pieces hold whole characters, and never a part of a text of ``stop``.
    Raises TypeError for unknown options and prompts that are neither text nor ids, ValueError for options out of range, an empty
    prompt if nothing can begin it, tokens that the model does not know, and a prompt and answer that together are longer than its
    positions; FloatingPointError for logits that are NaN or all infinite. While the model runs it is in evaluation mode; between steps, and after,
    its modules have the mode that they had.
    """
    settings = GenerationSettings.of(dict(options))
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    ids = [
        encode_prompt(prompt, tokenizer, settings.bos)
        for prompt in ([prompts] if isinstance(prompts, str) else prompts)
    ]
    run: _Run = ProgramRun(model) if isinstance(model, Program) else _DecoderRun(model)
    check_lengths(ids, run, max_new_tokens)
    pieces = _pieces(run, tokenizer, ids, max_new_tokens, settings)
    if stream:
        return (row[0] for row in pieces) if isinstance(prompts, str) else pieces
    answers = ["".join(row) for row in zip(*pieces)] if ids else []
    return answers[0] if isinstance(prompts, str) else answers


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Options of `generate`, validated."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    bos: bool = False
    inputs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: dict[str, Any]) -> GenerationSettings:
        known = [option.name for option in fields(cls)]
        if unknown := sorted(options.keys() - set(known)):
            raise TypeError(f"generate has no option {unknown[0]!r}; it knows {', '.join(known)}")
        stop = options.pop("stop", ())
        settings = cls(**options, stop=(stop,) if isinstance(stop, str) else tuple(stop))
        for wrong, what in (
            (
                not 0 <= settings.temperature < math.inf,
                f"temperature must be a number from 0 on, got {settings.temperature}",
            ),
            (settings.top_k is not None and settings.top_k < 1, f"top_k must be at least 1, got {settings.top_k}"),
            (
                settings.top_p is not None and not 0 < settings.top_p <= 1,
                f"top_p must be in (0, 1], got {settings.top_p}",
            ),
            ("" in settings.stop, "an empty text in stop would end every answer at once"),
        ):
            if wrong:
                raise ValueError(what)
        return settings


def encode_prompt(prompt: str | list[int] | Tensor, tokenizer: Tokenizer, bos: bool) -> list[int]:
    """Encode one prompt; a row of a tensor of ids counts as a list."""
    if isinstance(prompt, Tensor) and prompt.ndim == 1:
        prompt = prompt.tolist()
    if not isinstance(prompt, (str, Sequence)):
        raise TypeError(
            f"a prompt must be a text or a list of token ids, got {prompt!r}: put the ids of one prompt into a list of lists"
        )
    ids = tokenizer.encode(prompt, bos=bos) if isinstance(prompt, str) else list(prompt)
    if ids:
        return ids
    begin = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    if begin is None:
        raise ValueError("the prompt is empty, and the tokenizer has no token that begins a text: write a word")
    return [begin]


class _Run(Protocol):
    """Run a model with its cache, or a program, step by step."""

    vocab_size: int
    max_positions: int
    placeholders: tuple[int, ...]
    device: torch.device

    def start(self, padding_B: Tensor, length: int) -> None:
        """Start sequences of at most ``length`` tokens with ``padding_B`` tokens at the left.

        Padding has no meaning.
        """

    def logits(self, tokens_BT: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Append tokens; give the logits (B, V) behind them."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences (indices into the batch)."""


class _DecoderRun:
    def __init__(self, model: Decoder) -> None:
        if model.output is None:
            raise ValueError("this is a pipeline stage; generation needs the whole model")
        self.vocab_size, self.max_positions = model.config.vocab_size, model.config.max_positions
        self.placeholders = model.placeholders
        self.device = next(model.parameters()).device
        self._model = model
        self._cache = KVCache(0, 0)

    def start(self, padding_B: Tensor, length: int) -> None:
        self._cache = KVCache(len(padding_B), length, padding_B if bool(padding_B.any()) else None)

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor, inputs: dict[str, Any]) -> Tensor:
        with evaluating(self._model):  # called whole, as FSDP wants a model to be
            logits = self._model(tokens_BT, cache=self._cache, last=True, **inputs)[:, 0]
        whole: Tensor = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return whole

    def keep(self, rows: Tensor) -> None:
        self._cache.keep(rows)


def check_lengths(ids: list[list[int]], run: _Run, new: int, setting: str = "max_new_tokens") -> None:
    """Raise ValueError for unknown tokens, and for more tokens than the model has positions.

    ``setting``: what the caller calls the number of ``new`` tokens.
    """
    for number, prompt in enumerate(ids):
        unknown = next((token for token in prompt if not 0 <= token < run.vocab_size), None)
        if unknown is not None:
            raise ValueError(
                f"prompt {number} has token {unknown}, the model knows {run.vocab_size}: the tokenizer is another model's"
            )
        room = run.max_positions - len(prompt)
        if room < 1:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, which leave none of the model's {run.max_positions} positions for an answer: "
                "shorten it"
            )
        if new > room:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; with {new} new ones that is more than the model's "
                f"{run.max_positions} positions: shorten it, or lower {setting} to {room}"
            )


_COLD = 1e-3
"""Temperatures below which the greatest logit is subtracted before the division."""


def choose(logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, chance_B: Tensor) -> Tensor:
    """Sample each row's token by temperature, top-k and top-p, from ``chance_B`` in [0, 1).

    It is the token, likeliest first, at which cumulated probabilities pass ``chance_B``.
    """
    if not bool(logits_BV.isfinite().any(-1).all() & ~logits_BV.isnan().any()):  # one wait for the device
        raise FloatingPointError("the model's logits are not numbers: its weights or inputs are broken")
    if temperature == 0:
        return logits_BV.argmax(-1)
    wide = logits_BV.float()
    if temperature < _COLD:  # their quotients would be infinite, and the difference of two such is NaN
        wide, temperature = wide - wide.amax(-1, keepdim=True), max(temperature, torch.finfo(torch.float32).tiny)
    wide = wide / temperature
    values, tokens = (
        wide.sort(dim=-1, descending=True, stable=True) if top_k is None else wide.topk(min(top_k, wide.shape[-1]), -1)
    )
    sums = values.softmax(-1).cumsum(-1)
    if top_p is not None:
        kept = (sums < top_p).sum(-1, keepdim=True).clamp(max=sums.shape[-1] - 1)  # the last token that is needed
    else:
        kept = torch.full_like(tokens[:, :1], sums.shape[-1] - 1)
    threshold = chance_B.to(sums.device, sums.dtype)[:, None] * sums.gather(-1, kept)
    place = torch.minimum((sums <= threshold).sum(-1, keepdim=True), kept)
    return tokens.gather(-1, place)[:, 0]


class AnswerText:
    """Text of one answer, which withholds what may still become part of a text of ``stop``."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], prompt: list[int]) -> None:
        self.characters, self.stop, self.done = tokenizer.stream(after=prompt), stop, False
        self.pending = ""

    def push(self, token: int) -> str:
        return self._release(self.characters.push(token), last=False)

    def end(self) -> str:
        text = self._release(self.characters.end(), last=True)
        self.done = True
        return text

    def _release(self, new: str, last: bool) -> str:
        self.pending += new
        found = [place for stop in self.stop if (place := self.pending.find(stop)) >= 0]
        if found:
            self.done = True
            return self.pending[: min(found)]
        keep = 0 if last else max((_overlap(self.pending, stop) for stop in self.stop), default=0)
        out, self.pending = self.pending[: len(self.pending) - keep], self.pending[len(self.pending) - keep :]
        return out


def _overlap(text: str, stop: str) -> int:
    """Return the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


def _pieces(
    run: _Run, tokenizer: Tokenizer, ids: list[list[int]], new: int, settings: GenerationSettings
) -> Generator[list[str]]:  # fmt: skip
    if not ids:
        return
    device = run.device
    longest = max(map(len, ids))
    padding = torch.tensor([longest - len(prompt) for prompt in ids], device=device)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in ids], device=device)
    run.start(padding, longest + new)
    random = torch.Generator()  # on the CPU: the same draws for any device
    random.seed() if settings.seed is None else random.manual_seed(settings.seed)
    answers = [AnswerText(tokenizer, settings.stop, prompt) for prompt in ids]
    rows = list(range(len(ids)))
    never = [token for token in run.placeholders if token < tokenizer.vocab_size]
    for step in range(new):
        logits = run.logits(tokens, {} if step else settings.inputs)[:, : tokenizer.vocab_size]
        if never:
            logits[:, never] = -torch.inf
        chance = torch.rand(len(ids), generator=random)[rows]
        chosen = choose(logits, settings.temperature, settings.top_k, settings.top_p, chance)
        pieces = [""] * len(ids)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            pieces[row] = answers[row].end() if token == tokenizer.eos else answers[row].push(token)
            if step == new - 1 and not answers[row].done:
                pieces[row] += answers[row].end()
        yield pieces
        going = [place for place, row in enumerate(rows) if not answers[row].done]
        if not going:
            return
        if len(going) < len(rows):
            run.keep(torch.tensor(going, device=device))
        rows, tokens = [rows[place] for place in going], chosen[going][:, None]
