"""Apply torch.compile block by block: equal blocks share one compilation.

`parallelize` and `parallelize_steps` apply it after activation checkpointing and before FSDP. Names of parameters stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from arclight.parallel.blocks import repeated_blocks
from arclight.parallel.mesh import Mesh
from arclight.parallel.plan import Plan, PlanError


def compile_blocks(model: nn.Module, plan: Plan) -> None:
    """Compile each block of ``model`` in place by the plan; names stay."""
    compile_each([block for _, block in repeated_blocks(model)], plan)


def compile_each(parts: Iterable[nn.Module], plan: Plan) -> None:
    """Compile these blocks in place by the plan."""
    if plan.compile == "none":
        return
    options: dict[str, Any] = {"backend": plan.compile}
    if plan.async_tp:
        options["options"] = {"_micro_pipeline_tp": True}
    if not isinstance(plan.activation_checkpointing, str):
        options["backend"] = _within_budget(plan.activation_checkpointing, options.get("options"))
        options.pop("options", None)
    for part in parts:
        part.compile(**options)


def enable_async_tp(mesh: Mesh) -> None:
    """Enable asynchronous tensor parallelism over the symmetric memory of the ``tp`` group.

    The compiler pipelines exchanges and products through it. Raises PlanError for devices that have no such memory.
    """
    if mesh.device_type != "cuda":
        raise PlanError("async_tp needs CUDA devices that reach each other's memory: set async_tp = false")
    from torch.distributed import _symmetric_memory

    _symmetric_memory.enable_symm_mem_for_group(mesh.tp.get_group().group_name)


def _within_budget(part: float, options: Any) -> Any:
    """Return inductor as a backend that keeps the ``part`` of activations.

    The setting holds while it compiles only.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=part):
            return compile_fx(graph, inputs, config_patches=options)

    return backend
