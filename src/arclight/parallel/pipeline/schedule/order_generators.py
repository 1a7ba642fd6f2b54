"""Generate orders of pipeline schedules: 1F1B, zero bubble, and V-shaped ones.

Only `table` calls these; a new schedule is a function here and an entry of `table.SCHEDULES`. Tests compare orders with torch's and the papers'.

In a V-shaped schedule rank i holds stage i from the front and from the back. Two of them come from building blocks (Qi
et al. 2024, "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362): the times at which one micro-batch
passes each process, repeated every six units (F, I and W of two stages). The longer a micro-batch stays with a process,
the more are held at once; the distance between the turns of neighbours sets that.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from arclight.parallel.pipeline.schedule.actions import Action, Kind, Order
from arclight.parallel.plan import PlanError


def gpipe(ranks: int, micro_batches: int, stages_per_process: int = 1) -> Order:
    """Return all forwards, then all backwards (Huang et al. 2019)."""
    numbers = range(micro_batches)
    return tuple(
        (*(Action(rank, "F", number) for number in numbers), *(Action(rank, "B", number) for number in numbers))
        for rank in range(ranks)
    )


def looped_bfs(ranks: int, micro_batches: int, stages_per_process: int = 2) -> Order:
    """Return all micro-batches through one stage before the next, there and back.

    Lamy-Poirier 2022.
    """
    numbers = range(micro_batches)

    def of(rank: int) -> Iterator[Action]:
        own = range(rank, ranks * stages_per_process, ranks)
        for stage in own:
            yield from (Action(stage, "F", number) for number in numbers)
        for stage in reversed(own):
            yield from (Action(stage, "B", number) for number in reversed(numbers))

    return tuple(tuple(of(rank)) for rank in range(ranks))


def one_forward_one_backward(ranks: int, micro_batches: int, stages_per_process: int = 1) -> Order:
    """Return 1F1B (Narayanan et al. 2019), or interleaved 1F1B (Narayanan et al. 2021).

    It is interleaved with several stages on a process.
    """
    ahead = 1 if stages_per_process == 1 else 2
    return tuple(_alternating(rank, ranks, micro_batches, stages_per_process, ahead) for rank in range(ranks))


def zero_bubble(ranks: int, micro_batches: int, stages_per_process: int = 1) -> Order:
    """Return ZB-H1 (Qi et al. 2023), or its interleaved form.

    Process r puts off gradients of weights by r places, so that all hold alike.
    """
    return tuple(_alternating(rank, ranks, micro_batches, stages_per_process, 1, put_off=rank) for rank in range(ranks))


def zero_bubble_ahead(ranks: int, micro_batches: int, stages_per_process: int = 1) -> Order:
    """Return ZB-H2 (Qi et al. 2023): twice as many forwards ahead.

    They fill the wait for the first backward, and are held.
    """
    return tuple(
        _alternating(rank, ranks, micro_batches, stages_per_process, 2, put_off=2 * rank) for rank in range(ranks)
    )


def per_round(ranks: int, micro_batches: int) -> int:
    """Return the micro-batches of one stage before the process's next stage has its turn."""
    return micro_batches // max(1, micro_batches // ranks)


def _alternating(
    rank: int, ranks: int, micro_batches: int, own: int, ahead: int, put_off: int | None = None
) -> tuple[Action, ...]:
    """Return one process's turns: forwards ahead, then forward and backward by turns.

    ahead: forwards that each process does ahead of the one after it. put_off: after how many others the gradients of the
    weights of a micro-batch are computed; None for backwards in one.
    """
    together, total = per_round(ranks, micro_batches), own * micro_batches

    def places(backward: bool) -> Iterator[tuple[int, int]]:
        done = [0] * own
        for turn in range(total):
            place = turn // together % own
            place = own - 1 - place if backward else place
            yield place * ranks + rank, done[place]
            done[place] += 1

    forwards = [Action(stage, "F", number) for stage, number in places(backward=False)]
    backwards = list(places(backward=True))
    first = min((own - 1) * together + ahead * (ranks - 1 - rank), total)
    actions = forwards[:first]
    for turn, (stage, number) in enumerate(backwards):
        actions += forwards[first + turn : first + turn + 1]
        if put_off is None:
            actions.append(Action(stage, "B", number))
            continue
        actions.append(Action(stage, "I", number))
        if turn >= put_off:
            actions.append(Action(backwards[turn - put_off][0], "W", backwards[turn - put_off][1]))
    if put_off:
        actions += [Action(stage, "W", number) for stage, number in backwards[max(0, total - put_off) :]]
    return tuple(actions)


PERIOD = 6
"""Units in which a process does all that a micro-batch needs of it: F, I and W of two stages."""


def zero_bubble_v(ranks: int, micro_batches: int, stages_per_process: int = 2) -> Order:
    """Return ZB-V (Qi et al. 2023): no bubble if F, I and W take equal time.

    It holds what 1F1B does.
    """
    many = max(2 * ranks - 1, micro_batches)

    def of(rank: int) -> Iterator[Action]:
        stages = rank, 2 * ranks - 1 - rank
        done = {(kind, place): 0 for kind in "FIW" for place in (0, 1)}

        def do(kinds: str, place: int) -> Iterator[Action]:
            for kind in kinds:
                yield Action(stages[place], kind, done[kind, place])  # type: ignore[arg-type]
                done[kind, place] += 1

        yield from do("F" * (2 * (ranks - rank) - 1), 0)
        for _ in range(rank):
            yield from do("F", 1)
            yield from do("F", 0)
        for _ in range(ranks - rank):
            yield from do("FIW", 1)
        while done["F", 1] < done["F", 0] or done["F", 0] < many:
            yield from do("FIW" if done["F", 0] < many else "IW", 0)
            yield from do("FIW", 1)
        for _ in range(rank):
            yield from do("I", 0)
            yield from do("I", 1)
        for _ in range(ranks - rank):
            yield from do("IW", 0)
        for place in (1, 0):
            yield from do("W" * (done["I", place] - done["W", place]), place)

    return tuple(tuple(a for a in of(rank) if a.micro_batch < micro_batches) for rank in range(ranks))


def dual_pipe_v(ranks: int, micro_batches: int, stages_per_process: int = 2) -> Order:
    """Return DualPipeV (DeepSeek-AI 2024): pairs of a forward and a backward.

    It has the V form of torch, and pairs are meant to hide exchanges in each other.
    """
    if micro_batches < 2 * ranks:
        raise PlanError(f"DualPipeV over {ranks} processes needs at least {2 * ranks} micro-batches: {micro_batches}")

    def of(rank: int) -> Iterator[Action]:
        stages = rank, 2 * ranks - 1 - rank
        forwards, backwards, owed = [0, 0], [0, 0], deque[tuple[int, int]]()
        after = ranks - 1 - rank

        def forward(place: int) -> Action:
            forwards[place] += 1
            return Action(stages[place], "F", forwards[place] - 1)

        def backward(place: int, kind: Kind = "B") -> Action:
            number = backwards[place]
            backwards[place] += 1
            if kind == "I":
                owed.append((stages[place], number))
            return Action(stages[place], kind, number)

        def weights() -> Iterator[Action]:
            if owed:
                stage, number = owed.popleft()
                yield Action(stage, "W", number)

        for _ in range(2 * after):
            yield forward(0)
        for _ in range(rank + 1):
            yield forward(0)
            yield forward(1)
        for _ in range(after):
            yield backward(1, "I")
            yield from weights()
            yield forward(1)
        for _ in range(micro_batches - 2 * ranks + rank + 1):
            yield forward(0)
            yield backward(1)
            yield forward(1)
            yield backward(0)
        for _ in range(after):
            yield backward(1)
            yield forward(1)
            yield backward(0)
        # Of the last backwards the first half is done in one; then weights wait until nothing else is left.
        for turn in range(2 * (rank + 1)):
            yield backward(1 - turn % 2, "B" if turn < 2 * ((rank + 1) // 2) + (rank + 1) % 2 else "I")
        for _ in range(after):
            yield from weights()
            yield backward(0, "I")
        while owed:
            yield from weights()

    return tuple(tuple(of(rank)) for rank in range(ranks))


# -- building blocks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """Building block: turns of one micro-batch on each process, and the passes held."""

    times: tuple[dict[tuple[Kind, int], int], ...]
    """Times of each process, by kind and place (0 for its earlier stage)."""
    held: int
    each: tuple[tuple[int, int], ...]
    """The same for the two stages of each process separately."""
    length: int


def v_half(ranks: int, micro_batches: int, stages_per_process: int = 2) -> Order:
    """Return V-Half: about half of 1F1B's memory, and at most half of its bubble.

    It holds (p + 2) // 2 micro-batches; the bubble is for F = I = W.
    """
    return _repeated(_block(ranks, (2, 1, 2, 1)), ranks, micro_batches)


def v_min(ranks: int, micro_batches: int, stages_per_process: int = 2) -> Order:
    """Return V-Min: about a third of 1F1B's memory, and two thirds of its bubble.

    It holds (p + 4) // 3 micro-batches; the bubble is for F = I = W.
    """
    return _repeated(_block(ranks, (1, 1, 1, 1)), ranks, micro_batches)


@lru_cache(maxsize=64)
def _block(ranks: int, distances: tuple[int, int, int, int]) -> _Block:
    """Return the building block that holds least.

    ``distances``: units between neighbours, forth and back in forward, then in backward. What is free are the waits at
    the three turns; nothing may fall on the same unit of the period on a process.
    """
    found: list[_Block] = []
    for turns in itertools.product(range(1, PERIOD + 2), repeat=3):
        times = [_passes(rank, ranks, distances, turns) for rank in range(ranks)]
        if all(len({time % PERIOD for time in one.values()}) == len(one) for one in times):
            found.append(_with_weights(times))
    return min(found, key=lambda block: (block.held, block.length))


def _passes(
    rank: int, ranks: int, distances: tuple[int, int, int, int], turns: tuple[int, ...]
) -> dict[tuple[Kind, int], int]:
    last, rest = ranks - 1, ranks - 1 - rank
    there = last * distances[0] + turns[0]
    back = there + last * distances[1] + turns[1]
    end = back + last * distances[2] + turns[2]
    return {
        ("F", 0): rank * distances[0],
        ("F", 1): there + rest * distances[1],
        ("I", 1): back + rank * distances[2],
        ("I", 0): end + rest * distances[3],
    }


def _with_weights(times: list[dict[tuple[Kind, int], int]]) -> _Block:
    """Return the block with gradients of weights in the free units of the period.

    They come as early as they can.
    """
    whole, held, each = [], [], []
    for one in times:
        free = set(range(PERIOD)) - {time % PERIOD for time in one.values()}

        def after(time: int, unit: int) -> int:
            return time + 1 + (unit - time - 1) % PERIOD

        choices = [
            (after(one["I", 0], first), after(one["I", 1], second)) for first, second in itertools.permutations(free)
        ]
        first, second = min(choices, key=sum)
        known: dict[tuple[Kind, int], int] = {**one, ("W", 0): first, ("W", 1): second}
        lives = [(known["F", place], known["W", place]) for place in (0, 1)]
        counts = [[(time - begin) // PERIOD - (time - end - 1) // PERIOD for begin, end in lives] for time in range(6)]
        whole.append(known)
        held.append(max(map(sum, counts)))
        each.append((max(count[0] for count in counts), max(count[1] for count in counts)))
    return _Block(tuple(whole), max(held), tuple(each), times[0]["I", 0])


def _repeated(block: _Block, ranks: int, micro_batches: int) -> Order:
    """Return ``block`` for all micro-batches, squeezed if nothing must be waited for.

    It is the shorter of two ways to do so.
    """
    ways = [way for way in (_Squeeze(block, ranks, micro_batches, early).run() for early in (False, True)) if way]
    return min(ways, key=lambda way: way[0])[1]


class _Squeeze:
    """Squeeze a repeated block: each action as soon as it can be, in units of equal length.

    A process with nothing to do takes gradients of weights that are due later. At its end, when it has no forwards left, it
    prefers the backward that others wait for. early: it may also take forwards that are due later, as long as it holds no more
    than the block ever does (which may find no end; the other way always does).
    """

    def __init__(self, block: _Block, ranks: int, micro_batches: int, early: bool) -> None:
        self.block, self.ranks, self.micro_batches, self.early = block, ranks, micro_batches, early
        self.done: dict[tuple[int, Kind, int], int] = {}
        self.next: list[dict[tuple[Kind, int], int]] = [dict.fromkeys(times, 0) for times in block.times]
        self.holds = [[0, 0] for _ in range(ranks)]
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]

    def run(self) -> tuple[int, Order] | None:
        time, left = 0, 6 * self.ranks * self.micro_batches
        stop = PERIOD * self.micro_batches + 12 * PERIOD * self.ranks
        while left:
            if time > stop:
                return None
            chosen = [(rank, self._choose(rank, time)) for rank in range(self.ranks)]
            for rank, what in chosen:
                if what is not None:
                    self._do(rank, what, time)
                    left -= 1
            time += 1
        return time, tuple(map(tuple, self.orders))

    def _stage(self, rank: int, place: int) -> int:
        return rank if place == 0 else 2 * self.ranks - 1 - rank

    def _choose(self, rank: int, time: int) -> tuple[Kind, int] | None:
        count, times = self.next[rank], self.block.times[rank]
        due = sorted((times[what] + PERIOD * count[what], what) for what in times if count[what] < self.micro_batches)
        if not due:
            return None
        first = due[0][1]
        others = [what for _, what in due if what[0] != "W"]
        ending = first[0] == "W" and not any(what[0] == "F" for what in others)
        weights = [what for _, what in due if what[0] == "W"]
        order = [*(others if ending else ()), first, *(others if self.early else others[:1]), *weights]
        return next((what for what in order if self._can(rank, what, time)), None)

    def _can(self, rank: int, what: tuple[Kind, int], time: int) -> bool:
        kind, place = what
        stage, number, last = self._stage(rank, place), self.next[rank][what], 2 * self.ranks - 1

        def over(stage: int, kind: Kind) -> bool:
            return self.done.get((stage, kind, number), time) < time

        if kind == "F":
            holds = self.holds[rank]
            room = sum(holds) < self.block.held and (not self.early or holds[place] < self.block.each[rank][place])
            return room and (stage == 0 or over(stage - 1, "F"))
        if kind == "I":
            return over(stage, "F") and (stage == last or over(stage + 1, "I"))
        return over(stage, "I")

    def _do(self, rank: int, what: tuple[Kind, int], time: int) -> None:
        (kind, place), number = what, self.next[rank][what]
        self.done[self._stage(rank, place), kind, number] = time
        self.next[rank][what] += 1
        self.holds[rank][place] += (kind == "F") - (kind == "W")
        self.orders[rank].append(Action(self._stage(rank, place), kind, number))
