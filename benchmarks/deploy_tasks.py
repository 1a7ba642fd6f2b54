"""Three tasks on drawn digits, to see what rounding costs: classify images, classify sequences of tokens, find digits in scenes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arclight.vision.models.blocks import C3, SPPF, ConvBNAct

DIGITS, SIDE, SCENE, STRIDE, LEVELS = 10, 32, 64, 8, 16
BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Task:
    """A trained model, the data that it is scored on, and what trains it further."""

    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    points: Callable[[Tensor, Tensor], float]
    """Score of outputs (N, ...) on targets, from 0 to 100."""

    @property
    def calibration(self) -> list[Tensor]:
        return list(self.train[0][: 8 * BATCH].split(BATCH))

    @torch.no_grad()
    def score(self, model: Callable[[Tensor], Any]) -> float:
        """Score a model, or its program."""
        return self.points(torch.cat([model(inputs) for inputs in self.test[0].split(BATCH)]), self.test[1])

    def fit(self, model: nn.Module, epochs: int, rate: float, *, seed: int = 0) -> nn.Module:
        """Train ``model`` with AdamW under a rate of one cycle, on batches drawn by ``seed``."""
        inputs, targets = self.train
        steps = epochs * (len(inputs) // BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
        order = torch.Generator().manual_seed(seed)
        model.train()
        for _ in range(epochs):
            for chosen in torch.randperm(len(inputs), generator=order).split(BATCH)[: len(inputs) // BATCH]:
                optimizer.zero_grad()
                self.loss(model(inputs[chosen]), targets[chosen]).backward()
                optimizer.step()
                schedule.step()
        return model.eval()


def tasks(quick: bool) -> dict[str, Task]:
    """Draw the data of the three tasks and train their models, always the same."""
    torch.manual_seed(0)
    count, tests = (256, 128) if quick else (3072, 2000)
    images, labels = digits(np.random.default_rng(0), count + tests)
    tokens = (F.avg_pool2d(images, SIDE // 8) * LEVELS).round().long().flatten(1)
    scenes, cells = _scenes(np.random.default_rng(1), count // 2 + tests // 4)
    kinds: dict[str, tuple[nn.Module, Tensor, Tensor, int, int]] = {
        "images": (_classifier(), images, labels, count, 4),
        "tokens": (Encoder(), tokens, labels, count, 20),
        "scenes": (Finder(), scenes, cells, count // 2, 20),
    }
    made = {}
    for name, (model, inputs, targets, split, epochs) in kinds.items():
        found = name == "scenes"
        task = Task(
            model=model, train=(inputs[:split], targets[:split]), test=(inputs[split:], targets[split:]),
            loss=_cell_loss if found else F.cross_entropy, points=_average_precision if found else _accuracy,
        )  # fmt: skip
        task.fit(model, 1 if quick else epochs, 3e-3)
        made[name] = task
    return made


# -- data ----------------------------------------------------------------------------------------------------------


def digits(drawn: np.random.Generator, count: int, side: int = SIDE, noise: float = 0.35) -> tuple[Tensor, Tensor]:
    """Draw digits (N, 1, side, side), turned, moved and under noise, and their labels (N,)."""
    labels = drawn.integers(0, DIGITS, count)
    images = np.zeros((count, side, side), np.uint8)
    for image, label in zip(images, labels):
        scale = side / 32 * drawn.uniform(0.7, 1.0)
        cv2.putText(
            image, str(label), (round(side * 0.25), round(side * 0.78)), int(drawn.choice([0, 2, 3, 4])), scale,
            (int(drawn.integers(150, 256)),), int(drawn.integers(1, 3)), cv2.LINE_AA,
        )  # fmt: skip
        turn = cv2.getRotationMatrix2D((side / 2, side / 2), float(drawn.uniform(-20, 20)), 1)
        turn[:, 2] += drawn.uniform(-0.1 * side, 0.1 * side, 2)
        image[:] = cv2.warpAffine(image, turn, (side, side))
    shades = (images / np.float32(255) + noise * drawn.random(images.shape, np.float32)).clip(0, 1)
    return torch.from_numpy(shades)[:, None], torch.from_numpy(labels)


def _scenes(drawn: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Draw scenes (N, 1, 64, 64) of one to three digits, and the digit of each cell (N, 8, 8) in which one has its centre, else -1."""
    scenes = 0.35 * torch.from_numpy(drawn.random((count, 1, SCENE, SCENE), np.float32))
    cells = torch.full((count, SCENE // STRIDE, SCENE // STRIDE), -1)
    for scene, own in zip(scenes, cells):
        for _ in range(int(drawn.integers(1, 4))):
            side = int(drawn.integers(18, 29))
            y, x = (int(value) for value in drawn.integers(0, SCENE - side, 2))
            row, column = (y + side // 2) // STRIDE, (x + side // 2) // STRIDE
            if (own[max(0, row - 3) : row + 4, max(0, column - 3) : column + 4] >= 0).any():
                continue
            image, label = digits(drawn, 1, side, noise=0.0)
            patch = scene[:, y : y + side, x : x + side]
            patch.copy_(torch.maximum(patch, image[0]))
            own[row, column] = label[0]
    return scenes, cells


# -- models --------------------------------------------------------------------------------------------------------


def _classifier() -> nn.Sequential:
    """Build convolutions with batch norms and ReLU."""
    layers: list[nn.Module] = []
    for c_in, c_out, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)):
        layers.append(ConvBNAct(c_in, c_out, 3, stride, act=nn.ReLU))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, DIGITS))


class Encoder(nn.Module):
    """A transformer of two layers over tokens (N, 64)."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LEVELS + 1, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, DIGITS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.out(self.norm(x).mean(1))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (part(normed).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Finder(nn.Module):
    """A small detector of YOLOv5's blocks: whether a digit has its centre in a cell, and which, (N, 11, 8, 8)."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        w = width
        self.down = nn.Sequential(ConvBNAct(1, w, 3, 2), ConvBNAct(w, 2 * w, 3, 2), C3(2 * w, 2 * w))
        self.fine = nn.Sequential(ConvBNAct(2 * w, 4 * w, 3, 2), C3(4 * w, 4 * w))
        self.coarse = nn.Sequential(ConvBNAct(4 * w, 8 * w, 3, 2), SPPF(8 * w, 8 * w), ConvBNAct(8 * w, 4 * w))
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.neck, self.head = C3(8 * w, 4 * w, shortcut=False), nn.Conv2d(4 * w, 1 + DIGITS, 1)

    def forward(self, scenes: Tensor) -> Tensor:
        fine = self.fine(self.down(scenes))
        out: Tensor = self.head(self.neck(torch.cat((self.up(self.coarse(fine)), fine), 1)))
        return out


# -- losses and scores ---------------------------------------------------------------------------------------------


def _accuracy(outputs: Tensor, labels: Tensor) -> float:
    return 100 * float((outputs.argmax(1) == labels).double().mean())


def _cell_loss(outputs: Tensor, cells: Tensor) -> Tensor:
    there = cells >= 0
    found = F.binary_cross_entropy_with_logits(outputs[:, 0], there.float(), pos_weight=torch.tensor(4.0))
    return 5 * found + F.cross_entropy(outputs[:, 1:].permute(0, 2, 3, 1)[there], cells[there])


def _average_precision(outputs: Tensor, cells: Tensor) -> float:
    """Area under precision over recall, where a cell counts if it has a digit and the right one."""
    confidence, digit = outputs[:, 1:].softmax(1).max(1)
    order = (confidence * outputs[:, 0].sigmoid()).flatten().argsort(descending=True)
    right = ((digit == cells) & (cells >= 0)).flatten()[order].double().cumsum(0)
    precision = right / torch.arange(1, len(right) + 1)
    best = precision.flip(0).cummax(0).values.flip(0)
    return 100 * float(torch.trapezoid(best, right / (cells >= 0).sum()))


# -- batch norms whose epsilon matters -----------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norms of YOLOv5's epsilon and momentum behind activations so small that variances are near epsilon."""

    def __init__(self) -> None:
        super().__init__()
        norm = {"eps": 1e-3, "momentum": 0.03}
        self.conv1, self.bn1 = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, **norm)
        self.drop = nn.Dropout(0.1)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, **norm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.silu(self.bn1(self.conv1(x))))
        return F.silu(self.bn2(self.conv2(x)))


def small_inputs() -> Tensor:
    return 0.05 * torch.randn(16, 8, 16, 16, generator=torch.Generator().manual_seed(0))


def normed(passes: int) -> Normed:
    """Return `Normed` with statistics of ``passes`` passes, in training mode."""
    torch.manual_seed(0)
    model, x = Normed().train(), small_inputs()
    with torch.no_grad():
        for _ in itertools.repeat(None, passes):
            model(x)
    return model
