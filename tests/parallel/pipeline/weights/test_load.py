"""A stage gets its own tensors out of files, and nothing else: the right ones, by name, in little memory - or an error that says which."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.stage_loading import load_peak
from safetensors.torch import save_file
from torch import Tensor, nn

from arclight.fabric.weight_files import WeightFiles
from arclight.parallel.pipeline.weights.load import load

torch.set_num_threads(1)


class Net(nn.Module):
    """Tied weights, numbers that are no floats, a buffer that no file has."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.scale = Scale()
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        torch.arange(4.0, out=self.steps)


def net(seed: int = 0, tied: bool = True) -> Net:
    torch.manual_seed(seed)
    made = Net(tied)
    made.body[1].num_batches_tracked.fill_(7)
    return made


def on_meta(build: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return build()


def weights(model: nn.Module, prefix: str = "", without: tuple[str, ...] = ("head.weight",)) -> dict[str, Tensor]:
    return {prefix + name: tensor.clone() for name, tensor in model.state_dict().items() if name not in without}


def folder_of(tensors: dict[str, Tensor], folder: Path, files: Callable[[str], str]) -> Path:
    """As Hugging Face writes one: ``files`` says which file a name is in."""
    folder.mkdir()
    shards: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        shards.setdefault(files(name), {})[name] = tensor
    for file, content in shards.items():
        save_file(content, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: files(name) for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def is_same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip([*model.parameters(), *model.buffers()], [*other.parameters(), *other.buffers()], strict=True)
    return all(torch.equal(one, two) and one.dtype == two.dtype for one, two in pairs)


# -- what is read --------------------------------------------------------------------------------------------------


def test_a_whole_model_comes_from_one_file_tied_weights_and_passing_buffers_too(tmp_path: Path) -> None:
    save_file(weights(net()), tmp_path / "w.safetensors")
    model = on_meta(Net)
    loaded = load(model, tmp_path / "w.safetensors")
    assert is_same(model, net())
    assert model.head.weight is model.embed.weight
    assert isinstance(model.embed.weight, nn.Parameter)
    assert loaded.initialized == ("scale.steps",)
    assert loaded.bytes == sum(t.nbytes for t in weights(net()).values())
    assert "head.weight" not in loaded.names


def test_a_stage_opens_only_files_that_have_something_of_it(tmp_path: Path) -> None:
    folder = folder_of(weights(net()), tmp_path / "m", lambda name: f"{name.split('.')[0]}.safetensors")
    (folder / "embed.safetensors").write_bytes(b"damaged")
    stage = nn.Module()
    stage.add_module("body", on_meta(Net).body)
    assert load(stage, folder).files == (folder / "body.safetensors",)
    assert torch.equal(stage.body[0].weight, net().body[0].weight)
    with pytest.raises(ValueError, match=r"embed\.safetensors is not a sound safetensors file"):
        load(on_meta(Net), folder)


def test_mapped_weights_are_copied_on_write(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights(net()), path)
    before = path.read_bytes()
    for mapped in (True, False):
        model = on_meta(Net)
        load(model, path, mapped=mapped)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        assert torch.equal(model.head.weight, net().head.weight + 1)
        assert path.read_bytes() == before
    copied = on_meta(Net)
    load(copied, path, mapped=False)
    path.write_bytes(b"\0" * len(before))  # in the place of the file, as a careless program would
    assert is_same(copied, net())


def test_floats_are_converted_and_other_types_never(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights(net()), path)
    model = on_meta(Net)
    load(model, path, dtype=torch.bfloat16)
    assert torch.equal(model.embed.weight, net().embed.weight.bfloat16())
    assert model.body[1].num_batches_tracked.dtype == torch.int64
    assert int(model.body[1].num_batches_tracked) == 7
    assert model.scale.steps.dtype == torch.float32
    half = on_meta(Net).bfloat16()
    load(half, path)
    assert half.embed.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"dtype torch.int8 is not one of"):
        load(on_meta(Net), path, dtype=torch.int8)
    for name, kind in (("body.1.num_batches_tracked", torch.int32), ("embed.weight", torch.float8_e4m3fn)):
        save_file(weights(net()) | {name: weights(net())[name].to(kind)}, path)
        with pytest.raises(
            ValueError, match=rf"w\.safetensors: {name} is {kind}, and {name} .*: these are not converted"
        ):
            load(on_meta(Net), path)


def test_allocated_parameters_are_loaded_in_place(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights(net()), path)
    model = net(5)
    model.scale.steps.fill_(3)
    held = dict(model.named_parameters())
    places = {name: parameter.data_ptr() for name, parameter in held.items()}
    load(model, path)
    assert all(parameter is held[name] for name, parameter in model.named_parameters())
    assert {name: parameter.data_ptr() for name, parameter in held.items()} == places
    assert torch.equal(model.embed.weight, net().embed.weight)
    assert model.scale.steps.tolist() == [3] * 4  # nobody asked for it
    with pytest.raises(ValueError, match=r"embed.weight has memory as torch.float32 already"):
        load(model, path, dtype=torch.float16)


def test_frozen_parameters_stay_so(tmp_path: Path) -> None:
    save_file(weights(net()), tmp_path / "w.safetensors")
    model = on_meta(Net)
    model.body.requires_grad_(False)
    load(model, tmp_path / "w.safetensors")
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, False, False, False]


# -- names ---------------------------------------------------------------------------------------------------------


def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    tensors = weights(net(), without=("embed.weight",))
    save_file(tensors, tmp_path / "w.safetensors")
    model = on_meta(Net)
    assert load(model, tmp_path / "w.safetensors").names["embed.weight"] == "head.weight"
    assert is_same(model, net())
    save_file(tensors | {"embed.weight": tensors["head.weight"].clone()}, tmp_path / "w.safetensors")
    load(model, tmp_path / "w.safetensors")
    save_file(tensors | {"embed.weight": tensors["head.weight"] + 1}, tmp_path / "w.safetensors")
    with pytest.raises(
        ValueError, match=r"head.weight differs from embed.weight, which in this model are one tied weight"
    ):
        load(on_meta(Net), tmp_path / "w.safetensors")


@pytest.mark.parametrize("given", [None, "model", "model."])
def test_a_prefix_that_only_the_file_has_is_found_or_given(given: str | None, tmp_path: Path) -> None:
    others = {"modelling.embed.weight": torch.zeros(6, 4), "modelembed.weight": torch.zeros(6, 4)}  # no dot, no prefix
    save_file(weights(net(), "model.") | ({} if given is None else others), tmp_path / "w.safetensors")
    model = on_meta(Net)
    load(model, tmp_path / "w.safetensors", prefix=given)
    assert is_same(model, net())


@pytest.mark.parametrize("given", [None, "trunk"])
def test_a_prefix_that_only_the_model_has_is_found_or_given(given: str | None, tmp_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.top = Net(), nn.Linear(4, 2)

    torch.manual_seed(0)
    whole = Whole()
    tensors = weights(whole.trunk) | {f"top.{name}": tensor for name, tensor in weights(whole.top).items()}
    save_file(tensors, tmp_path / "w.safetensors")
    model = on_meta(Whole)
    load(model, tmp_path / "w.safetensors", prefix=given)
    assert is_same(model, whole)


def test_names_that_could_be_meant_are_not_guessed(tmp_path: Path) -> None:
    save_file(weights(net(), "student.") | weights(net(1), "teacher."), tmp_path / "w.safetensors")
    with pytest.raises(
        ValueError, match=r'more than one name \(with "student." before it or with "teacher." before it\)'
    ):
        load(on_meta(Net), tmp_path / "w.safetensors")
    model = on_meta(Net)
    load(model, tmp_path / "w.safetensors", prefix="teacher")
    assert is_same(model, net(1))
    mixed = {name: tensor for name, tensor in weights(net(1)).items() if "body" not in name} | weights(net(), "old.")
    save_file(mixed, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"lacks body.0.weight, body.0.bias"):  # half of one model, half of another
        load(on_meta(Net), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r'no name begins with "new.": .* has embed.weight'):
        load(on_meta(Net), tmp_path / "w.safetensors", prefix="new")


# -- files that are not right --------------------------------------------------------------------------------------


def damaged(folder: Path, what: str) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = folder / "body.safetensors"
    if what == "cut short":
        shard.write_bytes(shard.read_bytes()[:-9])
    elif what == "header":
        shard.write_bytes(b"\xff" * 8 + shard.read_bytes()[8:])
    elif what == "gone":
        shard.unlink()
    elif what == "elsewhere":
        content["weight_map"]["body.0.bias"] = "embed.safetensors"
    elif what == "outside":
        content["weight_map"]["body.0.bias"] = "../body.safetensors"
    elif what == "pickled":
        content["weight_map"]["body.0.bias"] = "body.bin"
    elif what == "missing":
        del content["weight_map"]["body.0.bias"]
    elif what == "no map":
        content = {"weight_map": ["body.0.bias"]}
    elif what == "shape":
        save_file({**weights(net()), "body.0.bias": torch.zeros(5)}, shard)
    index.write_text(json.dumps(content)[: -5 if what == "no json" else None])


FAULTS = {
    "cut short": (ValueError, r"body\.safetensors is not a sound safetensors file"),
    "header": (ValueError, r"body\.safetensors is not a sound safetensors file"),
    "gone": (FileNotFoundError, r"body\.safetensors is listed in the index but is not there"),
    "elsewhere": (ValueError, r"embed\.safetensors does not have body\.0\.bias, though the index says so"),
    "outside": (
        ValueError,
        r"says that body\.0\.bias is in '\.\./body\.safetensors', which is not a safetensors file beside",
    ),
    "pickled": (ValueError, r"says that body\.0\.bias is in 'body\.bin', which is not a safetensors file"),
    "missing": (ValueError, r"lacks body\.0\.bias; it has "),
    "no map": (ValueError, r"index\.json has no weight_map"),
    "shape": (ValueError, r"body\.safetensors: body\.0\.bias is \(5,\), and body\.0\.bias of this model \(4,\)"),
    "no json": (ValueError, r"index\.json is not sound JSON"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faulty_weights_are_named_and_load_nothing(what: str, tmp_path: Path) -> None:
    folder = folder_of(weights(net()), tmp_path / "m", lambda name: f"{name.split('.')[0]}.safetensors")
    damaged(folder, what)
    kind, message = FAULTS[what]
    model, full = on_meta(Net), net(4)
    for target in (model, full):
        with pytest.raises(kind, match=message):
            load(target, folder)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert is_same(full, net(4))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    torch.save(weights(net()), tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError, match=r"neither model\.safetensors nor .*\.bin.* must be converted to safetensors"
    ):
        load(on_meta(Net), tmp_path / "m")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a sound safetensors file"):
        load(on_meta(Net), tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"none is not there"):
        load(on_meta(Net), tmp_path / "none")
    folder_of(weights(net()), tmp_path / "n", lambda _: "w.safetensors")
    assert "embed.weight" in WeightFiles(tmp_path / "n" / "model.safetensors.index.json")


# -- memory --------------------------------------------------------------------------------------------------------


def limit(found: dict[str, float]) -> float:
    return found["stage"] + found["largest"] + 64e6


@pytest.mark.slow
def test_every_way_to_load_a_stage_stays_below_the_limit_and_the_naive_one_does_not(tmp_path: Path) -> None:
    found = load_peak(tmp_path, width=1024)
    assert found["copied"]["stage"] * 3 < sum(file.stat().st_size for file in (tmp_path / "rows-1024").iterdir())
    assert found["mapped"]["peak"] < 32e6
    for way in ("copied", "converted"):
        assert 0.9 * found[way]["stage"] < found[way]["peak"] < limit(found[way])
    assert found["whole"]["peak"] > limit(found["whole"])
