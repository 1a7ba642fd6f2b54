"""Robust means against brute force over whole updates, and against clients that lie."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arclight import recipe
from arclight.federated.aggregation.fixed_point import Contribution
from arclight.federated.aggregation.strategy_step import StrategyStep
from arclight.federated.coordination.settings import Buffered, Waiting
from arclight.federated.errors import FederatedError, RefusedError
from arclight.federated.masks.settings import Experts, Masks
from arclight.federated.privacy.robust import bounded, closest, fold_maker
from arclight.federated.privacy.settings import Krum, Median, NormBound, Robust, Trimmed
from arclight.federated.settings import Federation
from arclight.federated.strategies import FedAvg


def crowd(count: int, liars: int = 0, elements: int = 70_000) -> list[Contribution]:
    draw = torch.Generator().manual_seed(count)
    centre = torch.randn(elements, generator=draw)
    made = []
    for k in range(count):
        change = centre + 0.1 * torch.randn(elements, generator=draw)
        if k < liars:
            change = 1e6 * torch.randn(elements, generator=draw)
        made.append(
            Contribution(
                client=f"c{k:02}", weight=1.0 + k, tensors={"model/a": change[:9].view(3, 3), "model/b": change[9:]}
            )
        )
    return made


def flat(tensors: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([tensors[key].double().reshape(-1).numpy() for key in sorted(tensors)])


@pytest.mark.parametrize("count", [3, 6, 7, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("threads", [1, 2])
def test_median_and_trimmed_mean_are_those_of_brute_force(count: int, threads: int) -> None:
    clients = crowd(count, liars=1)
    rows = np.stack([flat(one.tensors) for one in clients])
    middle = flat(dict(fold_maker(Median())(clients, threads=threads)))
    assert np.allclose(middle, np.median(rows, axis=0), rtol=1e-6)
    cut = int(0.2 * count)
    trimmed = flat(dict(fold_maker(Trimmed(share=0.2))(clients, threads=threads)))
    assert np.allclose(trimmed, np.sort(rows, axis=0)[cut : count - cut].mean(axis=0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("robust", [Median(), Trimmed(share=0.3), Krum(byzantine=1, keep=2), NormBound()], ids=repr)
def test_order_and_threads_leave_no_trace(robust: Robust) -> None:
    clients, seen = crowd(5), set()
    for number, order in enumerate(itertools.islice(itertools.permutations(clients), 0, 120, 11)):
        fold = fold_maker(robust)(order, threads=1 + number % 2)
        seen.add((flat(dict(fold)).tobytes(), repr(fold.statistics)))
    assert len(seen) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2), st.data())
def test_krum_is_that_of_brute_force(byzantine: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(2 * byzantine + 3, 2 * byzantine + 6))
    keep = data.draw(st.integers(1, count - byzantine))
    values = st.integers(-8, 8).map(float)
    rows = [data.draw(st.lists(values, min_size=3, max_size=3)) for _ in range(count)]
    clients = [
        Contribution(client=f"c{k}", weight=1, tensors={"model/x": torch.tensor(row)}) for k, row in enumerate(rows)
    ]
    scores = []
    for k, row in enumerate(rows):
        apart = sorted(
            sum((a - b) ** 2 for a, b in zip(row, other, strict=True)) for j, other in enumerate(rows) if j != k
        )
        scores.append((sum(apart[: count - byzantine - 2]), f"c{k}"))
    chosen = closest(clients, Krum(byzantine=byzantine, keep=keep))
    assert [one.client for one in chosen] == [client for _, client in sorted(scores)[:keep]]


@pytest.mark.parametrize("robust", [Median(), Trimmed(share=0.25), Krum(byzantine=2, keep=4), NormBound()], ids=repr)
def test_liars_move_it_little(robust: Robust) -> None:
    honest = flat({key: sum(one.tensors[key] for one in crowd(9, 2)[2:]) / 7 for key in ("model/a", "model/b")})
    plain = flat(dict(fold_maker(None)(crowd(9, 2))))
    held = flat(dict(fold_maker(robust)(crowd(9, 2))))
    assert np.linalg.norm(plain - honest) > 1e4 * np.linalg.norm(honest), "without it the liars decide"
    assert np.linalg.norm(held - honest) < 0.6 * np.linalg.norm(honest)


def test_norm_bounds_shorten_and_keep_weights() -> None:
    long = Contribution(client="long", weight=3, tensors={"model/x": torch.tensor([30.0, 40.0])})
    short = Contribution(client="short", weight=1, tensors={"model/x": torch.tensor([0.0, 4.0])})
    fold = fold_maker(NormBound(largest=5))([long, short])
    mean = dict(fold)["model/x"]
    assert mean.tolist() == [(3 * 3 + 0) / 4, (3 * 4 + 4) / 4]
    assert fold.statistics.norms == pytest.approx({"long": 50, "short": 4}), "norms are told as they came"
    assert dict(fold_maker(NormBound(largest=5))([long]))["model/x"].tolist() == [3.0, 4.0]
    median = bounded(
        [long, short, Contribution(client="mid", weight=1, tensors=short.tensors, norm=10.0)], NormBound(times=2)
    )
    assert [one.scale for one in median] == [20 / 50, 1, 1]


def test_a_step_can_stand_on_any_of_them() -> None:
    anchor = {"model/a": torch.zeros(3, 3), "model/b": torch.zeros(70_000 - 9)}
    after = {one.key: one.value for one in StrategyStep(FedAvg(), anchor, crowd(5, 1), fold_maker=fold_maker(Median()))}
    assert torch.equal(after["model/b"], -dict(fold_maker(Median())(crowd(5, 1)))["model/b"])
    local = [
        Contribution(client=one.client, weight=one.weight, tensors={key: -t for key, t in one.tensors.items()})
        for one in crowd(5, 1)
    ]
    step = StrategyStep(FedAvg(), anchor, local, form="weights", fold_maker=fold_maker(Median()))
    assert torch.equal({one.key: one.value for one in step}["model/b"], after["model/b"])


@pytest.mark.parametrize("extra", ["model/a[0]", "model/z"])
def test_krum_blames_whoever_sent_other_tensors_than_most(extra: str) -> None:
    clients = crowd(5)
    clients[2] = replace(clients[2], tensors={**clients[2].tensors, extra: torch.zeros(3)})
    with pytest.raises(RefusedError, match="c02 sent other tensors than the others") as refused:
        closest(clients, Krum(byzantine=1))
    assert refused.value.clients == ("c02",)


def test_krum_chooses_whatever_moments_come_along() -> None:
    alone = crowd(5, 1)
    more = replace(alone[2], tensors={**alone[2].tensors, "momentum/a": torch.zeros(3)})
    together = [*alone[:2], more, *alone[3:]]
    kept, wanted = (closest(clients, Krum(byzantine=1, keep=2)) for clients in (together, alone))
    assert [one.client for one in kept] == [one.client for one in wanted]


def test_krum_is_refused_where_clients_send_their_own_experts() -> None:
    with pytest.raises(ValueError, match="krum compares whole updates"):
        Federation(clients=5, robust=Krum(byzantine=1), masks=Masks(experts=Experts(per_client=2)))


def test_krum_is_refused_where_a_buffer_mixes_rounds_that_send_different_weights() -> None:
    some: dict[str, Any] = {"clients": 6, "robust": Krum(byzantine=1), "moments": ("exp_avg",)}
    for pattern in ("w", "model", "model/w"):
        masks = Masks(periods={pattern: 2})
        with pytest.raises(ValueError, match="krum compares whole updates, and a buffer has updates of several rounds"):
            Federation(**some, buffered=Buffered(size=5), waiting=Waiting(quorum=1.0), masks=masks)
        Federation(**some, masks=masks, waiting=Waiting(quorum=1.0))
    for pattern in ("exp_avg", "exp_avg/w"):
        masks = Masks(periods={pattern: 2})
        Federation(**some, buffered=Buffered(size=5), waiting=Waiting(quorum=1.0), masks=masks)


def test_invalid_robust_rounds_are_refused() -> None:
    with pytest.raises(FederatedError, match="needs 5 updates, the round has 4"):
        fold_maker(Krum(byzantine=1))(crowd(4))
    with pytest.raises(FederatedError, match="cannot keep 5 of 5"):
        closest(crowd(5), Krum(byzantine=1, keep=5))
    with pytest.raises(FederatedError, match="c4 sent other tensors than the others"):
        part = Contribution(client="c4", weight=1, tensors={"model/a": torch.zeros(3, 3)})
        closest([*crowd(4), part], Krum())
    broken = crowd(3)
    broken[1].tensors["model/a"][0, 0] = torch.nan
    with pytest.raises(RefusedError, match="c01 sent model/a"):
        dict(fold_maker(Median())(broken))
    with pytest.raises(FederatedError, match='send = "delta"'):
        fold_maker(NormBound())(crowd(3), "weights")
    wrong: list[tuple[Any, str, float]] = [(Trimmed, "share", 0.5), (Krum, "keep", 0), (NormBound, "largest", 0)]
    for kind, name, value in wrong:
        with pytest.raises(ValueError, match=f"^{name}: need .*, got {value}$"):
            kind(**{name: value})


@pytest.mark.parametrize(
    "robust", [Median(), Trimmed(share=0.2), Krum(byzantine=2, keep=3), NormBound(largest=2.0)], ids=repr
)
def test_a_recipe_names_it_in_lower_case(robust: Robust) -> None:
    fields = {name: getattr(robust, name) for name in robust.__dataclass_fields__}
    table = {"robust": {"kind": type(robust).__name__.lower(), **{k: v for k, v in fields.items() if v is not None}}}
    table |= {"clients": 7, "waiting": {"quorum": 1.0}}
    assert recipe.read(Federation, table).robust == robust
