"""First values are a function of seed and name alone."""

from __future__ import annotations

import pytest
import torch

from arclight.parallel import Normal, draw


@pytest.mark.parametrize("cut", [None, 3.0])
def test_draws_do_not_depend_on_the_default_type(cut: float | None) -> None:
    expected = draw("layers.0.weight", (8, 4), Normal(0.02, cut), 7)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = draw("layers.0.weight", (8, 4), Normal(0.02, cut), 7)
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
