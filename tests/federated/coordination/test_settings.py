"""Settings under their former names."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arclight import recipe
from arclight.federated.clients.node import Node
from arclight.federated.coordination.coordinator import settings_digest
from arclight.federated.coordination.sampling import Roster
from arclight.federated.coordination.settings import Buffered, Waiting
from arclight.federated.privacy.settings import SecureSum
from arclight.federated.server.secure_sums import secure_sum_for_clients
from arclight.federated.settings import Federation
from arclight.federated.simulation.fleet import Costs, Links, Speeds
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
