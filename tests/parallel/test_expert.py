"""Experts shared out among real processes (gloo): the numbers are those of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from arclight.parallel import PlanError
from arclight.parallel.expert import expert_layers, shard_experts
from arclight.text import build_model
from arclight.text.models.moe import MoE, MoEConfig

CHECKS = ("uneven", "all_on_one", "fixed_sizes", "too_small", "recomputed", "beside_fsdp")


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_experts_on_several_processes(size: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("expert_script.py")
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**os.environ, **rendezvous, "RANK": str(rank)}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        for process in processes:
            out, error = process.communicate(timeout=120)
            assert process.returncode == 0, error
            assert [line.removeprefix("passed ") for line in out.split("\n") if line] == list(CHECKS)
    finally:
        for process in processes:
            process.kill()


def test_what_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with pytest.raises(PlanError, match="the model has none"):
            shard_experts(build_model("llama3-debug", layers=1), mesh)
        model = torch.nn.Sequential(MoE(MoEConfig(experts=3, top_k=1, hidden=8), 8, 0.1, 0.1))
        assert [name for name, _, _ in expert_layers(model)] == ["0"]
        mesh.size = lambda mesh_dim=None: 2  # type: ignore[method-assign]
        with pytest.raises(PlanError, match="0 has 3 experts, which ep = 2 does not divide"):
            shard_experts(model, mesh)
    finally:
        torch.distributed.destroy_process_group()
