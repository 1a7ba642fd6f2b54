"""Stages on several processes save one folder, which opens in other numbers of stages, in one process, and in transformers."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.parallel.pipeline.even_cuts import even_cuts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import arclight as al
from arclight.fabric.strategies import DDPStrategy
from arclight.fabric.weight_files import WeightFiles
from arclight.parallel import PlanError, pipeline
from arclight.parallel.pipeline.weights import save as saving
from arclight.parallel.pipeline.weights.load import load
from arclight.parallel.pipeline.weights.save import save

torch.set_num_threads(1)

TOKENS = torch.arange(12).reshape(2, 6)
EXAMPLE = {"input_ids": TOKENS, "use_cache": False}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 37,
    "vocab_size": 100,
}


def gpt2() -> Any:  # its embedding is its output too
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=2, vocab_size=100, n_positions=32, eos_token_id=0))


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL))


BUILD: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama}


def everywhere(processes: int, function: Any, *arguments: Any) -> list[Any]:
    """Return the result of ``function`` on each of several processes."""

    def run(fabric: al.Fabric) -> list[Any]:
        torch.set_num_threads(1)
        return fabric.strategy.all_gather_object(function(*arguments))

    fabric = al.Fabric(accelerator="cpu", devices=processes, strategy=DDPStrategy(start_method="fork"))
    return fabric.launch(run)


def reference(name: str) -> Any:
    torch.manual_seed(1)
    return BUILD[name]().eval()


def cut(name: str, stages: int) -> pipeline.Pipe:
    with torch.device("meta"):
        model = BUILD[name]()
    return pipeline.split(model.eval(), EXAMPLE, stages=stages, policy=even_cuts)


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def through(pipe: pipeline.Pipe) -> Tensor:
    """The model's logits, by all processes: each computes the stage of its number."""
    values: list[Any] = [()]
    for number, stage in enumerate(pipe.stages):
        if dist.get_rank() == number:
            with torch.no_grad():
                made = stage(*values[0], args=(), kwargs=EXAMPLE)
            values = [made if number < len(pipe.stages) - 1 else made.logits]
        dist.broadcast_object_list(values, src=number)
    return values[0]


def pass_on(source: Path, target: Path) -> tuple[Tensor, int]:
    """Load stages from one folder and save them to another; return their output and the opened files."""
    pipe = cut(source.name.split("-")[0], dist.get_world_size())
    loaded = pipe.load(source, [dist.get_rank()])
    result = through(pipe)
    pipe.save(target, max_shard_size="30KB")
    return result, len(loaded.files)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILD)
def test_saved_by_four_opens_in_two_and_one_and_in_transformers(name: str, tmp_path: Path) -> None:
    model = reference(name)
    model.save_pretrained(tmp_path / f"{name}-0", max_shard_size="30KB")
    wanted, logits = model.state_dict(), model(**EXAMPLE).logits
    everyone = everywhere(4, pass_on, tmp_path / f"{name}-0", tmp_path / f"{name}-4")
    assert all(torch.equal(found, logits) for found, _ in everyone)
    assert max(opened for _, opened in everyone) < len(list((tmp_path / f"{name}-0").glob("*.safetensors")))
    everyone = everywhere(2, pass_on, tmp_path / f"{name}-4", tmp_path / f"{name}-2")
    assert all(torch.equal(found, logits) for found, _ in everyone)
    for folder in (tmp_path / f"{name}-4", tmp_path / f"{name}-2"):
        pipe = cut(name, 1)
        pipe.load(folder)
        assert is_equal(pipe.stages[0].state_dict(), wanted)
        opened, report = type(model).from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        assert is_equal(opened.state_dict(), wanted)
        assert torch.equal(opened.eval()(**EXAMPLE).logits, logits)
        assert type(AutoModelForCausalLM.from_pretrained(folder)) is type(model)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert ("lm_head.weight" in index["weight_map"]) == (name == "llama")  # a tied weight once
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
        assert set(index["weight_map"].values()) == {file.name for file in folder.glob("*.safetensors")}
        assert all(file.stat().st_size < 33e3 for file in folder.glob("*.safetensors"))


def test_a_model_of_another_type_is_saved_in_it(tmp_path: Path) -> None:
    model = reference("llama").bfloat16()
    pipe = pipeline.split(model, EXAMPLE, stages=2, policy=even_cuts)
    pipe.save(tmp_path / "m")
    assert sorted(file.name for file in (tmp_path / "m").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert is_equal(opened.state_dict(), model.state_dict())
    assert model.config.architectures is None  # the user's own object


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_stages_of_a_traced_graph_load_and_save_as_those_of_modules_do(name: str, tmp_path: Path) -> None:
    model = reference(name)
    save(model, tmp_path / "m", model=model)
    if name == "gpt2":  # a file may have a tied weight under its other name
        tensors = {key: tensor for key, tensor in model.state_dict().items() if key != "transformer.wte.weight"}
        save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with torch.device("meta"):
        empty = BUILD[name]().eval()
    empty.config.use_cache = False
    pipe = pipeline.split(empty, (TOKENS,), stages=2, policy=even_cuts, frontend="trace")
    for number in (0, 1):
        pipe.load(tmp_path / "m", [number])
    assert torch.equal(pipe(TOKENS).logits, model(TOKENS).logits)
    pipe.save(tmp_path / "n")
    assert is_equal(type(model).from_pretrained(tmp_path / "n").state_dict(), model.state_dict())


def test_a_folder_may_be_replaced_by_what_lies_in_it(tmp_path: Path) -> None:
    reference("gpt2").save_pretrained(tmp_path / "m")
    pipe = cut("gpt2", 2)
    pipe.load(tmp_path / "m")  # mapped
    with torch.no_grad():
        pipe.stages[1].get_parameter("transformer.ln_f.weight").add_(1)
    for _ in range(2):
        pipe.save(tmp_path / "m")
    wanted = reference("gpt2").state_dict()
    wanted["transformer.ln_f.weight"] += 1
    assert is_equal(GPT2LMHeadModel.from_pretrained(tmp_path / "m").state_dict(), wanted)
    assert is_equal(pipe.stages[0].state_dict(), {name: wanted[name] for name in pipe.stages[0].state_dict()})
    assert os.listdir(tmp_path) == ["m"]


def summed_loss(output: Any, targets: Tensor) -> tuple[Tensor, int]:
    return cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def train(source: Path, target: Path) -> float:
    """One update of a model that no process has as a whole; two stages in each, of which both ends share a weight."""
    pipe = cut("gpt2", 4)
    with pytest.raises(
        PlanError, match=r"is on the meta device: .* first, by pipe\.load\(folder, pipe\.local_stage_indices"
    ):
        pipe.on(schedule="ZBVZeroBubble")
    pipe.load(source, pipe.local_stage_indices("ZBVZeroBubble"))
    runner = pipe.on(schedule="ZBVZeroBubble", micro_batches=2, loss=summed_loss)
    optimizer = torch.optim.SGD(runner.parameters(), 0.5)
    loss = float(runner.step(**EXAMPLE, targets=TOKENS).loss)
    optimizer.step()
    pipe.save(target)
    return loss


def test_stages_that_were_loaded_train_and_are_saved(tmp_path: Path) -> None:
    model = reference("gpt2")
    model.save_pretrained(tmp_path / "m")
    losses = everywhere(2, train, tmp_path / "m", tmp_path / "n")
    total, count = summed_loss(model(**EXAMPLE), TOKENS)
    (total / count).backward()
    assert losses == pytest.approx([float(total.detach() / count)] * 2, rel=1e-6)
    torch.optim.SGD(model.parameters(), 0.5).step()
    wanted = model.state_dict()
    for name, tensor in GPT2LMHeadModel.from_pretrained(tmp_path / "n").state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)


# -- stages in several processes each ------------------------------------------------------------------------------


def replicas(folder: Path) -> list[str]:
    """Two pipelines of two stages: what this process wrote."""
    written: list[str] = []
    pipe = cut("gpt2", 2)
    pipe.initialize([dist.get_rank() % 2], seed=3)
    plainly = saving.write_shard

    def noted(tensors: dict[str, Tensor], file: Path) -> None:
        written.extend(tensors)
        plainly(tensors, file)

    saving.write_shard = noted  # type: ignore[assignment]
    try:
        pipe.save(folder)
    finally:
        saving.write_shard = plainly
    return written


@pytest.mark.slow
def test_replicated_weights_are_saved_once_and_by_all_ranks(tmp_path: Path) -> None:
    everyone = everywhere(4, replicas, tmp_path / "m")
    pipe = cut("gpt2", 1)
    pipe.initialize(seed=3)
    opened = GPT2LMHeadModel.from_pretrained(tmp_path / "m")
    assert is_equal(opened.state_dict(), pipe.stages[0].state_dict())
    assert all(everyone)
    names = [name for written in everyone for name in written]
    assert sorted(names) == sorted(name for name, _ in opened.named_parameters())


def spread(folder: Path) -> bool:
    """A stage that is spread over both processes, saved, and loaded into shares that are on the meta device."""
    mesh = init_device_mesh("cpu", (2,))
    model = reference("llama")
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pipe = pipeline.split(model, EXAMPLE, stages=1, policy=even_cuts)
    fully_shard(pipe.stages[0], mesh=mesh)
    pipe.save(folder, max_shard_size="20KB")
    again = cut("llama", 1)
    fully_shard(again.stages[0], mesh=mesh)
    loaded = load(again.stages[0], folder)
    shares = dict(again.stages[0].named_parameters())
    assert all(isinstance(share, DTensor) for share in shares.values())
    assert 1.9 < sum(t.nbytes for t in wanted.values()) / loaded.bytes < 2.1
    return is_equal({name: share.full_tensor() for name, share in shares.items()}, wanted)  # type: ignore[attr-defined]


def test_sharded_weights_are_saved_whole_and_loaded_as_shards(tmp_path: Path) -> None:
    assert everywhere(2, spread, tmp_path / "m") == [True, True]
    assert is_equal(LlamaForCausalLM.from_pretrained(tmp_path / "m").state_dict(), reference("llama").state_dict())


class Shifted(nn.Module):
    """Buffers between the parts: every stage needs them, one of them lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.shift)
        nn.init.constant_(self.scale, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale + self.shift
        return x


def test_buffers_between_the_parts_are_saved_once_and_loaded_everywhere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Shifted(), torch.randn(2, 4)
    pipeline.split(model, (x,), stages=4, policy=even_cuts).save(tmp_path / "m")
    assert set(WeightFiles(tmp_path / "m")) == set(model.state_dict())
    with torch.device("meta"):
        empty = Shifted()
    pipe = pipeline.split(empty, (x,), stages=4, policy=even_cuts)
    for number in range(4):
        loaded = pipe.load(tmp_path / "m", [number])
        assert loaded.initialized == ("scale",)
    assert torch.equal(pipe(x), model(x))


# -- what goes wrong -----------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def failing(folder: Path) -> list[str]:
    told = []
    pipe = cut("gpt2", 2)
    pipe.initialize([0], seed=1)  # nobody has the second stage
    with pytest.raises(
        ValueError, match=r"no process has values of transformer\.h\.1\..* every stage must be materialized"
    ):
        pipe.save(folder)
    pipe.initialize([1] if dist.get_rank() == 1 else [], seed=1)

    def full(tensors: Any, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    plainly = saving.write_shard
    if dist.get_rank() == 1:
        saving.write_shard = full
    try:
        with pytest.raises((OSError, RuntimeError)) as caught:
            pipe.save(folder)
        told.append(str(caught.value))
    finally:
        saving.write_shard = plainly
    (folder.parent / "other").mkdir(exist_ok=True)
    (folder.parent / "other" / "tokenizer.json").write_text("{}")
    with pytest.raises((FileExistsError, RuntimeError), match=r"has tokenizer\.json, which would be lost"):
        pipe.save(folder.parent / "other")
    return told


def test_a_save_that_fails_on_one_process_fails_on_all_and_what_was_there_stays(tmp_path: Path) -> None:
    reference("gpt2").save_pretrained(tmp_path / "m")
    before = contents(tmp_path / "m")
    first, second = everywhere(2, failing, tmp_path / "m")
    assert first == [
        "rank 1 could not save its part, so nothing was saved: OSError: [Errno 28] No space left on device"
    ]
    assert second == ["[Errno 28] No space left on device"]
    assert contents(tmp_path / "m") == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m", "other"]


class Filled(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((50_000,), float(value))) for _ in range(8))


def save_on(folder: Path) -> None:
    for value in range(1, 10_000):
        save(Filled(value), folder, max_shard_size="300KB")


@pytest.mark.slow
def test_a_killed_save_leaves_what_was_there(tmp_path: Path) -> None:
    save(Filled(0), tmp_path / "m")
    rng, leftovers = random.Random(1), 0
    for attempt in range(50):
        if attempt >= 8 and leftovers:
            break
        process = multiprocessing.get_context("fork").Process(target=save_on, args=(tmp_path / "m",))
        process.start()
        time.sleep(0.05 + rng.expovariate(1 / 0.05))
        process.kill()
        process.join()
        leftovers += len(os.listdir(tmp_path)) > 1
        found = Filled(-1)
        load(found, tmp_path / "m")
        values = {float(value) for part in found.parts for value in part.detach().aminmax()}
        assert len(values) == 1
        assert values != {-1.0}
    assert leftovers
    save(Filled(3), tmp_path / "m")
    assert os.listdir(tmp_path) == ["m"]
