"""Every task as a program: one contract for all of them, in every format and with every recipe; a few of these are quick."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.test_federate_detector import ROUND, SITES
from tests.deploy import executorch_site
from tests.exports import compare_here
from tests.ranks import Ranks
from tests.text.test_heads import sequences, tokens
from tests.text.test_language_program import TEXT
from tests.text.test_language_program import model as language_model
from tests.vision.conftest import SMALL
from tests.vision.test_tasks import CASES, SHALLOW, built, trainer
from torch import nn
from torch.utils.data import DataLoader

import arclight as al
from arclight.cli.command import main
from arclight.deploy import (
    ExportError,
    Int8,
    Program,
    QuantizationAwareTraining,
    QuantizeError,
    convert,
    export,
    prepare_qat,
)
from arclight.deploy.capture import as_inputs, as_outputs, frozen_copy
from arclight.deploy.deployment import Deployment, configured, ship
from arclight.deploy.formats import export as exporting
from arclight.deploy.parity import compare
from arclight.fabric.distributed.sharding import full_tensor
from arclight.fabric.signing import SigningKey
from arclight.text import ByteTokenizer
from arclight.text.language_program import language_deployment

LEAST_DB = {"int8": 12.0, "float": 70.0}
"""Against the float model. Networks that learned nothing have outputs without structure, so few decibels are left of int8."""


class Own(al.Module):
    """A module of one's own: a network, its data and a metric."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(4, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)
        )

    def configure_deployment(self, data: Any, batches: int) -> Deployment:
        images = torch.rand(8, 4, 8, 8, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            labels = self.model(images).argmax(1)
        return Deployment(
            model=self.model, example_inputs=images[:3], calibration=[images], input_names=["images"], output_names=["logits"],
            metric=lambda network: float((network(images).argmax(1) == labels).float().mean()), metadata={"task": "own"},
        )  # fmt: skip


STEPS = {"segmentation": 20}
"""Steps of training: prototypes of masks are noise of 1e-6 before, of which int8 leaves 0 to 3 dB; 20 steps later it leaves 50 dB."""


def vision(name: str) -> Callable[[Path], Deployment]:
    def make(root: Path) -> Deployment:
        settings = CASES[name].settings(root, CASES[name].draw(root / "set"))
        Path(settings.model).write_text(SHALLOW.replace("HEAD", CASES[name].head))
        module, data = built(settings)
        if name in STEPS:
            trainer(root, max_steps=STEPS[name], limit_val_batches=0).fit(module, datamodule=data)
        return configured(module, data)

    return make


def language(name: str, **overrides: Any) -> Callable[[Path], Deployment]:
    return lambda root: language_deployment(language_model(name, **overrides), [TEXT], ByteTokenizer())


def head(task: Callable[[Path], Any]) -> Callable[[Path], Deployment]:
    def make(root: Path) -> Deployment:
        root.mkdir(parents=True, exist_ok=True)
        module, data = task(root).build()
        return dataclasses.replace(configured(module, data), metric=lambda network: 1.0)

    return make


TASKS: dict[str, Callable[[Path], Deployment]] = {
    **{name: vision(name) for name in CASES},
    "language": language("gpt2-debug"),
    "language-grouped": language("llama3-debug", kv_heads=2, hidden=96),
    "sequence-classification": head(sequences),
    "token-classification": head(tokens),
    "own": lambda root: configured(Own()),
}


@dataclass(frozen=True)
class Cell:
    """A task in a format, in float or int8; the refusal of what there is not."""

    task: str
    format: Any
    precision: str
    refused: str = ""

    @property
    def name(self) -> str:
        return f"{self.task}-{self.format}-{self.precision}"


REFUSED = {
    ("*", "pt2", "int8"): "does not run pt2|there is no int8 pt2",  # torch would run the rounding in float
    # inductor makes integer kernels of fixed shapes, and texts have any length
    ("language", "aoti", "int8"): "fixed shapes only",
    ("language-grouped", "aoti", "int8"): "fixed shapes only",
    # a cache is empty before the first token, which ends an executorch process; memory is planned there for the largest sizes
    **{
        (task, "executorch", precision): "may be 0"
        for task in ("language", "language-grouped")
        for precision in ("float", "int8")
    },
    **{
        (task, "executorch", precision): "holds for one size"
        for task in ("sequence-classification", "token-classification")
        for precision in ("float", "int8")
    },
}
"""Cells that cannot be, and what is said of them."""


def refusal(task: str, form: str, precision: str) -> str:
    return REFUSED.get((task, form, precision)) or REFUSED.get(("*", form, precision), "")


FORMATS = ("onnx", "openvino", "pt2", "aoti", "executorch")


def precisions(task: str, form: str) -> tuple[str, ...]:
    """The precisions in which a task is written in a format, of those that can be: both for a module of one's own, else one.

    Tasks take turns, so that every task is met with every format and in both precisions, and every format in both.
    """
    possible = [precision for precision in ("float", "int8") if not refusal(task, form, precision)]
    if task == "own" or len(possible) < 2:
        return tuple(possible)
    return (possible[(list(TASKS).index(task) + (form == "openvino")) % 2],)


CELLS = [
    Cell(task, form, precision, said)
    for task in TASKS
    for form in FORMATS
    for precision in ("float", "int8")
    if (said := refusal(task, form, precision)) or precision in precisions(task, form)
]
QUICK = {"own-onnx-int8", "own-openvino-int8", "own-pt2-int8", "obb-pt2-float"}
"""A cell of each format that takes seconds, a task of vision, and a refusal; `make test-all` has the others."""
FRESH = "own-onnx-int8"
"""The cell whose program runs in a process of its own, as in every export; the others' do in this one."""


def as_read(processing: Any) -> Any:
    """The fields of a processing as JSON has them, which knows no tuples."""
    return json.loads(json.dumps(dataclasses.asdict(processing)))


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Deployment]:
    """Make each task once; what it calibrates on can be read again."""
    made: dict[str, Deployment] = {}

    def of(task: str) -> Deployment:
        if task not in made:
            one = TASKS[task](tmp_path_factory.mktemp(task))
            made[task] = dataclasses.replace(one, calibration=list(one.calibration))
        return made[task]

    return of


@pytest.fixture
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    cell: Cell = request.param
    if cell.format == "aoti" and not shutil.which("g++") and not shutil.which("clang++"):
        pytest.skip("AOTInductor compiles C++, and there is neither g++ nor clang++")
    if cell.format == "executorch" and not executorch_site.INSTALLED:
        pytest.skip(executorch_site.NEEDED.kwargs["reason"])
    monkeypatch.setattr(exporting, "TIMED_ROUNDS", 2)
    if cell.name != FRESH:
        compare_here(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield cell
    torch.set_num_threads(threads)


def cells(quick: set[str], slow: set[str] | None = None) -> pytest.MarkDecorator:
    params = [
        pytest.param(cell, id=cell.name, marks=() if cell.name in quick else pytest.mark.slow)
        for cell in CELLS
        if slow is None or cell.name in quick | slow
    ]
    return pytest.mark.parametrize("quick", params, indirect=True)


def batch_of(cell: Cell, deployment: Deployment) -> int | None:
    """The batch size that a program is fixed to: inductor makes integer kernels of fixed shapes alone."""
    return 2 if (cell.format, cell.precision) == ("aoti", "int8") and deployment.dynamic is None else None


@cells(QUICK)
def test_a_task_is_a_program(quick: Cell, deployments: Callable[[str], Deployment], tmp_path: Path) -> None:
    cell, deployment = quick, deployments(quick.task)
    recipe = Int8(calibration_batches=1) if cell.precision == "int8" else None
    fixed = batch_of(cell, deployment)
    key = SigningKey.make(tmp_path / "key.pem") if cell.format in ("pt2", "aoti") else None
    how = {
        "format": cell.format,
        "sign": key,
        "batch_size": fixed,
        "max_drop": 1.0 if recipe and deployment.metric else None,
    }
    if cell.refused:
        with pytest.raises((ExportError, QuantizeError), match=cell.refused):
            ship(deployment, tmp_path / "program", recipe, **how)
        assert not (tmp_path / "program").exists()
        return
    written = ship(deployment, tmp_path / "program", recipe, **how)
    program = Program.load(written.path, trusted=[key.public] if key else None)
    described = program.metadata

    # it says what it is of
    assert program.format == cell.format
    assert {**described, **deployment.metadata} == described
    if deployment.output_names is not None:
        assert [spec.name for spec in program.outputs] == list(deployment.output_names)
    if deployment.processing is not None:
        assert type(program.processing) is type(deployment.processing)
        assert as_read(program.processing) == as_read(deployment.processing)

    # it computes what the model does, output by output
    model = frozen_copy(deployment.model)
    inputs = as_inputs(deployment.example_inputs)
    inputs = inputs if fixed is None else tuple(value[:fixed] for value in inputs)
    with torch.no_grad():
        expected = as_outputs(model(*inputs))
    parts = (deployment.quantized_parts if recipe else None) or deployment.parts
    for name, parity in compare(expected, as_outputs(program(*inputs)), parts).items():
        assert parity.sqnr_db > LEAST_DB[cell.precision], (name, parity)

    # kernels are named, and integers counted
    assert sum(program.kernels().values()) > 0
    if recipe is None:
        assert program.precision == "fp32"
        assert "quantization" not in described
        return
    report = described["quantization"]
    assert program.precision == "int8"
    assert sum(report["integer_kernels"].values()) >= 0.9 * report["quantized_layers"] > 0
    assert {"low", "high", "over_fp32"} <= report["speed"].keys()
    if deployment.metric is not None:  # carried, and the program's own
        scored = program if fixed is None else program.in_batches
        assert report["metric"]["program"] == pytest.approx(deployment.metric(scored), abs=1e-6)
        assert report["metric"]["float"] == pytest.approx(deployment.metric(model), abs=1e-6)


@cells(
    {"own-onnx-float", "own-pt2-int8"}, {"own-onnx-int8", "own-openvino-float", "own-pt2-float", "own-aoti-int8"}
)  # every format by one of the verbs, and each verb in two of them or more
def test_the_shell_writes_what_ship_does(
    quick: Cell, deployments: Callable[[str], Deployment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell, deployment = quick, deployments("own")
    verb = ["quantize", f"{__name__}:Own", "--calibration-batches", "1", "--max-drop", "1"]
    words = verb if cell.precision == "int8" else ["export", f"{__name__}:Own"]
    words += ["--out", str(tmp_path / "typed"), "--format", cell.format]
    key = SigningKey.make(tmp_path / "key.pem") if cell.format in ("pt2", "aoti") else None
    words += ["--sign", str(tmp_path / "key.pem")] if key else []
    fixed = batch_of(cell, deployment)
    words += ["--batch-size", str(fixed)] if fixed else []
    status = main(words)
    said = capsys.readouterr()
    if cell.refused:
        assert status == 2
        assert re.search(cell.refused, said.err)
        assert not (tmp_path / "typed").exists()
        return
    assert (status, f"wrote {tmp_path / 'typed'}: " in said.out) == (0, True), said
    recipe = Int8(calibration_batches=1) if cell.precision == "int8" else None
    how = {"format": cell.format, "sign": key, "batch_size": fixed, "max_drop": 1.0 if recipe else None}
    shipped = ship(deployment, tmp_path / "shipped", recipe, **how)
    typed = Program.load(tmp_path / "typed", trusted=[key.public] if key else None)
    assert (typed.inputs, typed.outputs, typed.kernels()) == (shipped.inputs, shipped.outputs, shipped.kernels())
    assert typed.metadata.keys() == shipped.metadata.keys()
    (images,) = as_inputs(deployment.example_inputs)
    assert torch.equal(typed(images[:2]), shipped(images[:2]))


# -- quantization-aware training of shards -------------------------------------------------------------------------


class Taught(Own):
    """The module of one's own with training data."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([(image, int(image.sum()) % 5) for image in torch.rand(16, 4, 8, 8)], batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def train_shards(rank: int, root: Path) -> dict[str, Any]:
    """Train under FSDP with rounding, convert on every rank, and give what rank 0 has learnt."""
    module, images = Taught(), torch.rand(4, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    qat = QuantizationAwareTraining(
        Int8(min_sqnr_db=-50), target="openvino", example_inputs=images, freeze_batch_norm_at=1
    )
    options = {"devices": 2, "strategy": "fsdp", "max_steps": 2, "limit_val_batches": 0, "callbacks": [qat]}
    run = trainer(root, **options, enable_checkpointing=False)
    run.fit(module)
    shares = [parameter.to_local().numel() for parameter in module.parameters()]
    sizes = [parameter.numel() for parameter in module.parameters()]
    quantized = convert(module.model)
    with torch.no_grad():
        outputs = as_outputs(quantized(images))
    state = {name: full_tensor(value).tolist() for name, value in module.model.state_dict().items()}
    return {"share": sum(shares) / sum(sizes), "outputs": [output.tolist() for output in outputs], "state": state}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.close()


@pytest.mark.slow
def test_shards_trained_with_rounding_are_a_program(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks(train_shards, tmp_path)
    assert first["outputs"] == second["outputs"]
    assert 0.3 < first["share"] < 0.7
    images = torch.rand(4, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    prepared = prepare_qat(Taught().model, images, recipe=Int8(min_sqnr_db=-50), target="openvino").eval()
    prepared.load_state_dict({name: torch.tensor(value) for name, value in first["state"].items()})
    quantized = convert(prepared)
    for output, told in zip(as_outputs(quantized(images)), first["outputs"], strict=True):
        wanted = torch.tensor(told)
        # but for single steps of rounding, where a rank's sums end on the other side of a half
        torch.testing.assert_close(output, wanted, rtol=0, atol=0.01 * float(wanted.abs().max()))
    compare_here(monkeypatch, rounds=2)
    # here: OpenVINO's threads do not outlive the fork by which ranks are made
    program = export(quantized, tmp_path / "program", example_inputs=images)
    assert sum(program.metadata["quantization"]["integer_kernels"].values()) >= 0.9 * len(quantized.quantized_layers)
    sqnr_db = program.metadata["parity"]["sqnr_db"]
    assert sqnr_db is None or sqnr_db > 30


# -- a round of a federation ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_federated_detector_is_an_int8_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from arclight.vision.qris.scenes.generate import generate

    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)
    Path("sites.toml").write_text(SITES)
    generate(tmp_path / "photos", 12, 3, size=96, val_share=0.25, workers=1, merchants=4)
    assert main(["federate", "sites.toml"]) == 0, capsys.readouterr().err
    words = ["quantize", ROUND, "--out", "int8", "--format", "onnx,openvino", "--calibration-batches", "1"]
    words += ["--recipe.min_sqnr_db", "-50"]  # one step has taught it nothing, so little of its outputs is left of int8
    assert main(words) == 0, capsys.readouterr().err
    for form, target in (("onnx", "onnxruntime"), ("openvino", "openvino")):
        program = Program.load(tmp_path / "int8" / form)
        report = program.metadata["quantization"]
        assert (program.precision, program.metadata["names"], report["target"]) == ("int8", ["qr_code"], target)
        assert sum(report["integer_kernels"].values()) >= 0.9 * report["quantized_layers"] > 0
        sqnr_db = program.metadata["parity"]["sqnr_db"]
        assert sqnr_db is None or sqnr_db > 30


def test_every_format_and_precision_is_quick_in_a_cell() -> None:
    cells = [cell for cell in CELLS if cell.name in QUICK]
    assert len(cells) == len(QUICK)
    assert {cell.format for cell in cells} == {"onnx", "openvino", "pt2"}
    assert {cell.precision for cell in cells if not cell.refused} == {"float", "int8"}
    assert any(cell.refused for cell in cells)


def test_every_two_of_task_format_and_precision_meet() -> None:
    written = [cell for cell in CELLS if not cell.refused]
    texts = {task for task in TASKS if "language" in task or task.endswith("-classification")}
    assert {(cell.task, cell.format) for cell in written} == {
        (task, form) for task, form in itertools.product(TASKS, FORMATS) if form != "executorch" or task not in texts
    }
    assert {(cell.task, cell.precision) for cell in written} == set(itertools.product(TASKS, ("float", "int8")))
    both = {(cell.format, cell.precision) for cell in written}
    assert both == set(itertools.product(FORMATS, ("float", "int8"))) - {("pt2", "int8")}
