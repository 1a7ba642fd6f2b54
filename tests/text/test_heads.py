"""Heads: logits beside transformers, SQuAD's scores, windows, entities, and runs that learn from a pre-trained run's weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.text.test_language_model import SMALL, fit

import arclight as al
from arclight.fabric.errors import MisconfigurationError
from arclight.optim import SGD, AdamW
from arclight.optim.schedule_settings import Constant
from arclight.text import ByteTokenizer, LanguageModel
from arclight.text.data.sources import SourceError
from arclight.text.heads.head_module import entities
from arclight.text.heads.head_settings import AnswerTask, HeadTask, SequenceTask, TokenTask
from arclight.text.heads.rows import HeadData, HeadRows
from arclight.text.heads.squad import Span, answer_of, best_span, exact_match, f1, windows

BROKEN = {
    "data": [{"paragraphs": [{"context": "a", "qas": [{"id": "q7", "question": "?", "answers": [{"text": "b", "answer_start": 0}]}]}]}]
}  # fmt: skip
"""An answer that is not where it says."""
WORDS = ("cat", "dog", "sun", "sea", "mat", "log", "ice", "sky")


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def squad(path: Path, *asked: tuple[str, str, str | None]) -> Path:
    """A file of (question, context, answer)."""
    paragraphs = [
        {"context": context, "qas": [{
            "id": str(number), "question": question, "is_impossible": answer is None,
            "answers": [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}],
        }]}
        for number, (question, context, answer) in enumerate(asked)
    ]  # fmt: skip
    path.write_text(json.dumps({"version": "2.0", "data": [{"title": "x", "paragraphs": paragraphs}]}))
    return path


def sequences(folder: Path) -> SequenceTask:
    rows = [
        {"text": f"a {word} {other}", "label": "animal" if word in ("cat", "dog") else "thing"}
        for word in WORDS
        for other in WORDS
    ]
    return SequenceTask(
        train=lines(folder / "a.jsonl", *rows), val=lines(folder / "b.jsonl", *rows[::3]), overrides=SMALL
    )


def tokens(folder: Path) -> TokenTask:
    rows = [
        {
            "tokens": ["Ada", one, "met", other, *rest],
            "tags": ["B-P", "I-P" if one == "cat" else "O", "O", "B-Q" if other == "sun" else "O", *["O"] * len(rest)],
        }
        for one in WORDS for other in WORDS for rest in [["twice"] * (5 if other == "sea" else 0)]
    ]  # fmt: skip
    return TokenTask(train=lines(folder / "a.jsonl", *rows), val=lines(folder / "b.jsonl", *rows[::3]), overrides=SMALL)


def questions(folder: Path, **options: Any) -> AnswerTask:
    rows = [("Who?", f"it was <{one}> {other} and so on", one) for one in WORDS for other in WORDS]
    return AnswerTask(
        train=squad(folder / "a.json", *rows), val=squad(folder / "b.json", *rows[::3]), overrides=SMALL, **options
    )


def trained(task: HeadTask, folder: Path, steps: int) -> tuple[Any, Any]:
    al.seed_everything(3)
    module, data = task.build()
    trainer = al.Trainer(
        max_steps=steps, default_root_dir=folder, enable_progress_bar=False, accelerator="cpu", log_every_n_steps=50,
        check_val_every_n_epoch=1000, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    (values,) = trainer.validate(module, datamodule=data, verbose=False)
    return module, values


# ------------------------------------------------------------------------------------------------------- SQuAD's rules


@pytest.mark.parametrize(
    ("said", "truths", "exact", "overlap"),
    [
        ("The Cat!", ("cat", "dog"), 1.0, 1.0), ("black cat", ("a cat", "the black dog"), 0.0, 2 / 3), ("", (), 1.0, 1.0),
        ("cat", (), 0.0, 0.0), ("", ("cat",), 0.0, 0.0), ("cat cat", ("cat",), 0.0, 2 / 3), ("x", ("the", "x"), 1.0, 1.0), ("", ("a",), 1.0, 1.0),
    ],
)  # fmt: skip
def test_scores_of_squad(said: str, truths: tuple[str, ...], exact: float, overlap: float) -> None:
    assert exact_match(said, truths) == exact
    assert f1(said, truths) == pytest.approx(overlap)


def test_windows_cover_the_context_by_stride() -> None:
    context = list(b"abcdefghij")
    found = windows(7, [1, 2], context, [1] * 10, (4, 6), length=6, stride=2)
    assert [bytes(window.tokens[2:]) for window in found] == [b"abcd", b"cdef", b"efgh", b"ghij"]
    assert [(window.start, window.end) for window in found] == [(0, 0), (4, 5), (2, 3), (0, 0)]
    assert found[1].offsets == [(2, 3), (3, 4), (4, 5), (5, 6)]
    assert {window.row for window in found} == {7}
    wide = windows(0, [1], [5, 6], [4, 4], (2, 6), length=9, stride=9)  # an answer within tokens of several bytes
    assert (wide[0].start, wide[0].end) == (1, 2)
    with pytest.raises(ValueError, match="leaves none for its context"):
        windows(0, [1, 2], context, [1] * 10, None, length=2, stride=1)


def test_the_best_span_is_that_of_all_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    (window,) = windows(0, [1, 2], list(range(9)), [2] * 9, None, length=20, stride=5)
    for _ in range(20):
        start, end = torch.randn(2, 11, generator=generator)
        found = best_span(window, start, end, max_answer=3)
        pairs = {
            (a, b): float(start[a + 2].double() + end[b + 2].double())
            for a in range(9)
            for b in range(a, min(9, a + 3))
        }
        (a, b), score = max(pairs.items(), key=lambda item: item[1])
        assert (found.start, found.stop) == (2 * a, 2 * b + 2)
        assert found.score == pytest.approx(score)
        assert found.null == pytest.approx(float(start[0] + end[0]))


def test_answers_are_chosen_over_windows() -> None:
    spans = [Span(0, 1.0, 0, 3, 4.0), Span(0, 2.0, 4, 8, 1.5)]
    assert answer_of(spans, "abc défg", may_be_none=True) == "déf"
    assert answer_of([Span(0, 1.0, 0, 3, 4.0)], "abc", may_be_none=True) == ""
    assert answer_of([Span(0, 1.0, 0, 3, 4.0)], "abc", may_be_none=False) == "abc"


def test_entities_begin_as_conll_has_it() -> None:
    assert entities(["B-P", "I-P", "O", "I-Q", "B-Q", "I-P"]) == {("P", 0, 2), ("Q", 3, 4), ("Q", 4, 5), ("P", 5, 6)}
    assert entities(["O", "O"]) == set()


# ------------------------------------------------------------------------------------------------- beside transformers


@pytest.mark.parametrize(
    ("make", "name", "head"),
    [
        (sequences, "LlamaForSequenceClassification", "score"), (tokens, "LlamaForTokenClassification", "score"),
        (questions, "LlamaForQuestionAnswering", "qa_outputs"),
    ],
)  # fmt: skip
def test_logits_are_those_of_transformers(tmp_path: Path, make: Any, name: str, head: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.3, attn_implementation="eager", pad_token_id=0, num_labels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "hf")
    ByteTokenizer().save(tmp_path / "hf")
    task = make(tmp_path)
    module, data = type(task)(train=task.train, val=task.val, weights=tmp_path / "hf").build()
    config.num_labels = len(data.labels)
    theirs = getattr(transformers, name)(config).eval()
    trunk = theirs.transformer if hasattr(theirs, "transformer") else theirs.model
    trunk.load_state_dict(base.model.state_dict())
    getattr(theirs, head).load_state_dict(module.head.state_dict(), strict=False)
    with torch.no_grad():
        batch = next(iter(data.val_dataloader()))
        attended = (torch.arange(batch["tokens"].shape[1]) < batch["lengths"][:, None]).long()
        out, ours = theirs(batch["tokens"], attention_mask=attended), module.eval()(batch["tokens"])
    if head == "qa_outputs":
        expected, ours = torch.stack([out.start_logits, out.end_logits], -1)[attended == 1], ours[attended == 1]
    elif make is sequences:
        expected, ours = out.logits, ours[torch.arange(len(ours)), batch["lengths"] - 1]
    else:
        expected, ours = out.logits[attended == 1], ours[attended == 1]
    assert torch.allclose(ours, expected, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a language model, with a checkpoint and its tokenizer."""
    trainer, _ = fit(tmp_path_factory.mktemp("lm"), steps=10)
    folder: Path = trainer.run_folder.path
    return folder


@pytest.mark.parametrize(
    ("make", "steps", "metric"),
    [
        (sequences, 40, "accuracy"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((tokens, 60, "f1"), (questions, 120, "exact_match"))
        ),
    ],
)
def test_heads_learn_from_a_pretrained_run(
    tmp_path: Path, pretrained: Path, make: Any, steps: int, metric: str
) -> None:
    task = make(tmp_path)
    task = type(task)(train=task.train, val=task.val, weights=pretrained, optimizer=AdamW(lr=5e-3))
    module, _ = task.build()
    start = LanguageModel.load_from_checkpoint(next((pretrained / "checkpoints").glob("*")))
    assert torch.equal(module.model.layers["0"].attention.wq.weight, start.model.layers["0"].attention.wq.weight)
    assert "output.weight" not in module.model.state_dict()
    _, values = trained(task, tmp_path, steps)
    assert values[f"val/{metric}"] > 0.95


def one_update(task: HeadTask, folder: Path, sizes: tuple[int, ...]) -> tuple[Any, dict[str, Any], list[Any]]:
    """Train one step on batches of these sizes; the module, its weights before, and the batches."""
    al.seed_everything(3)
    module, data = task.build()
    data.setup("fit")
    rows = iter(data.train_dataloader().dataset)
    batches = [data.train_dataloader().collate_fn([next(rows) for _ in range(size)]) for size in sizes]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = al.Trainer(
        max_steps=1, default_root_dir=folder, enable_progress_bar=False, accelerator="cpu", accumulate_grad_batches=len(sizes),
        logger=False, enable_checkpointing=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, batches)
    return module, before, batches


@pytest.mark.parametrize("make", [sequences, tokens, questions])
def test_updates_do_not_depend_on_how_a_batch_is_cut(tmp_path: Path, make: Any) -> None:
    task = replace(make(tmp_path), optimizer=SGD(lr=0.5, momentum=0.0), schedule=Constant())
    whole, before, _ = one_update(task, tmp_path, (12,))
    cut, _, _ = one_update(task, tmp_path, (2, 9, 1))
    assert not torch.equal(whole.head.weight, before["head.weight"])
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(cut.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_experts_of_a_trunk_are_balanced(tmp_path: Path) -> None:
    """The router's step is that of loss and balance loss, by the mean over labels; its bias moves once, by all batches' loads.

    Tokens that fill rows up are in none of them.
    """
    rate, weight = 0.125, 3.0
    moe = {"experts": 4, "top_k": 2, "hidden": 16, "bias_rate": rate, "balance_loss": weight}
    sizes = {"layers": 1, "dim": 32, "heads": 2, "moe": moe}
    rows = tokens(tmp_path)
    found = {}
    for name, loss in (("with", weight), ("without", 0.0)):
        task = replace(
            rows, model="sigma-moe-debug", overrides=sizes | {"moe": moe | {"balance_loss": loss}}, optimizer=SGD(lr=0.5, momentum=0.0),
            schedule=Constant(),
        )  # fmt: skip
        found[name] = one_update(task, tmp_path, (2, 9))
    module, before, batches = found["with"]
    router = "model.layers.0.feed_forward.router"
    stepped = found["without"][0].state_dict()[f"{router}.weight"] - module.state_dict()[f"{router}.weight"]

    task = replace(rows, model="sigma-moe-debug", overrides=sizes)
    fresh, _ = task.build()
    fresh.load_state_dict(before)
    seen: list[Any] = []
    layer = fresh.model.layers["0"].feed_forward
    layer.router.register_forward_hook(lambda _, given, out: seen.append((given[0].detach(), out[1])))
    loads, expected, labels, filled = torch.zeros(4), torch.zeros_like(stepped), 0, False
    for batch in batches:
        fresh(batch["tokens"])
        x, chosen = seen.pop()
        valid = torch.arange(x.shape[1]) < batch["lengths"][:, None]
        filled = filled or not bool(valid.all())
        rows_chosen = [row[here] for row, here in zip(chosen.view(*valid.shape, -1), valid, strict=True)]
        loads += torch.cat(rows_chosen).flatten().bincount(minlength=4)
        matrix = layer.router.weight.detach().requires_grad_()
        scores = (x @ matrix.T).sigmoid()
        normalised = scores / scores.sum(-1, keepdim=True)
        shares = torch.stack([row[here].mean(0) for row, here in zip(normalised, valid, strict=True)])
        frequency = torch.stack([4 * row.flatten().bincount(minlength=4) / row.numel() for row in rows_chosen])
        (gradient,) = torch.autograd.grad(weight * (frequency * shares).sum(-1).mean(), matrix)
        count = int((batch["labels"] != -100).sum())
        expected, labels = expected + count * gradient, labels + count
    assert filled
    torch.testing.assert_close(stepped, 0.5 * expected / labels, rtol=1e-3, atol=1e-6)
    step = rate * (loads.mean() - loads).sign()
    torch.testing.assert_close(module.state_dict()[f"{router}.expert_bias"], step - step.mean())


def test_long_contexts_are_answered_by_stride(tmp_path: Path) -> None:
    """Contexts of 60 tokens in windows of 32: every row has one outcome, and the places are those of the context."""
    rows = [("?", "x" * 20 + f" it was <{one}> and so on " + "y" * 20, one) for one in WORDS]
    task = AnswerTask(
        train=squad(tmp_path / "a.json", *rows), val=squad(tmp_path / "b.json", *rows), overrides=SMALL, max_length=32, stride=12,
        batch_size=5, optimizer=AdamW(lr=5e-3),
    )  # fmt: skip
    module, values = trained(task, tmp_path, 150)
    assert len(module.data.val_windows) > 2 * len(rows)
    assert values["val/exact_match"] > 0.8
    assert values["val/f1"] >= values["val/exact_match"]


@pytest.mark.slow
def test_questions_without_answers(tmp_path: Path) -> None:
    rows = [
        ("Who?", f"it was <{one}> here" if known else f"it was {one} here", one if known else None)
        for one in WORDS
        for known in (0, 1)
    ]
    task = AnswerTask(
        train=squad(tmp_path / "a.json", *rows),
        val=squad(tmp_path / "b.json", *rows),
        overrides=SMALL,
        optimizer=AdamW(lr=5e-3),
    )
    _, values = trained(task, tmp_path, 120)
    assert values["val/exact_match"] > 0.9


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        (SequenceTask, {"text": "x"}, "line 1: need the fields text, label; label is missing"), (SequenceTask, [1], "line 1: need the fields"),
        (TokenTask, {"tokens": ["a"], "tags": []}, "line 1: 1 tokens, of which none may be empty, and 0 tags"),
        (AnswerTask, BROKEN, "question q7 is not laid out as SQuAD is: ValueError 'b' is not at 0"),
        (AnswerTask, {"text": "x"}, "is not laid out as SQuAD is: KeyError 'data'"),
    ],
)  # fmt: skip
def test_rows_of_another_task_are_refused(tmp_path: Path, task: Any, row: Any, message: str) -> None:
    path = lines(tmp_path / "a.jsonl", row)
    with pytest.raises(SourceError, match=message):
        task(train=path, val=path, overrides=SMALL).build()[1].train_rows  # noqa: B018


def test_unknown_labels_and_tokenizers_are_refused(tmp_path: Path, pretrained: Path) -> None:
    train, val = (
        lines(tmp_path / "a.jsonl", {"text": "x", "label": "a"}),
        lines(tmp_path / "b.jsonl", {"text": "x", "label": "b"}),
    )
    with pytest.raises(SourceError, match=r"b\.jsonl, line 1: .*a\.jsonl has no label 'b', but a"):
        HeadData(HeadRows(kind="sequence", train=train, val=val, max_length=9, batch_size=1), ByteTokenizer()).val_rows  # noqa: B018
    with pytest.raises(MisconfigurationError, match="does not exist"):
        SequenceTask(train=train, val=train, weights=tmp_path / "none").build()
    with pytest.raises(MisconfigurationError, match="max_length = 9000 is more than"):
        SequenceTask(train=train, val=train, weights=pretrained, max_length=9000).build()
    with pytest.raises(ValueError, match="stride = 128 would leave out"):
        AnswerTask(train=train, val=train, max_length=64)
