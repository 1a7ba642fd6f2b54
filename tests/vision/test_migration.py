"""The page for people who come from YOLOv5: complete, and what it says to type is accepted."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

from arclight.cli.command import VERBS
from arclight.cli.commands.export import _parser as export_parser
from arclight.cli.commands.predict import _parser
from arclight.cli.quantization import parse_quantization
from arclight.cli.schema import Recipe
from arclight.recipe import explain, read, write
from arclight.vision.results.detections import Boxes, Detections
from arclight.vision.results.image_class import Classification
from arclight.vision.results.masks import Masks
from arclight.vision.rotated import OrientedBoxes

PAGE = (Path(__file__).resolve().parents[2] / "docs/migrate-from-yolov5.md").read_text()

FLAGS = shlex.split(
    """
weights cfg data hyp epochs batch-size imgsz rect resume nosave noval noautoanchor noplots evolve evolve_population resume_evolve bucket
cache image-weights device multi-scale single-cls optimizer sync-bn workers project name exist-ok quad cos-lr label-smoothing patience
freeze save-period seed local_rank entity upload_dataset bbox_interval artifact_alias ndjson-console ndjson-file mask-ratio no-overlap
"""
)
HYPERPARAMETERS = shlex.split(
    """
lr0 lrf momentum weight_decay warmup_epochs warmup_momentum warmup_bias_lr box cls cls_pw obj obj_pw iou_t anchor_t anchors fl_gamma
hsv_h hsv_s hsv_v degrees translate scale shear perspective flipud fliplr mosaic mixup copy_paste
"""
)


def rows(heading: str) -> dict[str, str]:
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(?:--)?([\w-]+)` \| (.*) \|$", section, re.MULTILINE))


def test_every_flag_and_hyper_parameter_has_a_row() -> None:
    assert (len(FLAGS), len(HYPERPARAMETERS)) == (44, 29)
    assert list(rows("Flags of train.py")) == FLAGS
    assert list(rows("Hyper-parameters")) == HYPERPARAMETERS


@pytest.mark.parametrize("heading", ["Flags of train.py", "Hyper-parameters"])
def test_migration_rows_give_flags_that_are_accepted(heading: str) -> None:
    fields = {setting.path for setting in explain(Recipe)}
    for name, text in rows(heading).items():
        typed = re.findall(r"`(--[^`]*)`", text)
        commands = re.findall(r"`(?:arclight|torchrun) [^`]*`", text)
        assert typed or commands or text.startswith("no: "), name
        for words in map(shlex.split, typed):
            assert all(flag.removeprefix("--") in fields for flag in words[::2]), (name, words)
            read(Recipe, {"task": {"kind": "detection", "data": "data.yaml"}}, words)


def test_presets_are_yolov5_s() -> None:
    def augment(kind: str) -> dict[str, float]:
        task = read(Recipe, {"task": {"kind": "detection", "data": "data.yaml", "augment": kind}}).task
        return {
            name: getattr(task.augment, name) for name in ("mosaic", "mixup", "copy_paste", "scale", "fliplr", "hsv_h")
        }

    low = {"mosaic": 1.0, "mixup": 0.0, "copy_paste": 0.0, "scale": 0.5, "fliplr": 0.5, "hsv_h": 0.015}
    assert augment("scratch-low") == low
    assert augment("scratch-med") == low | {"scale": 0.9, "mixup": 0.1}
    assert augment("scratch-high") == low | {"scale": 0.9, "mixup": 0.1, "copy_paste": 0.1}
    assert augment("voc") == low | {"mosaic": 0.85834, "mixup": 0.04266, "scale": 0.75544, "hsv_h": 0.01041}
    assert augment("objects365") == low | {"scale": 0.491, "hsv_h": 0.0188}
    assert set(augment("none").values()) == {0.0}


def test_a_preset_is_written_and_read_with_what_was_set_beside() -> None:
    recipe = read(
        Recipe, {"task": {"kind": "detection", "data": "data.yaml", "augment": "voc"}}, ["--task.augment.fliplr", "0"]
    )
    again = read(Recipe, tomllib.loads(write(recipe)))
    assert again == recipe
    assert (again.task.augment.fliplr, again.task.augment.mosaic) == (0.0, 0.85834)
    plain = read(Recipe, {"task": {"kind": "detection", "data": "data.yaml", "augment": {"mosaic": 0.5}}})
    assert (plain.task.augment.mosaic, plain.task.augment.scale) == (0.5, 0.5)  # recipes without a kind


DETECT_FLAGS = shlex.split(
    """
weights source data imgsz conf-thres iou-thres max-det device view-img save-txt save-format save-csv save-conf save-crop nosave classes
agnostic-nms augment visualize update project name exist-ok line-thickness hide-labels hide-conf half dnn vid-stride
"""
)


def test_every_flag_of_detect_has_a_row_whose_words_predict_reads() -> None:
    found = rows("Flags of detect.py")
    assert list(found) == DETECT_FLAGS
    for name, text in found.items():
        assert text.startswith("no: ") or name in ("weights", "source") or re.search("`--", text), name
        for words in map(shlex.split, re.findall(r"`(--[^`]*)`", text)):
            _parser().parse_args(["runs/x/1", "photos", *words])


VAL_FLAGS = shlex.split(
    """
data weights batch-size imgsz conf-thres iou-thres max-det task device workers single-cls augment verbose save-txt save-hybrid save-conf
save-json project name exist-ok half dnn
"""
)
EXPORT_FLAGS = shlex.split(
    """
data weights imgsz batch-size device half inplace keras optimize int8 per-tensor dynamic cache simplify mlmodel opset verbose workspace nms
agnostic-nms topk-per-class topk-all iou-thres conf-thres include
"""
)


def read_words(words: list[str]) -> None:
    """Parse the words of a command as ``arclight`` does, up to what opens files."""
    verb, *rest = words
    match verb:
        case "predict":
            _parser().parse_args(["runs/x/1", "photos", *rest])
        case "quantize":
            _, unread, *_ = parse_quantization(export_parser("quantize", ""), ["runs/x/1", "--out", "x.onnx", *rest])
            assert not unread
        case "export":
            export_parser("export", "").parse_args(["runs/x/1", "--out", "x.onnx", *rest])
        case _:
            assert any(verb in group for group in VERBS.values()), verb


@pytest.mark.parametrize(
    ("heading", "flags", "count"), [("Flags of val.py", VAL_FLAGS, 22), ("Flags of export.py", EXPORT_FLAGS, 25)]
)
def test_every_flag_of_val_and_export_has_a_row_whose_words_are_read(
    heading: str, flags: list[str], count: int
) -> None:
    found = rows(heading)
    assert list(found) == flags
    assert len(flags) == count
    own = {"--checkpoint", "--json", "--report"}
    for name, text in found.items():
        assert text.startswith(("no: ", "the RUN")) or re.search("`(--|arclight )", text), name
        for words in map(shlex.split, re.findall(r"`arclight ([^`]*)`", text)):
            read_words(words)
        for words in map(shlex.split, re.findall(r"`(--[^`]* [^`]*)`", text)):
            if heading == "Flags of export.py":
                read_words(["export", *words])
            elif words[0] not in own:
                read(Recipe, {"task": {"kind": "detection", "data": "data.yaml"}}, words)
    if heading == "Flags of val.py":
        asked = {words.split()[0] for text in found.values() for words in re.findall(r"`(--[^`]*)`", text)}
        assert own < asked


def test_scripts_and_results_name_what_there_is() -> None:
    found = PAGE.partition("## Results\n")[2]
    for name in re.findall(r"`([\w.]+)(?:\(\w*\))?`", "".join(re.findall(r"^\|.*\|(.*)\|$", found, re.MULTILINE)[1:])):
        owner, _, attribute = name.rpartition(".")
        kinds = {"boxes": [Boxes], "masks": [Masks], "obb": [OrientedBoxes], "": [Detections, Classification]}.get(
            owner
        )
        if kinds is not None and attribute != "to_csv":
            fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
            assert attribute in fields or any(hasattr(kind, attribute) for kind in kinds), name


def test_the_rate_falls_in_a_straight_line_as_without_cos_lr() -> None:
    words = ["--task.schedule.kind", "linear", "--task.schedule.final", "0.01", "--task.schedule.warmup", "0.0"]
    task = read(Recipe, {"task": {"kind": "detection", "data": "data.yaml"}}, words).task
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    schedule = task.schedule.build(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.01 * ((1 - step / 100) * (1 - 0.01) + 0.01) for step in range(100)])  # YOLOv5's lf
