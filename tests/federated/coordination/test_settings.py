"""Settings of waiting under their former names."""

from __future__ import annotations

from pathlib import Path

import pytest

from arclight import recipe
from arclight.federated.coordination.settings import Waiting
from arclight.recipe import RecipeError


def test_a_former_name_is_read_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=r"Waiting\.beat_every is called heartbeat_interval_s now"):
        made = Waiting(beat_every=2.0, retries=3)  # type: ignore[call-arg]
    assert made == Waiting(heartbeat_interval_s=2.0, retries=3)
    assert made.silence_s == 6.0


def test_both_names_of_a_field_are_refused() -> None:
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match="both join and join_timeout_s"):
        Waiting(join=1.0, join_timeout_s=2.0)  # type: ignore[call-arg]


def test_a_recipe_may_say_the_former_name(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text("stall = 7.0\nlease = 8.0\n")
    with pytest.warns(FutureWarning, match="stall is called no_progress_timeout_s now"):
        read = recipe.read(Waiting, tmp_path / "old.toml")
    assert read == Waiting(no_progress_timeout_s=7.0, lease_s=8.0)
    (tmp_path / "both.toml").write_text("stall = 7.0\nno_progress_timeout_s = 8.0\n")
    with pytest.warns(FutureWarning), pytest.raises(RecipeError, match="are one field"):
        recipe.read(Waiting, tmp_path / "both.toml")
