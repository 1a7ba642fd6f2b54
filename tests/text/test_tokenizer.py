"""Tokenizers: nothing is lost between text, ids and text, whatever the vocabulary."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arclight.text import ByteTokenizer, Tokenizer
from arclight.text.data.tokenizer import FILES, TokenizerError

tokenizers = pytest.importorskip("tokenizers")

STDLIB = Path(sysconfig.get_path("stdlib"))
SAMPLES = [STDLIB / name for name in ("argparse.py", "ast.py", "calendar.py", "inspect.py")]
TEXTS = [path.read_text(encoding="utf-8") for path in SAMPLES]
HARD = "naïve 東京 🏳️‍🌈 \t\r\n  x=1234567  \x00 \u2028 <|eos|> e\u0301"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.train(TEXTS, 600)


@pytest.fixture(params=["bpe", "bytes"])
def tokenizer(request: pytest.FixtureRequest, bpe: Tokenizer) -> Tokenizer:
    return bpe if request.param == "bpe" else ByteTokenizer()


def sentencepiece_like(tmp_path: Path) -> Tokenizer:
    """A vocabulary whose spaces belong to words and whose unknown characters are spelt in bytes."""
    words = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "e", "l", "o", "▁h", "lo", "▁hel"]
    vocab = {word: number for number, word in enumerate(words)}
    merges = [("▁", "h"), ("l", "o")]
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    decoders = tokenizers.decoders
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.load(tmp_path / "tokenizer.json")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=80, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    for tokenizer in (_learned(), ByteTokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())
        assert not tokenizer.specials & set(ids)
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.end() == text


_made: list[Tokenizer] = []


def _learned() -> Tokenizer:
    if not _made:
        _made.append(Tokenizer.train(TEXTS, 600))
    return _made[0]


def test_decoding_agrees_with_the_library(bpe: Tokenizer, tmp_path: Path) -> None:
    engine = tokenizers.Tokenizer.from_file(str(bpe.save(tmp_path) / "tokenizer.json"))
    rng = random.Random(3)
    for _ in range(50):
        ids = [rng.randrange(3, bpe.vocab_size) for _ in range(12)]
        assert bpe.decode(ids) == engine.decode(ids)
    assert bpe.encode(HARD.replace("<|eos|>", "")) == engine.encode(HARD.replace("<|eos|>", "")).ids


def test_training_is_repeatable_and_compresses(bpe: Tokenizer) -> None:
    assert Tokenizer.train(TEXTS, 600).digest == bpe.digest
    assert Tokenizer.train(TEXTS, 601).digest != bpe.digest
    assert bpe.vocab_size == 600
    assert bpe.bytes_per_token(TEXTS) > 2.0
    assert ByteTokenizer().bytes_per_token(TEXTS) == 1.0
    assert bpe.bytes_per_token([]) == 0.0


def test_impossible_vocabularies_are_refused() -> None:
    with pytest.raises(TokenizerError, match="need at least 259"):
        Tokenizer.train(TEXTS, 258)
    with pytest.raises(TokenizerError, match=r"tokens only, not vocab_size 300.* vocab_size of at most 260"):
        Tokenizer.train(["ab"], 300)
    for nothing in ([], ["", ""]):
        with pytest.raises(TokenizerError, match="no text to learn tokens from"):
            Tokenizer.train(nothing, 300)


def test_special_tokens_in_a_text_are_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos not in tokenizer.encode("a<|eos|>b")
    ids = tokenizer.encode("a<|eos|>b", specials=True)
    assert ids.count(tokenizer.eos) == 1
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, specials=True) == "a<|eos|>b"
    assert tokenizer.encode("a", bos=True, eos=True) == [tokenizer.bos, *tokenizer.encode("a"), tokenizer.eos]
    assert tokenizer.eos not in tokenizer.encode("a<|eos|>b")


def test_batches_are_what_single_texts_are(tokenizer: Tokenizer) -> None:
    texts = [HARD, "", "def f(x):\n    return x\n"]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [tokenizer.encode(text) for text in texts]


def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    twin = Tokenizer.load(tokenizer.save(tmp_path / "tok"))
    assert (twin.digest, twin.bos, twin.eos, twin.pad) == (
        tokenizer.digest,
        tokenizer.bos,
        tokenizer.eos,
        tokenizer.pad,
    )
    assert twin.encode(HARD) == tokenizer.encode(HARD)


def test_roles_and_chat_templates_come_from_the_config(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    config = {"bos_token": None, "eos_token": {"content": "<|pad|>"}, "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = Tokenizer.load(tmp_path)
    assert (found.eos, found.chat_templates) == (bpe.pad, {"default": "{{ messages }}"})
    (tmp_path / "chat_template.jinja").write_text("{{ own file }}")
    assert Tokenizer.load(tmp_path).chat_templates == {"default": "{{ own file }}"}
    (tmp_path / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": "tools", "template": "x"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).chat_templates == {"tools": "x"}
    config = {"chat_template": [{"name": "tools", "template": "x"}], "eos_token": "</nowhere>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="</nowhere>"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_files_may_begin_with_a_mark(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    for name in FILES:
        (tmp_path / name).write_text((tmp_path / name).read_text(encoding="utf-8"), encoding="utf-8-sig")
    found = Tokenizer.load(tmp_path)
    assert (found.digest, found.eos, found.chat_templates) == (bpe.digest, bpe.eos, {"default": "{{ messages }}"})


def test_invalid_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a readable tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "holds a list, and a tokenizer's settings are a table"),
        (None, "holds a NoneType"),
        ({"bos_token": ["a"]}, r"names \['a'\] as its bos_token"),
        ({"chat_template": 5}, "neither a text nor texts by name: 5"),
        ({"chat_template": [{"name": "x"}]}, "neither a text nor texts by name"),
        ({"chat_template": {"x": 1}}, "neither a text nor texts by name"),
    ],
)
def test_settings_of_other_types_are_refused(bpe: Tokenizer, tmp_path: Path, config: object, says: str) -> None:
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=says):
        Tokenizer.load(tmp_path)


def test_chat_templates_in_another_encoding_are_refused(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes("é".encode("latin-1"))
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is not UTF-8 text"):
        Tokenizer.load(tmp_path)


def test_tokens_with_letters_that_stand_for_no_byte_are_their_text(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["model"]["vocab"]["a b 東"] = len(described["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    ids = [bpe.encode("x")[0], bpe.vocab_size]
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).decode(ids) == library.decode(ids) == "xa b 東"


def test_half_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    shown = [stream.push(token) for token in tokenizer.encode("東🏳️")]
    assert "".join(shown) == "東🏳️"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(shown)
    half = tokenizer.encode("東")[:-1]
    stream = tokenizer.stream()
    assert stream.push(*half) == ""
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"


def test_other_kinds_of_vocabularies_stream_too(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    assert tokenizer.pieces is None
    text = "hello hello 東 hello"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    shown = [stream.push(token) for token in ids]
    assert "".join(shown) + stream.end() == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in shown)


def test_bytes_of_no_character_hold_back_a_text_for_four_tokens_at_most(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    stray = tokenizer.names.index("<0xE6>")
    stream = tokenizer.stream()
    shown = [stream.push(stray) for _ in range(9)]
    assert [len(part) for part in shown] == [0, 0, 0, 4, 0, 0, 0, 4, 0]
    assert "".join(shown) + stream.end() == tokenizer.decode([stray] * 9)
    whole = tokenizer.encode("hello 東")
    stream = tokenizer.stream()
    assert stream.push(*whole[:-1]) == ""  # of several tokens at once, the last of which is part of a character
    assert stream.push(whole[-1]) == "hello 東"


def test_bytes_of_other_kinds_of_vocabularies_are_those_of_the_text(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    for text in ("hello hello hel", "hel 東京 lo"):
        ids = tokenizer.encode(text)  # which begin with a space of their own
        assert tokenizer.token_bytes[ids].sum() == len(f" {text}".encode())
    assert tokenizer.token_bytes[tokenizer.names.index("<0xE6>")] == 1
    assert tokenizer.bytes_per_token(["hello hello"]) > 1


def test_a_text_that_goes_on_keeps_its_first_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    prompt, rest = tokenizer.encode("hello"), tokenizer.encode("hello 東")
    stream = tokenizer.stream(after=prompt)
    assert "".join(stream.push(token) for token in rest) + stream.end() == " hello 東"


def test_a_fork_prints_no_warning_about_parallelism() -> None:
    script = (
        "import os, sys; from arclight.text import Tokenizer\n"
        "t = Tokenizer.train(['some words ' * 50], 262); t.encode_batch(['a b c'] * 100)\n"
        "if os.fork() == 0:\n    t.encode_batch(['a b c'] * 100); os._exit(0)\n"
        "os.wait()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert done.stderr == ""


def test_ids_that_are_no_tokens_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for wrong in (-1, -4, -100, tokenizer.vocab_size, 10**9):
        with pytest.raises(TokenizerError, match=f"^{wrong} is not a token: they are numbered from 0 to"):
            tokenizer.decode([5, wrong])
    with pytest.raises(TokenizerError, match=r"^-1 is not a token"):
        sentencepiece_like(tmp_path).decode([-1])
