"""Build a small detector-like network and its programs for the tests of ``deploy``.

Network and quantized model are built once in a session, files of programs once for all workers: tests must not change them; `copied` is a file that a
test may damage. Pictures, seeds and sizes decide the numbers that tests assert.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shared import made_once
from torch import Tensor, nn

from arclight.deploy import Program, QuantizedModel, export, quantize

SIDE = 64


class ConvBNAct(nn.Sequential):
    def __init__(self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(c_out, eps=1e-3, momentum=0.03),
            nn.SiLU(inplace=True),
        )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = ConvBNAct(channels, channels), ConvBNAct(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x))


class Split(nn.Module):
    """Two branches, one with a residual block, concatenated."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        half = c_out // 2
        self.a, self.b, self.out = ConvBNAct(c_in, half), ConvBNAct(c_in, half), ConvBNAct(2 * half, c_out)
        self.block = Residual(half)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.block(self.a(x)), self.b(x)], 1))


class TinyDetector(nn.Module):
    """Detector with what makes YOLO hard to quantize: SiLU, concatenation, pooling, upsampling, decoded boxes."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.stem = ConvBNAct(3, 8, 3, 2)
        self.down1, self.stage1 = ConvBNAct(8, 16, 3, 2), Split(16, 16)
        self.down2, self.stage2 = ConvBNAct(16, 32, 3, 2), ConvBNAct(32, 32)
        self.pool, self.after_pool = nn.MaxPool2d(5, 1, 2), ConvBNAct(64, 32)
        self.up, self.neck = nn.Upsample(scale_factor=2), ConvBNAct(48, 16)
        self.head = nn.ModuleList([nn.Conv2d(16, 5 + classes, 1), nn.Conv2d(32, 5 + classes, 1)])

    def forward(self, images: Tensor) -> Tensor | list[Tensor]:
        fine = self.stage1(self.down1(self.stem(images)))
        coarse = self.stage2(self.down2(fine))
        coarse = self.after_pool(torch.cat([coarse, self.pool(coarse)], 1))
        fine = self.neck(torch.cat([self.up(coarse), fine], 1))
        raw = [head(x) for head, x in zip(self.head, (fine, coarse))]
        return raw if self.training else torch.cat([decode(x) for x in raw], 1)


def decode(raw: Tensor) -> Tensor:
    """Decode (N, C, H, W) logits to (N, H * W, C): box centre and size in pixels, then scores."""
    scores = raw.sigmoid().flatten(2).transpose(1, 2)
    height, width = raw.shape[2:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    cell = torch.stack([x, y], -1).reshape(1, -1, 2)
    stride = SIDE // height
    return torch.cat([(scores[..., :2] + cell) * stride, (scores[..., 2:4] * 2) ** 2 * stride, scores[..., 4:]], -1)


def picture(count: int, seed: int) -> Tensor:
    """Return (count, 3, SIDE, SIDE) images in [0, 1]: bright squares on noise."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, SIDE, SIDE, generator=generator) * 0.3
    for image in images:
        x, y, size = torch.randint(0, SIDE // 2, (3,), generator=generator).tolist()
        image[:, y : y + size, x : x + size] = torch.rand(3, 1, 1, generator=generator)
    return images


def warmed(model: nn.Module, *batches: Tensor) -> nn.Module:
    """Return ``model`` in evaluation mode, with batch-norm statistics of ``batches``."""
    model.train()
    with torch.no_grad():
        for _ in range(20):
            for batch in batches:
                model(batch)
    return model.eval()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def images() -> Tensor:
    return picture(8, seed=1)


@pytest.fixture(scope="session")
def model() -> nn.Module:
    torch.manual_seed(0)
    detector = TinyDetector()
    for head in detector.head:  # let scores vary as a trained head's do
        nn.init.normal_(head.weight, std=0.5)
    return warmed(detector, picture(8, seed=2), picture(8, seed=3))


@pytest.fixture(scope="session")
def quantized(model: nn.Module) -> QuantizedModel:
    return quantize(model, [picture(8, seed) for seed in (4, 5, 6, 7)])


@pytest.fixture(scope="session")
def fp32_program(model: nn.Module, images: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Program:
    about = {"task": "detect", "names": ["código", "二维码"], "image_size": SIDE}
    path = made_once(tmp_path_factory, "fp32.onnx", lambda path: _export(model, path, images, metadata=about))
    return Program.load(path, device="cpu")


@pytest.fixture(scope="session")
def int8_program(request: pytest.FixtureRequest, images: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Program:
    def make(path: Path) -> None:
        _export(request.getfixturevalue("quantized"), path, images)

    return Program.load(made_once(tmp_path_factory, "int8.onnx", make), device="cpu")


def _export(model: nn.Module | QuantizedModel, path: Path, images: Tensor, **options: Any) -> None:
    export(model, path, example_inputs=images, input_names=["images"], output_names=["predictions"], **options)


@pytest.fixture
def copied(fp32_program: Program, tmp_path: Path) -> Path:
    """The float program in a file that a test may damage."""
    path = tmp_path / "copy.onnx"
    path.write_bytes(fp32_program.path.read_bytes())
    return path
