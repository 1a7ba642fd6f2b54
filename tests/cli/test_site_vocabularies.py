"""Federated language runs whose sites have tokenizers of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from arclight.checkpoint import load
from arclight.cli.federate.recipe import FederatedRecipe
from arclight.cli.federate.sites import recipe_at_site, with_vocabulary
from arclight.data.unigrams import UNIGRAMS, read_unigrams
from arclight.federated.rounds.history import read_history
from arclight.federated.rounds.store import Rounds
from arclight.recipe import read
from arclight.text.data.corpus import held_out, open_split, write_corpus
from arclight.text.data.sources import Document
from arclight.text.data.tokenizer import ByteTokenizer, Tokenizer
from arclight.text.loss import UnigramLoss

Typed = Callable[[str], tuple[int, str, str]]
WORDS = {
    "sea": "the grey sea rolls over the old harbour wall while gulls call",
    "law": "pursuant to section four the lessee shall indemnify the lessor against all claims",
    "sums": "seven plus eight makes fifteen and fifteen minus six makes nine again",
}
OWN = 'personal = ["model.tok_embeddings.", "model.output."]\npersonal_from = "client"\n'


def texts(kind: str) -> list[Document]:
    words, random = WORDS[kind].split(), np.random.default_rng(len(kind))
    lines = [" ".join(random.choice(words, 60)) + f" {number}." for number in range(40)]
    return [Document(f"{kind} {number}", line, len(line)) for number, line in enumerate(lines)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of each kind, in 280 tokens, 400 tokens, and bytes; and one in the tokens of another."""
    folder = tmp_path_factory.mktemp("corpora")
    tokenizers = {
        "sea": Tokenizer.train((one.text for one in texts("sea")), 280),
        "law": Tokenizer.train((one.text for one in texts("law")), 330),
        "sums": ByteTokenizer(),
    }
    for kind, tokenizer in tokenizers.items():
        write_corpus(folder / kind, texts(kind), tokenizer, split=held_out(0.2))
    write_corpus(folder / "law-as-sea", texts("law"), tokenizers["sea"], split=held_out(0.2))
    return folder


def recipe_of(
    corpora: Path, kinds: tuple[str, ...], masks: str = OWN, *, task: str = "[task.unigram]\nsmoothing = 0.5\n",
    overrides: str = "", data: str = "", model: str = "llama3-debug", evaluate_on: str = "clients",
) -> str:  # fmt: skip
    named = ", ".join(f'{kind.replace("-", "_")} = "{corpora / kind}"' for kind in kinds)
    return (
        f'name = "own"\nseed = 3\n[task]\nkind = "language"\nmodel = "{model}"\nsampling = "none"\n'
        f"overrides = {{dim = 32, layers = 1, heads = 2, kv_heads = 1, hidden = 48{overrides}}}\n{task}"
        f"[task.data]\ndata = {{{named}}}\nsequence_length = 32\nbatch_size = 2\n{data}"
        '[task.optimizer]\nkind = "adamw"\nlr = 0.01\n[partition]\nkind = "source"\nby = "name"\n'
        f'[federation]\nclients = {len(kinds)}\nrounds = 3\nlocal_steps = 4\nevaluate_on = "{evaluate_on}"\n'
        f'[federation.masks]\n{masks}[trainer]\naccelerator = "cpu"\nlimit_val_batches = 2\nlog_every_n_steps = 1\n'
    )


def written(folder: Path, text: str) -> Path:
    (folder / "own.toml").write_text(text)
    return folder / "own.toml"


def weights(run: Path, number: int) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in Rounds(run).tensors(number, "model").items()}


def own_states(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The newest weights of each client, by its folder."""
    found = {}
    for states in sorted((run / "node").rglob("states")):
        newest = sorted(states.iterdir())[-1]
        found[states.parent.name] = load(newest, only=["model"])["model"]
    return found


@pytest.fixture
def whole(corpora: Path, folder: Path, typed: Typed) -> Path:
    """A run of three rounds by two sites."""
    status, _, err = typed(f"federate {written(folder, recipe_of(corpora, ('law', 'sums')))} --root whole")
    assert status == 0, err
    return folder / "whole" / "own" / "1"


def test_sites_share_the_trunk_and_keep_what_is_personal(whole: Path) -> None:
    first, last = weights(whole, 1), weights(whole, 3)
    for name, value in last.items():
        personal = name.startswith(("model.tok_embeddings.", "model.output."))
        assert torch.equal(value, first[name]) == personal, name  # nobody sends what is personal
    shapes = {name: state["model.output.weight"].shape[0] for name, state in own_states(whole).items()}
    assert sorted(shapes.values()) == [320, 384]

    history = read_history(whole)
    for client, said in history[-1]["metrics_by_client"].items():
        assert said["val/unigram_normalized_loss"] < said["val/loss"], client
        assert math.isfinite(history[-1]["train"][client]["train/unigram_normalized_loss"])
    mean = history[-1]["metrics"]["val/unigram_normalized_loss"]
    values = [said["val/unigram_normalized_loss"] for said in history[-1]["metrics_by_client"].values()]
    assert min(values) <= mean <= max(values)
    page = (whole / "report.html").read_text()
    assert "val/unigram_normalized_loss by client" in page
    assert "val/unigram_normalized_loss" in (whole / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.slow
def test_sites_resume_with_the_same_bits(whole: Path, folder: Path, typed: Typed) -> None:
    recipe = folder / "own.toml"
    for rounds in (1, 2, 3):  # the last is a second resume
        status, _, err = typed(
            f"federate {recipe} --root parts --federation.rounds {rounds} --trainer.max_steps 12"
            + (f" --resume {folder / 'parts' / 'own' / '1'}" if rounds > 1 else "")
        )
        assert status == 0, err
    parts = folder / "parts" / "own" / "1"
    last, resumed = weights(whole, 3), weights(parts, 3)
    assert last.keys() == resumed.keys()
    for name, value in last.items():
        assert torch.equal(value, resumed[name]), name
    for name, state in own_states(whole).items():
        for key, value in own_states(parts)[name].items():
            assert torch.equal(value, state[key]), (name, key)

    one, other = read_history(whole), read_history(parts)
    for here, there in zip(one, other, strict=True):
        assert here["metrics_by_client"] == there["metrics_by_client"]
        for client, said in here["train"].items():
            for name in ("train/loss", "train/unigram_normalized_loss"):
                assert said[name] == there["train"][client][name]


def test_a_sites_loss_is_less_what_its_own_counts_explain(corpora: Path, folder: Path) -> None:
    written(folder, recipe_of(corpora, ("sea", "law")))
    recipe = read(FederatedRecipe, folder / "own.toml")
    _, data = recipe_at_site(recipe, 0).task.build()
    data.prepare_data()
    data.setup("fit")
    shards = open_split(data.corpora[0], "train", data.tokenizer)
    (counts,) = (one.counts for one in read_unigrams(shards))
    assert (data.unigram_counts() == counts).all()
    labels = torch.as_tensor(next(iter(data.val_dataloader()))["labels"])
    smoothed = (counts.astype(float) + 0.5) / (counts.sum() + 0.5 * len(counts))
    expected = -sum(math.log(smoothed[int(label)]) for label in labels.flatten() if label != -100)
    assert float(UnigramLoss(counts, 0.5)(labels)) == pytest.approx(expected, rel=1e-6)
    unseen = int(np.flatnonzero(counts == 0)[0])
    assert math.isfinite(float(UnigramLoss(counts, 0.5)(torch.tensor([unseen]))))


def test_sites_learn_tokenizers_of_their_own(folder: Path, typed: Typed) -> None:
    for kind in ("sea", "law"):
        (folder / "texts" / kind).mkdir(parents=True)
        for one in texts(kind):
            (folder / "texts" / kind / f"{one.id}.txt").write_text(one.text)
    text = recipe_of(folder, ("sea", "law"), data='tokenizer = {kind = "bpe", vocab_size = 280, by_site = true}\n')
    text = text.replace(text.partition("data = {")[2].partition("}")[0], "").replace("data = {}", 'data = "texts"')
    recipe = written(folder, text.replace('by = "name"', 'by = "folder"'))
    status, _, err = typed(f"federate {recipe} --federation.rounds 1")
    assert status == 0, err
    learned = sorted((folder / "runs" / "data").glob("tokenizer-*"))
    assert len({Tokenizer.load(path).digest for path in learned}) == 2


@pytest.mark.parametrize(
    ("kinds", "options", "said"),
    [
        (("sea", "law"), {"masks": ""}, "has a vocabulary of its own"),
        (("sea", "law"), {"masks": OWN, "task": ""}, r"set \[task.unigram\]"),
        (("sea", "law"), {"masks": OWN.replace(', "model.output."', "")}, "model.output.weight has the shape of"),
        (("sea", "law"), {"masks": 'personal = ["model.layers."]\npersonal_from = "client"\n', "model": "qwen3-0.6b"},
         "The output is tied to it"),
        (("sea", "law"), {"data": 'tokenizer = "bytes"\n'}, "no site shares the server's vocabulary"),
        (("sea", "law"), {"evaluate_on": "server"}, "it has no whole model to evaluate"),
        (("sea", "law"), {"masks": 'personal_from = "client"\n'}, "name them in personal"),
    ],
)  # fmt: skip
def test_invalid_site_vocabularies_are_refused_before_writing(
    corpora: Path, folder: Path, typed: Typed, kinds: tuple[str, ...], options: dict[str, str], said: str
) -> None:
    recipe = written(folder, recipe_of(corpora, kinds, **options))
    status, _, err = typed(f"federate {recipe}")
    assert status != 0
    assert re.search(said, " ".join(err.split())), err
    assert not (folder / "runs").exists()


def test_a_site_without_counts_is_named(corpora: Path, folder: Path, typed: Typed) -> None:
    tokenizer = Tokenizer.load(corpora / "law" / "tokenizer")
    write_corpus(folder / "bare", texts("law"), tokenizer, split=held_out(0.2))
    (folder / "bare" / "train" / UNIGRAMS).unlink()
    (folder / "sea").symlink_to(corpora / "sea")
    status, _, err = typed(f"federate {written(folder, recipe_of(folder, ('sea', 'bare')))}")
    assert status != 0
    assert f"bare/train has no {UNIGRAMS}" in "".join(err.splitlines())
    assert "arclight data pack" in err


def test_one_tokenizer_at_all_sites_needs_no_masks(corpora: Path, folder: Path, typed: Typed) -> None:
    recipe = written(folder, recipe_of(corpora, ("sea", "law-as-sea"), "", task="", evaluate_on="server"))
    status, _, err = typed(f"federate {recipe} --federation.rounds 1")
    assert status == 0, err


def test_a_node_with_another_vocabulary_is_refused(corpora: Path, folder: Path) -> None:
    written(folder, recipe_of(corpora, ("sea", "law-as-sea"), "", task="", evaluate_on="server"))
    recipe = with_vocabulary(read(FederatedRecipe, folder / "own.toml"))
    other = recipe_at_site(recipe, 0).task.with_data(str(corpora / "law"))
    with pytest.raises(ValueError, match="vocabulary of its own"):
        recipe.task.check_vocabularies({"0": other}, lambda name: False, personal_from_client=False, complete=False)
