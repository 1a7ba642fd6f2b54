"""Corpora tokenized on a Ray cluster: the same bits as here, also when a node is lost on the way.

`test_ray_corpus` runs these tests in a process of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arclight.data.packing import Packed
from arclight.data.token_shards import TokenShards
from arclight.text.data.corpus import held_out, write_corpus
from arclight.text.data.sources import Document
from arclight.text.data.tokenizer import Tokenizer

ray = pytest.importorskip("ray")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one CPU each, on this machine."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    made.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def texts() -> Iterator[Document]:
    random, words = (
        np.random.default_rng(4),
        ["the", "sea", "rolls", "over", "an", "old", "harbour", "wall", "while", "gulls", "call"],
    )
    for source in ("first", "second"):
        for number in range(120):
            text = " ".join(random.choice(words, 80)) + f" {number}"
            yield Document(f"{source} {number}", text, len(text), source)


def files(folder: Path) -> dict[str, bytes]:
    """Read all files but hidden ones, which hold times."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("[!.]*")) if path.is_file()
    }


def test_the_shards_are_those_of_one_process_when_a_node_is_killed(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.train((one.text for one in texts()), 300)
    told: list[int] = []

    def progress(documents: int, size: int) -> None:
        told.append(documents)
        if len(told) == 4:  # tasks are at work on both nodes
            cluster.remove_node(cluster.second, allow_graceful=False)

    options: dict[str, Any] = {"split": held_out(0.2), "shard_bytes": 2000}
    write_corpus(tmp_path / "here", texts(), tokenizer, **options)
    write_corpus(tmp_path / "ray", texts(), tokenizer, engine="ray", progress=progress, **options)
    assert len(told) > 10
    monkeypatch.setattr("arclight.data.packing._GROUP", 50)
    Packed.build(TokenShards(tmp_path / "here" / "train"), 64)
    Packed.build(TokenShards(tmp_path / "ray" / "train"), 64, "ray")
    ray.init(address=cluster.address, log_to_driver=False)
    deadline = time.monotonic() + 60.0
    while (alive := sum(node["Alive"] for node in ray.nodes())) > 1 and time.monotonic() < deadline:
        time.sleep(0.2)  # the cluster finds out by health checks that a node is gone, which take seconds
    assert alive == 1
    here, there = files(tmp_path / "here"), files(tmp_path / "ray")
    assert here.keys() == there.keys()
    for name, content in here.items():
        assert content == there[name], name


def test_an_error_of_a_task_is_raised_as_here(cluster: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.train((one.text for one in texts()), 300)
    wrong = [Document("one", "sea", 3, ids=np.array([5, 999]))]
    with pytest.raises(ValueError, match=r"token ids outside 0\.\.299"):
        write_corpus(tmp_path / "ray", wrong, tokenizer, engine="ray")
    assert not (tmp_path / "ray").exists()
