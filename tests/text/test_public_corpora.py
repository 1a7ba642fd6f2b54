"""Descriptions of public corpora: complete, consistent, and nothing is fetched."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch

import pytest

from arclight.text.data.public_corpora import find_public_corpus, public_corpora
from arclight.text.data.sources import SourceError


def test_the_six_corpora_are_described() -> None:
    assert list(public_corpora()) == ["C4", "mC4", "Pile", "SmolLM", "FineMath", "Python-edu"]


@pytest.mark.parametrize("name", list(public_corpora()))
def test_a_description_is_sound(name: str) -> None:
    described = public_corpora()[name]
    assert described.licence
    assert described.files
    assert re.fullmatch("[0-9a-f]{40}", described.revision)
    assert ("text" in described.columns) == bool(described.sources)
    for source in described.sources:
        assert any(pattern == source or fnmatch(pattern, f"{source}/*") for pattern in described.files)


@pytest.mark.parametrize("name", list(public_corpora()))
def test_the_steps_are_shell_that_verifies_every_file(name: str) -> None:
    described = public_corpora()[name]
    commands = described.fetch_step()
    subprocess.run(["bash", "-n"], input="\n".join([*commands, *described.tokenize_step()]), text=True, check=True)
    for pattern in described.files:
        assert sum(pattern in line for line in commands) == 2
    assert sum("sha256sum -c" in line for line in commands) == len(described.files)
    assert sum(f"git checkout {described.revision}" in line for line in commands) == 1


def test_pointers_listed_by_git_lfs_become_lines_for_sha256sum(tmp_path) -> None:
    (tmp_path / "a b.parquet").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (verify,) = (line for line in public_corpora()["FineMath"].fetch_step() if "sha256sum" in line)
    pipe = verify.partition(" | ")[2]
    for told, status in ((digest, 0), (digest[::-1], 1)):
        listed = f"{told} * a b.parquet\n"
        ran = subprocess.run(
            ["bash", "-c", pipe], input=listed, text=True, cwd=tmp_path, capture_output=True, check=False
        )
        assert ran.returncode == status, ran.stderr


def test_names_are_found_in_any_case_and_near_ones_are_suggested() -> None:
    assert find_public_corpus("c4").name == "C4"
    with pytest.raises(SourceError, match="did you mean FineMath"):
        find_public_corpus("finemaths")
