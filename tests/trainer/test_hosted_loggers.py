"""Loggers of services: the real client of each in its offline mode, read back from what it wrote.

A client that is not installed is skipped by name: they come with the extra `track`.
"""

from __future__ import annotations

import glob
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import arclight as al
from arclight.fabric import MissingExtraError
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_only
from arclight.trainer import loggers
from arclight.trainer.loggers.hosted_logger import CheckpointArtifacts, joint_version, scan_checkpoints

CLIENTS = {
    "MLFlowLogger": "mlflow",
    "WandbLogger": "wandb",
    "CometLogger": "comet_ml",
    "ClearMLLogger": "clearml",
}


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder of the test's own, and the environment as it was: clients set variables."""
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))
    yield
    os.environ.clear()
    os.environ.update(before)


def client(name: str) -> Any:
    return pytest.importorskip(
        CLIENTS[name], reason=f'{CLIENTS[name]} is not installed: pip install "arclight-torch[track]"'
    )


class Learner(al.Module):
    def __init__(self, width: int = 1, shape: Any = (1, 2)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.line = torch.nn.Linear(4, width)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("train/loss", float(self.trainer.global_step))
        return self.line(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(logger: Any, **settings: Any) -> al.Trainer:
    trainer = al.Trainer(
        logger=logger, max_epochs=2, log_every_n_steps=2, enable_progress_bar=False, accelerator="cpu", **settings
    )  # fmt: skip
    trainer.fit(Learner(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
    return trainer


@pytest.mark.parametrize("name", CLIENTS)
def test_a_missing_client_is_named_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, CLIENTS[name], None)
    with pytest.raises(MissingExtraError, match=rf"{CLIENTS[name]} is not installed.*arclight-torch\[track\]"):
        getattr(loggers, name)()


def test_mlflow_keeps_metrics_parameters_and_checkpoints(tmp_path: Path) -> None:
    client("MLFlowLogger")
    place = str(tmp_path / "store")
    logger = loggers.MLFlowLogger(
        "study", save_dir=place, run_name="first", prefix="p", log_model="all", tags={"by": "me"}
    )
    fit(logger)
    store, run_id = logger.experiment, logger.run_id
    run = store.get_run(run_id)
    assert [(m.step, m.value) for m in store.get_metric_history(run_id, "p-train/loss")] == [(s, s - 1.0) for s in (2, 4, 6, 8)]  # fmt: skip
    assert (run.data.params, run.info.status) == ({"width": "1", "shape": "(1, 2)"}, "FINISHED")
    assert (run.data.tags["mlflow.runName"], run.data.tags["by"]) == ("first", "me")
    sent = [artifact.path for artifact in store.list_artifacts(run_id)]
    assert len(sent) == 2, "each epoch's checkpoint was sent"
    assert {Path(a.path).name for a in store.list_artifacts(run_id, sent[0])} >= {"metadata.yaml", "aliases.txt"}
    with pytest.warns(RuntimeWarning, match="special characters in metric name"):
        logger.log_metrics({"a[b]": 1, "text": "left out"})
    assert store.get_run(run_id).data.metrics["p-ab"] == 1
    logger.log_hyperparams({f"x{n}": "y" * 300 for n in range(120)})
    assert store.get_run(run_id).data.params["x119"] == "y" * 250
    again = loggers.MLFlowLogger("study", save_dir=place, run_id=run_id)
    again.log_metrics({"later": 2.0}, 9)
    assert store.get_run(run_id).data.metrics["later"] == 2.0
    assert pickle.loads(pickle.dumps(logger)).version == logger.version == run_id
    assert loggers.MLFlowLogger("study", save_dir=place).name == logger.name, "the same experiment"
    assert (logger.save_dir, logger.log_dir) == (place, place)


def test_mlflow_marks_a_failed_run(tmp_path: Path) -> None:
    client("MLFlowLogger")
    logger = loggers.MLFlowLogger("study", save_dir=tmp_path / "store")
    logger.finalize("failed")
    assert logger._mlflow_client.get_experiment_by_name("study") is None, "nothing was logged: nothing is made"
    logger.log_metrics({"a": 1})
    logger.finalize("failed")
    assert logger.experiment.get_run(logger.run_id).info.status == "FAILED"


def test_wandb_offline() -> None:
    wandb = client("WandbLogger")
    with pytest.raises(MisconfigurationError, match="cannot be uploaded in offline mode"):
        loggers.WandbLogger(offline=True, log_model=True)
    logger = loggers.WandbLogger(name="n", project="p", offline=True, save_dir="w", prefix="x")
    assert (logger.name, logger.version, logger.save_dir) == ("p", None, "w")
    fit(logger)
    run = logger.experiment
    assert (logger.version, run.summary["x-train/loss"], run.summary["trainer/global_step"]) == (run.id, 7.0, 8)
    assert dict(run.config) == {"width": 1, "shape": [1, 2]}
    logger.log_table("table", columns=["a"], data=[[1]])
    logger.log_image("image", [torch.zeros(3, 4, 4)], caption=["black"])
    with pytest.raises(TypeError, match='Expected a list as "images"'):
        logger.log_image("image", torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected 1 items but only found 2 for caption"):
        logger.log_image("image", [torch.zeros(3, 4, 4)], caption=["a", "b"])
    with pytest.warns(UserWarning, match="already in progress"):
        assert loggers.WandbLogger(project="other").experiment is run
    run.finish()
    assert len(glob.glob("w/wandb/offline-run-*/*.wandb")) == 1
    assert wandb.run is None


def test_comet_offline() -> None:
    client("CometLogger")
    logger = loggers.CometLogger(
        online=False, project="p", offline_directory="c", name="n", prefix="x", parse_args=False
    )
    fit(logger)
    assert (logger.name, len(str(logger.version)), logger.save_dir) == ("p", 32, "c")
    logger.experiment.end()
    (archive,) = glob.glob("c/*.zip")
    messages = [json.loads(line) for line in zipfile.ZipFile(archive).read("messages.json").decode().splitlines()]
    metrics = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    losses = [(m["step"], m["epoch"], m["metricValue"]) for m in metrics if m["metricName"] == "x_train/loss"]
    assert losses == [(2, 0, 1.0), (4, 0, 3.0), (6, 1, 5.0), (8, 1, 7.0)]
    parameters = [m["payload"]["param"] for m in messages if "param" in m["payload"]]
    assert {p["paramName"]: p["paramValue"] for p in parameters}["width"] == 1


def test_clearml_offline() -> None:
    client("ClearMLLogger")
    logger = loggers.ClearMLLogger("p", "t", offline=True, log_model=True)
    fit(logger)
    folder = Path(str(logger.save_dir))
    logger.experiment.close()
    rows = [row for line in (folder / "metrics.jsonl").read_text().splitlines() for row in json.loads(line)]
    losses = [(row["iter"], row["value"]) for row in rows if (row["metric"], row["variant"]) == ("train", "loss")]
    assert losses == [(2, 1.0), (4, 3.0), (6, 5.0), (8, 7.0)]
    task = json.loads((folder / "task.json").read_text())
    assert task["hyperparams"]["General"]["width"]["value"] == "1"
    assert [a["key"] for a in task["execution"]["artifacts"]], "the checkpoints that were left were sent"


def test_neptune_is_refused_with_the_reason() -> None:
    assert "NeptuneLogger" not in loggers.__all__
    with pytest.raises(NotImplementedError, match=r"`NeptuneLogger` is not offered: neptune\.ai has closed"):
        loggers.NeptuneLogger(project="a/b")


def test_checkpoint_artifacts_are_uploaded_at_once_or_at_the_end(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.ckpt", "b.ckpt")]
    for age, path in enumerate(paths):
        path.write_text("x")
        os.utime(path, (age, age))
    callback = SimpleNamespace(
        last_model_path="", current_score=None, best_model_path=paths[0], best_model_score=0.5,
        best_k_models={paths[0]: 0.5, paths[1]: 0.7, tmp_path / "gone": 0.9}, save_top_k=2,
    )  # fmt: skip
    assert [(p, s, t) for _, p, s, t in scan_checkpoints(callback, {})] == [(paths[0], 0.5, "best_k"), (paths[1], 0.7, "best_k")]  # fmt: skip
    artifacts = CheckpointArtifacts(log_model=True)
    assert not artifacts.saved(callback)
    assert artifacts.callbacks == {id(callback): callback}, "sent at the end"
    callback.save_top_k = -1
    assert artifacts.saved(callback), "at once, as none is ever removed"
    assert CheckpointArtifacts("all").saved(callback)
    assert not CheckpointArtifacts(False).saved(callback)
    assert [path for path, _ in artifacts.new(callback)] == paths
    os.utime(paths[0], (5, 5))
    assert [path for path, _ in artifacts.new(callback)] == paths[:1], "only what was written since"
    with pytest.raises(ValueError, match="choose True, False or 'all'"):
        CheckpointArtifacts("some")


def test_several_loggers_have_one_version(tmp_path: Path) -> None:
    several = [loggers.CSVLogger(tmp_path, version=v) for v in (0, 2, 1, 0)]
    assert (joint_version([]), joint_version(several[1:2]), joint_version(several, "-")) == ("", 2, "0-2-1")


def test_other_ranks_log_nothing(tmp_path: Path) -> None:
    logger, dummy = loggers.CSVLogger(tmp_path), loggers.DummyLogger()
    assert dummy[0].experiment.anything(1) is None
    dummy.log_metrics("x", 1)
    dummy.log_hyperparams({}, 2)
    dummy.log_text("whatever")  # type: ignore[operator]
    dummy.experiment["a"] = 1
    assert dummy.experiment["a"] != 1
    rank_zero_only.rank = 1
    try:
        logger.log_metrics({"a": 1.0}, 0)
        logger.experiment.log_metrics({"a": 1.0}, 0)
        logger.save()
        logger.finalize("success")
        with pytest.raises(RuntimeError, match="no folder on this rank"):
            _ = loggers.CSVLogger().log_dir
    finally:
        del rank_zero_only.rank
    assert not any(tmp_path.iterdir())
