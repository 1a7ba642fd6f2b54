"""Assignment of parameters to optimizers, and state that finds its parameter again."""

from __future__ import annotations

import copy
import json
import textwrap
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from arclight import recipe
from arclight.optim import ADOPT, QHADOPT, SGD, WSD, AdamW, Constant, Cosine, Mixed, MixedOptimizer, Muon, NorMuon


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tok_embeddings = nn.Embedding(11, 6)
        self.layers = nn.ModuleDict({str(n): nn.Linear(6, 6) for n in range(2)})
        self.experts = nn.Parameter(torch.randn(2, 6, 6) / 6)
        self.norm, self.output = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return self.output(self.norm(x + torch.einsum("btd,edf->btf", x, self.experts)))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, schedule: Any = None) -> None:
    tokens = torch.arange(22).view(2, 11) % 11
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def kinds(optimizer: MixedOptimizer) -> dict[str, tuple[str, float]]:
    return {name: (group["kind"], group["weight_decay"]) for name, _, group in optimizer.named()}


def test_muon_takes_hidden_matrices_and_adamw_all_else() -> None:
    found = kinds(Muon(weight_decay=0.3, others=AdamW(weight_decay=0.1)).build(Small().named_parameters()))
    muon = {name for name, (kind, _) in found.items() if kind == "muon"}
    assert muon == {"experts", "layers.0.weight", "layers.1.weight"}
    assert {found[name] for name in muon} == {("muon", 0.3)}
    assert found["output.weight"] == found["tok_embeddings.weight"] == ("adamw", 0.1)
    assert found["norm.weight"] == found["layers.0.bias"] == ("adamw", 0.0)


MIXED = Mixed(
    groups=(
        SGD(pattern=r"layers\.0\.", lr=0.5),
        NorMuon(pattern=r"layers\.|experts", others=AdamW(lr=0.25)),
    ),
    default=AdamW(lr=0.125, weight_decay=0.2),
)


def test_the_first_pattern_wins() -> None:
    model = Small()
    model.norm.requires_grad_(False)
    optimizer = MIXED.build(model.named_parameters())
    found = kinds(optimizer)
    assert found["layers.0.weight"][0] == found["layers.0.bias"][0] == "sgd"
    assert found["layers.1.weight"][0] == found["experts"][0] == "normuon"
    assert not any("norm" in name for name in found)
    rates = {name: group["lr"] for name, _, group in optimizer.named()}
    assert rates["layers.1.bias"] == 0.25
    assert rates["output.weight"] == 0.125


def test_patterns_without_parameters_are_errors() -> None:
    model = Small()
    with pytest.raises(ValueError, match=r"'layer\\\\.0' matches no parameter; the nearest names are layers\.0"):
        Mixed(groups=(SGD(pattern=r"layer\.0"),)).build(model.named_parameters())
    with pytest.raises(ValueError, match=r"'layers.\*bias' gets no parameter: layers.0.bias is taken by 'layers'"):
        Mixed(groups=(SGD(pattern="layers"), SGD(pattern="layers.*bias"))).build(model.named_parameters())
    with pytest.raises(ValueError, match=r"groups\[0\] needs a pattern"):
        Mixed(groups=(SGD(),))
    with pytest.raises(ValueError, match="is not a regular expression"):
        SGD(pattern="(")
    with pytest.raises(ValueError, match="not for the only optimizer"):
        SGD(pattern="layers").build(model.named_parameters())


def test_a_pipeline_stage_knows_the_names_of_the_others() -> None:
    model = Small()
    stage = [(name, p) for name, p in model.named_parameters() if "layers.1" in name]
    optimizer = MIXED.build(stage, all_names=dict(model.named_parameters()))
    assert set(kinds(optimizer)) == {"layers.1.weight", "layers.1.bias"}


def run_on(settings: Any, state: Any, model: Small, rewarm: int = 0) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Two more steps with an optimizer that takes up ``state``; the weights, and each parameter's rate."""
    again = copy.deepcopy(model)
    optimizer = settings.build(again.named_parameters())
    schedule = Cosine(rewarm=rewarm).build(optimizer, 20)
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    rates = [group["lr"] for _, _, group in sorted(optimizer.named(), key=lambda item: item[0])]
    trained(again, optimizer, 2, schedule)
    return {name: p.detach() for name, p in again.named_parameters()}, rates


def test_state_goes_by_name_whatever_the_order() -> None:
    model = Small()
    optimizer = MIXED.build(model.named_parameters())
    schedule = Cosine().build(optimizer, 20)
    trained(model, optimizer, 3, schedule)
    state = copy.deepcopy({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    assert set(state["optimizer"]["state"]) == {name for name, _ in model.named_parameters()}
    wanted, rates = run_on(MIXED, state, model)
    turned = Mixed(
        groups=(NorMuon(pattern=r"layers\.1|experts", others=AdamW(lr=9.0)), SGD(pattern="layers")),
        default=AdamW(lr=9.0),
    )
    found, turned_rates = run_on(turned, state, model)
    assert turned_rates == rates
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    trained(model, optimizer, 2, schedule)
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())


def test_options_that_a_checkpoint_replaces_are_named() -> None:
    model = Small()
    optimizer = AdamW(lr=0.01, weight_decay=0.1).build(model.named_parameters())
    schedule = Cosine().build(optimizer, 20)
    trained(model, optimizer, 2, schedule)
    state = json.loads(
        json.dumps({"optimizer": {**optimizer.state_dict(), "state": {}}, "schedule": schedule.state_dict()})
    )
    with pytest.warns(UserWarning, match=r"options: lr = 0\.01, not 0\.5; weight_decay = 0\.1, not 0\.3\. To train"):
        run_on(AdamW(lr=0.5, weight_decay=0.3), state, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_on(AdamW(lr=0.01, weight_decay=0.1), state, model)


def test_rates_warm_up_again_after_a_resume_that_asks_for_it() -> None:
    model = Small()
    optimizer = AdamW().build(model.named_parameters())
    schedule = Cosine().build(optimizer, 20)
    trained(model, optimizer, 8, schedule)
    state = copy.deepcopy({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    plain, again = run_on(AdamW(), state, model)[1], run_on(AdamW(), state, model, rewarm=3)[1]
    assert again == pytest.approx([rate / 4 for rate in plain])


def test_torchs_form_by_position_is_taken() -> None:
    model = Small()
    matrices, vectors = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    theirs = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01, fused=True)
    trained(model, theirs)
    state = copy.deepcopy(theirs.state_dict())
    again = copy.deepcopy(model)
    ours = AdamW(lr=0.7).build(again.named_parameters())
    ours.load_state_dict(state)
    trained(model, theirs)
    trained(again, ours)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for prefix in ("", "model."):  # torch's own names are taken where they are ours, and do no harm where they are not
        order = [(f"{prefix}{name}", p) for name, p in model.named_parameters()]
        members = [[pair for pair in order if pair[1].ndim > 1], [pair for pair in order if pair[1].ndim < 2]]
        named = torch.optim.AdamW([{"params": some} for some in (members if prefix else members[::-1])])
        trained(model, named)
        ours.load_state_dict(copy.deepcopy(named.state_dict()))
        for (_, theirs_own), (_, our_own) in zip(model.named_parameters(), again.named_parameters(), strict=True):
            assert torch.equal(named.state[theirs_own]["exp_avg"], ours.state[our_own]["exp_avg"])
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="8 parameters by position, this optimizer has 9"):
        ours.load_state_dict(state)


def test_a_parameter_that_left_muon_returns_by_the_advice_of_the_error() -> None:
    """As positions and kernels did, which Muon took before it went by names."""
    everything = {"not_hidden": "^$", "stacks": "."}
    model = torch.nn.Module()
    model.pos_embed = torch.nn.Parameter(torch.randn(1, 4, 6))
    model.mix = torch.nn.Conv1d(3, 4, 2)
    former = Muon(**everything).build(model.named_parameters())
    assert {group["kind"] for group in former.param_groups if "pos_embed" in group["param_names"]} == {"muon"}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    former.step()
    with pytest.raises(ValueError, match=r"pos_embed was trained with kind='muon'.*not_hidden and stacks of Muon"):
        Muon().build(model.named_parameters()).load_state_dict(former.state_dict())
    Muon(**everything).build(model.named_parameters()).load_state_dict(former.state_dict())


def test_state_that_does_not_fit_is_refused() -> None:
    model = Small()
    optimizer = MIXED.build(model.named_parameters())
    trained(model, optimizer)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="was trained with kind='normuon' and is resumed with kind='adamw'"):
        AdamW().build(model.named_parameters()).load_state_dict(state)
    part = {"state": state["state"], "param_groups": state["param_groups"][1:]}
    with pytest.raises(ValueError, match=r"does not have layers\.0\.weight"):
        optimizer.load_state_dict(part)
    broken = copy.deepcopy(state)
    broken["state"]["experts"]["momentum_buffer"] = torch.zeros(2, 6, 7)
    with pytest.raises(ValueError, match=r"momentum_buffer of experts is \(2, 6, 7\), not \(2, 6, 6\)"):
        optimizer.load_state_dict(broken)


def test_moments_change_their_precision_on_the_way() -> None:
    model = Small()
    half = AdamW(state_dtype="bfloat16").build(model.named_parameters())
    trained(model, half)
    full = AdamW().build(model.named_parameters())
    full.load_state_dict(half.state_dict())
    for _, parameter, _ in full.named():
        assert full.state[parameter]["exp_avg"].dtype == torch.float32
        assert torch.equal(full.state[parameter]["exp_avg"], half.state[parameter]["exp_avg"].float())


def test_parameters_that_come_later() -> None:
    model = Small()
    model.layers["1"].requires_grad_(False)
    optimizer = AdamW().build(model.named_parameters())
    model.layers["1"].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.layers["1"].parameters()), "lr": 0.5})
    assert kinds(optimizer)["layers.1.bias"][0] == "adamw"
    trained(model, optimizer)
    assert "layers.1.weight" in optimizer.state_dict()["state"]
    with pytest.raises(ValueError, match="have no name"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_a_copied_optimizer_goes_on() -> None:
    model = Small()
    optimizer = MIXED.build(model.named_parameters())
    Constant().build(optimizer, 5)
    trained(model, optimizer)
    pair = copy.deepcopy((model, optimizer))
    trained(model, optimizer)
    trained(*pair)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), pair[0].parameters(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    optimizer: AdamW | SGD | Muon | NorMuon | Mixed = field(default_factory=AdamW)
    schedule: Cosine | WSD | Constant = field(default_factory=Cosine)


def test_groups_of_a_recipe(tmp_path: Path) -> None:
    text = """
    [optimizer]
    kind = "mixed"
    default = {kind = "sgd", lr = 0.5}
    [[optimizer.groups]]
    pattern = "layers"
    kind = "normuon"
    lr = 0.03
    others.lr = 0.002
    [[optimizer.groups]]
    pattern = "bias"
    kind = "adamw"
    [schedule]
    kind = "wsd"
    warmup = 20
    decay = 0.1
    shape = "1-sqrt"
    """
    path = tmp_path / "recipe.toml"
    path.write_text(textwrap.dedent(text))
    made = recipe.read(Recipe, path)
    groups = (NorMuon(pattern="layers", lr=0.03, others=AdamW(lr=0.002)), AdamW(pattern="bias"))
    assert made.optimizer == Mixed(groups=groups, default=SGD(lr=0.5))
    assert made.schedule == WSD(warmup=20, decay=0.1, shape="1-sqrt")
    path.write_text(recipe.write(made))
    assert recipe.read(Recipe, path) == made
    flag = ["--optimizer.groups", '[{pattern = "norm", kind = "sgd", lr = 2}]']
    assert recipe.read(Recipe, path, flag).optimizer.groups == (SGD(pattern="norm", lr=2),)
    named = {setting.path for setting in recipe.explain(Recipe)}
    assert {"optimizer.groups", "optimizer.groups[].pattern", "optimizer.groups[].beta2", "schedule.shape"} <= named


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"pattern": "a", "kind": "mion"}], r"optimizer.groups\[0\].kind: need a kind, got 'mion'; did you mean muon"),
        (
            [{"pattern": "a", "kind": "sgd", "lrr": 1}],
            r"optimizer.groups\[0\].lrr is not a field of SGD; did you mean .*lr\?",
        ),
        ([{"kind": "sgd"}], r"optimizer: groups\[0\] needs a pattern"),
        ({"pattern": "a"}, "need a list of tables"),
    ],
)
def test_groups_that_no_recipe_can_mean(groups: Any, said: str) -> None:
    with pytest.raises(recipe.RecipeError, match=said):
        recipe.read(Recipe, {"optimizer": {"kind": "mixed", "groups": groups}})


@pytest.mark.parametrize(
    "settings", [MIXED, AdamW(state_dtype="bfloat16"), NorMuon(state_dtype="bfloat16"), ADOPT(), QHADOPT(state_dtype="bfloat16")],
)  # fmt: skip
def test_a_step_that_the_device_skips_changes_nothing(settings: Any) -> None:
    model = Small()
    optimizer = settings.build(model.named_parameters())
    trained(model, optimizer)
    before = copy.deepcopy((dict(model.named_parameters()), optimizer.state_dict()["state"]))
    optimizer.skip = torch.tensor(True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step()
    after = (dict(model.named_parameters()), optimizer.state_dict()["state"])
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    for name, entries in before[1].items():
        assert all(torch.equal(value, after[1][name][key]) for key, value in entries.items()), name
    optimizer.skip = torch.tensor(False)
    trained(model, optimizer, 1)
    assert not torch.equal(before[0]["experts"], model.experts)


class Named(nn.Module):
    """Layers whose names and shapes say what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(8, 8, 3)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.query_embed = nn.Parameter(torch.zeros(10, 8))
        self.tok = nn.Embedding(10, 8)
        self.token_embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.experts = nn.ParameterDict({"w1": torch.zeros(4, 8, 8)})
        self.head, self.fc, self.classifier = (nn.Linear(8, 3) for _ in range(3))


@pytest.mark.parametrize("settings", [Muon(), NorMuon(), NorMuon(state_dtype="bfloat16")])
def test_matrices_of_float16_are_updated_as_those_of_float32(settings: Muon) -> None:
    found = []
    for dtype in (torch.float32, torch.float16):
        generator = torch.Generator().manual_seed(1)
        weight = nn.Parameter(torch.randn(6, 4, generator=generator).to(dtype))
        optimizer = settings.build([("layers.0.weight", weight)])
        for _ in range(3):
            weight.grad = torch.randn(6, 4, generator=generator).to(dtype)
            optimizer.step()
        found.append(weight.detach().float())
    torch.testing.assert_close(found[1], found[0], atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("settings", [Muon(), NorMuon()])
def test_muon_leaves_embeddings_kernels_and_output_layers_to_adamw(settings: Muon) -> None:
    kinds = {name: group["kind"] for name, _, group in settings.build(Named().named_parameters()).named()}
    hidden = {name for name, kind in kinds.items() if kind != "adamw"}
    assert hidden == {"blocks.0.weight", "experts.w1"}
    stacks = Muon(stacks="conv1").build(Named().named_parameters())
    assert "conv1.weight" in {name for name, _, group in stacks.named() if group["kind"] == "muon"}
    with pytest.raises(ValueError, match=r"stacks '\(' is not a regular expression"):
        Muon(stacks="(")


@pytest.mark.parametrize("settings", [AdamW(), ADOPT(), SGD(), Muon(not_hidden="^$")])
def test_sparse_gradients_and_complex_parameters_are_refused_in_a_sentence(settings: Any) -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = settings.build(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"the gradient of weight is sparse, .* without sparse=True"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"w is of torch.complex64, .*view_as_real"):
        settings.build([("w", nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64)))])


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"weight_decay": float("nan")}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"initial_lr": -1.0}]
)
def test_numbers_of_a_group_beyond_their_interval_are_refused(wrong: dict[str, Any]) -> None:
    optimizer = AdamW().build([("w", nn.Parameter(torch.ones(2)))])
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}: need "):
        optimizer.add_param_group({"params": [("v", nn.Parameter(torch.ones(2)))], **wrong})
