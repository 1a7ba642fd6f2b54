"""Load programs as models, and replace them by newer programs without downtime.

`server` calls `load`; `app` warms models up by `start`, keeps them in `Models` and takes a `ServedModel` from it for each request; `servable`
makes one without a program. A new task needs a field of `ServedModel`, and its place in `load`, `start` and `check_replacement`. A request in
progress keeps the program that it began with when that is replaced: tests reload under load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arclight.fabric.launchers import available_cores
from arclight.serve.admission import LatencyWindow
from arclight.serve.settings import Limits
from arclight.serve.tasks.batching import Batcher
from arclight.serve.tasks.detection import Detect
from arclight.serve.tasks.pool import POOLED, Pool, pooled
from arclight.serve.tasks.tensors import zeros

if TYPE_CHECKING:
    from arclight.deploy import Program
    from arclight.deploy.programs.folder import FileStamp, Trusted
    from arclight.deploy.settings import FastestRuntime, Runtime
    from arclight.serve.tasks.scheduler import Scheduler
    from arclight.text.embedding_program import Embedder

log = logging.getLogger("arclight.serve")
FileStamps = Mapping[Path, "FileStamp"]


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Named model: a detector, program, text scheduler or embedder.

    A detector answers photos, a program plain tensors, or both; a scheduler text, an embedder vectors of texts.
    """

    name: str
    precision: str = "unknown"
    detector: Detect | None = None
    program: Program | None = None
    text: Scheduler | None = None
    embedder: Embedder | None = None
    loaded: Program | None = None
    """The program that all of these run; None for a detector of the caller's own."""
    latency: LatencyWindow = field(default_factory=LatencyWindow)
    """Times of its small requests for tensors: measured by `start` for programs of our export, else by the first requests."""
    pool: Pool | None = None
    """Share of the cores that each request has, if it was measured or set; None for the rule of `threads_of`."""
    waiting_pool: Pool | None = None
    """Share measured for the previous program, which this one cannot use; kept for the next one."""
    batcher: Batcher = field(default_factory=Batcher)
    """Batches its requests for tensors, once `start` has measured that this pays."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Time of loading, seconds since 1970."""

    @property
    def version(self) -> str:
        """Return the beginning of the program's digest; "1" for a detector of the caller's own."""
        return "1" if self.loaded is None else self.loaded.digest[:12]

    @property
    def task(self) -> str:
        """Return detect, language, embedding, or tensors for any other."""
        if self.text is not None:
            return "language"
        if self.embedder is not None:
            return "embedding"
        return "detect" if self.detector is not None else "tensors"


def load(
    name: str,
    path: Path,
    limits: Limits,
    *,
    lone: bool = False,
    trusted: Trusted | None = None,
    runtime: Runtime | FastestRuntime | None = None,
    old: ServedModel | None = None,
) -> ServedModel:
    """Load a program by its task, in ``runtime`` as for `Program.load`.

    Raises ProgramError, for a ``lone`` program also if it takes tensors only.

    A program that replaces ``old`` is not timed here, since requests go on meanwhile: it takes over the runtime that "fastest" chose, and the
    share of the cores as `_shared` says.
    """
    from arclight.deploy import Program, ProgramError

    if old is not None and old.loaded is not None and runtime == "fastest":
        runtime = old.loaded.runtime
    before = None if old is None else old.pool or old.waiting_pool
    started = time.monotonic()
    program = Program.load(
        path, threads=lambda runtime, metadata: threads_of(runtime, metadata, limits, before), trusted=trusted, runtime=runtime,
        requests=lambda runtime, metadata: requests_of(runtime, metadata, limits, before),
    )  # fmt: skip
    load_s = time.monotonic() - started
    task = program.metadata.get("task")
    if lone and task not in ("detect", "language", "embedding"):
        raise ProgramError(
            f"{path} is not a detector (its task is {task!r}) and takes no text: serve it by a name, as {path.stem}={path}"
        )
    if task == "language":
        from arclight.serve.tasks.scheduler import Scheduler

        text = Scheduler(
            program, streams=limits.streams, queue=limits.queue, prefix_cache_bytes=limits.prefix_cache_bytes
        )
        return ServedModel(name=name, precision=program.precision, text=text, loaded=program)
    program, pool = _shared(program, limits, load_s, old)
    made = ServedModel(
        name=name, precision=program.precision, loaded=program, pool=pool, waiting_pool=None if pool else before
    )
    if task == "embedding":
        from arclight.text.embedding_program import Embedder

        return replace(made, embedder=Embedder(program))
    detector = program.predict_one if task == "detect" else None
    return replace(made, detector=detector, program=program, batcher=Batcher(limits.batch, made.latency))


def _shared(program: Program, limits: Limits, load_s: float, old: ServedModel | None) -> tuple[Program, Pool | None]:
    """Return a program with its share of the cores, by the first row that applies.

    ============================================  ===========================================================
    program and settings                          share (`ServedModel.pool`)
    ============================================  ===========================================================
    language, or in torch                         none; one that was decided waits for the next program
    ``limits.requests`` is set                    so many requests at once
    after a program whose share was decided       that share, in another runtime without its figures
    after any other, or ``limits.threads`` set    none: the rule of `threads_of`
    the first one                                 measured if that is possible (`pooled`), else none
    ============================================  ===========================================================

    ``load_s``: what loading it took.
    """
    if program.requests is None:
        if old is not None or limits.threads:
            return program, None
        return pooled(program, workers=limits.workers, cores=available_cores(), load_s=load_s)
    share = Pool(requests=program.requests, threads=program.threads or available_cores())
    if old is None or old.pool is None or old.loaded is None or old.loaded.runtime != program.runtime:
        return program, share
    same = (old.pool.requests, old.pool.threads) == (share.requests, share.threads)
    return program, old.pool if same else share


def requests_of(runtime: Runtime, metadata: Mapping[str, Any], limits: Limits, pool: Pool | None = None) -> int | None:
    """Return how many requests a program computes at once; None for no bound.

    As set, or as measured for the program that it replaces (``pool``).
    """
    if metadata.get("task") == "language" or runtime not in POOLED:
        return None
    return limits.requests or (None if pool is None else pool.requests)


def threads_of(runtime: Runtime, metadata: Mapping[str, Any], limits: Limits, pool: Pool | None = None) -> int | None:
    """Return the CPU threads of one request to a program; None for as many as its runtime takes.

    ``limits.threads`` if set; else an equal share of the cores if the number of requests at once is set or was measured (``pool``). Otherwise,
    and until that is measured, a program in ONNX Runtime shares the cores among the workers, and in OpenVINO requests take turns on all cores.
    torch's threads are those of the whole process, and a language program computes all of its texts together.
    """
    if metadata.get("task") == "language":
        return None
    if limits.threads:
        return limits.threads
    if requests := requests_of(runtime, metadata, limits, pool):
        return max(1, available_cores() // requests)
    if runtime != "onnxruntime":
        return None
    return max(1, available_cores() // limits.workers)


def proof(model: ServedModel) -> list[str]:
    """Return what was measured of a model's program, a sentence each.

    Parity, metric and speed of its export, and of another runtime at its load.
    """
    from arclight.deploy.parity import parity_summary, speed_summary
    from arclight.deploy.programs.session import NAMES
    from arclight.serve.admission import one_sentence

    if model.loaded is None:
        return []
    metadata, choice, runtime = model.loaded.metadata, model.loaded.choice, model.loaded.runtime
    found = [one_sentence(parity_summary(metadata))] if "parity" in metadata else []
    if metric := metadata.get("quantization", {}).get("metric"):
        found.append(f"Its metric is {metric['program']:.4g}, that of the float model {metric['float']:.4g}.")
    if speed := speed_summary(metadata).lstrip(", "):
        where = "" if runtime == choice.exported_for else f", in {NAMES[choice.exported_for]}"
        found.append(f"It is {speed}{where}.")
    if runtime != choice.exported_for or choice.wall_ms:
        found.append(choice.summary(runtime))
    return found


def start(model: ServedModel) -> None:
    """Warm up a model by one run, and measure small requests and batches of its program.

    Errors of a detector, text or embedding model are raised; a program that refuses inputs of zeros is only warned of.
    """
    from arclight.deploy import ProgramError

    if model.text is not None:
        model.text.start()
    elif model.embedder is not None:
        model.embedder.embed([[0]])
    elif model.detector is not None:
        model.detector(np.full((64, 64, 3), 114, dtype=np.uint8))
    if model.program is None or model.text is not None or model.embedder is not None:
        return
    try:
        program, given = model.program, zeros(model.program)
        if model.detector is not None:  # tensors may be sent to it, too
            model.batcher.measure(program)
            return
        program(*given)
        if "parity" in program.metadata:  # of our export: what it computes is bounded by the sizes of its inputs
            for _ in range(model.latency.RECENT):
                model.latency.timed(lambda: program(*given))
            model.batcher.measure(program)
    except ProgramError as error:  # such as of a program that takes no batch of one; clients may send what it takes
        log.warning("%s was not warmed up, its first request may be slow: %s", model.program.path.name, error)


# -- replacing -----------------------------------------------------------------------------------------------------


def check_replacement(old: ServedModel, new: ServedModel) -> None:
    """Raise ProgramError if ``new`` breaks clients of ``old``, or is less proven."""
    from arclight.deploy import ProgramError

    if old.task != new.task:
        raise ProgramError(f"it answers {new.task}, and the one that is served answers {old.task}")
    recorded = ["parity" in model.loaded.metadata for model in (old, new) if model.loaded is not None]
    if recorded == [True, False]:
        raise ProgramError("it was never compared with its torch model, and the one that is served was: export it")
    if old.embedder is not None and new.embedder is not None and old.embedder.dimensions != new.embedder.dimensions:
        raise ProgramError(
            f"its vectors have {new.embedder.dimensions} dimensions, and those that are served have {old.embedder.dimensions}"
        )
    if old.embedder is not None and new.embedder is not None:
        _check_vectors(old.embedder, new.embedder)
    if old.text is not None and old.loaded is not None and new.loaded is not None:
        _check_texts(old.loaded, new.loaded)
    if old.program is None or new.program is None:
        return
    for kind, before, after in (
        ("inputs", old.program.inputs, new.program.inputs), ("outputs", old.program.outputs, new.program.outputs),
    ):  # fmt: skip
        same = len(before) == len(after) and all(
            one.name == other.name and one.dtype == other.dtype and _takes(other.shape, one.shape)
            for one, other in zip(before, after)
        )
        if not same:
            shown = [", ".join(map(str, specs)) for specs in (after, before)]
            raise ProgramError(f"its {kind} are {shown[0]}, and those that are served are {shown[1]}")
    _check_numbers(old.program, new.program)


def _takes(new: tuple[int | str, ...], old: tuple[int | str, ...]) -> bool:
    """Return True if a tensor of shape ``new`` may be whatever one of shape ``old`` may be."""
    return len(new) == len(old) and all(isinstance(one, str) or one == other for one, other in zip(new, old))


def _check_numbers(old: Program, new: Program) -> None:
    """Raise ProgramError if ``new`` fails, or gives NaN, on zeros on which ``old`` does not."""
    from arclight.deploy import ProgramError

    given = zeros(old)
    try:
        before = old(*given)
    except ProgramError:  # it takes no batch of one, and there is nothing to compare with
        return
    after = new(*given)
    for spec, was, now in zip(new.outputs, _several(before), _several(after)):
        if np.asarray(now).shape != np.asarray(was).shape:
            raise ProgramError(f"its output {spec.name} has shape {np.shape(now)} where {np.shape(was)} is served")
        if np.isfinite(was).all() and not np.isfinite(now).all():
            raise ProgramError(
                f"its output {spec.name} is NaN or infinite for zeros, and the one that is served is not"
            )


PROBES = ("The quick brown fox jumps over the lazy dog.", "0 1 2 3 4 5 6 7 8 9", "Once upon a time there was a king.")
SIMILAR = 0.9
"""Least cosine between the vectors that the old and the new program give for one text: 4-bit weights keep 0.9, and another model's vectors
have nothing in common."""


def _check_vectors(old: Embedder, new: Embedder) -> None:
    """Raise ProgramError if ``new`` takes shorter texts, or its vectors are another model's.

    Clients hold vectors of ``old``, with which they compare new ones.
    """
    from arclight.deploy import ProgramError

    if new.max_positions < old.max_positions:
        raise ProgramError(
            f"its texts have at most {new.max_positions} tokens, and those that are served have {old.max_positions}"
        )
    for text in PROBES:
        before, after = (one.embed([one.tokenizer.encode(text)[: old.max_positions]])[0] for one in (old, new))
        if not (cosine := float(before @ after)) >= SIMILAR:
            raise ProgramError(
                f"its vectors are another model's (the cosine to the one that is served is {cosine:.2f} for {text!r}), and clients may hold "
                "vectors to compare with: serve it by another name"
            )


def _check_texts(old: Program, new: Program) -> None:
    """Raise ProgramError if ``new`` takes shorter texts or no chats, or gives NaN.

    Only what ``old`` does not do is refused.
    """
    from arclight.deploy import ProgramError
    from arclight.serve.tasks.scheduler import first_logits
    from arclight.text.language_program import ProgramRun, tokenizer_of

    before, after = (ProgramRun(program).max_positions for program in (old, new))
    if after < before:
        raise ProgramError(f"its texts have at most {after} tokens, and those that are served have {before}")
    chats, answers = ("default" in tokenizer_of(program).chat_templates for program in (old, new))
    if chats and not answers:
        raise ProgramError("it has no chat template, and chats are answered by the one that is served")
    if np.isfinite(first_logits(old)).all() and not np.isfinite(first_logits(new)).all():
        raise ProgramError(
            "its logits are NaN or infinite after one token, and those of the one that is served are not"
        )


def _several(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


class Models:
    """Hold a server's models by name, and replace those whose programs have changed on disk.

    A program is watched at its path: who may write there decides what is served, so reloading needs no address or key. It is loaded once its
    files are the same at two looks, and the digests of an exported program must fit, so that a copy under way does no harm. The new program
    is loaded and run beside the old one, which requests in progress keep until they have ended.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        load: Callable[[ServedModel], ServedModel] | None = None,
        batch: Callable[[str, int], None] = lambda _name, _requests: None,
    ) -> None:
        """Hold ``models``, and observe their batches.

        ``load`` loads the program that is at the path of a model now. ``batch`` gets the name of a model, and how many requests one call of
        its program has computed, from any thread.
        """
        self._models = dict(models)
        self._load = load
        self._batch = batch
        for model in models.values():
            model.batcher.observe(partial(batch, model.name))
        self._refused: dict[str, FileStamps | None] = {}
        """What was at a path when it was refused; None after it was gone."""
        self._seen: dict[str, FileStamps | None] = {}
        self._texts: set[asyncio.Future[None]] = set()
        """Requests for text under way, any of which may be about to queue a text at a model that is replaced."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def all(self) -> list[ServedModel]:
        return list(self._models.values())

    @contextmanager
    def text_request(self) -> Iterator[None]:
        """Keep present models from ending until the texts of a request have been queued."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._texts.add(ended)
        try:
            yield
        finally:
            self._texts.discard(ended)
            ended.set_result(None)

    async def watch(self, every_s: float, on_reload: Callable[[str, bool], None]) -> None:
        """Watch programs, and replace models whose programs have changed, until cancelled.

        ``on_reload`` gets the name, and False if refused.
        """
        while self._load is not None:
            await asyncio.sleep(every_s)
            for model in self.all():
                if model.loaded is not None and await self._changed(model):
                    on_reload(model.name, await self._replace(model))

    async def close(self) -> None:
        """End all models; texts in progress are finished."""
        self._is_closed = True
        for model in self.all():
            if model.text is not None:
                await asyncio.get_running_loop().run_in_executor(None, model.text.close)
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _changed(self, model: ServedModel) -> bool:
        """Return True if the model's files have changed, and are the same as at the last look."""
        from arclight.deploy.programs.folder import stamps_at

        name, loaded = model.name, model.loaded
        assert loaded is not None
        found = await asyncio.get_running_loop().run_in_executor(None, stamps_at, loaded.path)
        settled, self._seen[name] = name in self._seen and found == self._seen[name], found
        if found == loaded.stamps:
            self._refused.pop(name, None)
            return False
        return settled and not (name in self._refused and self._refused[name] == found)

    async def _replace(self, old: ServedModel) -> bool:
        """Load the new program of a model and switch to it; return False if it is refused."""
        begun = time.monotonic()
        try:
            new = await asyncio.get_running_loop().run_in_executor(None, self._prepared, old)
        except Exception as error:  # whatever is wrong with the new program: the old one goes on
            self._refused[old.name] = self._seen[old.name]
            known = _is_known(error)
            log.error(
                "%s: the new program is refused, version %s goes on: %s", old.name, old.version, error,
                exc_info=None if known else error,
            )  # fmt: skip
            return False
        self._models[old.name] = new
        log.info(
            "%s: version %s replaces %s after %.1f s", old.name, new.version, old.version, time.monotonic() - begun
        )
        leaving = asyncio.create_task(self._retire(old))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return True

    def _prepared(self, old: ServedModel) -> ServedModel:
        assert self._load is not None
        assert old.loaded is not None
        new = self._load(old)
        check_replacement(old, new)
        start(new)
        if (
            self._is_closed and new.text is not None
        ):  # the server has ended meanwhile, and nobody else would end its thread
            new.text.close()
        new.batcher.observe(partial(self._batch, new.name))
        return new

    async def _retire(self, old: ServedModel) -> None:
        """Close the text scheduler of a replaced model, after its last texts are finished."""
        if old.text is None:
            return
        if self._texts:
            await asyncio.wait(self._texts)
        text = old.text
        await asyncio.get_running_loop().run_in_executor(None, lambda: text.close(waiting=True))


def _is_known(error: Exception) -> bool:
    """Return True for errors whose message is enough, without a traceback."""
    from arclight.deploy import ProgramError

    return isinstance(error, (ProgramError, OSError))
