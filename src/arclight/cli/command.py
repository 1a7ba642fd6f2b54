"""Dispatch the words after ``arclight`` to their verb's function.

The installed command and ``python -m arclight.cli`` call `main`; `tune.trial` words errors by `sentence`. A new verb needs a line in `VERBS`;
its module is imported only when the verb is called, so that ``arclight --help`` stays fast. Verbs and exit statuses are public and stay.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence

import arclight

# A group, then verb -> (module:function, one line of help). The function takes the words after the verb.
VERBS: dict[str, dict[str, tuple[str, str]]] = {
    "Start": {
        "demo": (
            "arclight.cli.commands.demo:demo",
            "run the whole chain on a small example: draw, train, quantize, export, scan",
        ),
    },
    "Train": {
        "plan": (
            "arclight.cli.plan.recipe_plan:plan",
            "find the fastest plan for a number of GPUs, without having them",
        ),
        "train": ("arclight.cli.commands.train:train", "train from a recipe, or resume a run"),
        "tune": ("arclight.cli.tune.search:tune", "search the settings of a recipe for the best ones"),
        "federate": (
            "arclight.cli.federate.federated_run:federate",
            "train one model on the data of many sites, which stay there",
        ),
        "validate": ("arclight.cli.commands.evaluate:validate", "evaluate a checkpoint on the validation data"),
        "test": ("arclight.cli.commands.evaluate:test", "evaluate a checkpoint on the test data"),
        "run": ("arclight.cli.commands.run:run", "start a script that uses Fabric in several processes"),
    },
    "Ship": {
        "export": (
            "arclight.cli.commands.export:export",
            "export a trained model as a float32 program, or as a Hugging Face folder",
        ),
        "quantize": ("arclight.cli.commands.export:quantize", "export a trained model as an int8 program"),
        "compare": (
            "arclight.cli.comparing.compare:compare",
            "compare two programs, checkpoints or runs: scores, outputs, worst samples, speed, size",
        ),
        "benchmark": ("arclight.cli.commands.benchmark:benchmark", "compare the speed of programs"),
    },
    "Use": {
        "predict": ("arclight.cli.commands.predict:predict", "detect objects in images; generate text"),
        "scan": ("arclight.cli.commands.scan:scan", "find and read payment codes in images"),
        "serve": ("arclight.cli.commands.serve:serve", "serve a program over HTTP, with a web page"),
    },
    "Maintain": {
        "data": ("arclight.cli.commands.data:data", "tokenize text, generate labelled images, check a data set"),
        "checkpoint": (
            "arclight.cli.commands.checkpoint:checkpoint",
            "inspect, verify or convert checkpoints; manage rounds of federated runs",
        ),
        "doctor": ("arclight.cli.commands.doctor:doctor", "report devices, threads and packages of this machine"),
    },
}
FAULTS_OF_USE = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
FAULTS_WITHOUT_CLASS = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
USAGE_STATUS, INTERRUPTED_STATUS, BROKEN_PIPE_STATUS = 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    A user's mistake is its message on standard error and status 2. Any other error is raised, which ends the command with a traceback and
    status 1. Ctrl-C gives 130, and a pipe that nobody reads any more 141.
    """
    verb, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    # Before NumPy is imported: its products are small here, and a second thread waits for the next one longer than it computes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _let_streams_hold_any_name()
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: (
        f"arclight: warning: {message}\n"
    )  # not the line of code that warns
    try:
        status = dispatch(verb, rest)
        sys.stdout.flush()  # here, where a pipe that nobody reads any more is distinguished from a fault
        return status
    except KeyboardInterrupt as interrupt:  # its text says what is kept, if something is
        print(": ".join(["arclight: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return INTERRUPTED_STATUS
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS
    except Exception as error:
        if not is_fault_of_use(error):
            raise
        print(f"arclight: {sentence(error)}", file=sys.stderr)
        return USAGE_STATUS
    finally:
        warnings.formatwarning = usual


def _let_streams_hold_any_name() -> None:
    """Let standard input and output pass file names that are not valid in their encoding."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def dispatch(verb: str, rest: list[str]) -> int:
    """Call the verb's function."""
    verbs = {name: target for group in VERBS.values() for name, (target, _) in group.items()}
    if verb in verbs:
        module, _, function = verbs[verb].partition(":")
        return int(getattr(importlib.import_module(module), function)(rest) or 0)
    if verb in ("", "-h", "--help", "help"):
        print(overview())
        return 0
    if verb in ("-V", "--version"):
        print(f"arclight {arclight.__version__}")
        return 0
    near = difflib.get_close_matches(verb, verbs, 1)
    advice = f"did you mean {near[0]}?" if near else "see arclight --help"
    print(f"arclight: {verb} is not a verb; {advice}", file=sys.stderr)
    return USAGE_STATUS


def is_fault_of_use(error: Exception) -> bool:
    """Return True if the message of an error is enough, without a traceback.

    It is for classes of this package, and for errors about files and addresses that were named.
    """
    ours = type(error).__module__.partition(".")[0] == "arclight"
    named = isinstance(error, OSError) and error.errno in FAULTS_WITHOUT_CLASS
    return ours or isinstance(error, FAULTS_OF_USE) or named or bool(getattr(error, "names_remedy", False))


def sentence(error: Exception) -> str:
    """Return the message of an error.

    An OSError's has the file and a remedy; torch's list of weights that do not fit is summarised.
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        advice = (
            "; name a place that can be written to" if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else ""
        )
        return f"{error.filename}: {error.strerror}{advice}"
    before, misfits, listed = str(error).partition("Error(s) in loading state_dict")
    return before + misfit(listed) if misfits else str(error)


def misfit(listed: str) -> str:
    """Summarise torch's list of names that do not fit a model, with the first of each kind."""
    counts = []
    for heading, what in (("Missing", "the checkpoint lacks"), ("Unexpected", "the model has no place for")):
        if names := re.search(rf"{heading} key\(s\) in state_dict: (.*?)\. *$", listed, re.MULTILINE):
            found = names[1].split(", ")
            counts.append(f"{what} {len(found)} tensors, such as {found[0].strip(chr(34))}")
    shapes = re.findall(r"size mismatch for ([^:]+): .*?torch\.Size\(\[(.*?)\]\).*?torch\.Size\(\[(.*?)\]\)", listed)
    if shapes:
        name, theirs, ours = shapes[0]
        counts.append(
            f"{len(shapes)} tensors have another shape, such as {name}: ({theirs}), where the model has ({ours})"
        )
    if not counts:  # an error while a tensor was copied
        return " ".join(listed.partition(":")[2].split())
    return "; ".join(counts) + ". Give the settings that they were trained with"


def overview() -> str:
    from arclight.cli.style import bold, dim

    lines = [
        f"{bold('arclight')} {arclight.__version__}  from a first batch to a deployed int8 program",
        "",
        "  arclight <verb> [recipe.toml] [--table.field value ...]",
    ]
    for group, verbs in VERBS.items():
        lines += ["", bold(group), *(f"  {verb:<12}{dim(about)}" for verb, (_, about) in verbs.items())]
    return "\n".join([*lines, "", "arclight <verb> --help explains a verb."])
