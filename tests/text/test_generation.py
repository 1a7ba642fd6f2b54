"""Generation beside transformers' own, and what its streams and stops promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.text.hf_models import hf_folder
from torch import Tensor

from arclight.parallel import initialize
from arclight.text import ByteTokenizer, Tokenizer, build_model, from_hf, generate
from arclight.text.generation import choose
from arclight.text.model import Decoder, DecoderConfig

PROMPTS = ["def main", "x", "import numpy as np\n"]


def model(name: str = "llama3-debug") -> Any:
    built = build_model(name, layers=2, vocab_size=259, dim=64, heads=4)
    initialize(built, seed=0)
    with torch.no_grad():
        built.tok_embeddings.weight.mul_(30)
    return built


class Says(Decoder):
    """A model that says a text, whatever it is asked, and counts its passes."""

    def __init__(self, text: bytes) -> None:
        super().__init__(
            DecoderConfig(vocab_size=259, dim=259, heads=1, layers=1, max_positions=1000), torch.nn.Identity
        )
        self.text, self.passes = [*text, 257], 0
        self.output = torch.nn.Linear(259, 259, bias=False)
        with torch.no_grad():
            self.output.weight.copy_(torch.eye(259) * 100)

    def hidden(self, tokens_BT: Tensor, positions: Any = None, documents: Any = None, cache: Any = None) -> Tensor:
        self.passes += 1
        said = torch.nn.functional.one_hot(torch.tensor(self.text[self.passes - 1]), 259).float()
        return said.expand(*tokens_BT.shape, 259)


@pytest.mark.parametrize(
    "case", ["llama", *(pytest.param(case, marks=pytest.mark.slow) for case in ("qwen3-tied", "gpt2"))]
)
def test_greedy_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = hf_folder(case, tmp_path / "hf")
    ours = from_hf(tmp_path / "hf")
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([list(prompt.encode())])
        out = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        expected.append(bytes(out[0, ids.shape[1] :].tolist()).decode("utf-8", "replace"))
    assert len(set(expected)) > 1
    assert generate(ours, ByteTokenizer(), PROMPTS, 12, temperature=0) == expected
    assert [generate(ours, ByteTokenizer(), prompt, 12, temperature=0) for prompt in PROMPTS] == expected


def test_a_seed_gives_the_same_answers_alone_and_streamed() -> None:
    tokenizer, ours = ByteTokenizer(), model()
    options: Any = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}
    first = generate(ours, tokenizer, PROMPTS, 24, seed=3, **options)
    assert generate(ours, tokenizer, PROMPTS, 24, seed=3, **options) == first
    assert generate(ours, tokenizer, PROMPTS, 24, seed=4, **options) != first
    assert generate(ours, tokenizer, PROMPTS, 24, **options) != generate(ours, tokenizer, PROMPTS, 24, **options)
    streamed = list(generate(ours, tokenizer, PROMPTS, 24, seed=3, stream=True, **options))
    assert ["".join(row) for row in zip(*streamed)] == first
    assert len(streamed) > 10


def test_a_model_in_training_goes_back_to_it() -> None:
    ours = model().train()
    stream = generate(ours, ByteTokenizer(), "a", 5, seed=0, stream=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert ours.training
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_every_module_keeps_its_own_mode() -> None:
    ours = model().train()
    ours.layers["1"].eval()  # frozen, as norms and dropout of parts that do not train are
    before = {name: part.training for name, part in ours.named_modules()}
    stream = generate(ours, ByteTokenizer(), "a", 5, seed=0, stream=True)
    next(stream)  # and nobody reads on
    assert {name: part.training for name, part in ours.named_modules()} == before
    list(stream)
    assert {name: part.training for name, part in ours.named_modules()} == before
    assert any(before.values())
    assert not all(before.values())


@pytest.mark.parametrize("temperature", [1e-4, 1e-20, 1e-38, 1e-45, 1e-60])
def test_a_temperature_near_zero_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0], [-9e9, -1e10, -8e9]])
    assert choose(logits, temperature, None, None, torch.tensor([0.3, 0.999])).tolist() == [1, 2]


def test_streams_give_whole_characters() -> None:
    text = "né 日本 🎉!"
    pieces = list(generate(Says(text.encode()), ByteTokenizer(), "?", 100, stream=True))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert max(map(len, pieces)) == 1
    cut = generate(Says(text.encode()), ByteTokenizer(), "?", 2)
    assert cut == "n\ufffd"  # the answer ends inside a character, which is said


def test_stop_texts_end_answers_wherever_tokens_end() -> None:
    says = Says(b"one. STOOP STOP two")
    pieces = list(generate(says, ByteTokenizer(), "?", 100, stream=True, stop=["STOP", "never"]))
    assert "".join(pieces) == "one. STOOP "
    assert says.passes == len("one. STOOP STOP")
    assert generate(Says(b"ends with ST"), ByteTokenizer(), "?", 100, stop="STOP") == "ends with ST"
    assert generate(Says(b"ab abc"), ByteTokenizer(), "?", 100, stop=["abc", "b a"]) == "a"


def test_text_of_real_tokens_is_streamed_as_it_is_decoded() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = Tokenizer.train(["na\u00efve caf\u00e9 \u65e5\u672c\u8a9e text " * 50], 270)
    ids = tokenizer.encode("caf\u00e9 \u65e5\u672c\u8a9e na\u00efve text")
    says = Says(b"")
    says.text = [*ids, 257]
    vocabulary = tokenizer.vocab_size
    says.config = DecoderConfig(vocab_size=vocabulary, dim=vocabulary, heads=1, layers=1)
    says.output = torch.nn.Identity()  # type: ignore[assignment]

    def hidden(tokens_BT: Tensor, *_: Any) -> Tensor:
        says.passes += 1
        return (
            torch.nn.functional.one_hot(torch.tensor(says.text[says.passes - 1]), vocabulary)
            .float()
            .expand(1, tokens_BT.shape[1], -1)
        )

    says.hidden = hidden  # type: ignore[assignment, method-assign]
    assert generate(says, tokenizer, "text", len(ids), temperature=0) == tokenizer.decode(ids)


def test_choices_follow_their_probabilities() -> None:
    logits = torch.tensor([0.1, 2.0, 1.0, -1.0, 1.5]).expand(1000, -1)
    chance = (torch.arange(1000) + 0.5) / 1000
    everything = logits[0].double()

    def shares(temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
        return choose(logits, temperature, top_k, top_p, chance).bincount(minlength=5) / 1000

    def softmax(kept: list[int], temperature: float) -> Tensor:
        out = torch.zeros(5)
        out[kept] = (everything[kept] / temperature).softmax(0).float()
        return out

    for got, expected in (
        (shares(1, None, None), softmax([0, 1, 2, 3, 4], 1)),
        (shares(0.5, None, None), softmax([0, 1, 2, 3, 4], 0.5)),
        (shares(1, 2, None), softmax([1, 4], 1)),
        (shares(2, 100, None), softmax([0, 1, 2, 3, 4], 2)),
        (shares(1, None, 0.5), softmax([1, 4], 1)),  # 0.45 alone is not enough
        (shares(1, None, 0.44), softmax([1], 1)),
        (shares(1, 3, 0.99), softmax([1, 2, 4], 1)),
        (shares(0, None, None), softmax([1], 1)),
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)
    with pytest.raises(FloatingPointError, match="not numbers"):
        choose(torch.tensor([[1.0, float("nan")]]), 1.0, None, None, torch.zeros(1))


def test_invalid_generation_options_are_refused() -> None:
    tokenizer, ours = ByteTokenizer(), model()
    wrong: list[tuple[str, Any]] = [
        ("temperature must be", {"temperature": -1}), ("top_k must be", {"top_k": 0}), ("top_p must be", {"top_p": 1.5}),
        ("end every answer", {"stop": ["a", ""]}), ("temperature must be", {"temperature": float("nan")}),
        ("temperature must be", {"temperature": float("inf")}),
    ]  # fmt: skip
    for match, options in wrong:
        with pytest.raises(ValueError, match=match):
            generate(ours, tokenizer, "a", 4, **options)
    with pytest.raises(ValueError, match="at least 1"):
        generate(ours, tokenizer, "a", 0)
    with pytest.raises(ValueError, match=r"leave none of the model's 2048 positions for an answer: shorten it$"):
        generate(ours, tokenizer, "a" * 2048, 1)
    with pytest.raises(
        ValueError, match="more than the model's 2048 positions: shorten it, or lower max_new_tokens to 3"
    ):
        generate(ours, tokenizer, "a" * 2045, 4)
    with pytest.raises(ValueError, match="another model's"):
        generate(build_model("llama3-debug", vocab_size=100, layers=1), tokenizer, "z", 4)
    with pytest.raises(ValueError, match="prompt 0 has token -1, the model knows 259"):
        generate(ours, tokenizer, [[-1]], 2)
    with pytest.raises(TypeError, match="list of token ids, got 1: put the ids"):
        generate(ours, tokenizer, [1, 2, 3], 2)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="no option 'topp'; it knows temperature"):
        generate(ours, tokenizer, "a", 2, topp=1)  # type: ignore[call-overload]
    assert generate(ours, tokenizer, [], 4) == []
    assert isinstance(generate(ours, tokenizer, "", 4, seed=0), str)  # begins with bos


def test_prompts_may_be_a_tensor_of_ids() -> None:
    ids, options = torch.tensor([[5, 6, 7], [8, 9, 10]]), {"temperature": 0.0}
    wanted = generate(model(), ByteTokenizer(), ids.tolist(), 4, **options)
    assert generate(model(), ByteTokenizer(), ids, 4, **options) == wanted
    with pytest.raises(TypeError, match="list of lists"):
        generate(model(), ByteTokenizer(), ids[0], 4, **options)
