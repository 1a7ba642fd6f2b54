"""``arclight serve``: serve an exported program over HTTP."""

from __future__ import annotations

from pathlib import Path

from arclight.cli.arguments import Parser


def serve(arguments: list[str]) -> None:
    parser = Parser(prog="arclight serve", description="Serve a detector over HTTP, with a web page to try it.")
    parser.add_argument("--program", type=Path, required=True, metavar="FILE", help="exported detector (.onnx)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, reachable from this machine only)",
    )
    parser.add_argument("--port", type=int, default=8000, help="TCP port (default: %(default)s)")
    options = parser.parse_args(arguments)

    from arclight import serve as server

    server.serve(options.program, host=options.host, port=options.port)
