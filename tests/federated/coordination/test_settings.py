"""Settings under their former names, and the digests of those that older runs were begun with."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from arclight import recipe
from arclight.federated.clients.node import Node
from arclight.federated.codecs.settings import Int8, TopK
from arclight.federated.coordination.coordinator import _ALWAYS_DIGESTED, settings_digest
from arclight.federated.coordination.sampling import Roster
from arclight.federated.coordination.settings import Buffered, Hours, Sampling, Streaming, Waiting
from arclight.federated.masks.settings import Experts, Masks
from arclight.federated.privacy.settings import Krum, Noise, SecureSum
from arclight.federated.server.secure_sums import secure_sum_for_clients
from arclight.federated.settings import Checks, Federation
from arclight.federated.simulation.fleet import Costs, Links, Speeds
from arclight.federated.strategies import DiLoCo, FedAdam, FedNesterov
from arclight.federated.transports.http_client import HttpLink
from arclight.recipe import RecipeError


def test_a_former_name_is_read_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=r"Waiting\.beat_every is called heartbeat_interval_s now"):
        made = Waiting(beat_every=2.0, retries=3)  # type: ignore[call-arg]
    assert made == Waiting(heartbeat_interval_s=2.0, retries=3)
    assert made.silence_s == 6.0


@pytest.mark.parametrize(
    ("settings", "former", "today", "value"),
    [
        (Waiting(retries=3), "join", "join_timeout_s", 5.0),
        (Federation(clients=3), "journal_every", "checkpoint_every_steps", 7),
    ],
    ids=["waiting", "federation"],
)
def test_a_pickle_with_a_former_name_is_read_with_a_warning(
    settings: Any, former: str, today: str, value: float
) -> None:
    """Its field had today's default, silently."""
    old = copy.copy(settings)
    old.__dict__[former] = value  # as versions with the former name pickled it
    del old.__dict__[today]
    pickled = pickle.dumps(old)
    with pytest.warns(FutureWarning, match=f"{type(settings).__name__}.{former} is called {today} now"):
        restored = pickle.loads(pickled)
    assert restored == replace(settings, **{today: value})
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_both_names_of_a_field_are_refused() -> None:
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match="both join and join_timeout_s"):
        Waiting(join=1.0, join_timeout_s=2.0)  # type: ignore[call-arg]


def test_former_names_in_a_recipe_are_read(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text("stall = 7.0\nlease = 8.0\n")
    with pytest.warns(FutureWarning, match="stall is called no_progress_timeout_s now"):
        read = recipe.read(Waiting, tmp_path / "old.toml")
    assert read == Waiting(no_progress_timeout_s=7.0, lease_s=8.0)
    (tmp_path / "both.toml").write_text("stall = 7.0\nno_progress_timeout_s = 8.0\n")
    with pytest.warns(FutureWarning), pytest.raises(RecipeError, match="are one field"):
        recipe.read(Waiting, tmp_path / "both.toml")
    with pytest.warns(FutureWarning), pytest.raises(RecipeError, match="--stall and --no_progress_timeout_s are one"):
        recipe.read(Waiting, tmp_path / "old.toml", ["--stall", "1", "--no_progress_timeout_s", "2"])


@pytest.mark.parametrize(("file", "flag"), [("stall", "no_progress_timeout_s"), ("no_progress_timeout_s", "stall")])
def test_the_command_line_goes_over_a_recipe_under_either_name(tmp_path: Path, file: str, flag: str) -> None:
    (tmp_path / "run.toml").write_text(f"{file} = 7.0\n")
    with pytest.warns(FutureWarning, match="stall is called no_progress_timeout_s now"):
        read = recipe.read(Waiting, tmp_path / "run.toml", [f"--{flag}", "9"])
    assert read == Waiting(no_progress_timeout_s=9.0)


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        (
            {"buffered": Buffered(size=3, max_staleness=4), "weigh_by": "equal"},
            "2db272163cfc417fc6fabf71a625e858c48246e2dbba79bb0f63184b7fc8905f",
        ),
        (
            {"secure": SecureSum(threshold=0.6, step_timeout_s=5.0, max_weight=100)},
            "acd4193720a6d63239475de3661952303c3f2bd66708b21619950420f5ce4bcc",
        ),
    ],
    ids=["buffered", "secure"],
)
def test_digests_are_those_of_runs_begun_under_the_former_names(settings: dict[str, Any], digest: str) -> None:
    """As computed by the release that called the fields ``most_stale``, ``patience`` and ``most_weight``."""
    asked = Federation(clients=4, rounds=2, local_steps=3, **settings)
    assert settings_digest(asked, Roster(4), 1) == digest


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        (
            {"strategy": FedAdam(lr=0.01), "checks": Checks(norm_times=5.0)},
            "089f88bfefc8400f01992b2476adfaf51ac932ac42e6088614f8784b4494522b",
        ),
        (
            {"strategy": FedNesterov(momentum=0.8), "up": TopK(share=0.1), "down": Int8()},
            "3c8b061b260e6e6adfe4eda9453e623b629200b9b4eece7376ffd8bd11b3272b",
        ),
        (
            {"masks": Masks(send=("a.*",), periods={"b": 2}, experts=Experts(tensors=("e",), per_client=2))},
            "7ddcd1a973af33672c761b044a565d13f73948bfc8946e2d3b9006f847151591",
        ),
        (
            {"sampling": Sampling(per_round=3, hours=Hours(per_round=2.0)), "robust": Krum(byzantine=0)},
            "52b8971f278526ab1121b2e6dd63cc75365a75b145cee089ec5730bf4ab7004b",
        ),
        (
            {"streaming": Streaming(fragments=3), "strategy": DiLoCo()},
            "79c83aea0dd7cee08ba0cec528e6395361cc27b49fa92f12fa093bb766bf7650",
        ),
        (
            {"noise": Noise(clip=1.0, multiplier=1.0), "weigh_by": "equal"},
            "b9651dc8c58c1dc4ed579d80a80e24a7aba385c1800bfc998a394ccd71755f53",
        ),
    ],
    ids=["strategy", "codecs", "masks", "sampling", "streaming", "noise"],
)
def test_digests_are_those_of_runs_begun_when_all_nested_fields_counted(settings: dict[str, Any], digest: str) -> None:
    asked = Federation(clients=4, rounds=2, local_steps=3, **settings)
    assert settings_digest(asked, Roster(4), 1) == digest


def test_a_later_field_of_a_nested_setting_counts_if_it_is_set() -> None:
    def with_later_field(kind: type[Any]) -> type[Any]:
        later = dataclasses.make_dataclass(
            kind.__name__, [("later", bool, False)], bases=(kind,), frozen=True, kw_only=True
        )
        later.__qualname__ = kind.__qualname__
        return later

    def digest(**settings: Any) -> str:
        return settings_digest(Federation(clients=4, rounds=2, local_steps=3, **settings), Roster(4), 1)

    of_masks, of_experts = {"send": ("a.*",)}, {"per_client": 2}
    masks, experts = with_later_field(Masks), with_later_field(Experts)
    before = digest(masks=Masks(experts=Experts(**of_experts), **of_masks))
    assert digest(masks=masks(experts=experts(**of_experts), **of_masks)) == before
    assert digest(masks=masks(experts=experts(later=True, **of_experts), **of_masks)) != before
    assert digest(masks=masks(experts=experts(**of_experts), later=True, **of_masks)) != before
    buffered = with_later_field(Buffered)
    assert digest(buffered=buffered(size=3)) == digest(buffered=Buffered(size=3))
    assert digest(buffered=buffered(size=3, later=True)) != digest(buffered=Buffered(size=3))


def test_digests_know_the_fields_of_all_nested_settings() -> None:
    """A class that is missing would count all its fields for ever, and so could never get more."""

    def nested(kind: Any) -> Iterator[type[Any]]:
        for part in get_args(kind):
            yield from nested(part)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield kind
            for hint in get_type_hints(kind).values():
                yield from nested(hint)

    found = {kind for name, hint in get_type_hints(Federation).items() if name != "waiting" for kind in nested(hint)}
    assert {kind.__qualname__ for kind in found} == set(_ALWAYS_DIGESTED)
    for kind in found:
        names = {item.name for item in dataclasses.fields(kind)}
        assert names >= {*_ALWAYS_DIGESTED[kind.__qualname__].split()}, kind


def test_secure_sums_have_their_former_names_on_the_wire() -> None:
    asked = Federation(clients=4, rounds=2, local_steps=3, secure=SecureSum(step_timeout_s=5.0, max_weight=100))
    table = secure_sum_for_clients(asked, 2)["secure"]
    assert (table["patience"], table["most_weight"]) == (5.0, 100)
    assert "step_timeout_s" not in table


@pytest.mark.parametrize(
    ("kind", "former", "today"),
    [
        (Buffered, "most_stale", "max_staleness"),
        (SecureSum, "patience", "step_timeout_s"),
        (SecureSum, "most_weight", "max_weight"),
        (Links, "latency", "latency_s"),
        (Speeds, "step", "step_s"),
        (Speeds, "start", "overhead_s"),
        (Speeds, "evaluate", "evaluation_s"),
        (Costs, "round", "round_s"),
    ],
    ids=str,
)
def test_renamed_fields_are_read_under_their_former_names(kind: type[Any], former: str, today: str) -> None:
    with pytest.warns(FutureWarning, match=f"{kind.__name__}.{former} is called {today} now"):
        assert kind(**{former: 7}) == kind(**{today: 7})


def test_nodes_and_links_take_their_timeout_under_the_former_name(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="HttpLink.patience is called retry_timeout_s now"):
        link = HttpLink("http://127.0.0.1:1", tmp_path / "cache", patience=3.0)  # type: ignore[call-arg]
    with pytest.warns(FutureWarning, match="Node.patience is called retry_timeout_s now"):
        Node(link, [], tmp_path / "node", "n", patience=3.0)  # type: ignore[call-arg]
    link.close()
