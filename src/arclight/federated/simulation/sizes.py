"""Compute the size of uploads and downloads from shapes, exactly as encoding gives.

`simulate` makes the `Sizes` of a run, `simulator` asks it for the bytes of each transfer. It must give what ``codecs`` and `manifest_io` write,
byte for byte: tests encode both ways.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from arclight.federated.codecs import layout
from arclight.federated.codecs.settings import Codec, Raw
from arclight.federated.protocol.manifest import Entry, Manifest
from arclight.federated.settings import Federation

Shapes = Mapping[str, Sequence[int]]
_WIDTH = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}
_LARGEST = 256 << 20
"""Must equal `manifest_io.MAX_BLOB_BYTES`, whose module imports torch."""


def message_bytes(shapes: Shapes, codec: Codec, *, dtype: str = "F32") -> int:
    """Return the bytes of the blobs and of the manifest of a message with these tensors.

    shapes: parameter name to shape. dtype: of the parameters, as safetensors names it. Raises ValueError for one without a size.
    """
    if dtype not in _WIDTH:
        raise ValueError(f"the size of {dtype!r} is not known; these are: {', '.join(_WIDTH)}")
    blobs: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    entries: dict[str, Entry] = {}
    size = 0
    for name, shape in shapes.items():
        key = f"model/{name}"
        raw = layout.is_sent_raw(shape, _WIDTH[dtype], codec)
        parts = {"": (dtype, tuple(shape))} if raw else layout.part_shapes(shape, codec)
        bytes = sum(_WIDTH[kind] * math.prod(part) for kind, part in parts.values())
        if not blobs or (blobs[-1] and size + bytes > _LARGEST):
            blobs.append({})
            size = 0
        blobs[-1] |= {f"{key}#{part}" if part else key: what for part, what in parts.items()}
        size += bytes
        entries[key] = Entry(
            blob="0" * 64, dtype=dtype, shape=tuple(shape), codec="raw" if raw else type(codec).__name__.lower(),
            parts=tuple(parts), settings={} if raw else layout.entry_settings(codec),
        )  # fmt: skip
    files = [_file_bytes(blob) for blob in blobs]
    manifest = Manifest(
        kind="update", tensors=entries, blobs={f"{n:064d}": bytes for n, bytes in enumerate(files)}, base="0" * 64
    )
    return sum(files) + len(manifest.to_json())


def model_bytes(shapes: Shapes, *, dtype: str = "F32") -> int:
    """Return the bytes of the values themselves."""
    return _WIDTH[dtype] * sum(math.prod(shape) for shape in shapes.values())


def _file_bytes(parts: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Return the bytes of a safetensors file."""
    header, end = {}, 0
    for name in sorted(parts, key=lambda name: (-_WIDTH[parts[name][0]], name)):
        kind, shape = parts[name]
        begin, end = end, end + _WIDTH[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = len(json.dumps(header, separators=(",", ":")).encode())
    return 8 + text + -text % 8 + end


class Sizes:
    """Compute the bytes of a run's messages.

    shapes: parameter name to shape; or the bytes of a model whose layers are alike.
    """

    def __init__(self, federation: Federation, shapes: Shapes | int, dtype: str = "F32") -> None:
        if isinstance(shapes, int):
            blocks, values = 32, max(32, shapes // _WIDTH[dtype])
            shapes = {f"blocks.{n}.weight": (1, values // blocks + (n < values % blocks)) for n in range(blocks)}
        self._fragments = [shapes]
        if federation.streaming is not None:
            from arclight.optim.outer import fragments_of

            dealt = fragments_of(shapes, federation.streaming.fragments)
            self._fragments = [{name: shapes[name] for name in names} for names in dealt]
        self.model = model_bytes(shapes, dtype=dtype)
        self.whole = message_bytes(shapes, Raw(), dtype=dtype)
        self._parts = [model_bytes(some, dtype=dtype) for some in self._fragments]
        self._ups = [message_bytes(some, federation.up, dtype=dtype) for some in self._fragments]
        self._downs = [message_bytes(some, federation.down, dtype=dtype) for some in self._fragments]
        whole_each_time = isinstance(federation.down, Raw) and federation.streaming is None
        self._changes = 0 if whole_each_time else federation.down_changes

    def up(self, fragment: int | None) -> int:
        """Return the bytes of an update; without a fragment, of all together."""
        return sum(self._ups) if fragment is None else self._ups[fragment]

    def part(self, fragment: int | None) -> int:
        """Return the bytes of decoded values of a fragment, or of all."""
        return sum(self._parts) if fragment is None else self._parts[fragment]

    def down(self, has: int, base: int) -> int:
        """Return the bytes that a node with the weights of one round fetches for those of another.

        A node with -1 has none.

        A chain of changes if that is kept and is less than the weights themselves.
        """
        if has == base:
            return 0
        if 0 <= has < base <= has + self._changes:
            changes = sum(self._downs[round % len(self._downs)] for round in range(has + 1, base + 1))
            return min(changes, self.whole)
        return self.whole
