"""Export and run language programs, whose KV cache goes in and out from call to call.

`LanguageModel.configure_deployment` describes the export; ``arclight predict``, `generate` and the server's scheduler run programs, and
``arclight compare`` scores them; `embedding_program` shares their description and tokenizer. Names and order of inputs and outputs, and the
metadata (task, sizes, tokenizer files), are in exported files: they stay.
"""

from __future__ import annotations

import base64
import functools
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arclight.deploy.capture import frozen_copy
from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.program import Program
from arclight.text.data.tokenizer import Tokenizer
from arclight.text.loss import IGNORED
from arclight.text.model.decoder import Decoder
from arclight.text.model.kv_cache import KVCache
from arclight.text.model.moe import BaseRouter

if TYPE_CHECKING:
    from arclight.deploy.comparison import Evaluation, NamedInputs
    from arclight.deploy.deployment import Deployment
    from arclight.deploy.settings import Quantization

TASK = "language"
LARGEST_TOKENIZER = 1 << 28
"""Most bytes of the tokenizer files of a program after decompression, all together."""
SCORED_TOKENS, SCORED_TEXTS = 64, 16
"""Most tokens of a text, and most texts, that two models are scored on."""
DYNAMIC = {"tokens": {0: "batch", 1: "time"}, "padding": {0: "batch"}, "past": {0: "batch", 2: "past"}}
"""Dynamic dimensions of the program's inputs; each ``past.N`` has those of ``past``."""


class CachedDecoder(nn.Module):
    """A decoder as its program computes it, with the cache as inputs and outputs.

    tokens: (B, T) int64. padding: (B,) int64, tokens without meaning at the left of each sequence. past: what each layer holds of
    earlier tokens, (B, K, P, C) in the order of `KVCache.tensors`. Gives the logits (B, V) of the last tokens, and the same
    tensors of P + T tokens.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, padding: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = _PassedCache(past, padding)
        logits = self.decoder(tokens, cache=cache, last=True)[:, 0]
        return (logits, *cache.present)

    @torch.no_grad()
    def empty(self, batch: int) -> tuple[Tensor, ...]:
        """Return a cache that holds no token of ``batch`` sequences."""
        cache = KVCache(1, 1)
        self.decoder(torch.zeros(1, 1, dtype=torch.int64), cache=cache, last=True)
        return tuple(held.new_empty(batch, held.shape[1], 0, held.shape[3]) for held in cache.tensors())


class _PassedCache(KVCache):
    """KV cache of one call: earlier tokens are passed in; ``present`` joins them with new ones."""

    def __init__(self, past: Sequence[Tensor], padding: Tensor) -> None:
        super().__init__(padding.shape[0], 0, padding)
        self.used = past[0].shape[2]
        self.present: list[Tensor] = []
        self._past = iter(past)

    def extend(self, layer: str, *new: Tensor) -> tuple[Tensor, ...]:
        joined = tuple(torch.cat((next(self._past), x), 2) for x in new)  # layers run in order
        self.present += joined
        return joined


def language_deployment(
    decoder: Decoder,
    batches: Sequence[Tensor],
    tokenizer: Tokenizer | None,
    metadata: Mapping[str, Any] | None = None,
    validation: Iterable[Tensor] | None = None,
) -> Deployment:
    """Return the deployment of ``decoder`` as a language program.

    It is compared and calibrated on ``batches``: token ids (B, T) int64 of real text, T at least 4. The program takes
    any number of sequences, of any length up to the model's positions; see `CachedDecoder` for its inputs. It is
    compared with the model where it reads prompts, where it adds single tokens, and where sequences of different
    lengths go on. ``tokenizer`` is stored in the program. ``validation``: texts that models are scored on (default: the
    batches), read only for that; see `evaluation_of`.
    """
    from arclight.deploy.deployment import EXAMPLES, Deployment

    cached = frozen_copy(CachedDecoder(decoder))
    assert isinstance(cached, CachedDecoder)
    inputs = _inputs(cached, batches[0][:EXAMPLES].cpu())
    layers = len(inputs["prompts"]) - 2
    evaluation = evaluation_of(batches if validation is None else validation, cached.empty, tokenizer)
    return Deployment(
        model=cached,
        example_inputs=inputs.pop("steps"),
        calibration=(_inputs(cached, batch.cpu())["continued"] for batch in batches),
        capture_inputs=inputs["prompts"],
        comparisons=inputs,
        dynamic=DYNAMIC,
        input_names=["tokens", "padding", *(f"past.{place}" for place in range(layers))],
        output_names=["logits", *(f"present.{place}" for place in range(layers))],
        quantized_parts=lambda logits, *_: {"logits": logits},  # what is cached is judged by them
        float_modules=tuple(  # another choice of experts is no rounding error
            name for name, module in cached.named_modules() if isinstance(module, BaseRouter)
        ),
        prefix="decoder.",
        metric=lambda network: next(iter(evaluation.scored(network).values())),
        evaluation=evaluation,
        metadata={**(metadata or {}), **described(decoder, tokenizer)},
    )


def evaluation_of(
    texts: Iterable[Tensor], empty: Callable[[int], Sequence[Tensor]], tokenizer: Tokenizer | None
) -> Evaluation:
    """Return the evaluation of language models and programs on texts, by their likelihood.

    texts: batches of token ids (B, T) int64, of which the first `SCORED_TEXTS` texts are read, when they are needed. empty: makes a cache that
    holds no token of as many sequences. Scores: mean log-likelihood of the next token, nats, and the share of tokens that are the likeliest.
    """
    from arclight.deploy.comparison import Evaluation, NamedInputs

    read = functools.cache(lambda: _scored_texts(texts))

    def samples() -> Iterator[NamedInputs]:
        place = 0
        for tokens in read():
            written = [f" {tokenizer.decode(row)[:24]!r}" if tokenizer else "" for row in tokens.tolist()]
            names = [f"text {place + row}{text}" for row, text in enumerate(written)]
            none = torch.zeros(len(tokens), dtype=torch.int64)
            yield NamedInputs(names, (tokens, none, *empty(len(tokens))))
            place += len(tokens)

    def scores(network: Callable[..., Any]) -> dict[str, float]:
        likelihood, right, count = 0.0, 0, 0
        for tokens in read():
            past, none = list(empty(len(tokens))), torch.zeros(len(tokens), dtype=torch.int64)
            for place in range(tokens.shape[1] - 1):
                logits, *past = network(tokens[:, place : place + 1], none, *past)
                target = tokens[:, place + 1 : place + 2]
                likelihood += float(logits.double().log_softmax(-1).gather(1, target).sum())
                right += int((logits.argmax(-1, keepdim=True) == target).sum())
                count += len(tokens)
        return {"log_likelihood": likelihood / count, "accuracy": right / count}

    return Evaluation(samples=samples(), scores=scores)


def scored_texts_of(batch: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the texts (B, T) of a batch without the tokens that fill rows up.

    They are cut to the length that is scored. Rows of full length come together, shorter ones one by one, and those without a label not at all.
    """
    tokens, predicted = batch["tokens"], batch["labels"] != IGNORED
    most = min(SCORED_TOKENS, tokens.shape[1])
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    lengths = (predicted * places).amax(1).clamp(max=most)  # up to the last token that predicts one
    whole = lengths == most
    if bool(whole.any()):
        yield tokens[whole, :most]
    for row in torch.nonzero(~whole & (lengths > 1))[:, 0].tolist():
        yield tokens[row : row + 1, : int(lengths[row])]


def _scored_texts(texts: Iterable[Tensor]) -> list[Tensor]:
    """Return the first texts, cut to as many tokens as are scored; ProgramError for none."""
    found, left = [], SCORED_TEXTS
    for tokens in texts:
        if left and tokens.shape[1] > 1:
            found.append(tokens[:left, :SCORED_TOKENS].cpu())
            left -= len(found[-1])
        if not left:
            break
    if not found:
        raise ProgramError("no text of two tokens or more to compare on: name texts that hold some")
    return found


def program_evaluation(program: Program, source: str) -> Evaluation:
    """Return the evaluation of programs on the texts of ``source``, a file or folder.

    See `evaluation_of`. Documents are joined, and cut into texts of equal length. Raises SourceError for what cannot be
    read.
    """
    from arclight.text.data.sources import documents

    tokenizer = tokenizer_of(program)
    length = min(SCORED_TOKENS, program.metadata["max_positions"])

    def texts() -> Iterator[Tensor]:
        left: list[int] = []
        for document in documents(source):
            left += tokenizer.encode(document.text)
            while len(left) >= length:
                yield torch.tensor([left[:length]])
                left = left[length:]

    shapes = [spec.shape for spec in program.inputs[2:]]
    return evaluation_of(
        texts(), lambda batch: [torch.empty(batch, int(s[1]), 0, int(s[3])) for s in shapes], tokenizer
    )


def export_language_model(
    model: Any,
    path: Path | str,
    batches: Sequence[Tensor],
    recipe: Quantization | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Program:
    """Export ``model``, a `LanguageModel` or its decoder, as a language program.

    See `language_deployment`, and `ship` for options and errors.
    """
    from arclight.deploy.deployment import ship

    deployment = deployment_by(language_deployment, model, batches, tokenizer)
    program: Program = ship(deployment, path, recipe, **options)
    return program


def deployment_by(
    make: Callable[..., Deployment], model: Any, batches: Sequence[Tensor], tokenizer: Tokenizer | None
) -> Deployment:
    """Return ``make``'s deployment of a decoder, or of a `LanguageModel`.

    Of the latter, name and tokenizer are passed on.
    """
    if isinstance(model, Decoder):
        return make(model, batches, tokenizer)
    return make(model.model, batches, tokenizer or model.tokenizer, {"model": model.settings.model})


@torch.no_grad()
def _inputs(cached: CachedDecoder, tokens_BT: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Return inputs of every kind that generation makes, from texts of equal length."""
    batch, length = tokens_BT.shape
    if length < 4:
        raise ValueError(f"texts of {length} tokens are too short to compare a program on: give at least 4")
    none, ragged = torch.zeros(batch, dtype=torch.int64), torch.arange(batch) % (length // 2)
    half, last = length // 2, length - 1
    return {
        "prompts": (tokens_BT[:, :last], none, *cached.empty(batch)),
        "steps": (tokens_BT[:, last:], none, *cached(tokens_BT[:, :last], none, *cached.empty(batch))[1:]),
        "continued": (tokens_BT[:, half:], ragged, *cached(tokens_BT[:, :half], ragged, *cached.empty(batch))[1:]),
        "first token": (tokens_BT[:1, :1], none[:1], *cached.empty(1)),
    }


def described(decoder: Decoder, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a language program's metadata: what `ProgramRun` needs, and tokenizer files."""
    described: dict[str, Any] = {
        "task": TASK,
        "vocab_size": decoder.config.vocab_size,
        "max_positions": decoder.config.max_positions,
        "placeholders": list(decoder.placeholders),
    }
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            files = sorted(tokenizer.save(folder).iterdir())
            packed = {file.name: base64.b64encode(zlib.compress(file.read_bytes())).decode() for file in files}
        described |= {"tokenizer": tokenizer.digest, "tokenizer_files": packed}
    return described


def tokenizer_of(program: Program, task: str = TASK) -> Tokenizer:
    """Return the tokenizer stored in a program of ``task``.

    Raises ProgramError if there is none, or it is another one.
    """
    _check(program, task)
    packed = program.metadata.get("tokenizer_files")
    if not packed:
        raise ProgramError(
            f"{program.path} was exported without a tokenizer: load the one that its model was trained with"
        )
    with tempfile.TemporaryDirectory() as folder:
        left = LARGEST_TOKENIZER
        for name, content in packed.items():
            if Path(name).name != name or name == "..":
                raise ProgramError(
                    f"{program.path} names a file of its tokenizer {name!r}, which is not a plain file name"
                )
            file = _unpacked(program.path, name, content, left)
            left -= len(file)
            (Path(folder) / name).write_bytes(file)
        try:
            tokenizer = Tokenizer.load(folder)
        except (ValueError, FileNotFoundError) as error:
            raise ProgramError(f"{program.path} holds no readable tokenizer: export it again") from error
    if tokenizer.digest != program.metadata.get("tokenizer"):
        raise ProgramError(f"{program.path} holds another tokenizer than it says: export it again")
    return tokenizer


def _unpacked(path: Path, name: str, content: Any, limit: int) -> bytes:
    """Decompress a file of a tokenizer, of at most ``limit`` bytes.

    A short text may stand for any number of bytes.
    """
    try:
        stream = zlib.decompressobj()
        file = stream.decompress(base64.b64decode(content), limit + 1)
    except (ValueError, TypeError, zlib.error) as error:
        raise ProgramError(f"{path}: the file {name!r} of its tokenizer is malformed: {error}") from error
    if len(file) > limit:
        raise ProgramError(f"{path}: the files of its tokenizer have more than {LARGEST_TOKENIZER} bytes")
    if not stream.eof:
        raise ProgramError(f"{path}: the file {name!r} of its tokenizer is cut short: export it again")
    return file


class ProgramRun:
    """Generation by one program: tokens of a batch in, logits out.

    The cache is kept from step to step.
    """

    def __init__(self, program: Program) -> None:
        _check(program)
        self.vocab_size: int = program.metadata["vocab_size"]
        self.max_positions: int = program.metadata["max_positions"]
        self.placeholders: tuple[int, ...] = tuple(program.metadata["placeholders"])
        self.device = torch.device("cpu")
        self._program = program
        self._padding = torch.zeros(0, dtype=torch.int64)
        self._past: list[Tensor] = []

    def start(self, padding_B: Tensor, length: int) -> None:
        """Start sequences, one for each of ``padding_B``; the cache grows as needed."""
        del length
        self._padding = padding_B
        shapes = [spec.shape for spec in self._program.inputs[2:]]
        self._past = [torch.empty(len(padding_B), int(shape[1]), 0, int(shape[3])) for shape in shapes]

    def logits(self, tokens_BT: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Compute the logits (B, V) behind ``tokens_BT``."""
        if inputs:
            raise TypeError(f"a program takes only tokens, got {', '.join(inputs)}: generate with the model itself")
        logits, *self._past = self._program(tokens_BT, self._padding, *self._past)
        return logits  # type: ignore[no-any-return]

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences (indices into the batch)."""
        self._padding, self._past = self._padding[rows], [held[rows] for held in self._past]


_SIZES = ("vocab_size", "max_positions")


def _check(program: Program, task: str = TASK) -> None:
    """Raise ProgramError for a program of another task, or with a malformed description."""
    about = program.metadata
    if about.get("task") != task:
        raise ProgramError(
            f"{program.path} is not a program of the task {task!r}: export a language model with arclight export"
        )
    if "max_positions" not in about:
        raise ProgramError(
            f"{program.path} is a language program of an older arclight, without a cache: export the model again"
        )
    for name in _SIZES:
        if type(about.get(name)) is not int or about[name] < 1:
            raise ProgramError(
                f"{program.path} describes its {name} as {str(about.get(name))[:60]!r}, and it is a number above 0"
            )
    placeholders = about.get("placeholders")
    if not isinstance(placeholders, list) or not all(type(one) is int and one >= 0 for one in placeholders):
        raise ProgramError(
            f"{program.path} describes its placeholders as {str(placeholders)[:60]!r}, and they are token ids"
        )
    if not isinstance(about.get("tokenizer_files") or {}, dict):
        raise ProgramError(f"{program.path} describes its tokenizer_files as no files by name: export the model again")
