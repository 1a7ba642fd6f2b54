"""The detector of the zoo as an int8 program: the whole way, at the size of a thumbnail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arclight.deploy import benchmark, export, quantize

SIDE = 160


@pytest.fixture
def photos() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(4, 3, 10, 10, generator=generator)
    return nn.functional.interpolate(coarse, SIDE, mode="bilinear")


@pytest.mark.slow
def test_yolov5n_becomes_an_int8_program(photos: Tensor, tmp_path: Path) -> None:
    from arclight.vision import build_model

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = build_model("yolov5n", num_classes=2).train()
    with torch.no_grad():
        for _ in range(5):
            model(photos)
    model.eval()
    quantized = quantize(model, [photos])
    program = export(quantized, tmp_path / "int8.onnx", example_inputs=photos, input_names=["images"])
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert program.metadata["quantization"]["integer_kernels"]["QLinearConv"] >= 0.9 * convolutions
    assert set(quantized.float_layers) == {"model.0.conv", "model.24.m.0", "model.24.m.1", "model.24.m.2"}
    with torch.no_grad():
        reference = model(photos).double().numpy()
    noise = program(photos.numpy()) - reference
    assert 10 * np.log10((reference**2).sum() / (noise**2).sum()) >= 30
    table = benchmark({"torch": model, "int8": program}, photos[:1], rounds=5)
    assert table["int8"].cpu_ms < table["torch"].cpu_ms
