"""Outcomes of torchao's tests as pytest reports them; numbers in the place of nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from benchmarks.torchao_tests import IN_PLACE, NUMBERS, explained, outcome
from torch import nn
from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

from benchmarks import torchao_tests

TESTS = """
import unittest, pytest
class TestOne(unittest.TestCase):
    def test_passes(self): pass
    def test_fails(self): self.assertEqual(1, 2)
    @unittest.skip("elsewhere")
    def test_is_skipped(self): pass
@pytest.fixture
def broken(): raise ValueError("no")
def test_cannot_start(broken): pass
"""


def test_outcomes_are_read_by_name_with_the_first_line_of_the_error(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    found = outcome(ElementTree.parse(report).getroot())
    assert (found.passed, found.skipped) == ({"TestOne.test_passes"}, {"TestOne.test_is_skipped": "elsewhere"})
    assert found.failed["TestOne.test_fails"].startswith("AssertionError: 1 != 2")
    assert "ValueError: no" in found.failed["test_some.test_cannot_start"]


def quantizer() -> Any:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_qat=True))


@pytest.mark.parametrize("eps, place", [(1e-5, None), (1e-1, "training step 0")])
def test_numbers_are_compared_from_the_first_training_step_on(
    eps: float, place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(graph: Any, annotator: Any) -> Any:
        for norm in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
            norm.update_arg(7, eps)
        return torchao_tests.prepare_qat(graph, annotator)

    monkeypatch.setattr(torchao_tests, "THEIRS", {"prepare_qat": other, "convert": torchao_tests.convert})
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)), torch.randn(1, 3, 5, 5)
    if place is None:
        torchao_tests.compare_numbers(model, (x,), quantizer)
    else:
        with pytest.raises(AssertionError, match=place):
            torchao_tests.compare_numbers(model, (x,), quantizer)


@pytest.mark.parametrize("asked, replaced", [("1", False), (NUMBERS, True)])
def test_comparisons_of_nodes_are_replaced_only_where_asked_for(
    asked: str, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Case:
        def _verify_symmetric_xnnpack_qat_graph_helper(self) -> None:
            pass

    monkeypatch.setenv(IN_PLACE, asked)
    torchao_tests.pytest_pycollect_makeitem("PT2EQATTestCase", Case)
    helper = Case._verify_symmetric_xnnpack_qat_graph_helper
    assert (helper is torchao_tests.compare_fused) == replaced


@pytest.mark.parametrize(
    "test, agrees, told",
    [
        ("TestQuantizePT2EQAT_ConvBn1d.test_qat_conv_bn_fusion", True, "Numbers agree"),
        ("TestQuantizePT2EQAT_ConvBn1d.test_qat_conv_bn_fusion", False, "fails: 1 != 2"),
        ("TestQuantizePT2EQAT_ConvBn1d.test_qat_conv_no_bias", True, "fails: 1 != 2"),
    ],
)
def test_a_reason_counts_only_where_numbers_agree(test: str, agrees: bool, told: str) -> None:
    (line,) = explained({test: "1 != 2"}, [test] if agrees else [])
    assert told in line


def test_tests_of_one_reason_share_a_line() -> None:
    bn1d, bn2d, shared = (
        f"ConvBn{case}"
        for case in ("1d.test_qat_conv_bn_fusion", "2d.test_qat_conv_bn_fusion", "2d.test_qat_shared_qspec")
    )
    lines = explained({bn1d: "1 != 2", shared: "3 != 4", bn2d: "5 != 6"}, {bn1d, bn2d, shared})
    assert [line.split(" expects")[0] for line in lines] == [f"* `{bn1d}`, `{bn2d}`", f"* `{shared}`"]
