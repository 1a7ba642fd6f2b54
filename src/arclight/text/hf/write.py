"""Write one of our models as a Hugging Face folder.

`to_hf` is public (``arclight.text``), and ``arclight export`` calls it. Families and their keys come from `registry`; `read` is the inverse.
Folders must open in Hugging Face's libraries.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arclight.fabric.weight_files import byte_count, shard_name, shards, write_index, write_shard
from arclight.text.hf.families import Family
from arclight.text.hf.registry import family_of_model
from arclight.text.hf.state_keys import Piece, pieces, same_tensors, tensors
from arclight.text.model.mup import folded_factor


class SavesFolder(Protocol):
    """A tokenizer that writes its files into a folder."""

    def save(self, folder: Path) -> Any: ...


def to_hf(
    model: nn.Module, folder: str | Path, *, max_shard_size: int | str = "5GB", tokenizer: SavesFolder | None = None,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Save ``model`` as a folder that transformers reads (diffusers that of a `Flux`).

    It has config.json, safetensors and the tokenizer. Multipliers of muP are folded into the weights. A sharded model
    is gathered tensor by tensor; every process calls this, rank 0 writes. max_shard_size: bytes of a file, a number or
    such as "500MB". dtype: that of the written weights, None for their own. The folder appears when it is complete.
    Raises FileExistsError if something is already there, ValueError for a pipeline stage and for what the family at
    Hugging Face does not do.
    """
    folder, family, limit = Path(folder), family_of_model(model), byte_count(max_shard_size)
    held = tensors(model)
    if non_trunk := getattr(model, "non_trunk", ()):
        raise ValueError(
            f"{', '.join(non_trunk)} have no place in a folder of {family.model_type}: write parts by themselves"
        )
    content = family.write(model.config)
    keys = []
    for names in same_tensors(held):
        key = next((key for rule in family.keys if (key := rule.match(names[0])) is not None), None)
        if key is None and names[0].endswith("router.expert_bias"):
            _check_unbiased(held[names[0]], names[0], family.model_type)
            continue
        if key is None:
            raise ValueError(f"{names[0]} has no name at Hugging Face in the table of {family.model_type}")
        keys.append(key)
    if any(getattr(model, part, model) is None for part in ("tok_embeddings", "output")):
        raise ValueError("this is a pipeline stage; a folder needs the whole model")
    todo = list(pieces(keys, {name: tensor.shape for name, tensor in held.items()}))
    alone = not torch.distributed.is_initialized()
    writes = alone or torch.distributed.get_rank() == 0
    taken = [writes and folder.exists() and any(folder.iterdir())]
    if not alone:
        torch.distributed.broadcast_object_list(taken)  # all raise, or those without a file would wait for rank 0
    if taken[0]:
        raise FileExistsError(f"{folder} is not empty; name another folder or move what is there")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    if writes:
        partial.mkdir(parents=True)
    try:
        factors = {name: folded_factor(model.config, name) for name in held}
        _write_shards(todo, held, factors, limit, dtype, family.stem, partial if writes else None)
        if writes:
            _write_rest(model, family, content, tokenizer, dtype, partial)
            if folder.exists():
                folder.rmdir()
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_unbiased(bias: Tensor, name: str, model_type: str) -> None:
    """Raise ValueError for a bias that moves the choice of experts.

    The family at Hugging Face has none.
    """
    if bool(bias.any()):
        raise ValueError(
            f"{name} balances the loads of experts, and a {model_type} model at Hugging Face has no such bias, so that it would choose "
            "other experts: keep the checkpoint, or train with overrides.moe.bias_rate = 0 and a moe.balance_loss"
        )


def _write_shards(
    todo: list[Piece], held: dict[str, Tensor], factors: dict[str, float], limit: int, dtype: torch.dtype | None, stem: str,
    folder: Path | None,
) -> None:  # fmt: skip
    types = [_written(held[piece.keys[0].ours], piece, dtype) for piece in todo]
    sizes = [torch.Size(piece.shape).numel() * kind.itemsize for piece, kind in zip(todo, types, strict=True)]
    files = list(shards(sizes, limit))
    last: dict[str, Tensor] = {}

    def whole(name: str) -> Tensor:
        if name not in last:
            if len(last) >= 3:  # a tensor's parts are used together, its experts one after the other
                last.clear()
            own = held[name].detach()
            full = (own.full_tensor() if isinstance(own, DTensor) else own).cpu()
            last[name] = full if factors[name] == 1 else full * factors[name]
        return last[name]

    index: dict[str, str] = {}
    for number, shard in enumerate(files):
        file, out = shard_name(number, len(files), stem), {}
        for place in shard:
            made = todo[place].make(whole).to(types[place])
            if folder is not None:
                out[todo[place].theirs] = made.clone() if made.untyped_storage().nbytes() > made.nbytes else made
                index[todo[place].theirs] = file
        if folder is not None:
            write_shard(out, folder / file)
    if folder is not None and len(files) > 1:
        write_index(index, sum(sizes), folder, stem)


def _written(tensor: Tensor, piece: Piece, dtype: torch.dtype | None) -> torch.dtype:
    keeps = dtype is None or piece.keys[0].exact or not tensor.is_floating_point()
    return tensor.dtype if keeps or dtype is None else dtype


def _write_rest(
    model: nn.Module, family: Family, content: dict[str, Any], tokenizer: SavesFolder | None, dtype: torch.dtype | None,
    folder: Path,
) -> None:  # fmt: skip
    first = next(model.parameters()).dtype
    if family.kind == "model_type":
        content["dtype"] = str(dtype or first).removeprefix("torch.")
        content |= {f"{role}_token_id": getattr(tokenizer, role, None) for role in ("bos", "eos", "pad")}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)
