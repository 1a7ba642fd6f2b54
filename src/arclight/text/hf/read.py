"""Read a Hugging Face folder, or a model of transformers, into one of our models.

`from_hf` is public; `LanguageModel` and ``heads`` call it for ``weights`` that name a folder. A new family is a table in `families`, not code
here. Folders are untrusted: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arclight.fabric.modules import find_shared_parameters, set_shared_parameters
from arclight.fabric.weight_files import WeightFiles
from arclight.text.hf.families import REQUIRED, Family, check_type
from arclight.text.hf.registry import family_of_model, family_of_type
from arclight.text.hf.state_keys import Bounds, Key, own_part, same_tensors, tensors


def from_hf(
    source: str | Path | nn.Module, model: nn.Module | None = None, *, dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:  # fmt: skip
    """Load a model from ``source``: a Hugging Face folder, or a model of transformers.

    Nothing is downloaded.

    model: fill this one, in its own types: whole, on meta (it moves to ``device``), sharded (each rank reads its shards
    only), a pipeline stage (its parameters only), or one with more beside the trunk (which stays as it is). Otherwise a new
    one is made, in ``dtype`` (None: that of config.json, or of the weights of a model). Values are copied, never shared.
    Raises FileNotFoundError if the folder or its files are missing, ValueError if config.json asks for what the family
    here does not do, differs from ``model``'s, or if tensors are missing, left over or of other shapes: all are named.
    """
    theirs = _config_of(source) if isinstance(source, nn.Module) else read_config(Path(source))
    family = family_of_type(theirs.get("model_type") or theirs.get("_class_name", ""))
    ours = family.read(theirs)
    with torch.device("meta"):
        whole = family.model(family.config(**ours))
    if model is None:
        model = whole
        kept = dtype or _dtype_of(source, theirs)
        for parameter in whole.parameters():
            parameter.data = parameter.data.to(kept)
    else:
        _check_same(model, family, ours)
    if any(tensor.is_meta for tensor in tensors(model).values()):
        for child in getattr(model, "non_trunk", ()):
            if any(tensor.is_meta for tensor in tensors(model.get_submodule(child)).values()):
                raise ValueError(f"{child} is on meta and gets no weights from this folder: give it its own first")
        tied = find_shared_parameters(model)
        model = set_shared_parameters(model.to_empty(device=device), tied)
    held = source.state_dict() if isinstance(source, nn.Module) else None
    where = type(source).__name__ if isinstance(source, nn.Module) else Path(source)
    weights = Folder(where, family.prefix, _blocks(theirs), family.stem, held)
    _fill(model, whole, family, weights, (*family.ignored, *family.unread(theirs)))
    return model


def _config_of(model: nn.Module) -> dict[str, Any]:
    """Return the config.json of ``model``.

    Raises TypeError for one that is not of transformers, ValueError without weights.
    """
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        raise TypeError(
            f"{type(model).__name__} is not a model of transformers (it has no config with to_dict): give such a model, or the folder of one"
        )
    if meta := next((name for name, tensor in model.state_dict().items() if tensor.is_meta), None):
        raise ValueError(f"{meta} of {type(model).__name__} is on meta and has no values: load its weights first")
    theirs: dict[str, Any] = config.to_dict()
    return theirs


def _dtype_of(source: str | Path | nn.Module, theirs: dict[str, Any]) -> torch.dtype:
    if isinstance(source, nn.Module):
        return next(p.dtype for p in source.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    return dtype_named(theirs.get("dtype") or theirs.get("torch_dtype"))


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a folder.

    Raises FileNotFoundError with what to do if there is none, ValueError for what is no table in JSON.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; nothing is downloaded here: fetch the model's files yourself, then name their folder"
        )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is not the folder of a Hugging Face model")
    try:
        theirs: Any = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / 'config.json'} is not valid JSON: {error}") from error
    if not isinstance(theirs, dict):
        raise ValueError(
            f"{folder / 'config.json'} holds a {type(theirs).__name__}, and a model's settings are a table"
        )
    return theirs


def _check_same(model: nn.Module, family: Family, ours: dict[str, Any]) -> None:
    if family_of_model(model) is not family:
        raise ValueError(f"the source has a model of {family.model_type}; the given one is a {type(model).__name__}")
    if getattr(model.config, "mup", None) is not None:
        raise ValueError(
            "the given model multiplies by mup's factors, which the weights of a folder have taken up or do not know: fill a model "
            "without mup"
        )
    other = {name: (value, own) for name, value in ours.items() if (own := getattr(model.config, name)) != value}
    for name in ("std", "head_dim"):  # how it began says nothing about how it computes; shapes are compared anyway
        other.pop(name, None)
    if other:
        names = ", ".join(
            f"{name} is {value!r} in the source, {own!r} in the model" for name, (value, own) in other.items()
        )
        raise ValueError(f"the given model is another one: {names}")


def _blocks(theirs: dict[str, Any]) -> tuple[int, int] | None:
    settings = theirs.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ValueError(f"config.json has quantization_config = {settings!r}: need a table, or null")
    if settings.get("quant_method") != "fp8" or len(settings.get("weight_block_size") or ()) != 2:
        raise ValueError(
            f"weights are quantized as {settings.get('quant_method')!r} with blocks {settings.get('weight_block_size')}; "
            "only 'fp8' in blocks of two dimensions can be read"
        )
    height, width = settings["weight_block_size"]
    for size in (height, width):
        check_type("weight_block_size", size, REQUIRED)
    return height, width


def _found(names: list[str], family: Family, shape: torch.Size, source: Folder) -> Key | None:
    """Return the first key, of the parameter under any of its names, whose tensors the file has."""
    for name in names:
        for rule in family.keys:
            key = rule.match(name)
            if key is not None and all(theirs in source for theirs, _ in key.files(shape)):
                return key
    return None


def _missing_experts(names: list[str], family: Family, shape: torch.Size, source: Folder) -> str:
    """Describe the experts that a file with a tensor for each lacks; empty if none or all.

    Empty for other parameters, too.
    """
    keys = (key for name in names for rule in family.keys if (key := rule.match(name)) is not None and key.per_expert)
    for key in keys:
        lacking = [str(expert) for expert, (theirs, _) in enumerate(key.files(shape)) if theirs not in source]
        if lacking and len(lacking) < shape[0]:
            return f" (experts {', '.join(lacking)} of {shape[0]})"
    return ""


def _fill(model: nn.Module, whole: nn.Module, family: Family, source: Folder, ignored: tuple[str, ...]) -> None:
    non_trunk = tuple(f"{child}." for child in getattr(model, "non_trunk", ()))
    everything = tensors(whole)
    targets = {name: tensor for name, tensor in tensors(model).items() if not name.startswith(non_trunk)}
    missing, wrong, no_floats, used = [], [], [], set()
    jobs: list[tuple[Tensor, Key]] = []
    for names in same_tensors(everything):
        shape = everything[names[0]].shape
        key = _found(names, family, shape, source)
        wanted = [name for name in names if name in targets]
        if key is None:
            missing += [f"{name}{_missing_experts(names, family, shape, source)}" for name in wanted[:1]]
            continue
        files = key.files(shape)
        used |= {theirs for theirs, _ in files}
        wrong += [
            f"{theirs} is {source.shape(theirs)}, {key.ours} needs {expected}"
            for theirs, expected in files
            if source.shape(theirs) != expected
        ]
        no_floats += [f"{theirs} ({source.kind(theirs)})" for theirs, _ in files if not source.is_float(theirs)]
        used |= _copies(names, key, family, shape, source)
        jobs += [(tensor, key) for tensor in {id(targets[name]): targets[name] for name in wanted}.values()]
    left = [name for name in sorted(source.names() - used) if not any(piece in name for piece in ignored)]
    unknown = [name for name in targets if name not in everything]
    for what, names in (
        ("it lacks the weights of", missing),
        ("it has weights that the model has no place for:", left),
        ("the model has weights that its configuration knows nothing of:", unknown),
        ("shapes differ:", wrong),
        ("weights are no floating-point numbers (quantized ones need a quantization_config that says how):", no_floats),
    ):
        if names:
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            raise ValueError(f"{source.folder}: {what} {', '.join(names[:20])}{more}")
    with torch.no_grad():
        for tensor, key in jobs:
            own, bounds = own_part(tensor)
            if own.numel():
                own.copy_(key.read(bounds, tensor.shape, source.read))


def _copies(names: list[str], used: Key, family: Family, shape: torch.Size, source: Folder) -> set[str]:
    """List the file's copies of a parameter under other names.

    Raises ValueError if a tied one's differ.
    """
    copies = set()
    for name in names:
        for rule in family.keys:
            key = rule.match(name)
            if key is None or key.ours == used.ours or not all(theirs in source for theirs, _ in key.files(shape)):
                continue
            copies |= {theirs for theirs, _ in key.files(shape)}
            bounds = tuple((0, size) for size in shape)
            if not torch.equal(key.read(bounds, shape, source.read), used.read(bounds, shape, source.read)):
                raise ValueError(
                    f"{source.folder}: config.json ties {used.theirs} and {key.theirs}, but the file has two that differ; "
                    "if they are meant to, set tie_word_embeddings to false there"
                )
    return copies


_SCALE = "_scale_inv"


class InMemory:
    """The tensors of a state dict, read as those of files are."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def part(self, name: str) -> InMemory.Part:
        return InMemory.Part(self._tensors[name])

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    class Part:
        """One tensor of a folder, read in parts: the slice of safetensors."""

        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor

        def get_shape(self) -> list[int]:
            return list(self._tensor.shape)

        def get_dtype(self) -> str:
            kind = str(self._tensor.dtype).removeprefix("torch.")
            return kind.replace("bfloat", "BF").replace("float", "F").upper()

        def __getitem__(self, places: Any) -> Tensor:
            return self._tensor[places]


class Folder:
    """Tensors of a Hugging Face folder, or ``held`` in memory.

    They are in ``<stem>.safetensors``, or in the shards that its index lists.
    prefix: names that lack it are found with it, because files of a family's trunk alone leave it out.
    block: height and width of the blocks of 8-bit weights that share a scale, if the folder has such.
    """

    def __init__(
        self, folder: str | Path, prefix: str = "", block: tuple[int, int] | None = None, stem: str = "model",
        held: dict[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.block = folder, block
        self._files: Any = WeightFiles(folder, stem) if held is None else InMemory(held)
        bare = prefix and not any(name.startswith(prefix) for name in self._files)
        self._names = {prefix + name if bare else name: name for name in self._files}

    def names(self) -> set[str]:
        """Return all tensors but the scales of 8-bit blocks, which belong to their weights."""
        if self.block is None:
            return set(self._names)
        return {name for name in self._names if not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in self)}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files.part(self._names[name]).get_shape())

    def kind(self, name: str) -> str:
        """Return the type of a tensor as safetensors spells it, such as ``F32`` or ``I8``."""
        return str(self._files.part(self._names[name]).get_dtype())

    def is_float(self, name: str) -> bool:
        return self.kind(name).startswith(("F", "BF"))

    def read(self, name: str, bounds: Bounds) -> Tensor:
        """Return the part ``bounds`` of a tensor, in its own type; 8-bit blocks as float32."""
        part = self._part(name, bounds)
        if self.block is None or name + _SCALE not in self:
            return part
        blocks = tuple(
            (start // size, -(-stop // size)) for (start, stop), size in zip(bounds, self.block, strict=True)
        )
        scales = self._part(name + _SCALE, blocks).float()
        for dim, ((start, stop), size) in enumerate(zip(bounds, self.block, strict=True)):
            scales = scales.repeat_interleave(size, dim).narrow(dim, start % size, stop - start)
        return part.float() * scales

    def _part(self, name: str, bounds: Bounds) -> Tensor:
        where = self._files.part(self._names[name])
        if tuple(stop - start for start, stop in bounds) == tuple(where.get_shape()):
            whole: Tensor = self._files.tensor(self._names[name])  # which copies nothing
            return whole
        part: Tensor = where[tuple(slice(*bound) for bound in bounds)]
        return part


def dtype_named(name: str | None) -> torch.dtype:
    """Return the dtype that config.json names; float32 without one.

    Raises ValueError for other types.
    """
    found = getattr(torch, str(name or "float32").removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"config.json has the dtype {name!r}, which is not a floating-point type")
    return found
