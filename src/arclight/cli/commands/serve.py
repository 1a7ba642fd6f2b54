"""Serve exported programs over HTTP: ``arclight serve``.

`command` calls `serve`. Options are read and checked here, and ``serve.server`` does the rest; each flag ``--limits.NAME`` is a field of
``serve.settings``. Flags are public and stay.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from arclight.cli.arguments import RUNTIMES, Parser, UsageError, add_trust, trusted


def serve(arguments: list[str]) -> None:
    from arclight import serve as server
    from arclight.serve.server import Tls, check_access

    options = _parser().parse_args(arguments)
    try:
        chosen = server.Limits(**{f.name: getattr(options, f"limits.{f.name}") for f in fields(server.Limits)})
        keys = None if options.api_key_file is None else _keys(options.api_key_file)
        if (options.tls_cert is None) != (options.tls_key is None):
            raise UsageError("a certificate and its private key go together: give both --tls-cert and --tls-key")
        tls = None if options.tls_cert is None else Tls(options.tls_cert, options.tls_key)
        check_access(options.host, keys, insecure=options.insecure, tls=tls, proxied=options.behind_proxy)
    except ValueError as error:
        raise UsageError(str(error)) from None
    programs = _programs(options.models, options.program)
    server.serve(
        programs,
        host=options.host,
        port=options.port,
        limits=chosen,
        api_key=keys,
        insecure=options.insecure,
        tls=tls,
        proxied=options.behind_proxy,
        trusted=trusted(options),
        runtime=_runtimes(options.runtime, programs),
        request_log=options.request_log,
    )


def _parser() -> Parser:
    from arclight.recipe import explain
    from arclight.serve import Limits

    parser = Parser(
        prog="arclight serve",
        description="Serve programs over HTTP, with a web page to try the first detector: photos at /detect, tensors at "
        "/v2/models/NAME/infer.",
    )
    parser.add_argument(
        "models", nargs="*", metavar="NAME=PROGRAM", help="exported programs (folders or .onnx), each by a name"
    )
    parser.add_argument("--program", type=Path, metavar="PATH", help="one exported detector (a folder or .onnx)")
    add_trust(parser)
    parser.add_argument(
        "--runtime", action="append", metavar="[NAME=]RUNTIME",
        help="what runs the programs, or the one of this name: onnxruntime, openvino, openvino-bf16, torch, inductor, or fastest, which times ONNX Runtime "
        "and OpenVINO; another one than a program was exported for is compared with that as it is loaded; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, reachable from this machine only)",
    )
    parser.add_argument("--port", type=int, default=8000, help="TCP port (default: %(default)s)")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file of keys, one on each line, of which requests must send one as Authorization: Bearer KEY; needed where other "
        "machines reach --host",
    )
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate of the server, PEM; needed there, too"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of the certificate, PEM")
    parser.add_argument(
        "--behind-proxy", action="store_true", help="listen without TLS, which a proxy before the server speaks"
    )
    parser.add_argument("--insecure", action="store_true", help="let everybody who reaches --host use the server")
    parser.add_argument(
        "--request-log",
        metavar="FILE",
        help='append a line of JSON about each request to FILE, "-" for standard output (the address then goes to standard error)',
    )
    limits = parser.add_argument_group("limits", "beyond which requests are refused")
    about = {setting.path: setting.doc for setting in explain(Limits)}
    for field in fields(Limits):
        limits.add_argument(
            f"--limits.{field.name}",
            type=type(field.default),
            default=field.default,
            metavar="N",
            help=f"{about[field.name].rstrip('.')} (default: %(default)s)",
        )
    return parser


def _keys(file: Path) -> list[str]:
    try:
        lines = file.read_text("utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"the API key cannot be read: {error}") from None
    return [line.strip() for line in lines if line.strip()]


def _runtimes(named: list[str] | None, programs: Path | dict[str, Path]) -> Any:
    """Return what ``--runtime`` names: None, one runtime for all, or runtimes by model name."""
    found: dict[str | None, str] = {}
    for word in named or ():
        name, _, runtime = word.rpartition("=")
        if runtime not in RUNTIMES:
            raise UsageError(f"--runtime {word}: there is no runtime {runtime!r}: take {', '.join(RUNTIMES)}")
        if (name or None) in found:
            raise UsageError(f"--runtime {word}: it was named before: name one runtime for each model")
        if name and (not isinstance(programs, dict) or name not in programs):
            known = (
                f"there are {', '.join(programs)}"
                if isinstance(programs, dict)
                else "there is only one, which needs no name"
            )
            raise UsageError(f"--runtime {word}: there is no model {name!r}; {known}")
        found[name or None] = runtime
    if not found:
        return None
    if not isinstance(programs, dict) or set(found) == {None}:
        return found[None]
    chosen = {name: found.get(name, found.get(None)) for name in programs}
    return {name: runtime for name, runtime in chosen.items() if runtime is not None}


def _programs(models: list[str], program: Path | None) -> Path | dict[str, Path]:
    if program is not None and not models:
        return program
    if program is not None or not models:
        raise UsageError("name the programs to serve: arclight serve NAME=PROGRAM ..., or one by --program FILE")
    if len(models) == 1 and "=" not in models[0]:
        return Path(models[0])
    from arclight.serve.server import MODEL_NAME

    named: dict[str, Path] = {}
    for word in models:
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise UsageError(f"{word} has no name: several programs are given as NAME=PROGRAM")
        if not re.fullmatch(MODEL_NAME, name):
            raise UsageError(
                f"{name!r} cannot name a model: use letters, digits, dots, dashes and underscores, up to 64"
            )
        if name in named:
            raise UsageError(f"{name} names two programs: give each a name of its own")
        named[name] = Path(path)
    return named
