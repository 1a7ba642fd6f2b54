"""Define the building blocks of the YOLO family, named as in published checkpoints.

Shapes: N images; C channels; every block maps (N, C_in, H, W) to (N, C_out, H / stride, W / stride) unless it says otherwise.

`yolov5` builds networks of them; `heads` and `one_to_one` use `ConvBNAct`. Names of attributes are keys of state dicts: they must stay, and
so must `BN_EPS` and `BN_MOMENTUM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_scripting, is_tracing  # type: ignore[attr-defined]

BN_EPS, BN_MOMENTUM = 1e-3, 0.03  # part of the architecture: weights trained with other values give other outputs

Activation = Callable[[], nn.Module]


class _Concatenate(torch.autograd.Function):
    """Concatenate maps along channels; copy their gradients out of the joint one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*maps: Tensor) -> Tensor:
        return torch.cat(maps, dim=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.channels = [own.shape[1] for own in inputs]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = zip(gradient.split(ctx.channels, dim=1), ctx.needs_input_grad, strict=True)
        return tuple(part.clone() if needed else None for part, needed in parts)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return torch.cat(tangents, dim=1)


def concatenate(maps: list[Tensor]) -> Tensor:
    """Concatenate feature maps (N, C_i, H, W) along channels.

    In channels_last a map's slice of the joint gradient has gaps at each pixel, which the backward kernels of activations take several times
    as long to read as it takes to close them.
    """
    if not is_scripting():  # noqa: SIM102 - TorchScript skips what this alone guards
        if _copies_gradients(maps):
            return _Concatenate.apply(*maps)  # type: ignore[no-any-return]
    return torch.cat(maps, dim=1)


def _copies_gradients(maps: list[Tensor]) -> bool:
    """Return True for maps in channels_last with gradients; graphs have the plain operator."""
    traced = torch.compiler.is_compiling() or is_tracing()
    if traced or isinstance(maps[0], torch.fx.Proxy):
        return False
    return torch.is_grad_enabled() and maps[0].is_contiguous(memory_format=torch.channels_last)


class ConvBNAct(nn.Module):
    """Convolution without bias, batch normalisation and activation, at ``stride``."""

    def __init__(
        self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: Activation = nn.SiLU
    ) -> None:
        super().__init__()
        padding = (kernel - 1) // 2  # the 6x6 stem, too, then halves the image exactly
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, padding, groups=groups, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(c_out, eps=BN_EPS, momentum=BN_MOMENTUM)
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1x1 then 3x3 convolution, with a residual connection if ``shortcut`` and widths allow it."""

    def __init__(
        self, c_in: int, c_out: int, shortcut: bool = True, expansion: float = 0.5, act: Activation = nn.SiLU
    ) -> None:
        super().__init__()
        hidden = int(c_out * expansion)
        self.cv1 = ConvBNAct(c_in, hidden, act=act)
        self.cv2 = ConvBNAct(hidden, c_out, 3, act=act)
        self.shortcut = shortcut and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cv2(self.cv1(x))
        return x + y if self.shortcut else y


class C3(nn.Module):
    """Cross-stage partial block (Wang et al. 2019): half of the channels bypass the bottlenecks."""

    def __init__(
        self, c_in: int, c_out: int, repeats: int = 1, shortcut: bool = True, act: Activation = nn.SiLU
    ) -> None:
        super().__init__()
        hidden = c_out // 2
        self.cv1 = ConvBNAct(c_in, hidden, act=act)
        self.cv2 = ConvBNAct(c_in, hidden, act=act)
        self.cv3 = ConvBNAct(2 * hidden, c_out, act=act)
        self.m = self._inner(hidden, repeats, shortcut, act)

    def _inner(self, hidden: int, repeats: int, shortcut: bool, act: Activation) -> nn.Module:
        return nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, 1.0, act) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(concatenate([self.m(self.cv1(x)), self.cv2(x)]))  # type: ignore[no-any-return]


class GhostConv(nn.Module):
    """Convolution that derives half of its channels cheaply from the others (Han et al. 2020)."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, act: Activation = nn.SiLU) -> None:
        super().__init__()
        hidden = c_out // 2
        self.cv1 = ConvBNAct(c_in, hidden, kernel, stride, act=act)
        self.cv2 = ConvBNAct(hidden, hidden, 5, groups=hidden, act=act)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cv1(x)
        return concatenate([y, self.cv2(y)])


class GhostBottleneck(nn.Module):
    """Two ghost convolutions with a residual connection, at the same width and size."""

    def __init__(self, channels: int, act: Activation = nn.SiLU) -> None:
        super().__init__()
        hidden = channels // 2
        # Identity keeps the place, and so the state-dict names, of the depthwise convolution in bottlenecks that halve the image
        self.conv = nn.Sequential(
            GhostConv(channels, hidden, act=act), nn.Identity(), GhostConv(hidden, channels, act=nn.Identity)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)  # type: ignore[no-any-return]


class C3Ghost(C3):
    """C3 with ghost bottlenecks."""

    def _inner(self, hidden: int, repeats: int, shortcut: bool, act: Activation) -> nn.Module:
        return nn.Sequential(*(GhostBottleneck(hidden, act) for _ in range(repeats)))


class TransformerLayer(nn.Module):
    """Transformer layer without normalisation, for tokens (L, N, C): attention and feed-forward."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.q = nn.Linear(channels, channels, bias=False)
        self.k = nn.Linear(channels, channels, bias=False)
        self.v = nn.Linear(channels, channels, bias=False)
        self.ma = nn.MultiheadAttention(channels, heads)
        self.fc1 = nn.Linear(channels, channels, bias=False)
        self.fc2 = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ma(self.q(x), self.k(x), self.v(x), need_weights=False)[0] + x
        return self.fc2(self.fc1(x)) + x  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Transformer over the positions of a feature map (Dosovitskiy et al. 2020).

    Positions are encoded by a learnt linear layer.
    """

    def __init__(self, channels: int, heads: int, layers: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        self.tr = nn.Sequential(*(TransformerLayer(channels, heads) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).permute(2, 0, 1)
        return self.tr(tokens + self.linear(tokens)).permute(1, 2, 0).reshape(x.shape)  # type: ignore[no-any-return]


HEADS = 4


class C3Transformer(C3):
    """C3 with transformer layers in the place of bottlenecks."""

    def _inner(self, hidden: int, repeats: int, shortcut: bool, act: Activation) -> nn.Module:
        return TransformerBlock(hidden, HEADS, repeats)


class SPP(nn.Module):
    """Spatial pyramid pooling (He et al. 2014): max pools of several sizes side by side."""

    def __init__(self, c_in: int, c_out: int, kernels: Sequence[int] = (5, 9, 13), act: Activation = nn.SiLU) -> None:
        super().__init__()
        hidden = c_in // 2
        self.cv1 = ConvBNAct(c_in, hidden, act=act)
        self.cv2 = ConvBNAct(hidden * (len(kernels) + 1), c_out, act=act)
        self.m = nn.ModuleList(nn.MaxPool2d(kernel, stride=1, padding=kernel // 2) for kernel in kernels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        return self.cv2(concatenate([x, *(pool(x) for pool in self.m)]))  # type: ignore[no-any-return]


class SPPF(nn.Module):
    """Spatial pyramid pooling, fast: three 5x5 max pools in a row equal pools of 5, 9 and 13."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 5, act: Activation = nn.SiLU) -> None:
        super().__init__()
        hidden = c_in // 2
        self.cv1 = ConvBNAct(c_in, hidden, act=act)
        self.cv2 = ConvBNAct(4 * hidden, c_out, act=act)
        self.m = nn.MaxPool2d(kernel, stride=1, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.cv1(x)]
        for _ in range(3):
            levels.append(self.m(levels[-1]))
        return self.cv2(concatenate(levels))  # type: ignore[no-any-return]


class Concat(nn.Module):
    """Join feature maps of the same size along channels."""

    def forward(self, maps: list[Tensor]) -> Tensor:
        return concatenate(maps)
