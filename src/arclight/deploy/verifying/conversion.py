"""Quantize a model by any quantizer of torchao, and keep its references.

`verify` calls `post_training` and `trained`, and compares the parts of the `Conversion` that comes back; a new reference is a field of it. Both go
through ``quantizing.pt2e`` and ``batch_norm`` as `ptq` and `qat` do, but leave integer weights under torchao's names.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule, Node

from arclight.deploy.capture import FreeDimensions, Inputs, as_outputs, capture, frozen_copy, input_names, quiet
from arclight.deploy.errors import QuantizeError, VerificationError
from arclight.deploy.quantizing import batch_norm, pt2e
from arclight.deploy.quantizing.ptq import Calibration, check_varied
from arclight.deploy.quantizing.qat import capture_as, round_biases

Mode = Literal["static", "dynamic", "weight-only", "qat"]
"""Ranges from calibration, of each call, of weights alone, or learned while the model trains."""
LEARNING_RATE = 1e-3
"""Rate of the SGD that `trained` takes its few steps with."""
Literals = dict[str, tuple[float, ...]]
"""Numbers of batch norms and dropouts that a conversion must not change, see `literals` of ``batch_norm``."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One model before and after a quantizer."""

    reference: nn.Module
    """The float model, with trained weights if it was trained."""
    captured: GraphModule
    """The captured graph, before batch norms are folded or fused."""
    twin: GraphModule
    """The graph that was quantized, without rounding; its nodes have the names of those of ``program``."""
    program: GraphModule
    """The converted graph, weights folded to integers."""
    prepared: GraphModule
    """The graph with observers, which ``rewritten`` converts again."""
    trained: GraphModule | None
    """The trained graph with fake quantization, in evaluation mode."""
    before: Literals
    """(momentum, epsilon) of batch norms and (p,) of dropout in ``captured``."""
    after: tuple[Literals, ...]
    """The same after each further step of the conversion."""

    def rewritten(self) -> GraphModule:
        """Convert again, with operators rewritten to integer arithmetic if torchao knows how.

        It takes seconds.
        """
        with torch.no_grad(), quiet():
            return pt2e.convert(copy.deepcopy(self.prepared), fold=True, reference=True)


def post_training(model: nn.Module, batches: Sequence[Inputs], quantizer: Any, free: FreeDimensions) -> Conversion:
    """Quantize ``model`` with ranges of all of ``batches``.

    Raises QuantizeError if they make NaN or infinite values.
    """
    reference = frozen_copy(model)
    graph = capture(frozen_copy(model), batches[0], free=free).module(check_guards=False)
    assert isinstance(graph, GraphModule)
    with quiet():
        captured = copy.deepcopy(graph)
    with torch.no_grad():
        with quiet():
            prepared = pt2e.prepare(graph, quantizer, batch_norm.fold_untrained)
        run = Calibration(prepared)
        for batch in batches:
            run.run(*batch)
        run.check_ranges()
        return _converted(prepared, reference, captured, batch_norm.literals(captured), ())


def trained(
    model: nn.Module, batches: Sequence[Inputs], quantizer: Any, free: FreeDimensions | None, steps: int
) -> Conversion:  # fmt: skip
    """Train a copy of ``model`` with fake quantization towards its own outputs; convert it.

    Training takes ``steps``. Ranges start from all of ``batches``, in evaluation mode. Raises VerificationError if a
    rounded weight gets no gradient, or the loss is not finite; QuantizeError if inputs do not vary, or outputs in training have other shapes;
    ExportError for a model that cannot be captured in training mode.
    """
    model = copy.deepcopy(model).cpu().float().requires_grad_(True)
    reference = frozen_copy(model)
    check_varied(input_names(model, len(batches[0])), batches)
    with torch.no_grad():
        targets = [as_outputs(reference(*batch)) for batch in batches]
    graph = capture_as("training", model.train(), batches[0], free=free)
    with quiet():
        captured = copy.deepcopy(graph)
        prepared = pt2e.prepare_qat(graph, quantizer, batch_norm.fuse)
    before, after = batch_norm.literals(captured), [batch_norm.literals(prepared)]
    with torch.no_grad():
        batch_norm.set_training(prepared, False)
        after.append(batch_norm.literals(prepared))
        _observe(prepared, True)
        for batch in batches:
            prepared(*batch)
    _train(prepared, batches, targets, steps)
    after.append(batch_norm.literals(prepared))
    batch_norm.set_training(prepared, False)
    _observe(prepared, False)
    tensors = {**dict(prepared.named_parameters()), **dict(prepared.named_buffers())}
    names = reference.state_dict().keys() & tensors.keys()
    reference.load_state_dict({name: tensors[name].detach() for name in names}, strict=False)
    with torch.no_grad(), quiet():
        emulated = copy.deepcopy(prepared)
        batch_norm.fold(prepared)
        prepared(*batches[0])  # ranges of folded weights
        round_biases(prepared)
        return _converted(prepared, reference, captured, before, after, emulated)


def without_rounding(prepared: GraphModule) -> GraphModule:
    """Copy a prepared graph without its observers and fake quantization."""
    with quiet():
        graph = copy.deepcopy(prepared)
    for node in list(graph.graph.nodes):
        if node.op == "call_module" and isinstance(graph.get_submodule(str(node.target)), pt2e.OBSERVERS):
            source = node.args[0]
            assert isinstance(source, Node)
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _converted(
    prepared: GraphModule,
    reference: nn.Module,
    captured: GraphModule,
    before: Literals,
    after: Sequence[Literals],
    emulated: GraphModule | None = None,
) -> Conversion:
    twin = without_rounding(prepared)
    with quiet():
        kept = copy.deepcopy(prepared)
        program = pt2e.convert(prepared, fold=True)
        if not any(node.target in pt2e.QUANTIZE | pt2e.DEQUANTIZE for node in program.graph.nodes):
            raise VerificationError(
                "the quantizer annotates nothing: the converted graph has no quantize and no dequantize operator. Either it "
                "supports no operator of this model, or it was given no configuration, say by set_global"
            )
    return Conversion(
        reference=reference,
        captured=captured,
        twin=twin,
        program=program,
        prepared=kept,
        trained=emulated,
        before=before,
        after=(*after, batch_norm.literals(program)),
    )


def _observe(prepared: GraphModule, enabled: bool) -> None:
    """Set whether fake quantization updates its ranges."""
    for module in prepared.modules():
        if isinstance(module, pt2e.FakeQuantize):
            module.enable_observer(enabled)
        elif isinstance(module, pt2e.OBSERVERS):
            module.train(enabled)


def _train(
    prepared: GraphModule, batches: Sequence[Inputs], targets: Sequence[Sequence[torch.Tensor]], steps: int
) -> None:  # fmt: skip
    batch_norm.set_training(prepared, True)
    weights = _rounded_weights(prepared)
    optimizer = torch.optim.SGD([value for value in prepared.parameters() if value.requires_grad], LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        given = as_outputs(prepared(*batches[step % len(batches)]))
        wanted = targets[step % len(batches)]
        shapes = [tuple(value.shape) for value in given], [tuple(value.shape) for value in wanted]
        if shapes[0] != shapes[1]:
            raise QuantizeError(
                f"the model returns {shapes[0]} in training and {shapes[1]} in evaluation: verify the part of it that returns "
                "the same in both"
            )
        loss = sum((one - other).square().mean() for one, other in zip(given, wanted) if one.is_floating_point())
        if not isinstance(loss, torch.Tensor) or not math.isfinite(loss.detach()):
            raise VerificationError(f"qat: the loss of step {step} is {loss}: it must be a finite number")
        loss.backward()
        dead = [name for name, value in weights.items() if value.grad is None or not value.grad.isfinite().all()]
        if dead:
            raise VerificationError(
                f"qat: the rounded weights {dead} get no gradient, or NaN: their fake quantization stops it"
            )
        optimizer.step()


def _rounded_weights(prepared: GraphModule) -> dict[str, nn.Parameter]:
    """Return the parameters that are rounded, scaled by a batch norm or not, by name."""
    parameters = dict(prepared.named_parameters())
    found: dict[str, nn.Parameter] = {}
    for node in prepared.graph.nodes:
        if node.op == "call_module" and isinstance(prepared.get_submodule(str(node.target)), pt2e.OBSERVERS):
            source = node.args[0]
            name = str(source.meta.get(batch_norm.SCALED, source.target))
            if name in parameters and parameters[name].requires_grad:
                found[name] = parameters[name]
    return found
