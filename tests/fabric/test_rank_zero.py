"""Functions that run on rank 0 only."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
from tests import warm

from arclight.fabric.rank_zero import known_rank, rank_zero_only, rank_zero_warn


@pytest.fixture(autouse=True)
def nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rank_zero_only, "_rank", None)  # whatever a test before has fixed it to


def test_a_process_alone_is_rank_zero_and_others_keep_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    @rank_zero_only
    def work(x: int) -> int:
        return x + 1

    assert (known_rank(), rank_zero_only.rank, work(1)) == (None, 0, 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (known_rank(), rank_zero_only.rank, work(1)) == (3, 3, None)
    monkeypatch.setenv("RANK", "0")
    assert work(1) == 2, "the global rank decides where both are known"
    assert rank_zero_only(lambda: 1, default=7)() == 1
    rank_zero_only.rank = 2
    try:
        assert work(1) is None
        assert rank_zero_only(lambda: 1, default=7)() == 7
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rank_zero_warn("not heard")
    finally:
        del rank_zero_only.rank

    def library_function() -> None:
        rank_zero_warn("heard")

    with pytest.warns(UserWarning, match="heard") as heard:
        library_function()
    assert (heard[0].filename, heard[0].lineno) == (__file__, sys._getframe().f_lineno - 1), "points at who called it"


def test_no_torch_is_imported() -> None:
    code = "import sys, arclight.fabric.rank_zero; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_process_group_decides() -> None:
    code = """
from arclight.fabric.rank_zero import rank_zero_only
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
import os
os.environ["RANK"] = "5"
assert rank_zero_only.rank == 0
dist.destroy_process_group()
assert rank_zero_only.rank == 5
"""
    warm.run("-c", code, timeout=120, check=True)
