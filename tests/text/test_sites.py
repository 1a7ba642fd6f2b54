"""Text divided among sites."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from arclight.data.sites import IID, Dirichlet, Size
from arclight.fabric.errors import MisconfigurationError
from arclight.text.data.corpus import documents_of, open_split
from arclight.text.data.data_module import TextDataModule
from arclight.text.data.data_settings import BPE, Bytes, Text
from arclight.text.data.site_split import Source
from arclight.text.settings import LanguageTask
from arclight.vision.data.site_split import Merchant


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Folders of authors, a file beside them, all of different sizes."""
    folder = tmp_path / "texts"
    for author in range(6):
        for number in range(8):
            path = folder / f"author{author}" / ("deeper" if number % 2 else ".") / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"author{author} wrote this as number {number}. " * (author + 1))
    (folder / "alone.txt").write_text("nobody's neighbour " * 10)
    return folder


def task(data, tmp_path: Path, **settings) -> LanguageTask:
    given = {"tokenizer": Bytes(), "sequence_length": 16, "batch_size": 2, "held_out": 0.2, "cache": tmp_path / "cache"}
    return LanguageTask(data=Text(data=data if isinstance(data, dict) else str(data), **{**given, **settings}))


def written(language: LanguageTask) -> dict[str, set[str]]:
    """Split to the texts that a task's data module prepares."""
    data = TextDataModule(language.data)
    data.prepare_data()
    data.setup("fit")
    found: dict[str, set[str]] = {"train": set(), "val": set()}
    for name in data.selection.names:
        for split in found:
            if (data._corpus(name) / split).is_dir():
                shards = open_split(data._corpus(name), split, data.tokenizer)
                found[split] |= {document.text for document in documents_of(shards, data.tokenizer)}
    return found


@pytest.mark.parametrize(
    "partition", [Source(), Source(by="file"), IID(), Dirichlet(alpha=1.0), Dirichlet(by="file"), Size(), None]
)
def test_sites_are_disjoint_and_together_all(texts, tmp_path, partition):
    whole = task(texts, tmp_path)
    sites = [written(whole.site(number, 3, partition)) for number in range(3)]
    central = written(whole)
    for split in ("train", "val"):
        assert sum(len(site[split]) for site in sites) == len(central[split])
        assert set.union(*(site[split] for site in sites)) == central[split]


def test_sizes_of_sites_are_those_asked_for(texts, tmp_path):
    partition = Size(shares=(3.0, 1.0, 2.0), seed=4)
    whole = task(texts, tmp_path)
    sites = [written(whole.site(number, 3, partition)) for number in range(3)]
    sizes = [sum(len(text) for split in site.values() for text in split) for site in sites]
    longest = max(len(text) for site in sites for split in site.values() for text in split)
    for size, share in zip(sizes, partition.shares, strict=True):
        assert abs(size - sum(sizes) * share / 6) <= longest
    whole.check_sites(3, partition)
    with pytest.raises(ValueError, match="one for each of 2 sites, got 3"):
        whole.site(0, 2, partition)
    with pytest.raises(MisconfigurationError, match="site 1 of 2 gets no document"):
        task(texts / "alone.txt", tmp_path).check_sites(2, Size(shares=(9.0, 1.0)))


def test_whole_folders_stay_together(texts, tmp_path):
    sites = [written(task(texts, tmp_path).site(number, 3, Source())) for number in range(3)]
    authors = [{text.split()[0] for split in site.values() for text in split} for site in sites]
    assert sorted(name for site in authors for name in site) == [*(f"author{n}" for n in range(6)), "nobody's"]


def test_a_division_does_not_depend_on_where_the_text_lies(texts, tmp_path):
    first = [written(task(texts, tmp_path).site(n, 3, Dirichlet(alpha=1.0)))["train"] for n in range(3)]
    moved = texts.rename(tmp_path / "elsewhere")
    assert [written(task(moved, tmp_path).site(n, 3, Dirichlet(alpha=1.0)))["train"] for n in range(3)] == first


def test_every_site_has_the_tokenizer_of_all(texts, tmp_path):
    whole = task(texts, tmp_path, tokenizer=BPE(vocab_size=280))
    modules = [TextDataModule(whole.site(n, 3, Source()).data) for n in range(3)] + [TextDataModule(whole.data)]
    for module in modules:
        module.prepare_data()
    assert len({module.tokenizer.digest for module in modules}) == 1


def test_rows_name_their_owner_in_a_field(tmp_path):
    rows = [{"text": f"{who} says {n}", "who": who} for n in range(10) for who in ("ann", "bob", "cy")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    partition = Source(by="field", field="who")
    sites = [written(task(path, tmp_path, held_out=0.3).site(number, 3, partition)) for number in range(3)]
    assert sorted({text.split()[0] for split in site.values() for text in split} for site in sites) == [
        {"ann"}, {"bob"}, {"cy"},
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no text in a field 'whom'"):
        written(task(path, tmp_path).site(0, 3, Source(by="field", field="whom")))
    path.write_text("\n".join(map(json.dumps, [*rows, {"text": "a\ud800", "who": "ann"}])))
    with pytest.raises(ValueError, match="line 31: character 1 is half of a surrogate pair"):
        written(task(path, tmp_path).site(0, 3, partition))


def test_named_sources_are_divided_by_name_tokens_as_well(texts, tmp_path):
    named = {f"a{n}": str(texts / f"author{n}") for n in range(4)}
    whole = task(named, tmp_path)
    sites = [written(whole.site(number, 2, Source(by="name")))["train"] for number in range(2)]
    assert sites[0].isdisjoint(sites[1])
    assert sites[0] | sites[1] == written(whole)["train"]
    ready = {name: str(TextDataModule(whole.data)._corpus(name)) for name in named}
    tokens = task(ready, tmp_path)
    assert [written(tokens.site(number, 2, Source(by="name")))["train"] for number in range(2)] == sites
    with pytest.raises(MisconfigurationError, match="holds tokens"):
        written(tokens.site(0, 2, IID()))


def test_invalid_partitions_are_refused(texts, tmp_path):
    with pytest.raises(ValueError, match="merchant does not divide text"):
        task(texts, tmp_path).site(0, 2, Merchant())
    with pytest.raises(ValueError, match=r"7 sources \(alone.txt, author0, .*\), too few for 8 sites"):
        written(task(texts, tmp_path).site(0, 8, Source()))
    with pytest.raises(MisconfigurationError, match=r"site [01] of 2 gets no document"):
        for number in range(2):
            written(task(texts / "alone.txt", tmp_path, held_out=0.0).site(number, 2, IID()))
    with pytest.raises(ValueError, match="does not divide texts"):
        replace(task(texts, tmp_path)).site(0, 2, Dirichlet(by="prefix"))


def test_a_site_that_has_nothing_to_validate_with_trains_all_the_same(texts, tmp_path, caplog):
    data = TextDataModule(task(texts / "alone.txt", tmp_path, held_out=1e-9).site(0, 1, IID()).data)
    data.prepare_data()
    data.setup("fit")
    assert data.val_dataloader() == []
    assert len(data.train_dataloader()) > 0
    assert "site 0 of 1 has no text to validate with" in caplog.text


def test_a_site_may_have_text_of_its_own(texts, tmp_path):
    whole = task(texts, tmp_path)
    own = whole.site(0, 3).with_data(str(texts / "author0"))
    assert own == task(texts / "author0", tmp_path)
    with pytest.raises(ValueError, match="one tokenizer that all of them have"):
        task(texts, tmp_path, tokenizer=BPE()).with_data(str(texts))


def test_shares_of_all_sites_are_checked_before_preparation(texts, tmp_path):
    named = {f"a{n}": str(texts / f"author{n}") for n in range(4)}
    for whole, partition, most in (
        (task(texts, tmp_path), Source(), 7),
        (task(named, tmp_path), Source(by="name"), 4),
        (task(named, tmp_path), Source(by="file"), 32),
    ):
        whole.check_sites(most, partition)
        with pytest.raises(
            MisconfigurationError, match=rf"{most} sources \(.*\), too few for {most + 1} sites"
        ) as raised:
            whole.check_sites(most + 1, partition)
        assert "\0" not in str(raised.value)
    task(texts, tmp_path).check_sites(3)
    with pytest.raises(MisconfigurationError, match=r"site [01] of 2 gets no document"):
        task(texts / "alone.txt", tmp_path).check_sites(2, IID())
    with pytest.raises(MisconfigurationError, match=r"site \d+ of 200 gets no document"):
        task(texts, tmp_path).check_sites(200, Dirichlet(alpha=1.0))
    assert not (tmp_path / "cache").exists()
