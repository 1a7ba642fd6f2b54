"""Define architectures as tables: YOLOv5, YOLOv3, our own, or from a YOLOv5 .yaml.

Nothing in a table is evaluated: a row names a block, and its arguments are numbers, lists of numbers or truth values.

`yolov5` builds networks from a table; tasks and ``arclight data`` look one up by name or file. Names of architectures are recipe values
and row numbers are parts of state-dict names: both must stay. A new block goes into `Block`, `_MODULES` and ``yolov5._build``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from arclight.fabric.extras import require

Block = Literal[
    "conv", "ghost_conv", "bottleneck", "c3", "c3_ghost", "c3_transformer", "spp", "sppf", "max_pool", "pad", "upsample",
    "concat", "detect", "one_to_one", "segment", "pose", "corners", "obb", "classify",
]  # fmt: skip
HeadBlock = Literal["detect", "one_to_one", "segment", "pose", "corners", "obb", "classify"]
HEADS: tuple[HeadBlock, ...] = get_args(HeadBlock)
ANCHOR_HEADS: tuple[HeadBlock, ...] = ("detect", "segment", "pose", "corners", "obb")
"""Heads that predict boxes relative to anchors."""
ActivationName = Literal["silu", "leaky_relu", "relu", "hardswish", "mish"]
AnchorLevels = tuple[tuple[tuple[float, float], ...], ...]
MAX_LEVELS, MAX_ROWS, MAX_CHANNELS, MAX_REPEATS = 5, 200, 8192, 200
MAX_BLOCKS = 1000
"""Most blocks of a user's table: repeats of all rows together, after scaling."""
MAX_TEXT = 1 << 16
"""Most characters of a user's table, each counted as often as an alias refers to it."""


class Layer(NamedTuple):
    """One row of an architecture, before scaling; its place is its number in state-dict names."""

    block: Block
    channels: int = 0
    kernel: int = 1
    stride: int = 1
    repeats: int = 1
    shortcut: bool = True
    source: tuple[int, ...] = (-1,)
    """Rows whose outputs come in: numbers from 0, or negative ones relative to this row; -1 is the row before."""
    kernels: tuple[int, ...] = (5, 9, 13)
    """Sizes of the pools of ``spp``."""
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Left, right, top and bottom of ``pad``, pixels."""
    masks: int = 32
    """Prototypes of ``segment``; its ``channels`` are those on the way to them."""


class Scale(NamedTuple):
    """Factors by which a family member scales a table: depth of repeats, width of channels."""

    depth: float = 1.0
    width: float = 1.0


class Architecture(NamedTuple):
    """A network before it is built: rows, their scale, and the anchors of each level."""

    rows: tuple[Layer, ...]
    scale: Scale
    anchors_px: AnchorLevels
    """Per level, finest first: (width, height) in pixels of each anchor."""
    activation: ActivationName = "silu"

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels of the image per cell of each level."""
        factors: list[int] = []
        for i, row in enumerate(self.rows):
            sources = [factors[i + s if s < 0 else s] if i else 1 for s in row.source]
            if row.block in HEADS:
                return tuple(sources)
            factors.append(max(1, sources[0] * row.stride if row.block != "upsample" else sources[0] // 2))
        raise ValueError("an architecture ends with the row of a head; this one has none")

    @property
    def head(self) -> str:
        """Kind of task that the last row is for: its block, but ``detect`` for ``one_to_one`` too."""
        return "detect" if self.rows[-1].block == "one_to_one" else self.rows[-1].block

    @property
    def has_anchors(self) -> bool:
        return self.rows[-1].block in ANCHOR_HEADS

    @property
    def levels(self) -> int:
        return len(self.rows[-1].source)


_P2: tuple[tuple[float, float], ...] = ((5, 7), (8, 15), (17, 12))
_P3: tuple[tuple[float, float], ...] = ((10, 13), (16, 30), (33, 23))
_P4: tuple[tuple[float, float], ...] = ((30, 61), (62, 45), (59, 119))
_P5: tuple[tuple[float, float], ...] = ((116, 90), (156, 198), (373, 326))
_P6: tuple[tuple[float, float], ...] = ((436, 615), (739, 380), (925, 792))
_P7: tuple[tuple[float, float], ...] = ((872, 1230), (1478, 760), (1850, 1584))
COCO_P5: AnchorLevels = (_P3, _P4, _P5)
"""Published for COCO at 640 pixels, strides 8, 16 and 32."""
COCO_P6: AnchorLevels = (
    ((19, 27), (44, 40), (38, 94)),
    ((96, 68), (86, 152), (180, 137)),
    ((140, 301), (303, 264), (238, 542)),
    _P6,
)
"""Published for COCO at 1280 pixels, strides 8, 16, 32 and 64."""
COCO_TINY: AnchorLevels = (((10, 14), (23, 27), (37, 58)), ((81, 82), (135, 169), (344, 319)))
"""Published for YOLOv3-tiny, strides 16 and 32."""


def _c3(channels: int, repeats: int = 3) -> Layer:
    """Return a C3 of a neck: without residual connections."""
    return Layer("c3", channels, repeats=repeats, shortcut=False)


def _down(channels: int) -> Layer:
    return Layer("conv", channels, kernel=3, stride=2)


def _concat(*other: int) -> Layer:
    return Layer("concat", source=(-1, *other))


def _detect(*levels: int) -> Layer:
    return Layer("detect", source=levels)


def _with_masks(rows: tuple[Layer, ...]) -> tuple[Layer, ...]:
    return (*rows[:-1], rows[-1]._replace(block="segment", channels=256))


def _with_head(rows: tuple[Layer, ...], head: HeadBlock) -> tuple[Layer, ...]:
    return (*rows[:-1], rows[-1]._replace(block=head))


_UP = Layer("upsample")
_STEM = (  # stride 2, 4, 8, 16
    Layer("conv", 64, kernel=6, stride=2), _down(128), Layer("c3", 128, repeats=3), _down(256), Layer("c3", 256, repeats=6),
    _down(512), Layer("c3", 512, repeats=9),
)  # fmt: skip
_BACKBONE = (*_STEM, _down(1024), Layer("c3", 1024, repeats=3), Layer("sppf", 1024, kernel=5))
_BACKBONE_P6 = (
    *_STEM, _down(768), Layer("c3", 768, repeats=3), _down(1024), Layer("c3", 1024, repeats=3), Layer("sppf", 1024, kernel=5),
)  # fmt: skip
_TOP_DOWN = (Layer("conv", 512), _UP, _concat(6), _c3(512), Layer("conv", 256), _UP, _concat(4), _c3(256))
"""Rows 10 to 17: from stride 32 back up to 8."""

YOLOV5 = (
    *_BACKBONE, *_TOP_DOWN, _down(256), _concat(14), _c3(512), _down(512), _concat(10), _c3(1024), _detect(17, 20, 23),
)  # fmt: skip
YOLOV5_CLS = (*_BACKBONE[:-1], Layer("classify"))
YOLOV5_P6 = (
    *_BACKBONE_P6,
    Layer("conv", 768), _UP, _concat(8), _c3(768), Layer("conv", 512), _UP, _concat(6), _c3(512),
    Layer("conv", 256), _UP, _concat(4), _c3(256),
    _down(256), _concat(20), _c3(512), _down(512), _concat(16), _c3(768), _down(768), _concat(12), _c3(1024),
    _detect(23, 26, 29, 32),
)  # fmt: skip
YOLOV5_P2 = (
    *_BACKBONE, *_TOP_DOWN, Layer("conv", 128), _UP, _concat(2), _c3(128, repeats=1),
    _down(128), _concat(18), _c3(256), _down(256), _concat(14), _c3(512), _down(512), _concat(10), _c3(1024),
    _detect(21, 24, 27, 30),
)  # fmt: skip
YOLOV5_P34 = (*_BACKBONE, *_TOP_DOWN, _down(256), _concat(14), _c3(512), _detect(17, 20))
YOLOV5_P7 = (
    *_BACKBONE_P6[:-1], _down(1280), Layer("c3", 1280, repeats=3), Layer("sppf", 1280, kernel=5),
    Layer("conv", 1024), _UP, _concat(10), _c3(1024), Layer("conv", 768), _UP, _concat(8), _c3(768),
    Layer("conv", 512), _UP, _concat(6), _c3(512), Layer("conv", 256), _UP, _concat(4), _c3(256),
    _down(256), _concat(26), _c3(512), _down(512), _concat(22), _c3(768), _down(768), _concat(18), _c3(1024),
    _down(1024), _concat(14), _c3(1280), _detect(29, 32, 35, 38, 41),
)  # fmt: skip
YOLOV5_FPN = (
    *_BACKBONE, _c3(1024), _UP, _concat(6), Layer("conv", 512), _c3(512), _UP, _concat(4), Layer("conv", 256), _c3(256),
    _detect(18, 14, 10),
)  # fmt: skip
YOLOV5_BIFPN = tuple(
    _concat(14, 6) if number == 19 else row for number, row in enumerate(YOLOV5)
)  # the map of the backbone joins the way back down, too
_GHOST_BLOCKS: dict[str, Block] = {"conv": "ghost_conv", "c3": "c3_ghost"}
YOLOV5_GHOST = tuple(
    row._replace(block=_GHOST_BLOCKS.get(row.block, row.block)) if number else row for number, row in enumerate(YOLOV5)
)
YOLOV5_TRANSFORMER = tuple(
    row._replace(block="c3_transformer") if number == 8 else row for number, row in enumerate(YOLOV5)
)


ARC = (
    Layer("conv", 64, kernel=3, stride=2), _down(128), Layer("c3", 128, repeats=3), _down(256), Layer("c3", 256, repeats=6),
    _down(512), Layer("c3", 512, repeats=6), _down(1024), Layer("c3", 1024, repeats=3), Layer("sppf", 1024, kernel=5),
    *_TOP_DOWN, _down(256), _concat(14), _c3(512), _down(512), _concat(10), _c3(1024),
    Layer("one_to_one", source=(17, 20, 23)),
)  # fmt: skip
"""Our own: no anchors, no non-maximum suppression; see `one_to_one`."""


def _yolov3(spp: bool) -> tuple[Layer, ...]:
    def residual(channels: int, repeats: int = 1, shortcut: bool = True) -> Layer:
        return Layer("bottleneck", channels, repeats=repeats, shortcut=shortcut)

    def conv(channels: int, kernel: int = 3, source: int = -1) -> Layer:
        return Layer("conv", channels, kernel=kernel, source=(source,))

    return (
        conv(32), _down(64), residual(64), _down(128), residual(128, 2), _down(256), residual(256, 8), _down(512),
        residual(512, 8), _down(1024), residual(1024, 4),
        residual(1024, shortcut=False), Layer("spp", 512) if spp else conv(512, 1), conv(1024), conv(512, 1), conv(1024),
        conv(256, 1, -2), _UP, _concat(8), residual(512, shortcut=False), residual(512, shortcut=False), conv(256, 1), conv(512),
        conv(128, 1, -2), _UP, _concat(6), residual(256, shortcut=False), residual(256, 2, shortcut=False), _detect(27, 22, 15),
    )  # fmt: skip


_POOL = Layer("max_pool", kernel=2, stride=2)
_YOLOV3_TINY = (
    Layer("conv", 16, kernel=3), _POOL, Layer("conv", 32, kernel=3), _POOL, Layer("conv", 64, kernel=3), _POOL,
    Layer("conv", 128, kernel=3), _POOL, Layer("conv", 256, kernel=3), _POOL, Layer("conv", 512, kernel=3),
    Layer("pad", padding=(0, 1, 0, 1)), Layer("max_pool", kernel=2),
    Layer("conv", 1024, kernel=3), Layer("conv", 256), Layer("conv", 512, kernel=3),
    Layer("conv", 128, source=(-2,)), _UP, _concat(8), Layer("conv", 256, kernel=3), _detect(19, 15),
)  # fmt: skip

SCALES: dict[str, Scale] = {
    "n": Scale(depth=0.33, width=0.25),
    "s": Scale(depth=0.33, width=0.50),
    "m": Scale(depth=0.67, width=0.75),
    "l": Scale(depth=1.00, width=1.00),
    "x": Scale(depth=1.33, width=1.25),
}

_LIKE_DETECT: tuple[HeadBlock, ...] = ("pose", "corners", "obb")
ARCHITECTURES: dict[str, Architecture] = {
    **{f"yolov5{size}": Architecture(YOLOV5, scale, COCO_P5) for size, scale in SCALES.items()},
    **{f"yolov5{size}6": Architecture(YOLOV5_P6, scale, COCO_P6) for size, scale in SCALES.items()},
    **{f"yolov5{size}-seg": Architecture(_with_masks(YOLOV5), scale, COCO_P5) for size, scale in SCALES.items()},
    **{
        f"yolov5{size}-{head}": Architecture(_with_head(YOLOV5, head), scale, COCO_P5)
        for head in _LIKE_DETECT
        for size, scale in SCALES.items()
    },
    **{f"yolov5{size}-cls": Architecture(YOLOV5_CLS, scale, ()) for size, scale in SCALES.items()},
    "yolov5-p2": Architecture(YOLOV5_P2, SCALES["l"], (_P2, _P3, _P4, _P5)),
    "yolov5-p34": Architecture(YOLOV5_P34, SCALES["s"], (_P3, _P4)),
    "yolov5-p6": Architecture(YOLOV5_P6, SCALES["l"], (_P3, _P4, _P5, _P6)),
    "yolov5-p7": Architecture(YOLOV5_P7, SCALES["l"], (_P3, _P4, _P5, _P6, _P7)),
    "yolov5-fpn": Architecture(YOLOV5_FPN, SCALES["l"], COCO_P5),
    "yolov5-panet": Architecture(YOLOV5, SCALES["l"], COCO_P5),
    "yolov5-bifpn": Architecture(YOLOV5_BIFPN, SCALES["l"], COCO_P5),
    "yolov5s-ghost": Architecture(YOLOV5_GHOST, SCALES["s"], COCO_P5),
    "yolov5s-transformer": Architecture(YOLOV5_TRANSFORMER, SCALES["s"], COCO_P5),
    "yolov5s-leakyrelu": Architecture(YOLOV5, SCALES["s"], COCO_P5, "leaky_relu"),
    **{f"arc-{size}": Architecture(ARC, scale, ()) for size, scale in SCALES.items()},
    "yolov3": Architecture(_yolov3(spp=False), Scale(), COCO_P5),
    "yolov3-spp": Architecture(_yolov3(spp=True), Scale(), COCO_P5),
    "yolov3-tiny": Architecture(_YOLOV3_TINY, Scale(), COCO_TINY),
}
"""Architectures by name. Where YOLOv5 leaves anchors to a fit (p2, p34, p6, p7), those published for the nearest strides."""


def is_table(name: str) -> bool:
    """Return True for the name of a file with a table, as against the name of an architecture."""
    return name.lower().endswith((".yaml", ".yml"))


def read_table(name: str) -> str:
    """Read the text of a .yaml file. Raises ValueError if it cannot be read."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be read as an architecture: {error}") from error


def find_architecture(name: str, table: str | None = None) -> Architecture:
    """Return the architecture of that name, or the one in a YOLOv5 .yaml file.

    ``table``: text of the file, if it was read already. Raises ValueError.
    """
    if is_table(name):
        return parse_architecture(read_table(name) if table is None else table, name)
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(
            f"{name!r} is not a known model: choose one of {known}, or a .yaml file{_nearest(name, ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _nearest(name: object, known: Iterable[str]) -> str:
    """Return the end of a sentence that asks for the name that was meant; empty if none is near."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def name_of(architecture: Architecture) -> str | None:
    """Return the name of the known architecture with these rows and scale, or None.

    Anchors may differ.
    """
    return next(
        (
            name
            for name, own in ARCHITECTURES.items()
            if own._replace(anchors_px=architecture.anchors_px) == architecture
        ),
        None,
    )


# ---------------------------------------------------------------- a user's own table

_MODULES: dict[str, Block] = {
    "Conv": "conv", "GhostConv": "ghost_conv", "Bottleneck": "bottleneck", "C3": "c3", "C3Ghost": "c3_ghost",
    "C3TR": "c3_transformer", "SPP": "spp", "SPPF": "sppf", "nn.MaxPool2d": "max_pool", "nn.ZeroPad2d": "pad",
    "nn.Upsample": "upsample", "Concat": "concat", "Detect": "detect", "DetectOneToOne": "one_to_one", "Segment": "segment", "Pose": "pose",
    "Corners": "corners", "OBB": "obb", "Classify": "classify",
}  # fmt: skip
"""What a .yaml calls the blocks."""
_ACTIVATIONS: dict[str, ActivationName] = {
    "nn.SiLU()": "silu", "nn.LeakyReLU(0.1)": "leaky_relu", "nn.ReLU()": "relu", "nn.Hardswish()": "hardswish", "nn.Mish()": "mish",
}  # fmt: skip


def parse_architecture(text: str, path: str) -> Architecture:
    """Parse a YOLOv5 .yaml, whose ``backbone`` and ``head`` list the rows.

    A row is [from, number, module, arguments]. ``depth_multiple``, ``width_multiple``, ``anchors`` (a list of numbers
    per level) and ``activation`` are read; ``nc`` is the data set's. Modules are looked up by name and their arguments
    must be numbers: nothing is evaluated. Raises ValueError that names the file at ``path`` and the row.
    """
    document = _document(text, path)
    if not isinstance(document, Mapping):
        raise ValueError(f"{path}: an architecture has backbone and head, found {type(document).__name__}")
    listed = [document.get(part) for part in ("backbone", "head")]
    if not all(isinstance(rows, list) for rows in listed):
        raise ValueError(f"{path}: backbone and head must be lists of rows [from, number, module, arguments]")
    given = [row for rows in listed for row in rows or ()]
    if len(given) > MAX_ROWS:
        raise ValueError(f"{path}: {len(given)} rows, at most {MAX_ROWS} are built")
    rows: list[Layer] = []
    for number, row in enumerate(given):
        try:
            rows.append(_row(row, number, last=number == len(given) - 1))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: row {number}, {str(row)[:80]}: {str(error)[:300]}") from None
    scale = Scale(_multiple(document, "depth_multiple", path), _multiple(document, "width_multiple", path))
    blocks = sum(max(round(row.repeats * scale.depth), 1) for row in rows)
    if blocks > MAX_BLOCKS:
        raise ValueError(f"{path}: {blocks} blocks, at most {MAX_BLOCKS} are built")
    written = document.get("activation") or "nn.SiLU()"
    if not isinstance(written, str) or written not in _ACTIVATIONS:
        raise ValueError(
            f"{path}: activation {str(written)[:80]!r} is not known: it is one of {', '.join(_ACTIVATIONS)}"
        )
    architecture = Architecture(tuple(rows), scale, (), _ACTIVATIONS[written])
    strides = architecture.strides
    if architecture.head == "classify":
        return architecture
    if list(strides) != sorted(set(strides)):
        raise ValueError(
            f"{path}: the head reads maps of strides {list(strides)}: list them from the finest to the coarsest"
        )
    if not architecture.has_anchors:
        return architecture
    return architecture._replace(anchors_px=_anchors(document.get("anchors", 3), strides, path))


def _document(text: str, path: str) -> Any:
    """Parse YAML.

    Raises ValueError for text that is not YAML, and for aliases that expand to too much.
    """
    yaml = require("yaml", extra="vision")
    if len(text) > MAX_TEXT:
        raise ValueError(
            f"{path} cannot be read as an architecture: {len(text):,} characters, at most {MAX_TEXT:,} are"
        )
    try:
        document = yaml.safe_load(text)
    # tags and dates raise whatever their values make Python raise
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read as an architecture: {error}") from error
    left, parts = MAX_TEXT, [document]
    while parts:
        part = parts.pop()
        left -= 1 + (len(part) if isinstance(part, str | bytes | list | tuple | set | Mapping) else 0)
        if left < 0 or (isinstance(part, int) and part.bit_length() > 64):
            raise ValueError(f"{path} cannot be read as an architecture: its aliases or numbers are too large")
        if isinstance(part, Mapping):
            parts += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set):
            parts += part
    return document


def _row(row: Any, number: int, last: bool) -> Layer:
    if not (isinstance(row, list) and len(row) == 4):
        raise ValueError("a row is [from, number, module, arguments]")
    origin, repeats, module, arguments = row
    if module not in _MODULES:
        raise ValueError(f"{module!r} is not a block; choose one of {', '.join(_MODULES)}{_nearest(module, _MODULES)}")
    block = _MODULES[module]
    if (block in HEADS) != last:
        raise ValueError(
            f"{module if block in HEADS else 'Detect, Segment, Pose, Corners, OBB or Classify'} is the last row, and only that"
        )
    sources = tuple(origin) if isinstance(origin, list) else (origin,)
    if not sources or not all(_whole(s) and (s == -1 or -number <= s < number) for s in sources):
        raise ValueError(f"from = {origin} must name rows before this one")
    if len(sources) > 1 and block not in ("concat", "one_to_one", *ANCHOR_HEADS):
        raise ValueError(f"{module} takes one map, from = {origin} names {len(sources)}")
    if not (_whole(repeats) and 1 <= repeats <= MAX_REPEATS):
        raise ValueError(f"number = {repeats} must be 1 to {MAX_REPEATS}")
    if not isinstance(arguments, list):
        raise ValueError("arguments must be a list")
    if repeats > 1 and block in ("max_pool", "pad", "upsample", "concat", *HEADS):
        raise ValueError(f"number = {repeats}: {module} is built once, write a row for each")
    layer = Layer(block, repeats=repeats, source=sources)
    if block == "concat" or block in HEADS:
        if block in HEADS and not 1 <= len(sources) <= MAX_LEVELS:
            raise ValueError(f"{module} has 1 to {MAX_LEVELS} levels, not {len(sources)}")
        return layer if block != "segment" else layer._replace(**_mask_arguments(arguments))
    if block == "upsample":
        if arguments not in ([None, 2, "nearest"], ["None", 2, "nearest"]):
            raise ValueError("only [None, 2, nearest] is built")
        return layer
    layer = layer._replace(**_arguments(block, arguments))
    if repeats > 1 and layer.stride > 1:
        raise ValueError(f"number = {repeats} of a stride of {layer.stride}: write a row for each")
    return layer


def _mask_arguments(arguments: Sequence[Any]) -> dict[str, Any]:
    """Return prototypes and channels from the arguments of a Segment row.

    Its classes and anchors are known otherwise.
    """
    given = list(arguments[2:])
    masks, channels = given[0] if given else 32, given[1] if len(given) > 1 else 256
    if len(arguments) > 4 or not (
        _whole(masks) and 1 <= masks <= 256 and _whole(channels) and 1 <= channels <= MAX_CHANNELS
    ):
        raise ValueError(f"takes nc, anchors, prototypes (1 to 256) and channels, given {list(arguments)}")
    return {"masks": masks, "channels": channels}


def _arguments(block: Block, arguments: Sequence[Any]) -> dict[str, Any]:
    """Name the arguments of one row. Raises ValueError for others than the block takes."""
    if block == "pad":
        (sides,) = arguments
        if not (isinstance(sides, list) and len(sides) == 4 and all(_whole(s) and 0 <= s <= 8 for s in sides)):
            raise ValueError("padding is [left, right, top, bottom], each 0 to 8")
        return {"padding": tuple(sides)}
    names = {
        "conv": ("channels", "kernel", "stride", "margin"), "ghost_conv": ("channels", "kernel", "stride"), "max_pool": ("kernel", "stride", "zero"),
        "spp": ("channels", "kernels"), "sppf": ("channels", "kernel"),
    }.get(block, ("channels", "shortcut"))  # fmt: skip
    if len(arguments) > len(names) or not arguments:
        raise ValueError(f"takes {', '.join(names)}, given {list(arguments)}")
    named = {"kernel": 5} if block == "sppf" else {}
    named |= dict(zip(names, arguments, strict=False))
    margin = named.pop("margin", None)
    if margin is not None and margin != (named.get("kernel", 1) - 1) // 2:
        raise ValueError(
            f"padding = {margin} of a kernel of {named['kernel']}: only {(named['kernel'] - 1) // 2} is built"
        )
    if named.pop("zero", 0) != 0:
        raise ValueError("a pool has no padding of its own: use nn.ZeroPad2d")
    for name, value in named.items():
        if name == "shortcut":
            if not isinstance(value, bool):
                raise ValueError(f"shortcut = {value!r} must be True or False")
        elif name == "kernels":
            if not (
                isinstance(value, list)
                and 1 <= len(value) <= 8
                and all(_whole(k) and 1 <= k <= 31 and k % 2 for k in value)
            ):
                raise ValueError(f"pools = {value!r} must be odd sizes")
            named[name] = tuple(value)
        elif not (_whole(value) and 1 <= value <= (MAX_CHANNELS if name == "channels" else 31)):
            raise ValueError(f"{name} = {value!r} must be a whole number from 1")
    if named.get("stride", 1) not in (1, 2):
        raise ValueError(f"stride = {named['stride']} must be 1 or 2")
    return named


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _multiple(document: Mapping[str, Any], name: str, path: str) -> float:
    value = document.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and 0 < value <= 4):
        raise ValueError(f"{path}: {name} = {value!r} must be a number above 0, at most 4")
    return float(value)


def _anchors(given: Any, strides: Sequence[int], path: str) -> AnchorLevels:
    """Return the given anchors per level, checked; for the number 3 the published ones."""
    published = dict(zip((4, 8, 16, 32, 64, 128), (_P2, _P3, _P4, _P5, _P6, _P7), strict=True))
    if given == 3:
        if unknown := [stride for stride in strides if stride not in published]:
            raise ValueError(f"{path}: there are no published anchors for stride {unknown[0]}: give them in pixels")
        return tuple(published[stride] for stride in strides)
    if not (isinstance(given, list) and len(given) == len(strides)):
        raise ValueError(f"{path}: anchors must have a list for each of {len(strides)} levels, or be 3")
    counts = {len(level) if isinstance(level, list) else 0 for level in given}
    if len(counts) != 1 or (count := counts.pop()) % 2 or not 2 <= count <= 32:
        raise ValueError(
            f"{path}: anchors are width, height, width, height ... of 1 to 16 anchors, as many on each level"
        )
    numbers = [value for level in given for value in level]
    if not all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and 0 < v <= 1e4 for v in numbers
    ):
        raise ValueError(f"{path}: anchors must be sizes in pixels above 0")
    return tuple(tuple(zip(level[::2], level[1::2], strict=True)) for level in given)


assert set(_MODULES.values()) == set(get_args(Block))
