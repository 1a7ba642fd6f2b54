"""Every architecture by name, and tables of a user's own: published sizes, every level trains, and nothing in a table is run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from arclight.trainer import Trainer
from arclight.vision import build_model, fuse
from arclight.vision.models.architectures import ARCHITECTURES, parse_architecture
from arclight.vision.models.loss import Gains, yolo_loss
from arclight.vision.tasks.detection import Detector
from arclight.vision.tasks.settings import DetectionTask

# 80 classes: parameters, and GFLOPs at 640 pixels (which also count what follows the convolutions)
PUBLISHED = {
    "yolov5n": (1_872_157, 4.6), "yolov5s": (7_235_389, 16.6), "yolov5m": (21_190_557, 49.2), "yolov5l": (46_563_709, 109.6),
    "yolov5x": (86_749_405, 206.3), "yolov5n6": (3_246_940, 4.7), "yolov5s6": (12_626_620, 17.0), "yolov5m6": (35_731_932, 50.3),
    "yolov5l6": (76_770_172, 111.8), "yolov5x6": (140_794_780, 210.4), "yolov5-bifpn": (46_825_853, 110.4),
    "yolov5-fpn": (41_117_565, 100.3), "yolov5-panet": (46_563_709, 109.6), "yolov5-p2": (47_493_372, 126.3),
    "yolov5-p34": (5_331_518, 15.1), "yolov5-p6": (76_770_172, 111.8), "yolov5-p7": (144_281_723, 116.5),
    "yolov5s-ghost": (3_897_605, 8.9), "yolov5s-transformer": (7_235_645, 16.6), "yolov5s-leakyrelu": (7_235_389, 16.6),
    "yolov3": (61_949_149, 156.6), "yolov3-spp": (62_998_749, 157.5), "yolov3-tiny": (8_852_366, 13.3),
    "yolov5n-seg": (1_991_549, 7.2), "yolov5s-seg": (7_621_277, 26.6), "yolov5m-seg": (21_990_397, 71.3),
    "yolov5l-seg": (47_924_957, 148.4), "yolov5x-seg": (88_819_517, 266.6),
}  # fmt: skip
# 1000 classes, GFLOPs at 224 pixels, and parameters when folded
CLASSIFIERS = {
    "yolov5n-cls": (2_493_000, 0.49, 2_489_464), "yolov5s-cls": (5_453_480, 1.41, 5_447_688), "yolov5m-cls": (12_957_640, 3.91, 12_947_192),
    "yolov5l-cls": (26_552_680, 8.55, 26_535_976), "yolov5x-cls": (48_097_160, 15.99, 48_072_600),
}  # fmt: skip
FUSED_SEGMENTERS = {
    "yolov5n-seg": 1_986_637, "yolov5s-seg": 7_611_485, "yolov5m-seg": 21_971_597, "yolov5l-seg": 47_894_397, "yolov5x-seg": 88_774_445,
}  # fmt: skip


OWN = {f"arc-{size}" for size in "nsmlx"} | {
    f"yolov5{size}-{task}" for size in "nsmlx" for task in ("pose", "corners", "obb")
}
# see test_one_to_one, test_pose, test_corners, test_obb


def one_of_each_form(names: Iterable[str]) -> list[Any]:
    """Mark the sizes s to x of a form slow, and its other names: n has its rows; and those of the large size with another neck."""
    alike = re.compile(r"yolov5[smlx]6?(-(seg|cls))?|yolov5-p[267]|yolov5-(panet|bifpn|fpn)|yolov3(-spp)?")
    return [pytest.param(name, marks=pytest.mark.slow) if alike.fullmatch(name) else name for name in names]


def test_all_are_known() -> None:
    assert PUBLISHED.keys() | CLASSIFIERS.keys() | OWN == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", one_of_each_form(PUBLISHED))
def test_parameters_and_operations_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name).eval()
        counter = FlopCounterMode(display=False)
        with counter:
            model.raw(torch.rand(1, 3, 640, 640))
    parameters, gflops = PUBLISHED[name]
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert counter.get_total_flops() / 1e9 == pytest.approx(gflops, rel=0.03)


@pytest.mark.parametrize("name", one_of_each_form(CLASSIFIERS))
def test_classifiers_have_the_published_sizes(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, 1000).eval()
        counter = FlopCounterMode(display=False)
        with counter:
            model.raw(torch.rand(1, 3, 32, 32))  # counted so, times 49 for 224 pixels: the linear layer, too
        folded = fuse(model)
    parameters, gflops, of_folded = CLASSIFIERS[name]
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(p.numel() for p in folded.parameters()) == of_folded
    assert 49 * counter.get_total_flops() / 1e9 == pytest.approx(gflops, rel=0.03)


@pytest.mark.parametrize("name", one_of_each_form(FUSED_SEGMENTERS))
def test_folded_segmenters_have_the_published_sizes(name: str) -> None:
    with torch.device("meta"):
        folded = fuse(build_model(name))
    assert sum(p.numel() for p in folded.parameters()) == FUSED_SEGMENTERS[name]
    assert folded.state_dict()["model.24.proto.cv3.conv.weight"].shape[0] == 32


@pytest.mark.parametrize(
    "name",
    [
        "yolov5-p34", "yolov5s-ghost", "yolov5s-transformer", "yolov3-tiny",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("yolov5n6", "yolov5s-leakyrelu")),
    ],
)  # fmt: skip
def test_every_level_learns_and_folds(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, 2).train()
    side = model.stride[-1] * 2
    # a box of each level's middle anchor, as large as the image allows
    sizes = [(anchors[1] * stride / side).clamp(max=0.9) for anchors, stride in zip(model.anchors, model.stride)]
    targets = torch.stack([torch.tensor([0, n % 2, 0.5, 0.5, *size.tolist()]) for n, size in enumerate(sizes)])
    raw = model(torch.rand(2, 3, side, side))
    assert [tuple(level.shape[2:4]) for level in raw] == [(side // s, side // s) for s in model.stride]
    loss, _ = yolo_loss(raw, targets, model.anchors, Gains(0.05, 1.0, 0.5))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(conv.weight.grad.abs().sum() > 0 for conv in model.head.m)
    images = torch.rand(1, 3, side, side)
    with torch.no_grad():
        torch.testing.assert_close(fuse(model)(images), model.eval()(images), rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- a user's own table

TABLE = """
nc: 80
depth_multiple: 0.33
width_multiple: 0.50
anchors:
  - [10,13, 16,30, 33,23]
  - [30,61, 62,45, 59,119]
  - [116,90, 156,198, 373,326]
backbone:
  [[-1, 1, Conv, [64, 6, 2, 2]], [-1, 1, Conv, [128, 3, 2]], [-1, 3, C3, [128]], [-1, 1, Conv, [256, 3, 2]],
   [-1, 6, C3, [256]], [-1, 1, Conv, [512, 3, 2]], [-1, 9, C3, [512]], [-1, 1, Conv, [1024, 3, 2]],
   [-1, 3, C3, [1024]], [-1, 1, SPPF, [1024, 5]]]
head:
  [[-1, 1, Conv, [512, 1, 1]], [-1, 1, nn.Upsample, [None, 2, nearest]], [[-1, 6], 1, Concat, [1]], [-1, 3, C3, [512, False]],
   [-1, 1, Conv, [256, 1, 1]], [-1, 1, nn.Upsample, [None, 2, nearest]], [[-1, 4], 1, Concat, [1]], [-1, 3, C3, [256, False]],
   [-1, 1, Conv, [256, 3, 2]], [[-1, 14], 1, Concat, [1]], [-1, 3, C3, [512, False]],
   [-1, 1, Conv, [512, 3, 2]], [[-1, 10], 1, Concat, [1]], [-1, 3, C3, [1024, False]],
   [[17, 20, 23], 1, Detect, [nc, anchors]]]
"""
TINY = """
anchors: [[8,8, 20,20], [40,40, 90,90]]
activation: nn.LeakyReLU(0.1)
backbone: [[-1, 1, Conv, [16, 3, 2]], [-1, 1, nn.MaxPool2d, [2, 2, 0]], [-1, 2, Bottleneck, [16]], [-1, 1, Conv, [16, 3, 2]]]
head: [[-1, 1, Conv, [24, 3, 2]], [[3, 4], 1, Detect, [nc, anchors]]]
"""


def test_a_table_of_yolov5s_form_is_yolov5s() -> None:
    read, own = parse_architecture(TABLE, "yolov5s.yaml"), ARCHITECTURES["yolov5s"]
    assert read.anchors_px == own.anchors_px
    torch.manual_seed(0)
    ours = build_model("yolov5s", 3)
    torch.manual_seed(0)
    theirs = build_model("mine.yaml", 3, table=TABLE)
    for (name, value), (other, same) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(value, same)


def test_any_number_of_levels_and_anchors() -> None:
    model = build_model("tiny.yaml", 2, table=TINY)
    assert model.stride == (8, 16)
    assert model.anchors.shape == (2, 2, 2)
    assert "model.2.1.cv1.conv.weight" in model.state_dict()
    assert isinstance(model.model[0].act, torch.nn.LeakyReLU)
    raw = model.train()(torch.rand(2, 3, 32, 32))
    assert [tuple(level.shape) for level in raw] == [(2, 2, 4, 4, 7), (2, 2, 2, 2, 7)]
    loss, _ = yolo_loss(raw, torch.tensor([[1, 1, 0.5, 0.5, 0.5, 0.5]]), model.anchors, Gains(0.05, 1.0, 0.5))
    loss.backward()


def test_a_checkpoint_holds_its_table(tmp_path: Path) -> None:
    table = tmp_path / "tiny.yaml"
    table.write_text(TINY)
    detector = Detector(DetectionTask(data=Path("none"), model=str(table), image_size=32), names=["a", "b"])
    trainer = Trainer(
        accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_steps=1,
    )  # fmt: skip
    batch = {"images": torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "targets": torch.zeros(0, 6), "paths": ["a", "b"]}
    trainer.fit(detector, [batch])
    trainer.save_checkpoint(tmp_path / "d.ckpt")
    table.unlink()
    opened = Detector.load_from_checkpoint(tmp_path / "d.ckpt")
    assert all(torch.equal(value, detector.state_dict()[name]) for name, value in opened.state_dict().items())
    with pytest.raises(ValueError, match=r"tiny\.yaml cannot be read"):
        Detector(DetectionTask(data=Path("none"), model=str(table), image_size=32), names=["a"])


# ten levels of nine aliases: three billion values
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))


def test_a_table_without_an_activation_has_the_usual_one() -> None:
    for text in (changed("nn.LeakyReLU(0.1)", "null"), changed("activation: nn.LeakyReLU(0.1)\n", "")):
        assert parse_architecture(text, "tiny.yaml").activation == "silu"


@pytest.mark.parametrize("name", ["SiLU", "ReLU", "Hardswish", "Mish"])
def test_a_table_names_its_activation(name: str) -> None:
    model = build_model("tiny.yaml", 2, table=changed("nn.LeakyReLU(0.1)", f"nn.{name}()"))
    assert {type(module.act).__name__ for module in model.modules() if hasattr(module, "act")} == {name}


LEFT_OUT = (
    "Focus", "BottleneckCSP", "CrossConv", "C3x", "C3SPP", "GhostBottleneck", "DWConv", "DWConvTranspose2d", "Contract", "Expand",
    "TransformerBlock", "MixConv2d",
)  # fmt: skip
"""Blocks of YOLOv5 that no published table of 6.0 or newer has."""


@pytest.mark.parametrize("block", LEFT_OUT)
def test_a_block_that_is_left_out_is_refused_by_row_with_those_there_are(block: str) -> None:
    with pytest.raises(ValueError, match=rf"tiny\.yaml: row 4.*'{block}' is not a block.*Conv.*SPPF") as caught:
        parse_architecture(changed("[-1, 1, Conv, [24, 3, 2]]", f"[-1, 1, {block}, [24, 3]]"), "tiny.yaml")
    assert "Detect" in str(caught.value)


def changed(old: str, new: str) -> str:
    assert old in TINY
    return TINY.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "cannot be read as an architecture"),
        ("- 1", "found list"),
        ("backbone: 3\nhead: []", "must be lists of rows"),
        (
            changed("Conv, [16, 3, 2]], [-1, 1, nn.M", "__import__('os').system, [1]], [-1, 1, nn.M"),
            "cannot be read|is not a block",
        ),
        (changed("[-1, 1, Conv, [24, 3, 2]]", "[-1, 1, Convv, [24]]"), "row 4.*did you mean 'Conv'"),
        (changed("[24, 3, 2]", "['eval(1)', 3, 2]"), "channels = 'eval"),
        (changed("[24, 3, 2]", "[-24, 3, 2]"), "channels = -24"),
        (changed("[24, 3, 2]", "[100000, 3, 2]"), "channels = 100000"),
        (changed("[24, 3, 2]", "[24, 3, 3]"), "stride = 3 must be 1 or 2"),
        (changed("[24, 3, 2]", "[24, 3, 2, 1, 7]"), "takes channels, kernel, stride"),
        (changed("[24, 3, 2]", "[]"), "takes channels"),
        (changed("[24, 3, 2]", "[24, 3, 2, 3]"), "padding = 3 of a kernel of 3: only 1"),
        (changed("[16]]", "[16, 1]]"), "shortcut = 1"),
        (changed("[3, 4], 1, Detect", "[3, 9], 1, Detect"), r"row 5.*from = \[3, 9\]"),
        (changed("[3, 4], 1, Detect", "[4, 3], 1, Detect"), r"strides \[16, 8\]"),
        (changed("-1, 2, Bottleneck", "-1, 1000, Bottleneck"), "number = 1000"),
        (changed("-1, 2, Bottleneck", "[0, 1], 2, Bottleneck"), "takes one map"),
        (changed("-1, 1, nn.MaxPool2d", "-1, 2, nn.MaxPool2d"), "is built once"),
        (changed("-1, 1, Conv, [24", "-1, 2, Conv, [24"), "number = 2 of a stride of 2"),
        (changed("[[3, 4], 1, Detect, [nc, anchors]]", "[-1, 1, Conv, [8]]"), "Classify is the last row"),
        (changed("[[8,8, 20,20], [40,40, 90,90]]", "[[8,8], [40,40, 90,90]]"), "as many on each level"),
        (changed("[[8,8, 20,20], [40,40, 90,90]]", "[[8,8]]"), "a list for each of 2 levels"),
        (changed("[[8,8, 20,20], [40,40, 90,90]]", "[[8,.nan], [40,40]]"), "sizes in pixels"),
        (changed("nn.LeakyReLU(0.1)", "os.system('x')"), "activation .* is not known"),
        (changed("nn.LeakyReLU(0.1)", "[1]"), "activation .* is not known"),
        (TINY + "x: 2024-13-45", "cannot be read"),
        (TINY + "x: !!timestamp x", "cannot be read"),
        (TINY + "x: !!bool x", "cannot be read"),
        (TINY + "x: !!int ''", "cannot be read"),
        (changed("[24, 3, 2]", "[0x" + "f" * 20_000 + ", 3, 2]"), "numbers are too large"),
        (changed("90,90", "90,0x" + "f" * 20_000), "numbers are too large"),
        (ALIASES + changed("[24, 3, 2]", "*a9"), "aliases or numbers are too large"),
        ("a: &a [*a]\n" + changed("[24, 3, 2]", "*a"), "aliases or numbers are too large"),
        ("# " + "x" * 70_000 + TINY, "at most 65,536"),
        (
            "depth_multiple: 4\n"
            + changed("-1, 2, Bottleneck, [16]", "-1, 200, Bottleneck, [16]], [-1, 200, C3, [16]"),
            "at most 1000",
        ),
        ("depth_multiple: .inf\n" + TINY, "depth_multiple = inf"),
        ("width_multiple: 1e9\n" + TINY, "width_multiple"),
        (TINY.replace("head: [", "head: [" + "[-1, 1, Conv, [8]], " * 300), "at most 200"),
    ],
)
def test_a_table_that_cannot_be_built_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_architecture(text, "tiny.yaml")
    assert str(caught.value).startswith("tiny.yaml")
    assert len(str(caught.value)) < 1000


def test_sides_are_multiples_of_the_coarsest_stride() -> None:
    with pytest.raises(ValueError, match="multiple of 64 for yolov5n6, got 96"):
        Detector(DetectionTask(data=Path("none"), model="yolov5n6", image_size=96), names=["a"])
