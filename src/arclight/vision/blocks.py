"""The convolutional blocks of the YOLOv5 family.

Attribute names (``conv``, ``bn``, ``cv1``, ``m``) are those of published YOLOv5 checkpoints: weights keep their names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BN_EPS, BN_MOMENTUM = 1e-3, 0.03  # part of the architecture: weights trained with other values give other outputs


class ConvBNAct(nn.Module):
    """Convolution without bias, batch normalisation, SiLU; the output is the input's size over ``stride``."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        padding = (kernel - 1) // 2  # the 6x6 stem, too, then halves the image exactly
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, padding, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(c_out, eps=BN_EPS, momentum=BN_MOMENTUM)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1x1 then 3x3 convolution at the same width, with a residual connection if ``shortcut``."""

    def __init__(self, channels: int, shortcut: bool = True) -> None:
        super().__init__()
        self.cv1 = ConvBNAct(channels, channels)
        self.cv2 = ConvBNAct(channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cv2(self.cv1(x))
        return x + y if self.shortcut else y


class C3(nn.Module):
    """Cross-stage partial block (Wang et al. 2019): half the channels pass bottlenecks, half go past them."""

    def __init__(self, c_in: int, c_out: int, repeats: int = 1, shortcut: bool = True) -> None:
        super().__init__()
        hidden = c_out // 2
        self.cv1 = ConvBNAct(c_in, hidden)
        self.cv2 = ConvBNAct(c_in, hidden)
        self.cv3 = ConvBNAct(2 * hidden, c_out)
        self.m = nn.Sequential(*(Bottleneck(hidden, shortcut) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), dim=1))  # type: ignore[no-any-return]


class SPPF(nn.Module):
    """Spatial pyramid pooling: three 5x5 max pools in a row see what pools of 5, 9 and 13 side by side would."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 5) -> None:
        super().__init__()
        hidden = c_in // 2
        self.cv1 = ConvBNAct(c_in, hidden)
        self.cv2 = ConvBNAct(4 * hidden, c_out)
        self.m = nn.MaxPool2d(kernel, stride=1, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.cv1(x)]
        for _ in range(3):
            levels.append(self.m(levels[-1]))
        return self.cv2(torch.cat(levels, dim=1))  # type: ignore[no-any-return]


class Concat(nn.Module):
    """Join feature maps of the same size along channels."""

    def forward(self, maps: list[Tensor]) -> Tensor:
        return torch.cat(maps, dim=1)
