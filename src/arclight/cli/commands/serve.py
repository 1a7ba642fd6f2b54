"""``arclight serve``: serve exported programs over HTTP."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from arclight.cli.arguments import Parser, UsageError, add_trust, trusted


def serve(arguments: list[str]) -> None:
    from arclight import serve as server
    from arclight.recipe import explain
    from arclight.serve.server import check_access

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
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, reachable from this machine only)",
    )
    parser.add_argument("--port", type=int, default=8000, help="TCP port (default: %(default)s)")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with a key that requests must send as Authorization: Bearer KEY; needed where other machines reach --host",
    )
    parser.add_argument("--insecure", action="store_true", help="let everybody who reaches --host use the server")
    limits = parser.add_argument_group("limits", "beyond which requests are refused")
    about = {setting.path: setting.doc for setting in explain(server.Limits)}
    for field in fields(server.Limits):
        limits.add_argument(
            f"--limits.{field.name}",
            type=type(field.default),
            default=field.default,
            metavar="N",
            help=f"{about[field.name].rstrip('.')} (default: %(default)s)",
        )
    options = parser.parse_args(arguments)
    try:
        chosen = server.Limits(**{f.name: getattr(options, f"limits.{f.name}") for f in fields(server.Limits)})
        key = (
            None if options.api_key_file is None else options.api_key_file.read_text("ascii", errors="replace").strip()
        )
        check_access(options.host, key, insecure=options.insecure)
    except OSError as error:
        raise UsageError(f"the API key cannot be read: {error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    server.serve(
        _programs(options.models, options.program),
        host=options.host,
        port=options.port,
        limits=chosen,
        api_key=key,
        insecure=options.insecure,
        trusted=trusted(options),
    )


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
