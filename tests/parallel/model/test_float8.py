"""Matrix products in 8 bits on plans; what no 8-bit product takes is refused or left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import warm

from arclight.parallel import Plan, PlanError
from arclight.parallel.model.float8 import convert_to_float8
from arclight.text import build_model

pytest.importorskip("torchao")


@pytest.mark.slow
def test_products_in_eight_bits_on_plans() -> None:
    script = Path(__file__).with_name("float8_script.py")
    for done in warm.run_ranks(2, script, timeout=300):
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("passed") == 9


def test_small_layers_and_the_output_stay() -> None:
    fields = {"vocab_size": 128, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 136}
    cpu = torch.device("cpu")
    names = convert_to_float8(build_model("llama3-debug", **fields), Plan(float8="rowwise", float8_smallest=64), cpu)
    assert names == [f"layers.{block}.attention.{name}" for block in (0, 1) for name in ("wq", "wo")]
    with pytest.raises(PlanError, match="finds no linear layer of 1024 or more"):
        convert_to_float8(build_model("llama3-debug", **fields), Plan(float8="rowwise"), cpu)
    with pytest.raises(PlanError, match="a multiple of 32"):
        convert_to_float8(build_model("llama3-debug", **fields), Plan(float8="mxfp8", tp=4, float8_smallest=64), cpu)
