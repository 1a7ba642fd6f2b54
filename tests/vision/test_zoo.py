"""The YOLOv5 family: published sizes and names, the head's arithmetic, folding, precision and export."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from arclight.vision import build_model, fuse
from arclight.vision.models import blocks
from arclight.vision.models.anchors import best_possible_recall, fit_anchors
from arclight.vision.models.blocks import concatenate

# name: as trained with 80 classes, folded with 80 classes, as trained with 1, folded with 1 (published sizes)
SIZES = {
    "yolov5n": (1_872_157, 1_867_405, 1_765_270, 1_760_518),
    "yolov5s": (7_235_389, 7_225_885, 7_022_326, 7_012_822),
    "yolov5m": (21_190_557, 21_172_173, 20_871_318, 20_852_934),
    "yolov5l": (46_563_709, 46_533_693, 46_138_294, 46_108_278),
    "yolov5x": (86_749_405, 86_705_005, 86_217_814, 86_173_414),
}


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def small(num_classes: int = 2, seed: int = 0):
    """A yolov5n whose batch statistics are not the trivial 0 and 1, and whose head is not its prior."""
    torch.manual_seed(seed)
    model = build_model("yolov5n", num_classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize(
    "name", [name if name == "yolov5n" else pytest.param(name, marks=pytest.mark.slow) for name in SIZES]
)
def test_parameter_counts_are_the_published_ones(name):
    with torch.device("meta"):
        counts = [size(m) for nc in (80, 1) for model in [build_model(name, nc)] for m in (model, fuse(model))]
    assert tuple(counts) == SIZES[name]


def test_state_dict_names_and_shapes_are_those_of_published_checkpoints():
    with torch.device("meta"):
        state = build_model("yolov5s").state_dict()
    assert len(state) == 349
    expected = {
        "model.0.conv.weight": (32, 3, 6, 6),
        "model.2.m.0.cv2.conv.weight": (32, 32, 3, 3),
        "model.6.m.2.cv1.bn.running_var": (128,),
        "model.9.cv2.conv.weight": (512, 1024, 1, 1),
        "model.13.cv3.bn.num_batches_tracked": (),
        "model.21.conv.weight": (256, 256, 3, 3),
        "model.24.anchors": (3, 3, 2),
        "model.24.m.0.weight": (255, 128, 1, 1),
        "model.24.m.2.bias": (255,),
    }
    assert {name: tuple(state[name].shape) for name in expected} == expected
    assert not any(word in name for name in state for word in ("grid", "stride", "anchor_"))


def test_anchors_are_stored_in_cells():
    anchors = build_model("yolov5n").state_dict()["model.24.anchors"]
    assert anchors[0, 0].tolist() == [10 / 8, 13 / 8]
    assert anchors[2, 2].tolist() == [373 / 32, 326 / 32]


def test_batch_norm_constants():
    norms = [m for m in build_model("yolov5n").modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 57
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.03)}


def test_head_starts_from_eight_objects_per_image_and_even_classes():
    model = build_model("yolov5n", 4)
    for conv, stride in zip(model.head.m, (8, 16, 32)):
        bias = conv.bias.detach().view(3, 9)
        assert bias[:, 4].sigmoid() == pytest.approx([8 / (640 / stride) ** 2] * 3, rel=0.03)
        assert bias[:, 5:].exp().flatten() == pytest.approx([0.6 / 3.0] * 12, rel=1e-4)


def test_the_score_of_a_single_class_is_one_whatever_the_image():
    model = small(num_classes=1)
    scores = model(torch.rand(1, 3, 64, 64))[..., 5]
    assert scores.min() > 0.9999


def test_outputs_of_both_modes():
    model = small()
    images = torch.rand(2, 3, 96, 64)
    decoded = model(images)
    assert decoded.shape == (2, 3 * (12 * 8 + 6 * 4 + 3 * 2), 7)
    model.train()
    raw = model(images)
    assert [tuple(level.shape) for level in raw] == [(2, 3, 12, 8, 7), (2, 3, 6, 4, 7), (2, 3, 3, 2, 7)]
    assert model.decode(raw).shape == decoded.shape
    assert model.stride == (8, 16, 32)


def test_decode_follows_the_published_formula():
    model = small()
    raw = [torch.randn(1, 3, 64 // s, 96 // s, 7, generator=torch.Generator().manual_seed(s)) for s in (8, 16, 32)]
    pixels = [[(10, 13), (16, 30), (33, 23)], [(30, 61), (62, 45), (59, 119)], [(116, 90), (156, 198), (373, 326)]]
    rows = []
    for level, anchors, stride in zip(raw, pixels, (8, 16, 32)):
        sigmoid = 1 / (1 + np.exp(-level[0].double().numpy()))
        for a, (anchor_w, anchor_h) in enumerate(anchors):
            for gy in range(64 // stride):
                for gx in range(96 // stride):
                    x, y, w, h, *scores = sigmoid[a, gy, gx]
                    box = [(2 * x - 0.5 + gx) * stride, (2 * y - 0.5 + gy) * stride]
                    rows.append([*box, (2 * w) ** 2 * anchor_w, (2 * h) ** 2 * anchor_h, *scores])
    np.testing.assert_allclose(model.decode(raw)[0].numpy(), rows, rtol=1e-5, atol=1e-5)


def test_folding_changes_nothing_but_the_layers():
    model = small().train()
    images = torch.rand(2, 3, 64, 64)
    fused = fuse(model)
    assert model.training
    assert not fused.training
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 57
    with torch.no_grad():
        torch.testing.assert_close(fused(images), model.eval()(images), rtol=1e-4, atol=1e-4)
    assert not any(p.requires_grad for p in fused.requires_grad_(False).parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert fuse(fused).state_dict().keys() == fused.state_dict().keys()


def test_channels_last_gives_the_same_boxes():
    model = small()
    images = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        plain = model(images)
        model.to(memory_format=torch.channels_last)
        torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), plain, rtol=1e-4, atol=1e-4)
        assert fuse(model)(images).shape == plain.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_concatenated_maps_have_the_gradients_of_slices_without_gaps(dtype):
    numbers = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, channels, 4, 6, generator=numbers).to(dtype) for channels in (16, 3, 8)]
    maps = [part.contiguous(memory_format=torch.channels_last).requires_grad_() for part in parts[:2]]
    maps.append(parts[2].contiguous(memory_format=torch.channels_last))  # a frozen layer's
    joined, plain = concatenate(maps), torch.cat(maps, dim=1)
    assert torch.equal(joined, plain)
    assert joined.is_contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(2, 27, 4, 6, generator=numbers).to(dtype).contiguous(memory_format=torch.channels_last)
    found, sliced = (torch.autograd.grad(one, maps[:2], gradient) for one in (joined, plain))
    assert all(map(torch.equal, found, sliced))
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in found)
    assert not any(one.is_contiguous(memory_format=torch.channels_last) for one in sliced)


@pytest.mark.parametrize("kind", ["symbolic_trace", "script", "trace"])
def test_concatenation_is_one_operator_in_graphs(kind, tmp_path):
    module = blocks.SPPF(8, 8).eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    graph_of = getattr(torch.fx if kind == "symbolic_trace" else torch.jit, kind)
    made = graph_of(module, x) if kind == "trace" else graph_of(module)
    torch.testing.assert_close(made(x), module(x))
    if kind != "symbolic_trace":
        torch.jit.save(made, tmp_path / "module.pt")
        torch.testing.assert_close(torch.jit.load(tmp_path / "module.pt")(x), module(x))


def test_concatenated_maps_have_derivatives_in_forward_mode():
    one, other = (torch.randn(1, n, 4, 4).to(memory_format=torch.channels_last) for n in (3, 5))
    joined, tangent = torch.func.jvp(lambda x: concatenate([x, other]), (one,), (2 * one,))
    assert torch.equal(joined, torch.cat([one, other], dim=1))
    assert torch.equal(tangent, torch.cat([2 * one, torch.zeros_like(other)], dim=1))


def test_a_step_in_channels_last_has_the_gradients_of_plain_concatenation(monkeypatch):
    def gradients():
        model = small().train().double().to(memory_format=torch.channels_last)
        raw = model(images.to(memory_format=torch.channels_last))
        return torch.autograd.grad(sum(level.sigmoid().mean() for level in raw), list(model.parameters()))

    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = gradients()
    monkeypatch.setattr(blocks, "concatenate", lambda maps: torch.cat(list(maps), dim=1))
    for own, plain in zip(found, gradients(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-9, atol=1e-15)


def test_boxes_are_float32_under_autocast_and_close_to_full_precision():
    model = small()
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        exact = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            assert model.raw(images)[0].dtype == torch.bfloat16
            mixed = model(images)
    assert mixed.dtype == torch.float32
    # a bfloat16 cell number or pixel would be off by whole pixels; logits off by 1 % move a centre by far less
    assert (mixed[..., :2] - exact[..., :2]).abs().max() < 1


@pytest.mark.slow  # test_detector exports the folded network with a free batch
def test_torch_export_takes_any_batch():
    model = small()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.rand(2, 3, 64, 64),), dynamic_shapes=({0: batch},))
    images = torch.rand(5, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images), model(images))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "yolov5q"}, "did you mean"),
        ({"name": "yolov5n", "num_classes": 0}, "at least one class"),
        ({"name": "yolov5n", "num_classes": 2, "names": ["a"]}, "num_classes is 2, but 1 names"),
        ({"name": "yolov5n", "anchors_px": torch.ones(4, 2)}, "anchors_px must be"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_model(**arguments)


def test_odd_image_sides_are_refused():
    with pytest.raises(ValueError, match="multiples of 32, they are 64 x 70"):
        small()(torch.rand(1, 3, 64, 70))


def test_fitted_anchors_answer_for_boxes_that_the_default_ones_miss():
    generator = torch.Generator().manual_seed(0)
    long_codes = torch.rand(300, 1, generator=generator) * torch.tensor([[300.0, 20.0]]) + torch.tensor([[200.0, 6.0]])
    coco = build_model("yolov5n").anchors * torch.tensor([8, 16, 32]).view(3, 1, 1)
    assert best_possible_recall(long_codes, coco.view(-1, 2)) < 0.2
    fitted = fit_anchors(long_codes, 640)
    assert fitted.shape == (9, 2)
    assert best_possible_recall(long_codes, fitted) == 1.0
    assert torch.equal(fitted, fit_anchors(long_codes, 640))
    assert (fitted.prod(1).diff() >= 0).all()
    model = build_model("yolov5n", 1, anchors_px=fitted)
    assert model.anchors[0, 0].tolist() == pytest.approx((fitted[0] / 8).tolist())


def test_anchors_find_the_sizes_that_are_there():
    centres = torch.tensor(
        [[12.0, 12], [20, 60], [60, 20], [50, 50], [90, 200], [200, 90], [180, 180], [300, 150], [400, 400]]
    )
    noise = 1 + 0.03 * torch.randn(9, 40, 2, generator=torch.Generator().manual_seed(1))
    fitted = fit_anchors((centres[:, None] * noise).view(-1, 2), 640)
    expected = centres[centres.prod(1).argsort()]
    # two of the sizes have nearly equal areas, so compare as sets
    distance = torch.cdist(fitted.log(), expected.log()).amin(0)
    assert distance.max() < math.log(1.05)


def test_one_box_is_enough_for_anchors_and_none_is_refused():
    fitted = fit_anchors(torch.tensor([[40.0, 40.0]]), 640)
    assert best_possible_recall(torch.tensor([[40.0, 40.0]]), fitted) == 1.0
    with pytest.raises(ValueError, match="none of the 1 given"):
        fit_anchors(torch.tensor([[1.0, 40.0]]), 640)
