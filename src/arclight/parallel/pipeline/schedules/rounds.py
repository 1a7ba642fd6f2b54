"""Orders in which every process takes its stages in turns: GPipe, looped BFS, and 1F1B with all that is made of it."""

from __future__ import annotations

from collections.abc import Iterator

from arclight.parallel.pipeline.actions import Action, Order


def gpipe(ranks: int, micro_batches: int, stages_per_process: int = 1) -> Order:
    """All forwards, then all backwards (Huang et al. 2019)."""
    numbers = range(micro_batches)
    return tuple(
        (*(Action(rank, "F", number) for number in numbers), *(Action(rank, "B", number) for number in numbers))
        for rank in range(ranks)
    )


def looped_bfs(ranks: int, micro_batches: int, stages_per_process: int = 2) -> Order:
    """All micro-batches through one stage before the next, there and back (Lamy-Poirier 2022)."""
    numbers = range(micro_batches)

    def of(rank: int) -> Iterator[Action]:
        own = range(rank, ranks * stages_per_process, ranks)
        for stage in own:
            yield from (Action(stage, "F", number) for number in numbers)
        for stage in reversed(own):
            yield from (Action(stage, "B", number) for number in reversed(numbers))

    return tuple(tuple(of(rank)) for rank in range(ranks))


def one_forward_one_backward(ranks: int, micro_batches: int, stages_per_process: int = 1) -> Order:
    """1F1B (Narayanan et al. 2019); with several stages on a process interleaved (Narayanan et al. 2021)."""
    ahead = 1 if stages_per_process == 1 else 2
    return tuple(_alternating(rank, ranks, micro_batches, stages_per_process, ahead) for rank in range(ranks))


def zero_bubble(ranks: int, micro_batches: int, stages_per_process: int = 1) -> Order:
    """ZB-H1 (Qi et al. 2023), or interleaved: process r puts off gradients of weights by r places, so that all hold alike."""
    return tuple(_alternating(rank, ranks, micro_batches, stages_per_process, 1, put_off=rank) for rank in range(ranks))


def zero_bubble_ahead(ranks: int, micro_batches: int, stages_per_process: int = 1) -> Order:
    """ZB-H2 (Qi et al. 2023): twice as many forwards ahead, which fill the wait for the first backward and are held."""
    return tuple(
        _alternating(rank, ranks, micro_batches, stages_per_process, 2, put_off=2 * rank) for rank in range(ranks)
    )


def per_round(ranks: int, micro_batches: int) -> int:
    """Micro-batches that go through one stage of a process before its next stage has its turn."""
    return micro_batches // max(1, micro_batches // ranks)


def _alternating(
    rank: int, ranks: int, micro_batches: int, own: int, ahead: int, put_off: int | None = None
) -> tuple[Action, ...]:
    """One process's turns: forwards ahead, then forward and backward by turns.

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
