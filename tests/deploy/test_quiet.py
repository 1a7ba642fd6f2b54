"""Exporters are kept quiet, and what a model itself warns of arrives."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from arclight.deploy import export, prepare_qat, quantize
from arclight.deploy.capture import quiet
from arclight.deploy.settings import DynamicInt8


class Warns(nn.Module):
    """Warns in its forward, of a line of its own or of that of its caller."""

    def __init__(self, level: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        self.level = level

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn(f"inputs are not normalized ({self.level})", stacklevel=self.level)
        return self.layers(x)


X = torch.rand(2, 4, 8, 8)


@pytest.mark.parametrize("level", [1, 2])
def test_warnings_of_the_model_arrive_in_training_with_rounding(level: int) -> None:
    with pytest.warns(UserWarning, match=f"inputs are not normalized .{level}.") as caught:
        prepare_qat(Warns(level), X)
    assert {str(warning.message) for warning in caught} == {f"inputs are not normalized ({level})"}
    if level == 1:
        assert {warning.filename for warning in caught} == {__file__}


def test_warnings_of_the_model_arrive_in_quantization_and_export(tmp_path: Path) -> None:
    for step in (
        lambda: quantize(Warns(), [X]),
        lambda: export(Warns(), tmp_path / "p.onnx", example_inputs=X),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        assert {str(warning.message) for warning in caught} == {"inputs are not normalized (1)"}


def test_a_warning_that_is_repeated_arrives_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet():
            for line in (3, 3, 4):
                warnings.warn_explicit("seen", UserWarning, "model.py", line)
    assert [warning.lineno for warning in caught] == [3, 4]


def test_a_filter_that_makes_errors_of_warnings_holds() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="bad weights"), quiet():
            warnings.warn("bad weights", stacklevel=1)


def test_warnings_and_logs_of_torch_are_suppressed(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as caught, quiet():
        warnings.simplefilter("always")
        nn.functional.upsample(torch.rand(1, 1, 2, 2), 4)
        logging.getLogger("torch.fx.experimental.symbolic_shapes").warning("Unable to find user code")
    assert caught == []
    assert capfd.readouterr() == ("", "")


def test_a_branch_is_refused_without_a_line_of_torchs_log(tmp_path: Path) -> None:
    program = """
        import torch
        from arclight.deploy import ExportError, export

        class Branch(torch.nn.Module):
            def forward(self, x):
                return x * 2 if x.sum() > 0 else x

        try:
            export(Branch(), "p.onnx", example_inputs=torch.rand(3, 4))
        except ExportError as error:
            print("refused")
    """
    (tmp_path / "run.py").write_text(textwrap.dedent(program))
    ran = subprocess.run(
        [sys.executable, "run.py"],
        check=False,
        cwd=tmp_path,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ran.stdout, ran.stderr) == ("refused\n", "")


def test_a_recipe_without_calibration_lets_warnings_through() -> None:
    with pytest.warns(UserWarning, match="inputs are not normalized"):
        quantize(nn.Sequential(Warns(), nn.Flatten(), nn.Linear(64, 4)), recipe=DynamicInt8(), example=X)


def test_a_failure_is_not_replaced_by_a_warning_that_is_an_error() -> None:
    with warnings.catch_warnings(), pytest.raises(ValueError, match="of the model") as caught:
        warnings.simplefilter("error")
        with quiet():
            warnings.warn("inputs are not normalized", stacklevel=1)
            raise ValueError("of the model")
    assert "inputs are not normalized" in str(caught.value.__notes__)


def test_warnings_pass_nested_calls_once_and_heed_filters_by_module() -> None:
    with pytest.warns(UserWarning, match="one") as caught, quiet(), quiet():
        warnings.warn("one", stacklevel=1)
    assert len(caught) == 1
    with warnings.catch_warnings(record=True) as kept:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
        with quiet():
            warnings.warn("two", stacklevel=1)
    assert not kept
