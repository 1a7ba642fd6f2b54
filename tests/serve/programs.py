"""Small programs that servers of tests serve."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from arclight.deploy import export
from arclight.deploy.settings import Quantization
from arclight.parallel import initialize
from arclight.text import build_model
from arclight.text.data.tokenizer import ByteTokenizer
from arclight.text.embedding_program import export_embedding_model
from arclight.text.language_program import export_language_model
from arclight.text.model.decoder import Decoder

SIDE = 64


class OneBox(nn.Module):
    """A detector that always sees one code: centre (24, 32), 12 wide and 20 high, of its 64 pixels square."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prediction", torch.tensor([[[24.0, 32.0, 12.0, 20.0, 0.9, 1.0]]]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.prediction + 0 * images.mean((1, 2, 3))[:, None, None]


def write_detector(path: Path, **metadata: object) -> Path:
    processing = {
        "processing": "arclight.vision.tasks.processing:DetectionProcessing",
        "processing_args": {"names": ["qr_code"], "image_size": SIDE},
    }
    images = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    export(OneBox(), path, example_inputs=images, input_names=["images"], metadata=processing | metadata)
    return path


class Affine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x + 1


def write_affine(path: Path) -> None:
    export(Affine(), path, example_inputs=torch.rand(2, 3), input_names=["x"], output_names=["y"])


def language_model() -> Decoder:
    model = build_model(
        "llama3-debug", dim=64, layers=1, heads=4, kv_heads=2, hidden=128, vocab_size=259, max_positions=256
    )
    initialize(model, 0)
    model.eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(3)  # so that texts differ
    model.output.weight[ByteTokenizer().eos] = 0  # and do not end early
    return model


def write_language_program(path: Path, recipe: Quantization | None = None) -> None:
    texts = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(0))
    export_language_model(language_model(), path, [texts], recipe, tokenizer=ByteTokenizer())


def write_embedding_program(path: Path) -> None:
    texts = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(0))
    export_embedding_model(language_model(), path, [texts], tokenizer=ByteTokenizer())
