"""Durations as people write them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.data import limits
from arclight.trainer.loop.progress import Progress
from arclight.trainer.run.durations import Duration, Unit


@pytest.mark.parametrize(
    ("given", "value", "unit"),
    [
        ("10ep", 10, Unit.EPOCHS),
        ("500ba", 500, Unit.BATCHES),
        ("1_000_000tok", 1_000_000, Unit.TOKENS),
        ("1e9tok", 10**9, Unit.TOKENS),
        (" 1000sp ", 1000, Unit.SAMPLES),
        ("0.5dur", 0.5, Unit.FRACTION),
        ("10s", 10, Unit.SECONDS),
        ("1.5min", 90, Unit.SECONDS),
        ("2h30min", 9000, Unit.SECONDS),
        ("1d", 86400, Unit.SECONDS),
        ("01:02:03:04", 86400 + 2 * 3600 + 3 * 60 + 4, Unit.SECONDS),
        (timedelta(minutes=2), 120, Unit.SECONDS),
        ({"hours": 1, "seconds": 5}, 3605, Unit.SECONDS),
        (Duration(3, Unit.EPOCHS), 3, Unit.EPOCHS),
    ],
)
def test_forms(given: Any, value: float, unit: Unit) -> None:
    parsed = Duration.parse(given)
    assert (parsed.value, parsed.unit) == (value, unit)
    assert parsed.seconds == (value if unit is Unit.SECONDS else None)
    assert Duration.parse(str(parsed)) == parsed, "what is shown can be read"


@pytest.mark.parametrize(
    "given", ["10", "ep", "10 epochs", "6:00:00", "60 minutes", "1ep2ba", "-1ep", "1.5ep", "2dur", "", 5]
)
def test_everything_else_is_refused_with_the_forms_there_are(given: Any) -> None:
    with pytest.raises(MisconfigurationError, match="duration"):
        Duration.parse(given)
    with pytest.raises(MisconfigurationError, match="DD:HH:MM:SS"):
        Duration.parse("60 minutes")


def test_a_fraction_of_the_training() -> None:
    assert Duration.parse("0.25dur").of(Duration.parse("10ep")) == Duration(3, Unit.EPOCHS)
    assert Duration.parse("0.25dur").of(Duration.parse("10s")) == Duration(2.5, Unit.SECONDS)
    assert Duration.parse("7ba").of(Duration.parse("10ep")) == Duration(7, Unit.BATCHES)
    with pytest.raises(MisconfigurationError, match="how long training is"):
        Duration.parse("0.5dur").of(Duration.parse("1dur"))


# -- validation by the clock ---------------------------------------------------------------------------------------


class Clocked:
    """A strategy of so many ranks, whose batches take time on a clock of the test's own."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.exchanges = 1000.0, 0
        self.validated_time = self.now
        self.progress, self.world_size = Progress(), ranks
        monkeypatch.setattr(limits.time, "monotonic", lambda: self.now)

    def broadcast(self, value: Any) -> Any:
        self.exchanges += 1
        return value

    def validations(self, *seconds: float) -> list[float]:
        """Times since the start at which validation is due, with batches that take so long each."""
        due = limits.timed_validation(
            "00:00:01:00",
            self.progress,
            self,  # type: ignore[arg-type]
            validated=lambda: self.validated_time,
            validates=lambda epoch: True,
        )
        start = self.now
        assert due is not None
        times = []
        for batch in seconds:
            self.now += batch
            self.progress.batches += 1
            if due():
                times.append(self.now - start)
                self.validated_time = self.now
        return times


def test_one_process_looks_at_the_clock_after_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(1, monkeypatch)
    assert clocked.validations(*[0.5] * 400) == [60, 120, 180]
    assert clocked.exchanges == 0


def test_ranks_agree_on_the_time_in_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(2, monkeypatch)
    assert clocked.validations(*[0.5] * 400) == pytest.approx([60, 120, 180], abs=1.0)
    assert clocked.exchanges < 40
    slower = Clocked(2, monkeypatch)
    (first, *_) = slower.validations(*[0.5] * 20, *[5.0] * 100)
    assert 60 <= first <= 300, "half of what was left had been expected at the old rate"
    assert Clocked(2, monkeypatch).validations(*[90.0] * 3) == [90, 180, 270]
