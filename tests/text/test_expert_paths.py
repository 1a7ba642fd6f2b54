"""Paths by which experts are multiplied: the Triton product beside loops and the dense path, and the choice among paths."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.text.test_language_model import fit

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.extras import MissingExtraError
from arclight.parallel import Plan
from arclight.parallel.mesh import Mesh
from arclight.text import build_model
from arclight.text.model import expert_paths
from arclight.text.model.conditional_product import conditional_product
from arclight.text.model.expert_paths import MoE, expert_layers, prepare_paths, tokens_of_pass
from arclight.text.model.moe import MoEConfig
from arclight.text.model.switch_head import SwitchHeadConfig
from arclight.text.settings import LanguageTask

TRITON = Path(os.environ.get("TRITON_SITE", f"{tempfile.gettempdir()}/triton-site"))
"""A folder with Triton (``pip install --no-deps --target``), for machines without a GPU; only the script of this file sees it."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Return the output of the comparison in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None and not (TRITON / "triton").is_dir():
        pytest.skip(f"triton is not installed, and not in {TRITON}: pip install --no-deps --target {TRITON} triton")
    root = Path(__file__).parents[2]
    found = [str(root / "src"), str(root), str(TRITON)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.text.triton_script"], capture_output=True, text=True, check=False,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(found)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def test_products_and_gradients_are_those_of_a_loop_in_float32(report: dict[str, Any]) -> None:
    """8 bits: 3 bits of mantissa are a relative error of 1/16 of each operand at most, an int8 one of 1/254 of a row's largest."""
    assert len(report["products"]) == 5
    for name, errors in report["products"].items():
        bound = 1e-2 if "bfloat16" in name else 1e-3 if "float16" in name else 1e-5
        for part in ("product", "rows", "weights"):
            assert errors[part] < bound, (name, part)
    for name in ("one expert, float32", "uneven, over tiles, bfloat16"):
        errors = report["products"][name]
        assert errors["product"] < errors["e4m3"] < 0.1, name
        assert errors["product"] < errors["int8"] < 0.02, name


def test_gradients_of_products_in_8_bits_are_straight_through(report: dict[str, Any]) -> None:
    compared = [errors for errors in report["products"].values() if "int8" in errors]
    assert len(compared) == 3
    assert all(errors["e4m3, gradient"] == errors["int8, gradient"] == 0 for errors in compared)


def test_layers_on_the_triton_path_are_the_dense_reference(report: dict[str, Any]) -> None:
    for name, bound in (("float32", 1e-5), ("bfloat16", 0.03)):  # of three products one after the other
        for layer, error in report["layers"][name].items():
            assert error < bound, (name, layer)
    assert report["gathered"]


def test_triton_is_imported_on_request_and_refused_if_no_kernel_runs(report: dict[str, Any]) -> None:
    assert report["imported before"] is False
    assert 'path = "triton" needs a GPU, and this is a cpu: set path = "auto" or "grouped"' in report["cpu"]
    assert "not torch.float64" in report["float64"]


def test_paths_and_precisions_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match=r"moe.path = 'cuda' is not known; choose auto, dense, grouped, triton"):
        MoEConfig(experts=4, top_k=1, hidden=8, path="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"switch_head.path = 'cvmm' is not known"):
        SwitchHeadConfig(experts=4, path="cvmm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"moe.precision = 'fp8' is not known; choose full, e4m3, int8"):
        MoEConfig(experts=4, top_k=1, hidden=8, path="triton", precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'moe.precision = "e4m3" needs the Triton path'):
        MoEConfig(experts=4, top_k=1, hidden=8, precision="e4m3")


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_the_triton_path_names_the_missing_package() -> None:
    x, w, ends = torch.randn(2, 4), torch.randn(1, 4, 4), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(MissingExtraError, match=r"\[triton\]"):
        conditional_product(x, w, ends)
    model = build_model("sigma-moe-debug", moe={"path": "triton"})
    for device in (CPU, torch.device("cuda")):
        asked: list[Any] = []  # other ranks learn of it, and do not wait for this one
        with pytest.raises(MisconfigurationError, match=r"moe.path: triton is not installed.*\[triton\]"):
            prepare_paths(model, 64, device, torch.float32, gather=lambda own: asked.append(own) or [own])  # noqa: B023
        assert len(asked) == 1


class Clock:
    """Stands in for the measurement: the seconds of each path, and how often they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds, self.asked = seconds, 0
        monkeypatch.setattr(expert_paths, "timed", self)
        monkeypatch.setattr(expert_paths, "_measured", {})

    def __call__(self, shape: Any, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
        self.asked += 1
        return {path: self.seconds[path] for path in shape.paths}


def paths(model: Any) -> set[str]:
    return {layer.experts.path if isinstance(layer, MoE) else layer.path for layer in expert_layers(model)}


def small(**settings: Any) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 64, "dim": 32, "layers": 2, "heads": 2, "head_dim": 16}
    return build_model("deptoe-debug", **sizes, moe=settings or {"path": "auto"}, switch_head={"path": "auto"})


def test_the_fastest_path_is_taken_and_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(monkeypatch, grouped=1.0, dense=0.5), small()
    assert paths(model) == {"grouped"}
    chosen = prepare_paths(model, 100, CPU, torch.float32)
    assert paths(model) == {"dense"}
    assert clock.asked == len(chosen) == 3  # feed-forward parts, values and outputs
    assert any(name == "moe 32, 4 of 16 experts of 128, relu, 128 tokens, float32, cpu" for name in chosen)
    assert prepare_paths(small(), 128, CPU, torch.float32) == chosen
    assert clock.asked == 3
    prepare_paths(small(), 129, CPU, torch.float32)
    assert clock.asked == 6


def test_another_path_must_gain_and_dense_is_not_tried_among_many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, grouped=1.0, dense=0.97)
    assert set(prepare_paths(small(), 64, CPU, torch.float32).values()) == {"grouped"}
    clock = Clock(monkeypatch, grouped=1.0, dense=0.1)
    model = build_model("sigma-moe-debug", moe={"path": "auto", "experts": 17, "top_k": 4})
    assert set(prepare_paths(model, 64, CPU, torch.float32).values()) == {"grouped"}
    assert clock.asked == 0


def test_paths_that_were_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, grouped=1.0, dense=0.5)
    model = build_model("sigma-moe-debug", moe={"path": "dense"})
    assert prepare_paths(model, 64, CPU, torch.float32) == {}
    assert paths(model) == {"dense"}


def test_all_ranks_take_what_rank_zero_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a rank that has other layers, as stages of a pipeline have, and whose own measurement would say otherwise."""
    of_both: list[Any] = []
    Clock(monkeypatch, grouped=1.0, dense=0.5)
    prepare_paths(small(), 64, CPU, torch.float32, gather=lambda own: of_both.append(own) or [own])
    Clock(monkeypatch, grouped=1.0, dense=0.5)
    stage = torch.nn.Linear(2, 2)  # rank 0's has no experts
    sent = prepare_paths(stage, 64, CPU, torch.float32, gather=lambda own: [own, *of_both])
    assert len(sent) == 3
    Clock(monkeypatch, grouped=0.1, dense=0.5)
    other = small()
    assert (
        prepare_paths(other, 64, CPU, torch.float32, gather=lambda own: [own, *of_both], send=lambda own: sent) == sent
    )
    assert paths(other) == {"dense"}


def test_ranks_refuse_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MisconfigurationError, match="of another rank"):
        prepare_paths(small(), 64, CPU, torch.float32, gather=lambda own: [own, ("moe.path: of another rank", [])])


@pytest.mark.parametrize("first", [True, False], ids=["rank 0 has not", "rank 1 has not"])
def test_only_paths_that_run_on_every_rank_are_measured(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """As where one machine has no Triton, whichever it is."""
    Clock(monkeypatch, grouped=1.0, dense=0.5)

    def gather(own: Any) -> list[Any]:
        less = (None, [(name, dataclasses.replace(shape, paths=("grouped",))) for name, shape in own[1]])
        return [less, own, own] if first else [own, less, own]

    model = small()
    prepare_paths(model, 64, CPU, torch.float32, gather=gather)
    assert paths(model) == {"grouped"}


def test_a_kept_path_that_does_not_run_any_more_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the Triton that the run began with."""
    Clock(monkeypatch, grouped=1.0, dense=0.5)
    model = small()
    kept: Any = dict.fromkeys(prepare_paths(model, 64, CPU, torch.float32), "triton")
    with pytest.warns(
        UserWarning, match="'triton' before the run was resumed, which does not run on all ranks any more"
    ):
        prepare_paths(model, 64, CPU, torch.float32, kept)
    assert paths(model) == {"dense"}


def test_a_path_measured_for_other_paths_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of experts under ep has the sizes of a whole layer, and no dense path."""
    Clock(monkeypatch, grouped=1.0, dense=0.5)
    shape = expert_paths.shape_class(next(expert_layers(small())), 64, CPU, torch.float32)
    assert shape is not None
    assert expert_paths.measured(shape, CPU, torch.float32) == "dense"
    share = dataclasses.replace(shape, paths=("grouped",))
    assert expert_paths.measured(share, CPU, torch.float32) == "grouped"


def test_triton_is_not_measured_for_types_that_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_paths.importlib.util, "find_spec", lambda name: object())
    layer = MoE(MoEConfig(experts=4, top_k=2, hidden=8, path="auto"), 8, 0.3, 0.3)
    for dtype, known in ((torch.float32, True), (torch.float64, False)):
        shape = expert_paths.shape_class(layer, 16, torch.device("cuda"), dtype)
        assert shape is not None
        assert ("triton" in shape.paths) is known


def test_the_measurement_leaves_random_numbers_alone() -> None:
    layer = MoE(MoEConfig(experts=4, top_k=2, hidden=8, path="auto"), 8, 0.3, 0.3)
    shape = expert_paths.shape_class(layer, 16, CPU, torch.float32)
    assert shape is not None
    before = torch.get_rng_state()
    times = expert_paths.timed(shape, CPU, torch.float32, turns=1)
    assert torch.equal(before, torch.get_rng_state())
    assert set(times) == {"grouped", "dense"}
    assert all(seconds > 0 for seconds in times.values())


def test_paths_are_measured_with_the_tokens_of_a_pass() -> None:
    mesh = Mesh.__new__(Mesh)  # made by processes; its plan is all that counts here
    mesh.plan = Plan(pp=2, micro_batches=4, cp=2)
    assert tokens_of_pass(64, SimpleNamespace(mesh=mesh)) == 8
    assert tokens_of_pass(4, SimpleNamespace(mesh=mesh)) == 1
    assert tokens_of_pass(64, SimpleNamespace()) == 64


def test_a_resumed_run_takes_the_path_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, grouped=1.0, dense=0.5)
    sizes: dict[str, Any] = {"dim": 32, "layers": 1, "heads": 2, "moe": {"path": "auto", "hidden": 16}}
    task = LanguageTask(model="sigma-moe-debug", sampling=None, overrides=sizes)
    trainer, model = fit(tmp_path / "1", steps=2, batch_size=4, settings=task, val_check_interval=2)
    assert paths(model.model) == {"dense"}
    assert set(model.expert_paths.values()) == {"dense"}
    assert trainer.measured == {"overrides.moe.path": "dense"}
    Clock(monkeypatch, grouped=0.1, dense=0.5)
    last = trainer.checkpoint_callback.last_model_path or trainer.checkpoint_callback.best_model_path
    _, resumed = fit(tmp_path / "2", steps=3, batch_size=4, ckpt=last, settings=task, val_check_interval=None)
    assert paths(resumed.model) == {"dense"}
    assert resumed.trainer.measured == {"overrides.moe.path": "dense"}
    assert clock.asked == 1
