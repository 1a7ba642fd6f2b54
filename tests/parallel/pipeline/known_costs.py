"""Costs as `split` predicts them, for tests that cut one model many times or in many processes: a prediction takes longer than a step."""

from __future__ import annotations

from typing import Any

from torch import nn

from arclight.parallel import PlanError
from arclight.parallel.pipeline.call_graph import arguments_of
from arclight.parallel.pipeline.cost.measure import predict
from arclight.parallel.pipeline.splitting.capture import capture_call_graph
from arclight.parallel.pipeline.unit_costs import ModelCosts


def known_costs(model: nn.Module, example: Any) -> ModelCosts | None:
    """Predict the costs of a model's calls; None, by which `split` sees for itself, where that cannot be done."""
    args, kwargs = arguments_of(example)
    try:
        return predict(model, capture_call_graph(model, None, args, kwargs, ()), (args, kwargs))
    except PlanError:
        return None
