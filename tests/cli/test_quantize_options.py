"""The recipe of ``arclight quantize``: kinds, files, flags, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from arclight.cli.arguments import Parser, UsageError
from arclight.cli.quantization import parse_quantization
from arclight.deploy.settings import DynamicInt8, Int8, LowBit, Quantization, WeightOnly
from arclight.recipe import RecipeError


def parsed(words: str) -> Quantization:
    parser = Parser(prog="arclight quantize")
    parser.add_argument("run")
    parser.add_argument("--observer")
    parser.add_argument("--calibration-batches", type=int)
    options, rest, recipe, _ = parse_quantization(parser, words.split())
    assert not rest
    assert options.run == "RUN"
    return recipe


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ("RUN", Int8()),
        ("RUN --observer minmax --calibration-batches 3 --skip a --skip b.c", Int8(observer="minmax", calibration_batches=3, skip=("a", "b.c"))),
        ("--recipe.bits 4 RUN --recipe weightonly --recipe.group_size=64", WeightOnly(bits=4, group_size=64)),
        ("RUN --recipe dynamicint8 --skip head", DynamicInt8(skip=("head",))),
        ("RUN --recipe lowbit --recipe.activation_bits 4 --calibration-batches 2", LowBit(activation_bits=4, calibration_batches=2)),
        ("RUN --recipe w4.toml", WeightOnly(bits=4, skip=("output",))),
        ("RUN --recipe w4.toml --recipe.bits 8", WeightOnly(bits=8, skip=("output",))),
    ],
)  # fmt: skip
def test_recipes_are_kinds_files_and_flags(
    words: str, recipe: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("w4.toml").write_text('[recipe]\nkind = "weightonly"\nbits = 4\nskip = ["output"]\n')
    assert parsed(words) == recipe


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("--recipe weightonly --recipe.bits 3", "bits must be 8 or 4, for which there are kernels, got 3"),
        ("--recipe weightonly --observer minmax", "--recipe.observer is not a field of WeightOnly"),
        ("--recipe weight", "need a kind, got 'weight'; did you mean weightonly"),
        (
            "--recipe int4",
            "got 'int4'; torchao's int4 needs a package for NVIDIA's GPUs; take weightonly with bits = 4",
        ),
        (
            "--recipe float8",
            "got 'float8'; float8 has no kernels for CPUs here, where torchao's took 12 times as long as float32; take bfloat16",
        ),
        ("--recipe weightonly --recipe.kind int4", "--recipe weightonly --recipe.bits 4"),
        ("--recipe float8.toml", "recipe.kind: need a kind, got 'float8'; float8 has no kernels for CPUs"),
        ("--recipe none.toml", "--recipe none.toml: there is no such file"),
    ],
)
def test_recipes_that_cannot_be_are_refused(
    words: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("float8.toml").write_text('[recipe]\nkind = "float8"\n')
    with pytest.raises((UsageError, RecipeError)) as refused:
        parsed(f"RUN {words}")
    assert wrong in str(refused.value)
