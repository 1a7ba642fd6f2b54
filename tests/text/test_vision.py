"""The language model that sees: its encoder beside transformers', its packing beside images alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.text.hf_models import hf_folder

from arclight.parallel import initialize
from arclight.text import ByteTokenizer, build_model, from_hf, generate, to_hf
from arclight.text.vision_language.siglip import Images, VisionConfig, VisionEncoder, native_size
from arclight.text.vision_language.vision_llama import VisionLlama

SIZES = [(5, 3), (2, 7), (4, 4), (1, 1)]


def packed(patch: int = 4, seed: int = 0, sizes: list[tuple[int, int]] = SIZES) -> Images:
    random = torch.Generator().manual_seed(seed)
    return Images(torch.randn(sum(h * w for h, w in sizes), 3 * patch**2, generator=random), sizes)


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Siglip2VisionConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, patch_size=4, num_patches=36,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Siglip2VisionModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_the_encoder_is_that_of_transformers(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path / "siglip2")
    ours = from_hf(tmp_path / "siglip2")
    assert isinstance(ours, VisionEncoder)
    images = packed()
    parts = images.patches.split([h * w for h, w in SIZES])
    padded = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    mask = torch.tensor([[1] * len(part) + [0] * (padded.shape[1] - len(part)) for part in parts])
    expected = theirs(padded, mask, torch.tensor(SIZES)).last_hidden_state
    got = ours(images)
    torch.testing.assert_close(
        got, torch.cat([row[: len(part)] for row, part in zip(expected, parts)]), rtol=0, atol=1e-5
    )
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(5))
    (got * weights).sum().backward()
    sum(
        (row[: len(part)] * w).sum() for row, part, w in zip(expected, parts, weights.split([len(p) for p in parts]))
    ).backward()
    gradient = theirs.embeddings.position_embedding.weight.grad
    torch.testing.assert_close(ours.positions.weight.grad, gradient, rtol=1e-5, atol=1e-5)
    to_hf(ours, tmp_path / "written")
    again = from_hf(tmp_path / "written")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in ours.state_dict().items())


def test_patches_are_cut_as_transformers_cuts_them() -> None:
    module = pytest.importorskip("transformers.models.siglip2.image_processing_pil_siglip2")
    image = torch.randn(3, 12, 20)
    cut = Images.of([image], patch=4, most=None)
    assert cut.sizes == [(3, 5)]
    assert torch.equal(cut.patches, torch.from_numpy(module.convert_image_to_patches(image.numpy(), 4)))
    for height, width, most in [(480, 640, 256), (33, 1000, 256), (7, 7, 64), (3000, 200, 100), (1, 5000, 256)]:
        expected = module.get_image_size_for_max_num_patches(height, width, 16, most)
        assert native_size(height, width, 16, most) == (expected[0] // 16, expected[1] // 16)
    fitted = Images.of([torch.randn(3, 480, 640), torch.randn(3, 30, 70)])
    assert all(h * w <= 256 for h, w in fitted.sizes)
    with pytest.raises(ValueError, match="does not divide"):
        Images.of([torch.randn(3, 13, 20)], patch=4, most=None)
    with pytest.raises(ValueError, match="have 15 patches, not 14"):
        Images(torch.randn(14, 48), [(5, 3)])


def test_packed_images_do_not_see_one_another() -> None:
    encoder = VisionEncoder(VisionConfig(dim=48, layers=2, heads=4, hidden=80, patch=4, grid=6))
    initialize(encoder, seed=0)
    images = packed()
    together = encoder(images)
    alone = [
        encoder(Images(part, [size])) for part, size in zip(images.patches.split([h * w for h, w in SIZES]), SIZES)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def sees() -> Any:
    model = build_model(
        "llama3-vision-debug", layers=2, dim=64, heads=4, kv_heads=2, hidden=96,
        vision=VisionConfig(dim=48, layers=2, heads=4, hidden=80, patch=4, grid=6),
    )  # fmt: skip
    initialize(model, seed=0)
    return model


def text_with(images: list[tuple[int, int]], lead: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(lead)
    parts = []
    for height, width in images:
        parts += [torch.randint(0, 2000, (lead,), generator=random), torch.full((height * width,), 2047)]
    return torch.cat([*parts, torch.randint(0, 2000, (lead,), generator=random)])


def test_packed_texts_with_images_are_as_alone(sees: Any) -> None:
    sizes = [[(5, 3)], [(2, 7), (4, 4)]]
    texts = [text_with(own, 3 + i) for i, own in enumerate(sizes)]
    images = packed(sizes=[size for own in sizes for size in own])
    documents = torch.cat([torch.full((len(text),), i) for i, text in enumerate(texts)])[None]
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    together = sees(torch.cat(texts)[None], positions, documents, images=images)
    first, rest = images.patches.split([15, 30])
    alone = [
        sees(text[None], images=Images(part, own)) for text, part, own in zip(texts, (first, rest), sizes, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=0, atol=1e-5)
    other = Images(torch.cat((first, rest.flip(0))), images.sizes)
    changed = sees(torch.cat(texts)[None], positions, documents, images=other) - together
    assert changed[:, : len(texts[0]) + 4].abs().max() < 1e-5  # the first text, and the second before its image
    assert changed[:, -1].abs().max() > 1e-3


def test_model_learns_from_images(sees: Any) -> None:
    """Only the image distinguishes the two classes."""
    sees.train()
    optimizer = torch.optim.AdamW(sees.parameters(), 3e-3)
    random = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(30):
        kinds = torch.randint(0, 2, (8,), generator=random)
        base = torch.linspace(-1, 1, 48)
        patches = torch.cat([(base if kind else -base).expand(4, 48) for kind in kinds])
        images = Images(patches + torch.randn(32, 48, generator=random) * 0.3, [(2, 2)] * 8)
        tokens = torch.tensor([1] + [2047] * 4 + [2]).expand(8, -1)
        loss = torch.nn.functional.cross_entropy(sees(tokens, images=images)[:, -1], kinds + 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in sees.parameters())
    assert losses[-1] < 0.2 < 0.5 < losses[0]


def test_generation_depends_on_the_images(sees: Any) -> None:
    """Two prompts of different lengths with images of different sizes, beside the passes that greedy choice is made of."""
    tokenizer = ByteTokenizer()
    sizes = [[(2, 2)], [(3, 1), (1, 2)]]
    prompts = [text_with(own, 3 + i).clamp(max=2047) for i, own in enumerate(sizes)]
    images = packed(sizes=[size for own in sizes for size in own])
    expected = []
    for prompt, patches, own in zip(prompts, images.patches.split([4, 5]), sizes, strict=True):
        ids = prompt
        for _ in range(6):
            logits = sees(ids[None], images=Images(patches, own))[0, -1, :259]
            ids = torch.cat((ids, logits.argmax()[None]))
        expected.append(ids[len(prompt) :].tolist())
    answers = generate(sees, tokenizer, [p.tolist() for p in prompts], 6, temperature=0, inputs={"images": images})
    assert answers == [tokenizer.decode(ids[: ids.index(257)] if 257 in ids else ids) for ids in expected]
    small = VisionLlama(replace(sees.config, image_token=65))
    initialize(small, seed=0)
    with torch.no_grad():
        small.output.weight[65] = small.output.weight.abs().sum(0) * 100
        small.norm.weight.fill_(1)
    assert "A" not in generate(small, tokenizer, "xyz", 20, seed=0)


def test_trunk_and_encoder_come_from_folders_of_their_own(theirs: Any, tmp_path: Path) -> None:
    hf_folder("llama", tmp_path / "llama")
    theirs.save_pretrained(tmp_path / "siglip2")
    trunk, tower = from_hf(tmp_path / "llama"), from_hf(tmp_path / "siglip2")
    fields = vars(trunk.config) | {"image_token": 255}
    model = build_model("llama3-vision-debug", **fields, vision=tower.config)  # type: ignore[arg-type]
    initialize(model, seed=0)
    projector = model.projector.w1.weight.clone()
    from_hf(tmp_path / "llama", model=model)
    from_hf(tmp_path / "siglip2", model=model.vision)
    assert torch.equal(model.layers["1"].attention.wq.weight, trunk.layers["1"].attention.wq.weight)
    assert torch.equal(model.vision.positions.weight, tower.positions.weight)
    assert torch.equal(model.projector.w1.weight, projector)
    with pytest.raises(ValueError, match="vision, projector have no place"):
        to_hf(model, tmp_path / "out")


def test_places_and_patches_must_be_as_many(sees: Any) -> None:
    with pytest.raises(ValueError, match="3 places for patches, the images have 15"):
        sees(torch.tensor([[1, 2047, 2047, 2047]]), images=packed(sizes=[(5, 3)]))
    with pytest.raises(ValueError, match="1 places for patches, the images have 0"):
        sees(torch.tensor([[1, 2047]]))
    with pytest.raises(TypeError, match="Llama does not take images"):
        build_model("llama3-debug", layers=1)(torch.tensor([[1]]), images=packed())
