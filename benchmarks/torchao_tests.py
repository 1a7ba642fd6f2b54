"""torchao's own tests of PT2E quantization, as they are and with Arclight's prepare and convert in the place of torchao's.

No wheel holds these tests: --source names a checkout of pytorch/ao at the version that is installed. They need `expecttest`. What fails in
our place alone is listed by name with its first line, and runs again with numbers compared where nodes, new nodes or warnings of torchao's own
fusion are expected. Used as a plugin of pytest, too: it puts the functions in their place.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from arclight.deploy.quantizing import batch_norm, pt2e
from benchmarks.results import parser, publish, versions

IN_PLACE = "ARCLIGHT_IN_THE_PLACE_OF_TORCHAO"
"""Environment variable of the tests' process: 0 for torchao's functions, 1 for Arclight's, `NUMBERS` for these without comparing nodes."""
NUMBERS = "numbers"
STEPS = 3
THEIRS: dict[str, Callable[..., GraphModule]] = {}
"""torchao's functions that Arclight's took the place of."""
FOLDER = Path("test/quantization/pt2e")
FILES = (
    "test_quantize_pt2e", "test_quantize_pt2e_qat", "test_representation", "test_metadata_porting", "test_duplicate_dq", "test_graph_utils",
    "test_numeric_debugger", "test_x86inductor_quantizer",
)  # fmt: skip

REASONS = {
    r"ConvBn[12]d\.test_qat_conv_(bn_fusion|bn_relu_fusion|transpose_bn)": (
        "expects the nodes of torchao's fusion: `reshape`, zeros for a bias that is added later, and gamma / sqrt(variance + epsilon). Here shapes change by "
        "`view`, the layer has no bias, and the scale is 1 where gamma is 0: torchao's outputs are NaN there"
    ),
    r"ConvBn2d\.test_qat_shared_qspec": (
        "expects new nodes for convolutions and batch norms. Here they stay, so that epsilon and momentum are not written again"
    ),
    r"TestQuantizePT2E\.test_linear_bn_fusion_skipped_for_3d_input": (
        "expects torchao's warning that the batch norm is not folded. Here it stays without one, as it computes the same"
    ),
}  # fmt: skip
"""Maps patterns of tests' names to what they expect that Arclight does by design in another way; it counts where numbers agree."""


def pytest_configure() -> None:
    """Put Arclight's functions in the place of torchao's, before a test imports them."""
    if os.environ.get(IN_PLACE, "0") == "0":
        return
    import torchao.quantization.pt2e.quantize_pt2e as public
    import torchao.testing.pt2e.utils as utilities

    THEIRS.update(prepare_qat=public.prepare_qat_pt2e, convert=public.convert_pt2e)
    for module in (public, utilities):
        vars(module).update(prepare_pt2e=prepare, prepare_qat_pt2e=prepare_qat, convert_pt2e=convert)


def pytest_pycollect_makeitem(name: str, obj: type) -> None:
    """Put `STAND_INS` into a class before its tests are collected, if the process was told so."""
    if os.environ.get(IN_PLACE) == NUMBERS:
        for method, stand_in in STAND_INS.get(name, {}).items():
            setattr(obj, method, stand_in)


def prepare(model: GraphModule, quantizer: object) -> GraphModule:
    return pt2e.prepare(model, quantizer, batch_norm.fold_untrained)


def prepare_qat(model: GraphModule, quantizer: object) -> GraphModule:
    return pt2e.prepare_qat(model, quantizer, batch_norm.fuse)


def convert(
    model: GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
) -> GraphModule:  # fmt: skip
    batch_norm.fold(model)
    return pt2e.convert(model, fold=fold_quantize, reference=use_reference_representation)


def compare_fused(
    _case: Any, model: nn.Module, inputs: tuple[Tensor, ...], is_per_channel: bool, **_: Any
) -> None:  # fmt: skip
    """Compare numbers in the place of `_verify_symmetric_xnnpack_qat_graph_helper`, with the same quantizer."""
    from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

    config = get_symmetric_quantization_config(is_per_channel=is_per_channel, is_qat=True)
    compare_numbers(model, inputs, lambda: XNNPACKQuantizer().set_global(config))


def compare_shared(case: Any) -> None:
    """Check what `test_qat_shared_qspec` does, but that torchao's fusion made new nodes; and compare numbers."""
    module = sys.modules[type(case).__module__]
    model, inputs = module.DoubleConvBnModel(), (torch.randn(1, 3, 5, 5),)
    graph = prepare_qat(torch.export.export(model, inputs, strict=True).module(), module.DoubleConvBnQuantizer())
    named = set()
    for annotation in filter(None, (node.meta.get("quantization_annotation") for node in graph.graph.nodes)):
        named.update(annotation.input_qspec_map)
        for spec in (*annotation.input_qspec_map.values(), annotation.output_qspec):
            edge = getattr(spec, "edge_or_node", ())
            named.update(edge if isinstance(edge, tuple) else (edge,))
    assert named <= set(graph.graph.nodes)
    assert len(named) == 5
    assert sum(node.target is torch.ops.aten.batch_norm.default for node in named) == 2
    compare_numbers(model, inputs, module.DoubleConvBnQuantizer)


def compare_flat(_case: Any) -> None:
    """Check what `test_linear_bn_fusion_skipped_for_3d_input` does, but that torchao warns."""
    from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer

    for bias in (True, False):
        model, x = nn.Sequential(nn.Linear(3, 5, bias=bias), nn.BatchNorm1d(5)).eval(), torch.randn(2, 5, 3)
        graph = prepare(torch.export.export(model, (x,), strict=True).module(), XNNPACKQuantizer())
        torch.testing.assert_close(graph(x), model(x), atol=1e-5, rtol=1e-5)


def compare_numbers(model: nn.Module, inputs: tuple[Tensor, ...], quantizer: Callable[[], Any]) -> None:
    """Compare outputs of training steps, and of the converted model, with those that torchao's functions give.

    Tolerances are the ones of torch's tests, which torchao's own comparisons of numbers have. Raises AssertionError.
    """
    theirs = outputs(THEIRS["prepare_qat"], THEIRS["convert"], model, inputs, quantizer())
    ours = outputs(prepare_qat, convert, model, inputs, quantizer())
    for step, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        place = f"training step {step}" if step < STEPS else "converted"
        torch.testing.assert_close(found, wanted, msg=lambda text, place=place: f"{place}: {text}")


def outputs(
    prepare: Callable[..., GraphModule], convert: Callable[..., GraphModule], model: nn.Module, inputs: tuple[Tensor, ...], quantizer: Any,
) -> list[Tensor]:  # fmt: skip
    """Return the output of each of `STEPS` training steps on random targets, and that of the converted model."""
    from torchao.quantization.pt2e import move_exported_model_to_eval

    graph = prepare(torch.export.export(copy.deepcopy(model), inputs, strict=True).module(), quantizer)
    optimizer = torch.optim.SGD(graph.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        output = graph(*(torch.randn(value.shape, generator=random) for value in inputs))
        found.append(output.detach())
        optimizer.zero_grad()
        (output - torch.randn(output.shape, generator=random)).square().mean().backward()
        optimizer.step()
    move_exported_model_to_eval(graph)
    program = convert(graph)
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default), "not folded"
    return [*found, program(*inputs).detach()]


STAND_INS = {
    "PT2EQATTestCase": {"_verify_symmetric_xnnpack_qat_graph_helper": compare_fused},
    "TestQuantizePT2EQAT_ConvBn2d": {"test_qat_shared_qspec": compare_shared},
    "TestQuantizePT2E": {"test_linear_bn_fusion_skipped_for_3d_input": compare_flat},
}
"""Maps classes of torchao's tests to methods that compare nodes or warnings of its fusion, and what compares numbers in their place."""


@dataclass(frozen=True)
class Outcome:
    """What the tests of one file did."""

    passed: set[str]
    skipped: dict[str, str]
    """Name -> why."""
    failed: dict[str, str]
    """Name -> the first line of the error."""


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--source", type=Path, required=True, metavar="DIR", help="a checkout of pytorch/ao")
    options = arguments.parse_args()
    source = options.source.resolve()
    if not (source / FOLDER).is_dir():
        sys.exit(f"there are no tests of PT2E at {source / FOLDER}: name a checkout of pytorch/ao with --source")
    rows, notes, kept, agreed, told = [], [], 0, 0, 0
    skipped: dict[str, str] = {}
    for name in FILES[2:5] if options.quick else FILES:
        file = source / FOLDER / f"{name}.py"
        bare, ours = run(file, "0"), run(file, "1")
        lost = {test: error for test, error in ours.failed.items() if test in bare.passed}
        by_numbers = run(file, NUMBERS, only=lost).passed if lost else set()
        more = {test: why for test, why in ours.skipped.items() if test not in bare.skipped}
        rows.append((
            name, str(len(bare.passed)), str(len(bare.failed)), str(len(bare.skipped)), str(len(ours.passed)), str(len(ours.skipped)), str(len(more)),
            str(len(lost)), str(len(by_numbers)),
        ))  # fmt: skip
        print(*rows[-1], file=sys.stderr, flush=True)  # the whole takes an hour
        kept, agreed, told = kept + len(ours.passed & bare.passed), agreed + len(by_numbers), told + len(bare.passed)
        notes += explained(lost, by_numbers)
        notes += [f"* `{test}` is skipped in our place alone: {why}" for test, why in more.items()]
        skipped |= bare.skipped
    for why in dict.fromkeys(skipped.values()):
        tests = ", ".join(f"`{test}`" for test in skipped if skipped[test] == why)
        notes.append(f'* skipped with torchao\'s functions, "{why}": {tests}')
    publish(
        "torchao_tests", "torchao's tests of PT2E with our prepare and convert",
        (
            "file", "passed, torchao", "failed, torchao", "skipped, torchao", "passed, ours", "skipped, ours", "skipped, ours alone",
            "failed, ours alone", "of which numbers agree",
        ),
        rows, {"passed_of_those_of_torchao": kept / told, "passed_or_agreed_by_numbers": (kept + agreed) / told},
        options=options, packages=versions("torch", "torchao"), notes="\n".join(notes),
    )  # fmt: skip


def explained(lost: Mapping[str, str], by_numbers: Collection[str]) -> list[str]:
    """List the tests that fail in our place alone, those of one reason in one line.

    lost: name -> the first line of the error. by_numbers: names of those whose numbers agree with torchao's, of which alone `REASONS` are given.
    """
    tests: dict[str, list[str]] = {}
    for test, error in lost.items():
        why = next((text for pattern, text in REASONS.items() if test in by_numbers and re.search(pattern, test)), None)
        tests.setdefault(f"fails: {error}" if why is None else f"{why}. Numbers agree with torchao's", []).append(test)
    return [f"* {', '.join(f'`{test}`' for test in named)} {why}" for why, named in tests.items()]


def run(file: Path, in_place: str, *, only: Collection[str] = ()) -> Outcome:
    """Run the tests of one file in a process of their own, which sees the installed torchao and not the checkout's.

    in_place: the value of `IN_PLACE`. only: names of tests, by default all of the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        root = Path(__file__).resolve().parents[1]
        paths = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "benchmarks.torchao_tests",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        tests = [f"{file}::{name.replace('.', '::')}" for name in only] or [str(file)]
        done = subprocess.run(
            [*command, "--rootdir", folder, "-c", os.devnull, *tests],
            cwd=folder, env={**os.environ, "PYTHONPATH": paths, IN_PLACE: in_place}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not report.exists() or done.returncode not in (0, 1):
            sys.exit(f"{file} did not run:\n{done.stdout[-2000:]}{done.stderr[-1000:]}")
        return outcome(ElementTree.parse(report).getroot())


def outcome(report: ElementTree.Element) -> Outcome:
    """Read a report in JUnit's format."""
    made = Outcome(set(), {}, {})
    for case in report.iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        fault = next((one for one in case if one.tag in ("failure", "error")), None)
        if fault is not None:
            made.failed[name] = next(iter(fault.get("message", "").splitlines()), fault.tag)[:160]
        elif (skip := case.find("skipped")) is not None:
            made.skipped[name] = skip.get("message", "").strip()[:160]
        else:
            made.passed.add(name)
    return made


if __name__ == "__main__":
    main()
