"""Digest programs of a small convolutional network: float32 and int8 outputs.

`digests` runs `values`: the float32 program, and int8 ones by both observers and with a layer in float, as exported and as reopened. Other recipes
and training with rounding are not digested.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arclight.deploy import Int8, Program, export, quantize


class Block(nn.Sequential):
    def __init__(self, c_in: int, c_out: int, stride: int = 1) -> None:
        super().__init__(nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.SiLU())


class Net(nn.Module):
    """Network of convolutions, a residual and a concatenation of scales, with one output (N, 7, H / 2, W / 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.same = Block(3, 8, 2), Block(8, 16, 2), Block(16, 16)
        self.up, self.head = nn.Upsample(scale_factor=2), nn.Conv2d(24, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(x)
        coarse = self.down(fine)
        coarse = coarse + self.same(coarse)
        found: Tensor = self.head(torch.cat([self.up(coarse), fine], 1)).sigmoid()
        return found


def pictures(seed: int) -> Tensor:
    return torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def values(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for seed in range(4):
            model(pictures(seed))
    model.eval()
    images, calibration = pictures(9), [pictures(seed) for seed in range(4)]
    found: dict[str, Any] = {"model": model(images)}
    found["float"] = export(model, folder / "float.onnx", example_inputs=images)(images)
    for name, recipe in {
        "histogram": Int8(),
        "minmax": Int8(observer="minmax"),
        "partly": Int8(skip=("head",)),
    }.items():
        quantized = quantize(model, calibration, recipe=recipe)
        program = export(quantized, folder / f"{name}.onnx", example_inputs=images)
        found[f"int8-{name}"] = {"program": program(images), "reopened": Program.load(program.path)(images)}
    return found
