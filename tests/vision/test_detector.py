"""A detector as users run it: trained, killed and resumed, saved and opened, exported and served as a program."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import shutil
import sys
import threading
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from tests import warm
from tests.vision.conftest import detector_run
from tests.vision.test_architectures import TABLE, TINY
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from arclight import checkpoint
from arclight.checkpoint import CheckpointError
from arclight.deploy import Program
from arclight.optim.settings import AdamW
from arclight.trainer import Callback, Trainer
from arclight.vision import build_model
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.dataset import DatasetError, DetectionDataset, read_data_yaml
from arclight.vision.data.images import decode_image
from arclight.vision.qris.scenes.generate import generate
from arclight.vision.results.metrics import DetectionMetrics
from arclight.vision.results.plots import DetectionPlots, write_predictions
from arclight.vision.tasks.deployment import evaluate_program, export_module
from arclight.vision.tasks.detection import DetectionData, Detector
from arclight.vision.tasks.module import InferenceCopy, check_class_names
from arclight.vision.tasks.settings import DetectionTask

SCRIPT = Path(__file__).parent / "detector_script.py"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("scenes") / "set", 25, 0, size=128, val_share=0.2, workers=1)


def quiet(folder: Path, **options: Any) -> Trainer:
    return Trainer(
        default_root_dir=folder, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


def run(data: Path, root: Path, *flags: str) -> int:
    done = warm.run(SCRIPT, data, root, *flags, timeout=600)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def trained(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    assert run(scenes, root) == 0
    return root


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bits(scenes: Path, trained: Path, tmp_path: Path) -> None:
    """Mid-epoch, with shuffling, mosaics and mixup in two worker processes, and an average of the weights."""
    assert run(scenes, tmp_path, "--die-at-step", "7") == -9
    assert run(scenes, tmp_path, "--resume") == 0
    whole, resumed = checkpoint.load(trained / "end.ckpt"), checkpoint.load(tmp_path / "end.ckpt")
    for entry in ("model", "ema"):
        assert whole[entry].keys() == resumed[entry].keys()
        assert all(torch.equal(tensor, resumed[entry][name]) for name, tensor in whole[entry].items())
    assert (trained / "run" / "1" / "metrics.csv").read_bytes() == (tmp_path / "run" / "1" / "metrics.csv").read_bytes()


def test_the_run_folder_shows_what_it_learned(trained: Path) -> None:
    run_folder = trained / "run" / "1"
    assert {p.name for p in (run_folder / "plots").iterdir()} == {
        "pr_curve.svg",
        "confusion_matrix.svg",
        "predictions.jpg",
        "captions.json",
        "labels.svg",
        "train_batch0.jpg",
        "train_batch1.jpg",
        "train_batch2.jpg",
    }
    header = (run_folder / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "val/map50", "val/map50_95", "val/precision", "val/recall"} <= set(header)


def test_a_checkpoint_opens_as_the_averaged_detector(trained: Path) -> None:
    detector = Detector.load_from_checkpoint(trained / "end.ckpt")
    saved = checkpoint.load(trained / "end.ckpt")["ema"]
    assert detector.names == ["qr_code"]
    assert all(torch.equal(value, saved[name]) for name, value in detector.state_dict().items() if name in saved)


def test_weights_carry_over_to_a_new_task(trained: Path, scenes: Path) -> None:
    first = Detector.load_from_checkpoint(trained / "end.ckpt")
    second = Detector(DetectionTask(data=scenes, weights=trained / "end.ckpt"), names=["a", "b", "c"])
    ours, theirs = second.model.state_dict(), first.model.state_dict()
    same = [name for name in ours if ours[name].shape == theirs[name].shape]
    assert len(same) == len(ours) - 6  # the three heads' weights and biases are for other classes
    assert all(torch.equal(ours[name], theirs[name]) for name in same)


def test_weights_are_those_of_the_best_checkpoint_of_a_run(tmp_path: Path) -> None:
    run = detector_run(tmp_path / "run")
    wanted = Detector.load(run / "checkpoints" / "last.ckpt").model.state_dict()
    task = dataclasses.replace(Detector.load(run / "checkpoints" / "last.ckpt").settings, weights=run)
    found = Detector(task, names=["code", "text"]).model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    shutil.rmtree(run / "checkpoints" / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"weights = .* has no checkpoint: it failed, or was stopped"):
        Detector(task, names=["code", "text"])


@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_classes_that_have_other_numbers_than_in_the_checkpoint_are_refused(
    tmp_path: Path, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = detector_run(tmp_path / "run")
    path = str(run / "checkpoints" / "last.ckpt")
    task = Detector.load(path).settings

    def meet(names: list[str]) -> None:
        trainer = quiet(tmp_path, max_steps=2, limit_val_batches=1)
        getattr(trainer, verb)(Detector(task, names=names), datamodule=DetectionData(task), ckpt_path=path)

    with pytest.raises(CheckpointError, match=r"class 0 is 'code', which is class 1 of the data: .*: code, text"):
        meet(["text", "code"])
    with caplog.at_level("WARNING", logger="arclight"):
        meet(["qr", "text"])
    assert "class 0 is 'code' in the checkpoint, and 'qr' in the data: they are taken for the same" in caplog.text


def test_one_of_two_classes_of_one_name_may_get_another(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="arclight"):
        check_class_names(["code", "code", "text"], ["code", "qr", "text"])
    assert "class 1 is 'code' in the checkpoint, and 'qr' in the data: they are taken for the same" in caplog.text
    with pytest.raises(CheckpointError, match="class 1 is 'code', which is class 2 of the data"):
        check_class_names(["code", "code", "text"], ["code", "text", "code"])


def test_a_program_is_not_scored_on_data_of_other_classes(tmp_path: Path) -> None:
    """A third class ended in an error of the metrics; two exchanged ones were scored crosswise."""
    detector = Detector.load(detector_run(tmp_path / "run") / "checkpoints" / "last.ckpt")
    other = detector.settings.data.with_name("other.yaml")
    for names, error, said in (
        ("code, text, cat", DatasetError, r"other\.yaml has 3 classes, and this network tells 2 apart: code, text"),
        ("text, code", CheckpointError, "class 0 is 'code', which is class 1 of the data"),
    ):
        other.write_text(f"train: images/train\nval: images/val\nnames: [{names}]\n")
        data = DetectionData(dataclasses.replace(detector.settings, data=other))
        deployment = detector.configure_deployment(data, 1)
        assert deployment.metric is not None
        assert deployment.evaluation is not None
        for score in (deployment.metric, deployment.evaluation.scores):
            with pytest.raises(error, match=said):
                score(deployment.model)


def test_a_tuned_checkpoint_needs_no_other_file(trained: Path, scenes: Path, tmp_path: Path) -> None:
    weights = tmp_path / "w.ckpt"
    shutil.copytree(trained / "end.ckpt", weights)
    task = DetectionTask(
        data=scenes, image_size=64, weights=weights, batch_size=8, workers=0, memory_format="contiguous"
    )
    tuned = Detector(task, names=["qr_code"])
    trainer = quiet(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(tuned, datamodule=DetectionData(task))
    trainer.save_checkpoint(tmp_path / "tuned.ckpt")
    shutil.rmtree(weights)
    opened = Detector.load_from_checkpoint(tmp_path / "tuned.ckpt")
    assert all(torch.equal(value, tuned.state_dict()[name]) for name, value in opened.state_dict().items())
    assert opened.settings.weights is None
    resumed = Detector(task, names=["qr_code"])  # what a recipe builds before a run is resumed
    quiet(tmp_path, max_steps=2, limit_val_batches=0).fit(
        resumed, datamodule=DetectionData(task), ckpt_path=str(tmp_path / "tuned.ckpt")
    )
    with pytest.raises(CheckpointError, match=r"w\.ckpt"):
        Detector(task, names=["qr_code"]).detect([np.zeros((8, 8, 3), np.uint8)])
    with pytest.raises(CheckpointError, match=r"w\.ckpt"):
        quiet(tmp_path, max_steps=1).fit(Detector(task, names=["qr_code"]), datamodule=DetectionData(task))


@pytest.mark.parametrize("name", [None, "float64"])
def test_detect_finds_what_the_model_in_evaluation_mode_does(trained: Path, scenes: Path, name: str | None) -> None:
    detector = Detector.load_from_checkpoint(trained / "end.ckpt")
    if name:
        detector.to(getattr(torch, name))
    detector.train()
    images = [decode_image(path) for path in read_data_yaml(scenes).images("val")]
    unsure = dataclasses.replace(detector.processing, conf_threshold=0.0005, max_det=5)
    batch, context = unsure.preprocess(images)
    exact = copy.deepcopy(detector.model).double().eval()
    with torch.inference_mode():
        expected = unsure.postprocess(exact(torch.from_numpy(batch).double()), context)
    for _ in range(2):  # the second time by the same copy
        found = detector.detect(images, unsure)
        assert detector.training, "a thread beside this one may train or detect"
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours.boxes.conf, theirs.boxes.conf, rtol=3e-2)
    assert detector.detect([]) == []
    with torch.no_grad():
        for conv in detector.model.head.m:
            conv.bias += 1
    assert detector.detect(images, unsure)[0].boxes.conf[0] > found[0].boxes.conf[0], "the copy is made anew"


def test_freeze_leaves_something_to_train(scenes: Path) -> None:
    with pytest.raises(ValueError, match="freeze = 25: yolov5n has 25 layers"):
        Detector(DetectionTask(data=scenes, freeze=25), names=["qr_code"])


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"max_epochs": 5}, 5),
        ({"max_steps": 7}, 3.5),  # 20 images in batches of 8, the rest dropped: two steps an epoch
        ({"max_steps": 7, "accumulate_grad_batches": 2}, 7),
        ({"max_steps": 7, "limit_train_batches": 1}, 7),
        ({"max_steps": 7, "max_epochs": 2}, 2),
        ({"max_epochs": -1}, None),
    ],
)
def test_mosaics_end_with_the_run_however_its_length_is_given(
    scenes: Path, tmp_path: Path, options: dict[str, int], epochs: float | None
) -> None:
    task = DetectionTask(data=scenes, image_size=64, batch_size=8, workers=0, memory_format="contiguous")
    data = DetectionData(task)
    data.trainer = quiet(tmp_path, **options)
    data.setup("fit")
    assert data.train.epochs == epochs


def test_the_last_epoch_of_a_run_by_steps_has_no_mosaics(scenes: Path, tmp_path: Path) -> None:
    class Seen(Callback):
        def __init__(self) -> None:
            self.open: list[bool] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.open.append(trainer.datamodule.train.mosaic_open)

    task = DetectionTask(
        data=scenes,
        image_size=64,
        batch_size=8,
        workers=0,
        memory_format="contiguous",
        augment=Augment(close_mosaic=0.5),
    )
    seen = Seen()
    quiet(tmp_path, max_steps=4, max_epochs=-1, callbacks=[seen], limit_val_batches=0).fit(
        Detector(task, names=["qr_code"]), datamodule=DetectionData(task)
    )
    assert seen.open == [True, True, False, False]


def test_background_alone_is_measured(scenes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(scenes.parent, tmp_path / "set")
    for label in (tmp_path / "set" / "labels" / "val").glob("*.txt"):
        label.write_text("")
    task = DetectionTask(
        data=tmp_path / "set" / scenes.name, image_size=64, batch_size=8, workers=0, memory_format="contiguous"
    )
    (metrics,) = quiet(tmp_path).validate(Detector(task, names=["qr_code"]), datamodule=DetectionData(task))
    assert math.isfinite(metrics["val/loss"])
    assert "are background" in caplog.text


def test_missing_weights_are_an_error_wherever_they_are_needed(scenes: Path, tmp_path: Path) -> None:
    task = DetectionTask(data=scenes, image_size=64, weights=tmp_path / "missing.pt")
    photos = DetectionDataset.open(read_data_yaml(scenes), "val", image_size=64, cache_labels=False)
    for use in (
        lambda detector: detector.eval()(torch.zeros(1, 3, 64, 64)),
        lambda detector: export_module(detector, tmp_path / "a.onnx", photos),
    ):
        with pytest.raises((CheckpointError, OSError), match=r"missing\.pt"):
            use(Detector(task, names=["qr_code"]))


def test_damaged_images_are_neither_shown_nor_measured(scenes: Path, tmp_path: Path) -> None:
    shutil.copytree(scenes.parent, tmp_path / "set")
    photos = DetectionDataset.open(
        read_data_yaml(tmp_path / "set" / scenes.name), "val", image_size=64, cache_labels=False
    )
    detector = Detector(DetectionTask(data=scenes, image_size=64), names=["qr_code"])
    for image in photos.images[1:]:
        image.unlink()
    assert write_predictions(detector.detect, photos, tmp_path).keys() == {"predictions.jpg"}

    class Nothing:
        metadata: ClassVar = {"names": ["qr_code"]}
        processing = None

        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            assert len(images)
            return torch.zeros(len(images), 1, 6)

    program: Any = Nothing()
    assert evaluate_program(program, photos, batch_size=1).images == 1
    photos.images[0].unlink()
    assert write_predictions(detector.detect, photos, tmp_path) == {}
    with pytest.raises(DatasetError, match="none of the images picked"):
        export_module(detector, tmp_path / "a.onnx", photos)


def test_a_copy_for_inference_is_not_pickled_and_keeps_hooks() -> None:
    class Counter:
        def __init__(self) -> None:
            self.lock, self.calls = threading.Lock(), 0

        def count(self, *_: Any) -> None:
            self.calls += 1

    detector = Detector(DetectionTask(data=Path("none"), image_size=64), names=["a"])
    size = len(pickle.dumps(detector))
    counter = Counter()
    handle = detector.model.model[0].register_forward_hook(counter.count)
    detector.detect([np.zeros((64, 64, 3), np.uint8)])
    assert counter.calls == 1
    handle.remove()
    assert len(pickle.dumps(detector)) < 1.1 * size


def test_a_sharded_detector_ends_with_charts_and_no_pictures(scenes: Path, tmp_path: Path) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        detector = Detector(DetectionTask(data=scenes, image_size=64), names=["a"])
        detector.results = DetectionMetrics(num_classes=1).compute()
        weight = detector.model.head.m[0].weight
        detector.model.head.m[0].weight = nn.Parameter(
            distribute_tensor(weight.detach(), init_device_mesh("cpu", (2,)))
        )
        photos = DetectionDataset.open(read_data_yaml(scenes), "val", image_size=64, cache_labels=False)
        trainer: Any = types.SimpleNamespace(
            is_global_zero=True, loggers=[0], run_folder=types.SimpleNamespace(plots=tmp_path), datamodule=types.SimpleNamespace(val=photos),
            strategy=types.SimpleNamespace(in_stages=False),
        )  # fmt: skip
        DetectionPlots().on_train_end(trainer, detector)
        assert {path.name for path in tmp_path.iterdir()} == {"pr_curve.svg", "confusion_matrix.svg", "captions.json"}
        with pytest.raises(RuntimeError, match="shards of the weights only"):
            detector.detect([decode_image(photos.images[0])])
    finally:
        torch.distributed.destroy_process_group()


def test_detections_between_steps_are_of_the_newest_weights(scenes: Path, tmp_path: Path) -> None:
    """Fused steps count no version of a tensor, and with all but the head frozen no batch norm counts batches either."""
    photo = decode_image(next(iter((scenes.parent / "images" / "val").iterdir())))

    class Compare(Callback):
        found: ClassVar[list[list[float]]] = []

        def look(self, detector: Detector) -> None:
            surest = dataclasses.replace(detector.processing, conf_threshold=0.0, max_det=100)
            anew = copy.deepcopy(detector).detect([photo], surest)[0].boxes.conf
            assert detector.detect([photo], surest)[0].boxes.conf.tolist() == anew.tolist()
            self.found.append(anew.tolist())

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.look(pl_module)

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.look(pl_module)

    task = DetectionTask(
        data=scenes, image_size=64, batch_size=8, workers=0, memory_format="contiguous", freeze=24,
        optimizer=AdamW(lr=0.02),  # steps so large that each shows in bfloat16, too
    )  # fmt: skip
    quiet(tmp_path, max_epochs=2, limit_val_batches=1, num_sanity_val_steps=1, callbacks=[Compare()]).fit(
        Detector(task, names=["qr_code"]), datamodule=DetectionData(task)
    )
    assert len({str(found) for found in Compare.found}) == 5  # before, and after each of four steps


@pytest.mark.parametrize(
    ("ranks", "shared", "epochs", "drops"),
    [(1, True, 3.5, True), (2, True, 7, True), (4, True, 7, False), (4, False, 3.5, True)],
)
def test_ranks_that_read_the_same_data_make_an_epoch_no_shorter(
    scenes: Path, tmp_path: Path, ranks: int, shared: bool, epochs: float, drops: bool
) -> None:
    task = DetectionTask(data=scenes, image_size=64, batch_size=8, workers=0, memory_format="contiguous")
    data = DetectionData(task)
    trainer: Any = types.SimpleNamespace(
        max_epochs=None, max_steps=7, world_size=8, limit_train_batches=1.0, accumulate_grad_batches=1,
        use_distributed_sampler=shared, strategy=types.SimpleNamespace(distributed_sampler_kwargs={"num_replicas": ranks, "rank": 0}),
    )  # fmt: skip
    data.trainer = trainer
    data.setup("fit")
    assert data.train.epochs == epochs
    assert data.train_dataloader().drop_last == drops


def test_a_program_finds_what_the_detector_finds(tmp_path: Path) -> None:
    detector = Detector.load_from_checkpoint(detector_run(tmp_path / "run") / "checkpoints" / "last.ckpt")
    photos = DetectionDataset.open(
        read_data_yaml(tmp_path / "set" / "data.yaml"), "val", image_size=64, cache_labels=False
    )
    program = export_module(detector, tmp_path / "detector.onnx", photos)
    images = [decode_image(path) for path in photos.images]
    batch, context = detector.processing.preprocess(images)
    with torch.inference_mode():
        expected = detector.eval()(torch.from_numpy(batch))
    np.testing.assert_allclose(program(batch), expected.numpy(), rtol=1e-3, atol=1e-3)
    # a detector this young is sure of nothing, so its surest boxes are looked at
    unsure = dataclasses.replace(detector.processing, conf_threshold=0.0005, max_det=5)
    assert [len(found) for found in unsure.postprocess(expected, context)] == [5] * len(images)
    by_hand, named = (
        unsure.postprocess(program(batch), context),
        Program.load(tmp_path / "detector.onnx", processing=unsure).predict(images),
    )
    for ours, theirs, direct in zip(named, unsure.postprocess(expected, context), by_hand, strict=True):
        np.testing.assert_allclose(ours.boxes.conf, theirs.boxes.conf, rtol=1e-2)
        np.testing.assert_array_equal(ours.boxes.xyxy, direct.boxes.xyxy)
    assert evaluate_program(program, photos).images == len(photos)


def test_a_model_file_of_yolov5_opens_without_its_code(tmp_path: Path) -> None:
    """A whole pickled module in half precision, of classes that do not exist here, in the layout that its training writes."""
    there = types.ModuleType("yolo_elsewhere")

    class DetectionModel(nn.Module):
        pass

    DetectionModel.__module__, DetectionModel.__qualname__ = there.__name__, "DetectionModel"
    there.DetectionModel = DetectionModel  # type: ignore[attr-defined]
    torch.manual_seed(0)
    network = build_model("yolov5n", 2, anchors_px=torch.arange(18.0).view(9, 2) * 3 + 5)
    theirs = DetectionModel()
    theirs.model = copy.deepcopy(network.model).half()
    theirs.names, theirs.stride = {0: "cat", 1: "dog"}, torch.tensor([8.0, 16.0, 32.0])
    theirs.yaml = {"nc": 2, "ch": 3, **yaml.safe_load(TABLE.replace("0.50", "0.25").replace("nc: 80", ""))}
    sys.modules[there.__name__] = there
    torch.save({"epoch": -1, "model": theirs, "ema": None, "opt": None, "date": "today"}, tmp_path / "yolov5n.pt")
    del sys.modules[there.__name__]
    detector = Detector.load(tmp_path / "yolov5n.pt")
    assert (detector.settings.model, detector.names) == ("yolov5n", ["cat", "dog"])
    ours = detector.model.state_dict()
    assert len(ours) == 349
    for name, value in network.state_dict().items():
        torch.testing.assert_close(ours[name], value.half().to(value.dtype), rtol=0, atol=0)
    torch.testing.assert_close(detector.model.anchors, network.anchors, rtol=1e-3, atol=0)
    theirs.yaml = {
        **theirs.yaml,
        "head": theirs.yaml["head"][:-1] + [[[17, 20, 23], 1, "Segment", ["nc", "anchors", 32, 256]]],
    }
    sys.modules[there.__name__] = there
    torch.save({"model": theirs}, tmp_path / "seg.pt")
    torch.save({"model": theirs.model.state_dict()}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="ends with a segment head, a Detector needs one to detect"):
        Detector.load(tmp_path / "seg.pt")
    with pytest.raises(CheckpointError, match="does not say which architecture"):
        Detector.load(tmp_path / "weights.pt")


def test_a_model_file_that_does_not_fill_its_own_architecture_is_refused(tmp_path: Path) -> None:
    there = types.ModuleType("yolo_elsewhere")
    there.Net = type("Net", (nn.Module,), {"__module__": there.__name__})  # type: ignore[attr-defined]
    tiny = yaml.safe_load(TINY)
    huge = {**tiny, "width_multiple": 4, "backbone": [*tiny["backbone"][:3], [-1, 1, "Conv", [8192, 31, 2]]]}
    huge["head"] = [[-1, 1, "Conv", [8192, 31, 2]], tiny["head"][1]]  # four terabytes

    def file(names: Any, table: dict[str, Any]) -> Path:
        theirs = there.Net()
        theirs.model, theirs.names, theirs.yaml = build_model("tiny.yaml", 2, table=TINY).model, names, table
        sys.modules[there.__name__] = there
        torch.save({"model": theirs}, tmp_path / "a.pt")
        del sys.modules[there.__name__]
        return tmp_path / "a.pt"

    assert Detector.load(file({1: "b", 0: "a"}, {**tiny, "seen": {"at": torch.zeros(1)}})).names == ["a", "b"]
    for names, table in (
        (["a"] * 3, tiny),
        (["a"] * 100_000, tiny),
        (["a", "b"], huge),
        (["a", "b"], {**tiny, "width_multiple": 2}),
    ):
        with pytest.raises(CheckpointError, match=r"lacks \d+ of \d+ tensors"):
            Detector.load(file(names, table))
    for wrong in ({1: "a", 2: "b"}, {"x": "a"}):
        with pytest.raises(CheckpointError, match="does not say which architecture and classes"):
            Detector.load(file(wrong, tiny))


def test_a_checkpoint_is_loaded_by_the_same_name(trained: Path) -> None:
    assert Detector.load(trained / "end.ckpt").names == ["qr_code"]


def test_a_copy_for_inference_follows_every_change_of_the_network() -> None:
    detector = Detector(DetectionTask(data=Path("none"), image_size=64), names=["a"]).eval()
    network = detector.model

    def replace_weight() -> None:
        head = network.head.m[0]
        head.weight = torch.nn.Parameter(torch.ones_like(head.weight))

    def replace_module() -> None:
        network.model[0].act = torch.nn.ReLU()

    def add_buffer() -> None:
        network.register_buffer("extra", torch.zeros(1))

    def write_in_place() -> None:
        with torch.no_grad():
            network.head.m[0].bias.add_(1)

    for change in (replace_weight, replace_module, add_buffer, write_in_place):
        taken = InferenceCopy(network)
        assert taken.is_current(network)
        change()
        assert not taken.is_current(network), change.__name__
    assert not InferenceCopy(network).is_current(copy.deepcopy(network))
