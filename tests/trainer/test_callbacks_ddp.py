"""Callbacks of two processes: they stop at the same step, know the same checkpoints and hear of the same errors."""

from __future__ import annotations

import json
from pathlib import Path

from tests import warm

from arclight import checkpoint

SCRIPT = Path(__file__).parent / "callbacks_ddp_script.py"


def test_two_processes_agree(tmp_path: Path) -> None:
    for done in warm.run_ranks(2, SCRIPT, tmp_path, timeout=300):
        assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["stop"] == [8, "PATIENCE_EXHAUSTED", 1], "a value of the first process alone stops both"
    assert first["kept"] == ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]
    assert first["best"] == "epoch=1-step=8.ckpt"
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {*first["kept"], "last.ckpt"}
    assert all(checkpoint.verify(tmp_path / "kept" / name) == [] for name in kept)
    assert "no space for epoch=1-step=8.ckpt" in first["error"]
    assert "epoch=0-step=4.ckpt" in first["error"]
    assert 1 <= first["time"] < 99 * 4
    assert first["steps after a search"] == 16
    assert 2 < len(first["search"]["loss"]) < 30, "both stop where the mean of their losses diverges"
