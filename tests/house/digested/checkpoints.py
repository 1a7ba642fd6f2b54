"""Digest what comes back of checkpoints: folders, single files, stages and others' formats.

`digests` runs `values`. Covered are a Trainer's checkpoints, conversions, files of torch and Lightning, pipeline stages, and Hugging Face folders;
`plans` digests sharded ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tests.house.digested.trainer import Classifier, fit
from torch import nn

import arclight as al
from arclight import checkpoint
from arclight.parallel import pipeline
from arclight.text import build_model, from_hf, to_hf
from arclight.trainer import callbacks as c

STATE: dict[str, Any] = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.zeros(3, dtype=torch.bfloat16), "count": torch.tensor(7)},
    "plain": {"text": "é", "bytes": b"\x00\xff", "none": None, "list": [1, 2.5, True, (3, "x")], "set": {1, 2}, "path": Path("a/b"), 5: "five"},
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
}  # fmt: skip


def plain(tree: Any) -> Any:
    """Return a tree without sets and paths, in one order, so that it can be digested."""
    if isinstance(tree, dict):
        return {str(key): plain(item) for key, item in tree.items()}
    if isinstance(tree, (set, frozenset)):
        return sorted(plain(item) for item in tree)
    if isinstance(tree, (list, tuple)):
        return [type(tree).__name__, *map(plain, tree)]
    return str(tree) if isinstance(tree, Path) else tree


def of_trainer(folder: Path) -> dict[str, Any]:
    """Return the state in a Trainer's checkpoints with stateful callbacks: best, last, weights only, asynchronous."""
    al.seed_everything(11, verbose=False)
    saver = al.ModelCheckpoint(dirpath=folder, monitor="val/loss", save_top_k=2, save_last=True)
    others = [c.EMAWeightAveraging(decay=0.9), c.EarlyStopping("val/loss", patience=9), c.LossGuard(warmup=2, window=3)]
    trainer = fit(folder, Classifier(), saver, *others, enable_checkpointing=True)
    trainer.save_checkpoint(folder / "end.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    best = checkpoint.load(saver.best_model_path)
    opened = Classifier.load_from_checkpoint(folder / "end.ckpt")
    al.seed_everything(11, verbose=False)
    saver = al.ModelCheckpoint(dirpath=folder / "background", save_last=True, every_n_train_steps=5, asynchronous=True)
    fit(folder, Classifier(), saver, enable_checkpointing=True, max_epochs=1)
    return {
        "names": sorted(path.name for path in folder.iterdir()),
        "background": checkpoint.load(folder / "background" / "last.ckpt")["model"],
        "best": {name: best[name] for name in ("model", "ema", "optimizers", "schedulers")},
        "end": {
            name: checkpoint.load(folder / "end.ckpt")[name] for name in ("model", "ema", "optimizers", "schedulers")
        },
        "weights": checkpoint.load(folder / "weights.ckpt")["model"],
        "averaged": checkpoint.load_weights(folder / "end.ckpt"),
        "opened": opened.state_dict(),
        "hyper_parameters": plain(dict(opened.hparams)),
    }


def converted(folder: Path) -> dict[str, Any]:
    weights = STATE["model"]
    saved = checkpoint.save(folder / "c", {"model": weights, "step": 2})
    single = checkpoint.convert(saved, folder / "w.safetensors")
    torch.save({"state_dict": weights, "epoch": 3}, folder / "foreign.ckpt")
    foreign = checkpoint.convert(folder / "foreign.ckpt", folder / "foreign")
    return {
        "single": load_file(single),
        "bytes": single.read_bytes(),
        "back": checkpoint.load(checkpoint.convert(single, folder / "back"))["model"],
        "foreign": plain(checkpoint.load(foreign)),
        "weights": checkpoint.load_weights(folder / "foreign.ckpt"),
    }


def lightning(folder: Path) -> dict[str, Any]:
    """Return the weights that are loaded from a file with Lightning's keys."""
    al.seed_everything(11, verbose=False)
    module = Classifier()
    trainer = fit(folder, module, max_epochs=1)
    optimizer = trainer.optimizers[0].state_dict()
    content = {
        "epoch": 0, "global_step": 11, "pytorch-lightning_version": "2.6.6", "state_dict": module.state_dict(),
        "optimizer_states": [optimizer], "lr_schedulers": [], "hyper_parameters": {"width": 16}, "hparams_name": "kwargs",
    }  # fmt: skip
    torch.save(content, folder / "foreign.ckpt")
    return {"opened": Classifier.load_from_checkpoint(folder / "foreign.ckpt").state_dict()}


def stages(folder: Path) -> dict[str, Any]:
    torch.manual_seed(2)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    pipe = pipeline.split(model, (x,), stages=2)
    pipe.save(folder / "stages")
    again = pipeline.split(model, (x,), stages=3)
    again.load(folder / "stages")
    files = {path.name: load_file(path) for path in sorted((folder / "stages").glob("*.safetensors"))}
    return {
        "files": files,
        "whole": model(x),
        "cut": pipe(x),
        "again": again(x),
        "names": [sorted(s.state_dict()) for s in pipe.stages],
    }


def hugging_face(folder: Path) -> dict[str, Any]:
    torch.manual_seed(2)
    found = {}
    for name in ("llama3-debug", "qwen3-debug", "gpt2-debug"):
        model: Any = build_model(name, vocab_size=64, layers=2)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        to_hf(model, folder / name)
        files = {path.name: load_file(path) for path in sorted((folder / name).glob("*.safetensors"))}
        found[name] = {"files": files, "back": from_hf(folder / name).state_dict()}
    return found


def values(folder: Path) -> dict[str, Any]:
    saved = checkpoint.save(folder / "plain", STATE)
    assert not checkpoint.verify(saved)
    trained = folder / "trained"
    trained.mkdir()
    return {
        "plain": plain(checkpoint.load(saved)),
        "tensor-files": {path.name: path.read_bytes() for path in sorted(saved.rglob("*.safetensors"))},
        "trainer": of_trainer(trained),
        "converted": converted(folder),
        "lightning": lightning(folder),
        "stages": stages(folder),
        "hugging-face": hugging_face(folder),
    }
