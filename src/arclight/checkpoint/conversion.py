"""Convert checkpoints: read .pt, .ckpt, safetensors and DCP; write safetensors and DCP.

`convert`, `load_weights` and `read_pickled` are public (``arclight.checkpoint``): ``arclight checkpoint convert``, the Trainer's
checkpoint IO and federated servers call them; ``vision.tasks.detection`` calls `read_foreign`. Files are untrusted: no class of a file is
imported or called; torch's ``weights_only`` reader or `pickled_modules` reads pickles. A new format goes into `read_foreign` and
`convert`; layouts that are read now must stay readable.
"""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from arclight.checkpoint import files, tree
from arclight.checkpoint.dcp import DCP_SUFFIX, is_dcp, read_dcp, write_dcp
from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.manifest import read_manifest
from arclight.checkpoint.pickled_modules import PickledModule, read_modules
from arclight.checkpoint.store import load, save
from arclight.checkpoint.tensorfile import METADATA, NAMES, write_tensors

_WEIGHTS = ("state_dict", "model_state_dict", "model", "module", "weights", "net")
"""Keys under which other projects keep a state dict, in the order in which they are tried."""
_PICKLED = (".pt", ".pth", ".ckpt", ".bin")


def convert(src: str | Path, dst: str | Path) -> Path:
    """Convert `src` to the format that the suffix of `dst` selects.

    * a ``.pt``, ``.pth``, ``.ckpt`` or ``.bin`` file -> a checkpoint folder: read without unpickling any class
      (``weights_only``); the state dict, searched for in the usual layouts, becomes the entry `model`, everything else keeps its name;
      of a module that was pickled as a whole (YOLOv5, ultralytics) its tensors, averaged ones as `ema`, and its plain `attributes`;
    * a ``.safetensors`` file -> a checkpoint folder with the entry `model`;
    * a checkpoint folder, or any of the files above -> a single ``.safetensors`` file of the entry `model`, in which
      tied tensors are written under each of their names;
    * a folder of torch.distributed.checkpoint (DCP), of any number of ranks, is read like the files above; any of them -> a name
      that ends in ``.dcp``: such a folder, from which the state is read back bit for bit. Weights are under ``model.<name>``.

    Raises CheckpointError if `src` would need unpickling, holds no weights, or is damaged, and for a `dst` named as a file of
    ``torch.save``, which is not written; the message says what to do instead.
    """
    src, dst = Path(src), Path(dst)
    if dst.suffix.lower() in _PICKLED:
        raise CheckpointError(
            f"{dst} is named as a file of torch.save, which is not written here: end it in .safetensors or {DCP_SUFFIX}, or name a folder"
        )
    state = read_foreign(src) if src.is_file() or is_dcp(src) else load(src)
    if dst.suffix == DCP_SUFFIX:
        return write_dcp(dst, state)
    if dst.suffix.lower() != ".safetensors":
        return save(dst, state)
    if "model" not in state:
        raise CheckpointError(f"{src} has no entry `model` to write to {dst}; it has {', '.join(state) or 'none'}")
    return _write_single(dst, state["model"])


def load_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Load a model's tensors by name from a checkpoint or any file of `convert`.

    Averaged ones replace the others if there is an entry `ema`. Raises CheckpointError if there are none, or reading them would need
    unpickling.
    """
    path = Path(path)
    state = (
        read_foreign(path)
        if path.is_file() or is_dcp(path)
        else load(path, only=["model", *({"ema"} & read_manifest(path).entries.keys())])
    )
    return {**state["model"], **_averages(path, state["model"], state.get("ema"))}


def _averages(path: Path, model: Mapping[str, torch.Tensor], found: Any) -> dict[str, torch.Tensor]:
    """Return averaged weights under the model's names.

    The prefix ``module.`` and the counter of torch's AveragedModel are removed.
    """
    if not _is_state_dict(found):
        return {}
    averages = {name: tensor for name, tensor in found.items() if name != "n_averaged" or name in model}
    if not averages.keys() <= model.keys():
        averages = {name.removeprefix("module."): tensor for name, tensor in averages.items()}
    if unknown := sorted(averages.keys() - model.keys()):
        raise CheckpointError(
            f"{path} has averaged weights for {unknown[0]}, which its model does not have: they are of another model"
        )
    return averages


def read_foreign(path: Path) -> dict[str, Any]:
    """Read a file or folder of another project, with its weights as the entry `model`."""
    if is_dcp(path):
        content, complete = read_dcp(path, read_pickled)
        usual = _is_state_dict(content) or any(_is_state_dict(content.get(name)) for name in _WEIGHTS)
        return _with_model(path, content) if usual and not complete else content
    if path.suffix.lower() == ".safetensors":
        return {"model": _read_safetensors(path)}
    if path.suffix.lower() not in _PICKLED:
        raise CheckpointError(
            f"{path} cannot be converted: its name must end in one of {', '.join((*_PICKLED, '.safetensors'))}"
        )
    try:
        content = read_pickled(path)
    except CheckpointError as error:
        if not zipfile.is_zipfile(path) or not isinstance(error.__cause__, pickle.UnpicklingError):
            raise
        if not (modules := read_modules(path)):
            raise
        return _state_of_modules(path, modules)
    return _with_model(path, content)


def _state_of_modules(path: Path, modules: Mapping[str, PickledModule]) -> dict[str, Any]:
    """Return pickled modules as entries of a checkpoint: `model`, `ema` and `attributes`."""
    averaged = modules.get("ema")
    model = modules.get("model") or averaged
    if model is None or not model.tensors:
        raise CheckpointError(
            f"{path} has modules in {', '.join(modules)}, and none with tensors in 'model' or 'ema': save its state_dict and convert that"
        )
    state: dict[str, Any] = {"model": model.tensors}
    if averaged is not None and averaged is not model:
        state["ema"] = averaged.tensors
    return {**state, "attributes": model.attributes}


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a sound safetensors file ({error}): fetch or write it again") from error


def read_pickled(path: str | Path | IO[bytes], map_location: Any = "cpu") -> Any:
    """Read a file of ``torch.save`` (a path, or an open one) without running anything from it.

    Raises CheckpointError for a file that is damaged or holds objects that only unpickling could restore.
    """
    try:
        try:
            return torch.load(path, map_location=map_location, weights_only=True, mmap=isinstance(path, (str, Path)))
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location=map_location, weights_only=True)  # written before torch 1.6
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None and not _is_pickled(path):
            raise CheckpointError(f"{path} is damaged or not a file of torch.save: fetch or write it again") from error
        what = f"objects of class {found[1]}" if found else "objects"
        raise CheckpointError(
            f"{path} holds {what} that only unpickling could restore, and unpickling runs code from the file. In the "
            "project that wrote it, run torch.save(model.state_dict(), 'weights.pt') and convert that"
        ) from error
    except (
        RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, struct.error,
    ) as error:  # fmt: skip
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged or not a file of torch.save ({reason}): fetch or write it again"
        ) from error


def _is_pickled(path: str | Path | IO[bytes]) -> bool:
    """Return True for a whole zip archive, and for what begins as a pickle does.

    Open files are not looked at.
    """
    if not isinstance(path, (str, Path)) or zipfile.is_zipfile(path):
        return True
    with Path(path).open("rb") as file:
        return file.read(1) == pickle.PROTO


def _with_model(path: Path, content: Any) -> dict[str, Any]:
    """Return `content` with its state dict as the entry `model`.

    It is `content` itself, or under a key of `_WEIGHTS`.
    """
    if _is_state_dict(content):
        return {"model": dict(content)}
    if isinstance(content, Mapping):
        for name in _WEIGHTS:
            if _is_state_dict(content.get(name)):
                rest = {str(key): value for key, value in content.items() if key != name}
                if len(rest) < len(content) - 1:
                    keys = [key for key in content if list(map(str, content)).count(str(key)) > 1]
                    raise CheckpointError(f"{path} has keys that a checkpoint cannot tell apart, {keys}: rename them")
                if "model" in rest:
                    raise CheckpointError(
                        f"{path} has weights in {name!r} and something else in 'model': save the two in files of their own first"
                    )
                return {"model": dict(content[name]), **rest}
        found = ", ".join(map(str, content)) or "nothing"
    else:
        found = f"a {type(content).__name__}"
    raise CheckpointError(
        f"{path} holds no state dict under any of the usual names ({', '.join(_WEIGHTS)}); it holds {found}: "
        "save a dict of names to tensors"
    )


def _is_state_dict(value: Any) -> bool:
    """Return True for a dict of names to tensors; ``_extra_state`` may hold other values."""
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and any(isinstance(item, torch.Tensor) for item in value.values())
        and all(isinstance(item, torch.Tensor) or key.endswith("_extra_state") for key, item in value.items())
    )


def _write_single(dst: Path, model: Any) -> Path:
    if not isinstance(model, dict) or not all(isinstance(v, torch.Tensor) and v.dtype in NAMES for v in model.values()):
        raise CheckpointError(f"the entry `model` is not a flat dict of tensors, so {dst} cannot hold it")
    for name, tensor in model.items():
        tree.check_tensor(tensor, ("model", name))
    if METADATA in model:
        raise CheckpointError(f"model.{METADATA} has the name of the format's own entry, so {dst} cannot hold it")
    staging = files.temporary_file(dst)
    try:
        with files.create(staging) as file:
            write_tensors(file, model)
        files.replace_file(dst, staging)
    except OSError as error:
        raise CheckpointError(
            f"{dst} could not be written: {error.strerror}; what was there before is intact"
        ) from error
    finally:
        files.discard(staging)
    return dst
