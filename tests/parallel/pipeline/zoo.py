"""Small models of many kinds, and what each is called with: for tests that cut them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from arclight.text import build_model as build_language_model
from arclight.vision import build_model as build_detector

Example = tuple[tuple[Any, ...], dict[str, Any]]
VOCABULARY = 48


@dataclass(frozen=True)
class Kind:
    """A model, and its arguments for a number of samples and a length (tokens of a sequence, or side of an image)."""

    build: Callable[[], nn.Module]
    example: Callable[[int, int], Example]
    lengths: tuple[int, int] = (8, 12)
    """Two that the model takes."""
    shared: bool = False
    """Whether parameters are used in several places of the model."""


# -- transformers ----------------------------------------------------------------------------------------------------


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length))


def text(batch: int, length: int) -> Example:
    return (tokens(batch, length),), {"use_cache": False}


def padded(batch: int, length: int) -> Example:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - 2 :] = 0
    return (), {"input_ids": tokens(batch, length), "attention_mask": mask}


def translated(batch: int, length: int) -> Example:
    given = {"input_ids": tokens(batch, length), "decoder_input_ids": tokens(batch, length - 2), "use_cache": False}
    return (), given


def images(batch: int, side: int) -> Example:
    return (torch.randn(batch, 3, side, side),), {}


SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
DECODER: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "head_dim": 4}
GPT: dict[str, Any] = {
    "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
T5: dict[str, Any] = {
    "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
}  # fmt: skip
VIT: dict[str, Any] = SIZES | {"image_size": 16, "patch_size": 8, "num_labels": 5}


def hf(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**sizes))


TRANSFORMERS: dict[str, Kind] = {
    "gpt2": Kind(hf("GPT2LMHeadModel", "GPT2Config", **GPT), text, shared=True),
    "gptj": Kind(hf("GPTJForCausalLM", "GPTJConfig", rotary_dim=4, **GPT), text),
    "llama": Kind(hf("LlamaForCausalLM", "LlamaConfig", **DECODER), text),
    "llama-tied": Kind(hf("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, **DECODER), text, shared=True),
    "qwen2": Kind(hf("Qwen2ForCausalLM", "Qwen2Config", tie_word_embeddings=True, **DECODER), text, shared=True),
    "qwen3": Kind(hf("Qwen3ForCausalLM", "Qwen3Config", **DECODER), text),
    "bert": Kind(hf("BertForMaskedLM", "BertConfig", **SIZES), padded, shared=True),
    "bert-classifier": Kind(hf("BertForSequenceClassification", "BertConfig", num_labels=3, **SIZES), padded),
    "albert": Kind(hf("AlbertForMaskedLM", "AlbertConfig", embedding_size=8, **SIZES), padded, shared=True),
    "t5": Kind(hf("T5ForConditionalGeneration", "T5Config", **T5), translated, shared=True),
    "vit": Kind(hf("ViTForImageClassification", "ViTConfig", **VIT), images, (16, 16)),
}  # fmt: skip


# -- torch.nn, and models as timm writes them ------------------------------------------------------------------------


def rows(batch: int, length: int) -> Example:
    return (torch.randn(batch, length, 16),), {}


def sequential() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.LayerNorm(16), nn.Linear(16, 3))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj, self.proj_drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        return self.proj_drop(self.proj(y))  # type: ignore[no-any-return]


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(width), Attention(width, heads), LayerScale(width)
        self.norm2, self.ls2 = nn.LayerNorm(width), LayerScale(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """As timm has it: parameters in the forward of the model itself, and blocks in a Sequential."""

    def __init__(self, width: int = 16, depth: int = 4, side: int = 16) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (side // 4) ** 2, width) * 0.02)
        self.pos_drop, self.norm_pre = nn.Dropout(0.1), nn.Identity()
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm, self.fc_norm, self.head = nn.LayerNorm(width), nn.Identity(), nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1) + self.pos_embed
        x = self.norm(self.blocks(self.norm_pre(self.pos_drop(x))))
        return self.head(self.fc_norm(x[:, 0]))  # type: ignore[no-any-return]


class BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.act1, self.act2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        x += shortcut
        return self.act2(x)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """As timm has it: stages that are Sequentials, batch norms, and operations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.global_pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.act1(self.bn1(self.conv1(images))))
        x = self.layer2(self.layer1(x))
        return self.fc(self.global_pool(x).flatten(1))  # type: ignore[no-any-return]


PLAIN: dict[str, Kind] = {
    "sequential": Kind(sequential, rows),
    "timm-vit": Kind(VisionTransformer, images, (16, 16)),
    "timm-resnet": Kind(ResNet, images, (16, 32)),
}


# -- our own ---------------------------------------------------------------------------------------------------------


def ours(name: str, **changes: Any) -> Callable[[], nn.Module]:
    sizes = {"vocab_size": VOCABULARY, "dim": 32, "layers": 4, "heads": 4, "max_positions": 64} | changes

    def build() -> nn.Module:
        from arclight.parallel import initialize

        model = build_language_model(name, **sizes)
        initialize(model, 1)
        return model

    return build


def written(batch: int, length: int) -> Example:
    return (tokens(batch, length),), {}


GROUPED = {"kv_heads": 2, "hidden": 48}

OURS: dict[str, Kind] = {
    "llama3": Kind(ours("llama3-debug", **GROUPED), written),
    "llama3-tied": Kind(ours("llama3-debug", tied=True, **GROUPED), written, shared=True),
    "qwen3-tied": Kind(ours("qwen3-debug", head_dim=8, **GROUPED), written, shared=True),
    "our-gpt2-tied": Kind(ours("gpt2-debug"), written, shared=True),
    "our-gpt2": Kind(ours("gpt2-debug", tied=False), written),
    "deepseek": Kind(ours("deepseek-v3-debug", hidden=48), written),
    "llama4": Kind(ours("llama4-debug", **GROUPED), written),
    "yolov5": Kind(lambda: build_detector("yolov5n", 3), images, (32, 64)),
}

ZOO: dict[str, Kind] = TRANSFORMERS | PLAIN | OURS
