"""torchao's own tests of PT2E quantization, as they are and with Arclight's prepare and convert in the place of torchao's.

No wheel holds these tests: --source names a checkout of pytorch/ao at the version that is installed. They need `expecttest`. What fails in
our place alone is listed by name with its first line. Used as a plugin of pytest, too: it puts the functions in their place.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.results import parser, publish, versions

IN_PLACE = "ARCLIGHT_IN_THE_PLACE_OF_TORCHAO"
"""Environment variable by which the tests' process is told to use Arclight's functions."""
FOLDER = Path("test/quantization/pt2e")
FILES = (
    "test_quantize_pt2e", "test_quantize_pt2e_qat", "test_representation", "test_metadata_porting", "test_duplicate_dq", "test_graph_utils",
    "test_numeric_debugger", "test_x86inductor_quantizer",
)  # fmt: skip


def pytest_configure() -> None:
    """Put Arclight's functions in the place of torchao's, before a test imports them."""
    if os.environ.get(IN_PLACE) != "1":
        return
    import torchao.quantization.pt2e.quantize_pt2e as public
    import torchao.testing.pt2e.utils as utilities
    from torch.fx import GraphModule

    from arclight.deploy.quantizing import batch_norm, pt2e

    def prepare(model: GraphModule, quantizer: object) -> GraphModule:
        return pt2e.prepare(model, quantizer, batch_norm.fold_untrained)

    def prepare_qat(model: GraphModule, quantizer: object) -> GraphModule:
        return pt2e.prepare_qat(model, quantizer, batch_norm.fuse)

    def convert(
        model: GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
    ) -> GraphModule:
        batch_norm.fold(model)
        return pt2e.convert(model, fold=fold_quantize, reference=use_reference_representation)

    for module in (public, utilities):
        vars(module).update(prepare_pt2e=prepare, prepare_qat_pt2e=prepare_qat, convert_pt2e=convert)


@dataclass(frozen=True)
class Outcome:
    """What the tests of one file did."""

    passed: set[str]
    skipped: set[str]
    failed: dict[str, str]
    """Name -> the first line of the error."""


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--source", type=Path, required=True, metavar="DIR", help="a checkout of pytorch/ao")
    options = arguments.parse_args()
    source = options.source.resolve()
    if not (source / FOLDER).is_dir():
        sys.exit(f"there are no tests of PT2E at {source / FOLDER}: name a checkout of pytorch/ao with --source")
    rows, lost, kept, told = [], {}, 0, 0
    for name in FILES[2:5] if options.quick else FILES:
        bare, ours = (run(source, FOLDER / f"{name}.py", in_place) for in_place in (False, True))
        only_ours = {test: error for test, error in ours.failed.items() if test in bare.passed}
        counts = (bare.passed, bare.failed, ours.passed, ours.skipped, only_ours)
        rows.append((name, *(str(len(tests)) for tests in counts)))
        print(*rows[-1], file=sys.stderr, flush=True)  # the whole takes an hour
        kept, told = kept + len(ours.passed & bare.passed), told + len(bare.passed)
        lost.update(only_ours)
    publish(
        "torchao_tests", "torchao's tests of PT2E with our prepare and convert",
        ("file", "passed, torchao", "failed, torchao", "passed, ours", "skipped", "failed, ours alone"), rows, {"passed_of_those_of_torchao": kept / told},
        options=options, packages=versions("torch", "torchao"), notes="\n".join(f"* `{test}`: {error}" for test, error in lost.items()),
    )  # fmt: skip


def run(source: Path, file: Path, in_place: bool) -> Outcome:
    """Run the tests of one file in a process of their own, which sees the installed torchao and not the checkout's."""
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
        done = subprocess.run(
            [*command, "--rootdir", folder, "-c", os.devnull, str(source / file)],
            cwd=folder, env={**os.environ, "PYTHONPATH": paths, IN_PLACE: str(int(in_place))}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not report.exists() or done.returncode not in (0, 1):
            sys.exit(f"{file} did not run:\n{done.stdout[-2000:]}{done.stderr[-1000:]}")
        return outcome(ElementTree.parse(report).getroot())


def outcome(report: ElementTree.Element) -> Outcome:
    """Read a report in JUnit's format."""
    made = Outcome(set(), set(), {})
    for case in report.iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        fault = next((one for one in case if one.tag in ("failure", "error")), None)
        if fault is not None:
            made.failed[name] = next(iter(fault.get("message", "").splitlines()), fault.tag)[:160]
        else:
            (made.passed if case.find("skipped") is None else made.skipped).add(name)
    return made


if __name__ == "__main__":
    main()
