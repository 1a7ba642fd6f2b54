"""Federated runs as they are typed: in this process, and as processes that find each other over HTTP."""

from __future__ import annotations

import hashlib
import importlib.abc
import io
import json
import logging
import os
import re
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import psutil
import pytest
from tests import warm

from arclight._installed import pip_install
from arclight.cli.arguments import UsageError
from arclight.cli.federate.federated_run import explain_resume, is_unfinished
from arclight.cli.federate.network import log_to_folder
from arclight.cli.federate.progress import Progress, print_warnings
from arclight.cli.federate.recipe import FederatedRecipe
from arclight.cli.federate.run_report import client_table, federated_report, round_table
from arclight.federated.coordination import events, records
from arclight.federated.coordination.run_database import RunDatabase
from arclight.federated.coordination.run_state import RunState, StateSaved
from arclight.federated.errors import OBSERVED, FederatedError, SettingsError
from arclight.federated.protocol import ActiveWork, Heartbeat
from arclight.federated.rounds.history import Round, metrics_row, read_history
from arclight.recipe import RecipeError, explain, read
from arclight.trainer.loggers.csv_logger import read_metrics
from arclight.trainer.run.folder import RunFolder

Typed = Callable[[str], tuple[int, str, str]]
DEADLINE = 300.0
"""Seconds for a process to end; they take a few where nothing else runs."""


@pytest.fixture
def lines(folder: Path) -> Iterator[Path]:
    """A recipe for a line that three sites fit, each to points of its own."""
    (folder / "fed_task.py").write_text(
        textwrap.dedent('''
        import os
        import time
        from dataclasses import dataclass, replace

        import torch
        from torch.utils.data import DataLoader, TensorDataset

        import arclight as al


        class Line(al.Module):
            def __init__(self, lr):
                super().__init__()
                self.layer, self.lr = torch.nn.Linear(1, 1), lr

            def training_step(self, batch, batch_idx):
                time.sleep(float(os.environ.get("FED_PAUSE", "0")))
                loss = (self.layer(batch[0]) - batch[1]).square().mean()
                self.log("train/loss", loss)
                return loss

            def validation_step(self, batch, batch_idx):
                self.log("val/loss", (self.layer(batch[0]) - batch[1]).square().mean())

            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters(), self.lr)


        class Points(al.DataModule):
            def __init__(self, x):
                super().__init__()
                self.x = x

            def train_dataloader(self):
                return DataLoader(TensorDataset(self.x, 2 * self.x + 1), batch_size=2, shuffle=True)

            def val_dataloader(self):
                x = torch.arange(12.0)[:, None] / 12
                return DataLoader(TensorDataset(x, 2 * x + 1), batch_size=4)


        @dataclass(frozen=True, kw_only=True)
        class Fit:
            """Fit a line."""

            lr: float = 0.05
            number: int = -1
            count: int = 1

            def site(self, number, count):
                return replace(self, number=number, count=count)

            def build(self):
                x = torch.arange(12.0)[:, None] / 12
                return Line(self.lr), Points(x if self.number < 0 else x[self.number :: self.count])


        class NoSites(Line):
            pass
        ''')
    )
    recipe = folder / "lines.toml"
    recipe.write_text(
        'name = "lines"\nseed = 3\ntask = "fed_task:Fit"\n'
        "[federation]\nclients = 3\nrounds = 3\nlocal_steps = 4\ncheckpoint_every_steps = 2\n"
        '[federation.strategy]\nkind = "fedavg"\n'
        '[federation.waiting]\nheartbeat_interval_s = 0.2\njoin_timeout_s = 60.0\n[trainer]\naccelerator = "cpu"\nlog_every_n_steps = 1\n'
    )
    yield recipe
    sys.modules.pop("fed_task", None)


def digest(run: Path, number: int) -> str:
    return hashlib.sha256((run / "rounds" / f"{number:06d}" / "model.safetensors").read_bytes()).hexdigest()


def command(*words: str, spawns: bool = False, **environment: str) -> warm.Program:
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    return warm.Program("-m", "arclight.cli", *words, env=variables, merged=True, spawns=spawns)


def ended(process: warm.Program) -> str:
    """Return the output of a process after it has ended with status 0."""
    out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, out
    return out


def address_of(server: warm.Program) -> str:
    """Return the address in the first line that a server prints."""
    found = re.search(r"served at (https?://\S+),", server.until("served at ", DEADLINE))
    assert found is not None, server.said()[0]
    return found[1]


def until(process: warm.Program, words: str) -> str:
    """The line in which a process says ``words``."""
    return process.until(words, DEADLINE)


# -- in this process -----------------------------------------------------------------------------------------------


def test_a_recipe_runs_in_this_process(lines: Path, typed: Typed, folder: Path) -> None:
    status, out, err = typed("federate lines.toml")
    assert status == 0, err
    run = folder / "runs/lines/1"
    assert [line.partition("  ")[0] for line in out.splitlines() if "of 3 clients" in line] == [
        f"round {n}/3" for n in (1, 2, 3)
    ]
    history = read_history(run)
    assert [here["contributors"] for here in history] == [[], *[["0", "1", "2"]] * 3]
    losses = [here["metrics"]["val/loss"] for here in history]
    assert losses[-1] < losses[0]
    page = (run / "report.html").read_text()
    assert "cosine similarity to the mean update" in page
    assert "<li>clients <b>3</b></li><li>strategy <b>FedAvg</b></li><li>rounds <b>3</b></li>" in page
    assert ">received<" not in page  # clients of one node share what it fetches
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert re.search(r"runs/lines/1/node keeps \d\S* .B for a longer run", out)
    assert (run / "recipe.toml").read_text().startswith("# arclight federate")
    status, _, err = typed("train lines.toml")
    assert status == 2
    assert "lines.toml is a federated run: arclight federate lines.toml" in err
    status, _, err = typed(f"validate {run}/recipe.toml --json {folder}/values.json")
    assert status == 0, err
    measured = json.loads((folder / "values.json").read_text())
    assert measured[0]["val/loss"] == pytest.approx(history[-1]["metrics"]["val/loss"], rel=1e-6)
    status, out, err = typed("federate runs/lines/1/recipe.toml")
    assert status == 0, err
    assert digest(folder / "runs/lines/2", 3) == digest(run, 3)


def test_the_last_weights_are_an_ordinary_checkpoint(lines: Path, typed: Typed, folder: Path) -> None:
    import torch

    from arclight.checkpoint import load_weights

    typed("federate lines.toml --federation.rounds 1")
    run = folder / "runs/lines/1"
    kept, of_round = load_weights(run / "checkpoints/last.ckpt"), load_weights(run / "rounds/000001")
    assert kept.keys() == of_round.keys()
    assert all(torch.equal(kept[name], of_round[name]) for name in kept)


def test_a_run_goes_on_where_it_stopped(lines: Path, typed: Typed, folder: Path) -> None:
    assert typed("federate lines.toml")[0] == 0
    assert typed("federate lines.toml --federation.rounds 2 --trainer.max_steps 12")[0] == 0
    (folder / "runs/lines/3").mkdir()  # as a run leaves it that could not be built
    status, out, err = typed("federate lines.toml --resume last --trainer.max_steps 12")
    assert status == 0, err
    assert "round 3/3" in out
    assert "round 2/3" not in out
    assert digest(folder / "runs/lines/2", 3) == digest(folder / "runs/lines/1", 3)


def test_a_centralised_run_is_shown_beside(lines: Path, typed: Typed, folder: Path) -> None:
    status, _out, err = typed("federate lines.toml --centralised --trainer.enable_progress_bar false")
    assert status == 0, err
    page = (folder / "runs/lines/1/report.html").read_text()
    assert "vs. centralised" in page
    central = read_metrics(folder / "runs/lines-centralised/1/metrics.csv")
    assert [step for step, _ in central["val/loss"]] == [4, 8, 12]  # at the steps at which rounds are measured
    assert "val/loss vs. centralised<" in page
    assert typed("federate lines.toml --federation.rounds 4 --beside runs/lines-centralised/1")[0] == 0
    page = (folder / "runs/lines/2/report.html").read_text()
    assert "val/loss vs. centralised at step 12<" in page, "after as many samples"


def test_checkpoint_verbs_list_inspect_prune_and_fork_rounds(lines: Path, typed: Typed, folder: Path) -> None:
    typed("federate lines.toml --federation.keep_rounds 0")
    run = "runs/lines/1"
    assert [row["number"] for row in json.loads(typed(f"checkpoint rounds {run} --json")[1])] == [0, 1, 2, 3]
    assert "round 3 of" in typed(f"checkpoint inspect {run}")[1]
    assert typed(f"checkpoint validate {run}")[0] == 0
    assert "would remove rounds 0, 1" in typed(f"checkpoint prune {run} --keep 2")[1]
    assert typed(f"checkpoint fork {run} runs/lines/9 --round 1")[0] == 0
    status, out, err = typed("federate lines.toml --resume runs/lines/9")
    assert status == 0, err
    assert "round 2/3" in out
    status, out, _ = typed(f"checkpoint edit {run} --round 1 --clock 7")
    assert status == 2  # its journal says what its rounds are
    typed(f"checkpoint fork {run} runs/lines/10 --round 2")
    out = typed("checkpoint edit runs/lines/10 --round 2 --number 1 --clock 3")[1]
    assert "round.clock: 8 -> 3" in out
    assert "history: rounds 2 -> rounds 1" in out
    assert "1 round of runs/lines/10 is sound" in typed("checkpoint validate runs/lines/10")[1]
    assert "removed rounds 0, 1" in typed(f"checkpoint prune {run} --keep 2 --yes")[1]
    (folder / run / "rounds/000003/model.safetensors").write_bytes(b"damaged")
    status, out, _ = typed(f"checkpoint validate {run}")
    assert status == 1
    assert "round 3" in out
    status, out, _ = typed(f"checkpoint rounds {run}")
    assert f"round 3: {run}/rounds/000003/model.safetensors has 7 bytes instead of" in out


def test_rounds_are_kept_at_addresses_and_runs_are_not(
    lines: Path, typed: Typed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed("federate lines.toml --federation.rounds 1")
    before = set(folder.iterdir())
    try:
        out = typed("checkpoint fork runs/lines/1 memory://kept/lines")[1]
        assert "fork from the address into one" in out
        assert "1 round of memory://kept/lines is sound" in typed("checkpoint validate memory://kept/lines")[1]
        for line, words in (
            ("lines.toml --resume memory://kept/lines", "checkpoint fork memory://kept/lines FOLDER"),
            ("lines.toml --root memory://kept", "a run is written to a folder of this machine"),
        ):
            status, _, err = typed(f"federate {line}")
            assert status == 2
            assert words in err
        assert set(folder.iterdir()) == before

        class Away(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
            def ls(self, *_: object, **__: object) -> None:
                raise TimeoutError("nobody answers")

            isdir = ls

        monkeypatch.setattr(fsspec, "filesystem", lambda _: Away())
        status, _, err = typed("checkpoint rounds memory://kept/lines")
        assert status == 2
        assert "nobody answers; check the address, the network, the credentials" in err
    finally:
        fsspec.get_filesystem_class("memory").store.clear()


@pytest.mark.parametrize("missing", ["uvicorn", "starlette", "httptools", "urllib3", "cryptography"])
def test_missing_packages_are_named_before_a_run_starts(
    missing: str, lines: Path, typed: Typed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(missing)
    typed("federate keys server keys 127.0.0.1")
    typed("federate keys node a.key a --any-client")
    for module in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Without(missing), *sys.meta_path])
    line = "serve lines.toml --address 127.0.0.1:0 --tls-cert keys/server.pem --tls-key keys/server.key"
    if missing in ("urllib3", "cryptography"):
        line = "join http://127.0.0.1:1 --name a --key a.key"
    status, _, err = typed(f"federate {line}")
    assert status == 2
    assert f"{missing} is not installed; this feature needs it: {pip_install('federated')}" in err
    assert not (folder / "runs" / "lines").exists()


class Without(importlib.abc.MetaPathFinder):
    """Of what is imported, all but one package."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_clients_may_measure_in_place_of_the_server(lines: Path, typed: Typed, folder: Path) -> None:
    status, _, err = typed("federate lines.toml --federation.evaluate_on clients --federation.rounds 2")
    assert status == 0, err
    history = read_history(folder / "runs/lines/1")
    assert sorted(history[2]["metrics_by_client"]) == ["0", "1", "2"]
    each = [values["val/loss"] for values in history[2]["metrics_by_client"].values()]
    assert history[2]["metrics"]["val/loss"] == pytest.approx(sum(each) / 3, rel=1e-5)  # all have as many samples
    assert "val/loss by client" in (folder / "runs/lines/1/report.html").read_text()


def test_a_run_that_cannot_go_on_gives_the_reason(lines: Path, typed: Typed, folder: Path) -> None:
    """Every client's loss becomes infinite, so that no update is taken."""
    task = folder / "fed_task.py"
    task.write_text(
        task.read_text().replace(
            '.square().mean()\n        self.log("train', '.square().mean() * 1e38**2\n        self.log("train'
        )
    )
    status, out, err = typed("federate lines.toml --federation.waiting.retries 0")
    assert status == 2
    assert "could not continue" in err
    assert "failed: 0 (" in err
    assert "excluded" not in out  # said once
    assert "The run did not finish" in (folder / "runs/lines/1/report.html").read_text()


@pytest.fixture
def broken(lines: Path, folder: Path) -> Path:
    """As long as this file is there, the data of site 1 cannot be read."""
    task = folder / "fed_task.py"
    build = "x = torch.arange(12.0)[:, None] / 12\n        return Line"
    assert build in task.read_text()
    check = 'if self.number == 1 and os.path.exists("broken"):\n            raise ValueError("points.csv is cut short")\n        '
    step = "def training_step(self, batch, batch_idx):\n"
    assert step in task.read_text()
    count = '        with open("steps", "a") as file:\n            file.write("|")\n'
    task.write_text(task.read_text().replace(build, check + build).replace(step, step + count))
    (folder / "broken").touch()
    return folder / "broken"


def test_a_mistake_in_one_sites_data_ends_the_run_so_that_it_can_go_on(
    lines: Path, broken: Path, typed: Typed, folder: Path
) -> None:
    status, out, err = typed("federate lines.toml")
    assert status == 2
    assert out.count("cut short") == 0
    assert err.count("cut short") == 1
    assert "failed: 1 (node here says: task: points.csv is cut short); no others could be asked: mend that" in err
    assert "waiting.quorum, now 0.75" in err
    assert "the same command with --resume runs/lines/1 resumes it" in err
    assert "--resume runs/lines/1 resumes it" in (folder / "runs/lines/1/report.html").read_text()

    broken.unlink()
    status, out, _ = typed("federate lines.toml --resume runs/lines/1")
    assert status == 0
    assert "round 1/3" in out
    steps = len((folder / "steps").read_text())
    assert 36 <= steps < 36 + 4  # what had arrived was not trained again
    assert typed("federate lines.toml")[0] == 0
    assert digest(folder / "runs/lines/2", 3) == digest(folder / "runs/lines/1", 3)


def test_rounds_go_on_without_a_site_where_a_quorum_lets_them(
    lines: Path, broken: Path, typed: Typed, folder: Path
) -> None:
    status, out, _ = typed("federate lines.toml --federation.waiting.quorum 0.6")
    assert status == 0
    for number in (1, 2, 3):
        assert f"round {number}: client 1 is excluded: node here says: task: points.csv is cut short" in out
        assert re.search(rf"round {number}/3 .* 2 of 3 clients", out)


def test_settings_of_training_that_rounds_do_not_have_are_named(lines: Path, typed: Typed) -> None:
    flags = "--federation.rounds 0 --checkpoint.save_top_k 3 --trainer.val_check_interval 5"
    status, out, err = typed(f"federate lines.toml {flags}")
    assert status == 0, err
    assert "arclight: [checkpoint], trainer.val_check_interval: not used in a federated run" in out
    assert "not used" not in typed("federate lines.toml --federation.rounds 0")[1]


def test_invalid_federation_settings_are_refused(lines: Path, typed: Typed) -> None:
    for flags, words in (
        ("--task.kind fed_task:NoSites --task.lr 0.1", "no method site(number, count)"),
        ("--partition.kind iid", "Fit divides its own data by its method site"),
        ("--stopping.patience 3", "[stopping] has no place"),
        ("--ema.decay 0.9", "[ema] has no place"),
        ("--trainer.max_epochs 3", "leave out trainer.max_epochs"),
        ("--trainer.devices 2", "federate join ... --trainer.devices 2"),
        ("--trainer.num_nodes 2", "another machine is a node of its own"),
        ("--trainer.max_steps 5", "cannot be less than the 12 steps"),
        ("--federation.rouns 3", "did you mean --federation.rounds"),
    ):
        status, out, err = typed(f"federate lines.toml {flags}")
        assert status == 2, (flags, out)
        assert words in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("serv lines.toml", "neither a recipe, as recipes/fed-lm.toml, nor one of serve, join, keys, flower, report; did you mean serve?"),
        ("serve", "name a recipe, a .toml or .yaml file"),
        ("serve line.toml", "did you mean lines.toml?"),
        ("serve lines.toml --adress 127.0.0.1:1", "--adress is not an option of arclight federate serve; did you mean --address?"),
        ("serve lines.toml --address 127.0.0.1", "as in 127.0.0.1:8470"),
        ("serve lines.toml --address :8470", "write host:port"),
        ("serve lines.toml --address 127.0.0.1:99999", "write host:port"),
        ("serve lines.toml --address 0.0.0.0:0 --tls-cert a.pem", "--tls-key, --node-keys are missing"),
        ("join http://127.0.0.1:1 --name a --cleint 3", "did you mean --client?"),
        ("join http://127.0.0.1:1 --name a --client 0 --data nowhere", "--data nowhere: there is no such file or folder"),
        ("serve lines.toml --address 198.51.100.7:0 --tls-cert {keys}.pem --tls-key {keys}.key --node-keys nodes.txt", "no such name or address"),
        ("serve lines.toml --address name.invalid:0 --tls-cert {keys}.pem --tls-key {keys}.key --node-keys nodes.txt", "no such name or address"),
        ("serve lines.toml --tls-cert {keys}.pem --tls-key none.key", "there is no private key none.key"),
        ("serve lines.toml --tls-cert {keys}.pem --tls-key a.key", "a.key is not the private key of keys/server.pem"),
        ("serve lines.toml --node-keys none.txt", "none.txt cannot be read"),
        ("serve lines.toml --node-keys a.key", "a.key, line 1"),
        ("join https://127.0.0.1:99999 --name a", "write https://host:port"),
        ("join https://127.0.0.1/run --name a", "write https://host:port"),
        ("serve lines.toml --trainer.devices 2", "federate join ... --trainer.devices 2"),
        ("flower lines.toml --out app --trainer.devices 2", "federate join ... --trainer.devices 2"),
        ("join http://127.0.0.1:1 --name a --trainer.devices 0", "give the number of processes that train one client"),
        ("join http://127.0.0.1:1 --name a --trainer.devices auto", "give the number of processes that train one client"),
        ("join 127.0.0.1:8470 --name a", "write https://host:port"),
        ("join http://127.0.0.1:1 --name a --fingerprint 00", "write https://, or leave it out"),
        ("join https://127.0.0.1:1 --name a --fingerprint 00", "64 hexadecimal digits"),
        ("join https://127.0.0.1:1 --name a --fingerprint 00 --ca {keys}.pem", "give only one of them"),
        ("join https://127.0.0.1:1 --name a --ca none.pem", "there is no file none.pem"),
        ("join http://127.0.0.1:1 --name a --nodes none.txt", "the file of nodes none.txt cannot be read"),
        ("join https://127.0.0.1:1 --name a --ca a.key", "a.key has no PEM certificate"),
        ("keys node b.key b --into nodes.txt", "name the clients of b: --client N"),
        ("keys node b.key b --client 0 --any-client", "name the clients of b: --client N"),
        ("keys node b.key a --client 0 --into nodes.txt", "nodes.txt already has a line for a"),
        ("keys node b.key a/b --client 0 --into nodes.txt", "a registered name is made of"),
        ("keys server keys example.org", "keys/server.key already exists"),
        ("keys server new example.org:8470", "a name or an address alone"),
        ("lines.toml --beside nowhere", "nowhere has no metrics.csv: give the folder of a run"),
        ("report lines.toml", "lines.toml has no history of rounds: give the folder of a federated run"),
        ("report runs/lines/1 --beside nowhere", "nowhere has no metrics.csv: give the folder of a run"),
    ],
)  # fmt: skip
def test_invalid_command_lines_are_refused_before_writing(
    lines: Path, typed: Typed, folder: Path, line: str, words: str
) -> None:
    if any(said in line for said in ("keys", "a.key")):
        pytest.importorskip("cryptography")
        typed("federate keys server keys 127.0.0.1")
        typed("federate keys node a.key a --any-client --into nodes.txt")
    here = set(folder.iterdir())
    status, _, err = typed(f"federate {line.format(keys='keys/server')}")
    assert status == 2
    assert words in err
    assert set(folder.iterdir()) <= here | {folder / "__pycache__"}


def test_a_port_in_use_is_reported_before_a_run_starts(lines: Path, typed: Typed, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, _, err = typed(f"federate serve lines.toml --address 127.0.0.1:{other.getsockname()[1]}")
    assert status == 2
    assert "Address already in use; name another port" in err
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_an_interrupted_run_prints_how_to_resume(lines: Path, typed: Typed, folder: Path) -> None:
    run = command("federate", "lines.toml", FED_PAUSE="0.3")
    until(run, "round 1/3")
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == 130
    said = re.search(
        r"arclight: interrupted: (\d) of 3 rounds are done, and saved in (\S+) .* with --resume (\S+) resumes it", out
    )
    assert said is not None, out
    assert said.groups() == ("1", "runs/lines/1", "runs/lines/1")
    assert typed("federate lines.toml --resume runs/lines/1")[0] == 0
    assert typed("federate lines.toml")[0] == 0
    assert digest(folder / "runs/lines/1", 3) == digest(folder / "runs/lines/2", 3)


def test_the_help_is_short_and_lists_every_field_on_request(typed: Typed, folder: Path) -> None:
    status, short, _ = typed("federate --help")
    assert status == 0
    for words in ("[federation]", "local_steps", "[federation.strategy]", "[partition]", "arclight federate serve"):
        assert words in short
    assert "heartbeat_interval_s" not in short
    assert len(short.splitlines()) < 154
    for line in ("federate --help all", "federate serve --help all"):
        status, everything, _ = typed(line)
        assert status == 0
        fields = {setting.path.rpartition(".")[2] for setting in explain(FederatedRecipe)}
        assert fields - {"kind"} <= set(re.findall(r"\w+", everything))
    _, table, _ = typed("federate lines.toml --help federation.waiting")
    assert table.startswith("[federation.waiting]")
    assert "heartbeat_interval_s" in table
    assert "local_steps" not in table
    _, table, _ = typed("train --help trainer")
    assert table.startswith("[trainer]")
    status, _, err = typed("federate --help federation.wating")
    assert status == 2
    assert "did you mean federation.waiting?" in err


def test_the_length_of_a_run_is_that_of_its_rounds(lines: Path) -> None:
    sys.path.append(str(lines.parent))
    recipe = read(FederatedRecipe, lines)
    assert recipe.steps == 12
    central = recipe.central()
    assert (central.trainer.max_steps, central.trainer.accumulate_grad_batches) == (12, 3)
    with pytest.raises(RecipeError, match="max_time"):
        read(FederatedRecipe, lines, ["--trainer.max_time", "2h"])


@pytest.fixture
def texts(folder: Path) -> Path:
    """A recipe for two sources of text, which are too few for three sites."""
    for name in ("ann", "bob"):
        (folder / "texts" / name).mkdir(parents=True)
        for number in range(8):
            (folder / "texts" / name / f"{number}.txt").write_text(f"{name} wrote this as number {number}. " * 40)
    (folder / "texts.toml").write_text(
        'name = "texts"\n[task]\nkind = "language"\nmodel = "llama3-debug"\n'
        '[task.data]\ndata = "texts"\ntokenizer = "bytes"\nheld_out = 0.3\n'
        '[partition]\nkind = "source"\n[federation]\nclients = 3\n[federation.waiting]\njoin_timeout_s = 100.0\nheartbeat_interval_s = 0.2\n'
    )
    return folder / "texts.toml"


TOO_FEW = "divided among federation.clients = 3: the data have 2 sources (ann, bob), too few for 3 sites"


@pytest.mark.parametrize("verb", ["federate", "federate serve"])
def test_more_sites_than_sources_are_refused_before_a_run_starts(
    texts: Path, typed: Typed, folder: Path, verb: str
) -> None:
    status, out, err = typed(f"{verb} texts.toml")
    assert (status, out) == (2, "")
    assert TOO_FEW in err
    assert len(err.splitlines()) == 1
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("verb", ["federate", "federate serve"])
@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ("experts.per_client 64", "federation.masks.experts.per_client is 64, the model has 16 experts"),
        (
            "head_experts.heads 3",
            "federation.masks.head_experts.heads = 3 does not divide the 16 pairs of *.wv.experts",
        ),
        (
            "head_experts.heads 4 --federation.masks.head_experts.per_client 5",
            "federation.masks.head_experts.per_client is 5, each head has 4 experts",
        ),
        ("personal nothing.", "federation.masks.personal has 'nothing.', which matches no parameter"),
    ],
)
def test_masks_that_do_not_fit_the_model_are_refused_before_a_run_starts(
    texts: Path, typed: Typed, folder: Path, verb: str, masks: str, words: str
) -> None:
    flags = "--federation.clients 2 --task.model deptoe-debug"
    status, out, err = typed(f"{verb} texts.toml {flags} --federation.masks.{masks}")
    assert (status, out) == (2, "")
    assert words in err
    assert "--resume" not in err
    assert not (folder / "runs").exists()


def test_wrong_settings_are_not_advised_to_be_resumed(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path)
    with pytest.raises(SettingsError) as wrong, explain_resume(folder):
        raise SettingsError("masks.send matches nothing")
    assert str(wrong.value) == "masks.send matches nothing"
    with pytest.raises(FederatedError, match=r"lost\. Updates .* resumes it"), explain_resume(folder):
        raise FederatedError("lost")


def test_a_run_that_fails_while_it_prepares_its_data_leaves_no_folder(texts: Path, typed: Typed, folder: Path) -> None:
    for path in (folder / "texts").rglob("*.txt"):
        path.write_text("")
    status, _, err = typed("federate texts.toml --federation.clients 1 --partition.kind iid")
    assert status == 2
    assert "leaves none to validate with" in err
    assert list((folder / "runs").iterdir()), "it was begun"
    assert not list((folder / "runs").glob("texts/*"))


# -- as processes --------------------------------------------------------------------------------------------------


def joined(address: str, *clients: str, name: str, **environment: str) -> warm.Program:
    flags = [word for client in clients for word in ("--client", client)]
    return command("federate", "join", address, "--name", name, "--folder", f"nodes/{name}", *flags, **environment)


def test_processes_come_to_the_same_weights(lines: Path, typed: Typed, folder: Path) -> None:
    assert typed("federate lines.toml")[0] == 0
    server = command("federate", "serve", "lines.toml", "--address", "127.0.0.1:0")
    address = address_of(server)
    for flags, why in (
        (("--client", "9"), "this run has no client '9': its clients are 0, 1, 2"),
        (("--trainer.acelerator", "cpu"), "did you mean --trainer.accelerator?"),
    ):
        mistaken = command("federate", "join", address, "--name", "c", "--folder", "nodes/c", *flags)
        out, _ = mistaken.communicate(timeout=DEADLINE)
        assert mistaken.returncode == 2
        assert why in out
    nodes = [joined(address, "0", "2", name="a"), joined(address, "1", name="b")]
    said = [ended(node) for node in nodes]
    ended(server)
    assert digest(folder / "runs/lines/2", 3) == digest(folder / "runs/lines/1", 3)
    assert "round 3: client 2" in said[0]
    assert "is done" in said[1]
    assert "nodes/b keeps" in said[1]
    assert (folder / "runs/lines/2/report.html").exists()


@pytest.mark.slow
def test_a_node_that_cannot_divide_its_data_fails_when_it_joins(texts: Path, folder: Path) -> None:
    """The server measures nothing and need not have the data."""
    server = command(
        "federate", "serve", "texts.toml", "--address", "127.0.0.1:0", "--federation.evaluate_on", "clients"
    )
    node = joined(address_of(server), "0", name="a")
    said, _ = node.communicate(timeout=DEADLINE)
    assert node.returncode == 2
    assert TOO_FEW in said
    assert "trains" not in said
    assert f"node a is lost: it has left: the data cannot be {TOO_FEW}" in until(server, "it has left")
    server.send_signal(signal.SIGINT)
    assert TOO_FEW not in server.communicate(timeout=DEADLINE)[0]  # once is enough


@pytest.mark.slow
def test_an_error_at_one_site_ends_all_nodes_and_a_fixed_run_resumes(
    lines: Path, broken: Path, typed: Typed, folder: Path
) -> None:
    why = "failed: 1 (node b says: task: points.csv is cut short)"
    for status in (2, 0):
        flags = ["--resume", "last"] if status == 0 else []
        server = command("federate", "serve", "lines.toml", "--address", "127.0.0.1:0", *flags)
        address = address_of(server)
        nodes = [joined(address, "0", "2", name="a"), joined(address, "1", name="b")]
        said = [process.communicate(timeout=DEADLINE)[0] for process in (server, *nodes)]
        assert [process.returncode for process in (server, *nodes)] == [status] * 3, said
        if status:
            assert all(why in text for text in said), said
            assert "with --resume runs/lines/1 resumes it" in said[0]
            assert all("the same command joins again when the server is back" in text for text in said[1:])
            broken.unlink()
    assert typed("federate lines.toml")[0] == 0
    assert digest(folder / "runs/lines/2", 3) == digest(folder / "runs/lines/1", 3)


@pytest.mark.slow
def test_processes_of_a_site_train_a_client_together(lines: Path, typed: Typed, folder: Path) -> None:
    """Two of them see two batches in a step, of which the update is that of their mean, and both end with the node."""
    server = command("federate", "serve", "lines.toml", "--address", "127.0.0.1:0")
    node = command("federate", "join", address_of(server), "--name", "a", "--trainer.devices", "2", spawns=True)
    until(node, "round 1: client 0 trains")
    members: list[psutil.Process] = []
    deadline = time.monotonic() + DEADLINE
    while len(members) < 2:
        assert time.monotonic() < deadline
        assert node.poll() is None
        members = [
            one for one in psutil.Process(node.pid).children(recursive=True) if "spawn_main" in " ".join(one.cmdline())
        ]
        time.sleep(0.02)
    ended(node)
    ended(server)
    assert not [one for one in members if one.is_running()]
    history = read_history(folder / "runs/lines/1")
    assert [here["samples"] for here in history[1:]] == [dict.fromkeys("012", 16)] * 3
    task = folder / "fed_task.py"
    task.write_text(task.read_text().replace("batch_size=2", "batch_size=4"))
    sys.modules.pop("fed_task", None)
    assert typed("federate lines.toml")[0] == 0
    alone = read_history(folder / "runs/lines/2")
    assert [here["samples"] for here in alone[1:]] == [dict.fromkeys("012", 16)] * 3
    assert history[-1]["metrics"]["val/loss"] == pytest.approx(alone[-1]["metrics"]["val/loss"], rel=1e-4)


@pytest.mark.slow
def test_interrupted_processes_print_their_saved_state(lines: Path, folder: Path) -> None:
    """The server has an ask in hand, which it does not keep waiting; the node waits for a server that is gone."""
    server = command("federate", "serve", "lines.toml", "--address", "127.0.0.1:0")
    node = joined(address_of(server), "0", name="a")
    until(node, "round 1: client 0, 4 steps")
    time.sleep(0.3)  # for the request that follows; the server answers it 20 s later where nothing interrupts
    server.send_signal(signal.SIGINT)
    out, _ = server.communicate(timeout=DEADLINE)
    assert server.returncode == 130
    assert "interrupted: 0 of 3 rounds are done, and saved in runs/lines/1" in out
    assert "Traceback" not in out
    until(node, "cannot reach its server")
    node.send_signal(signal.SIGINT)
    out, _ = node.communicate(timeout=DEADLINE)
    assert node.returncode == 130
    assert "interrupted: node a has left. The progress of its clients is kept in nodes/a" in out


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on(lines: Path, typed: Typed, folder: Path) -> None:
    assert typed("federate lines.toml")[0] == 0
    server = command("federate", "serve", "lines.toml", "--address", "127.0.0.1:0")
    address = address_of(server)
    nodes = [joined(address, "0", "1", name="a", FED_PAUSE="0.2"), joined(address, "2", name="b", FED_PAUSE="0.2")]
    until = time.monotonic() + DEADLINE
    while not (folder / "runs/lines/2/rounds/000001").is_dir():
        assert time.monotonic() < until, "round 1 was not committed in time"
        time.sleep(0.05)
    server.send_signal(signal.SIGKILL)
    server.wait(DEADLINE)
    host = address.removeprefix("http://")
    again = command("federate", "serve", "lines.toml", "--address", host, "--resume", "last")
    for node in nodes:
        ended(node)
    ended(again)
    assert digest(folder / "runs/lines/2", 3) == digest(folder / "runs/lines/1", 3)


@pytest.mark.slow
def test_clients_of_a_lost_node_move_to_a_node_that_has_their_data(lines: Path, typed: Typed, folder: Path) -> None:
    assert typed("federate lines.toml")[0] == 0
    flags = ["--federation.waiting.nodes", "2", "--federation.waiting.lease_s", "0.5"]
    server = command("federate", "serve", "lines.toml", "--address", "127.0.0.1:0", *flags)
    address = address_of(server)
    killed, node = joined(address, name="a", FED_PAUSE="0.2"), joined(address, name="b", FED_PAUSE="0.2")
    until = time.monotonic() + DEADLINE
    while not (folder / "runs/lines/2/rounds/000001").is_dir():
        assert time.monotonic() < until, "round 1 was not committed in time"
        time.sleep(0.05)
    killed.kill()
    killed.wait(DEADLINE)
    said = ended(node)
    out = ended(server)
    assert {f"round 3: client {number} trains" for number in range(3)} <= {
        line.partition(" 4 ")[0] for line in said.splitlines()
    }
    assert "node a is lost" in out


def test_off_this_machine_tls_and_keys_are_needed(lines: Path, typed: Typed, folder: Path) -> None:
    status, _, err = typed("federate serve lines.toml --address 0.0.0.0:0")
    assert status == 2
    assert "TLS" in err
    assert "federate keys" in err
    assert "--tls-cert, --tls-key, --node-keys are missing" in err
    (folder / "some.pem").write_text("")
    status, _, err = typed("federate serve lines.toml --address 0.0.0.0:0 --tls-cert some.pem --tls-key some.pem")
    assert status == 2
    assert ": --node-keys is missing" in err
    status, _, err = typed("federate join http://example.org:8470 --name a --client 0")
    assert status == 2
    assert "not encrypted" in err


@pytest.mark.slow
def test_certificates_and_keys_are_made_and_used(lines: Path, typed: Typed, folder: Path) -> None:
    pytest.importorskip("cryptography")
    status, out, err = typed("federate keys server keys localhost 127.0.0.1")
    assert status == 0, err
    fingerprint = re.search(r"--fingerprint (\w{64})", out)
    assert fingerprint is not None
    assert typed("federate keys node keys/a.key a --client 0 --client 1 --client 2 --into keys/nodes.txt")[0] == 0
    assert typed("federate keys node keys/b.key b --any-client")[0] == 0
    assert typed("federate keys node keys/b.key b --any-client")[0] == 2  # nothing is overwritten
    nodes = folder / "keys/nodes.txt"
    nodes.write_text(nodes.read_text().rstrip())  # as an editor may leave it
    assert typed("federate keys node keys/c.key c --into keys/nodes.txt --client 7")[0] == 0
    assert [line.split()[0] for line in nodes.read_text().splitlines()] == ["a", "c"]
    tls = ["--tls-cert", "keys/server.pem", "--tls-key", "keys/server.key", "--node-keys", "keys/nodes.txt"]
    server = command("federate", "serve", "lines.toml", "--address", "127.0.0.1:0", *tls, "--federation.rounds", "1")
    address = address_of(server)
    assert address.startswith("https://")
    known = ["--fingerprint", fingerprint[1]]
    clients = [word for number in "012" for word in ("--client", number)]
    stranger = command("federate", "join", address, "--name", "b", *clients, *known, "--key", "keys/b.key")
    out, _ = stranger.communicate(timeout=DEADLINE)
    assert stranger.returncode == 2, out
    node = command("federate", "join", address, "--name", "a", *clients, *known, "--key", "keys/a.key")
    ended(node)
    ended(server)


def test_options_of_the_server_are_refused_for_a_node(typed: Typed, folder: Path) -> None:
    status, _, err = typed("federate join http://127.0.0.1:1 --name a --client 0 --federation.rounds 9")
    assert status == 2
    assert "is set by the server" in err
    status, _, err = typed("federate join http://127.0.0.1:1 --name a --data here")
    assert status == 2
    assert "--client N" in err


def test_an_app_for_flower_follows_the_recipe(
    lines: Path, typed: Typed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Flower: what the app builds, run in this process, comes to the weights of the recipe."""
    import importlib

    assert typed("federate lines.toml --federation.rounds 2")[0] == 0
    status, out, err = typed("federate flower lines.toml --federation.rounds 2 --out app")
    assert status == 0, err
    assert "flwr run app" in out
    assert (folder / "app/pyproject.toml").exists()
    monkeypatch.syspath_prepend(str(folder / "app"))
    building = importlib.import_module("lines.building")
    server = building.server(folder / "under-flower", {})
    server.run([building.client(str(number), {}) for number in range(3)])
    assert digest(folder / "under-flower", 2) == digest(folder / "runs/lines/1", 2)
    with monkeypatch.context() as flags, pytest.raises(UsageError, match="clients under Flower use one device"):
        flags.setenv("ARCLIGHT_FLAGS", "--trainer.devices 2")
        building.client("0", {})
    assert typed("federate report under-flower")[0] == 0
    assert typed("federate report app")[0] == 2
    assert typed("federate flower lines.toml --out app")[0] == 2  # nothing is overwritten
    for name in [name for name in sys.modules if name == "lines" or name.startswith("lines.")]:
        del sys.modules[name]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_node_on_a_full_disk_ends_with_its_own_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not with the traceback of a log that cannot be closed, nor one for each line."""
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with pytest.raises(FederatedError, match="the run has ended"), log_to_folder(tmp_path):
        logging.getLogger("arclight.test_federate").warning("no room for the update of 0")
        raise FederatedError("the run has ended")
    assert capsys.readouterr().err == "arclight: no room for the update of 0\n"


# -- progress ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def __init__(self, moves: bool) -> None:
        super().__init__()
        self._moves = moves

    def isatty(self) -> bool:
        return self._moves


def accepted(client: str, **more: object) -> records.UpdateAccepted:
    given = {
        "round": 1,
        "digest": "d",
        "samples": 8,
        "tokens": 0,
        "steps": 4,
        "seconds": 1.0,
        "bytes": 2_500_000,
        "norm": 1.0,
    }
    return records.UpdateAccepted(client=client, **{**given, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("moves", [False, True])
def test_a_round_is_one_line_with_its_cost(moves: bool) -> None:
    seconds = iter(range(1000))
    stream = Terminal(moves)
    progress = Progress(3, stream, clock=lambda: float(next(seconds)))
    progress.observe(records.RoundOpened(round=1, base="b", clients=("0", "1"), wanted=2, clock=0, steps=4))
    progress.observe_heartbeat(
        Heartbeat(
            node="a",
            session="s",
            active_work=(ActiveWork(client="0", round=1, steps=3, loss=2.5), ActiveWork(client="7", round=1, steps=9)),
        )
    )
    progress.observe(accepted("1", metrics={"train/loss": 1.5}))
    assert ("waiting for client 0 at 3 of 4 (loss 2.500)" in stream.getvalue()) == moves
    progress.observe(
        records.UpdateRefused(round=1, client="0", reason="not_finite", message="w has 3 values that are none")
    )
    progress.observe(accepted("0", metrics={"train/loss": 2.5}))
    progress.sent_down = {1: 4_000_000}.__getitem__
    progress.observe(records.RoundCommitted(round=1, base="c", checkpoint="x", norm=1.0, drift={"0": 0.5, "1": 0.7}))
    progress.observe(events.NodeLost(node="a", session="s", why="silent for 1.5 s"))
    text = re.sub(r"\x1b\[[0-9;]*[mK]", "", stream.getvalue())
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    assert lines[0] == "round 1: client 0 is refused (not_finite): w has 3 values that are none"
    assert lines[1].startswith(
        "round 1/3  train/loss 2  2 of 2 clients  8 steps  5.0 MB up, 4.0 MB down  cosine 0.60  "
    )
    assert lines[2] == "node a is lost: silent for 1.5 s"


def test_the_line_of_a_round_has_the_training_loss_of_metrics_csv() -> None:
    stream, samples = Terminal(moves=False), {"0": 30, "1": 10}
    progress = Progress(3, stream)
    progress.observe(records.RoundOpened(round=1, base="b", clients=("0", "1"), wanted=2, clock=0, steps=4))
    for client, loss in (("0", 1.0), ("1", 3.0)):
        progress.observe(accepted(client, samples=samples[client], metrics={"train/loss": loss}))
    progress.observe(records.RoundCommitted(round=1, base="c", checkpoint="x", norm=1.0))
    here = Round(round=1, samples=samples, train={"0": {"train/loss": 1.0}, "1": {"train/loss": 3.0}})
    assert metrics_row(here)["train/loss"] == 1.5
    assert "train/loss 1.500  2 of 2 clients" in stream.getvalue()


def test_warnings_are_printed_among_the_rounds_and_none_twice() -> None:
    stream, log = Terminal(moves=False), logging.getLogger("arclight.federated.server.runtime")
    progress = Progress(3, stream)
    with print_warnings(progress):
        log.info("run r resumes after round 1")
        log.error("the run pauses until its journal can be written: %s", "the disk is full")
        log.warning("node a is lost: silent for 1.5 s", extra=OBSERVED)
        progress.observe(events.NodeLost(node="a", session="s", why="silent for 1.5 s"))
        log.warning("node %s", "b\x1b[2J\nround 3/3")
    log.warning("nobody is here any more")
    assert stream.getvalue().splitlines() == [
        "arclight: the run pauses until its journal can be written: the disk is full",
        "node a is lost: silent for 1.5 s",
        "arclight: node b\N{REPLACEMENT CHARACTER}[2J round 3/3",
    ]


def test_a_lost_terminal_does_not_end_who_warns(capsys: pytest.CaptureFixture[str]) -> None:
    class Closed(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError("the terminal is gone")

    with print_warnings(Progress(3, Closed(moves=False))):
        logging.getLogger("arclight.federated.server.runtime").warning("node a is slow")
    assert "the terminal is gone" in capsys.readouterr().err


def test_excluded_clients_are_not_counted() -> None:
    stream = Terminal(moves=False)
    progress = Progress(3, stream)
    progress.observe(records.RoundOpened(round=1, base="b", clients=("0", "1"), wanted=2, clock=0, steps=4))
    progress.observe(accepted("0", metrics={"train/loss": 1.5}))
    progress.observe(accepted("1", metrics={"train/loss": 9.5}))
    progress.observe(records.ClientFailed(round=1, client="1", message="it would outweigh them", redo=True))
    progress.observe(records.RoundCommitted(round=1, base="c", checkpoint="x", norm=1.0))
    assert "train/loss 1.500  1 of 2 clients  4 steps" in stream.getvalue()


@pytest.mark.parametrize(
    ("last", "unfinished"),
    [
        ((), True),
        ((records.RunEnded(why="all 2 rounds are done"),), False),
        ((StateSaved(state=RunState(run="r", committed=2, ended="all 2 rounds are done")),), False),
        ((StateSaved(state=RunState(run="r", committed=1)),), True),
        ((records.RunEnded(why="x", failed=True), records.RoundEvaluated(round=0, client=None, samples=0, metrics={})), False),
        ((records.RunEnded(why="x", failed=True), records.RunOpened(run="r", settings="s")), True),
    ],
)  # fmt: skip
def test_a_run_that_has_ended_is_finished_by_any_form_of_its_journal(
    tmp_path: Path, last: tuple[records.Record, ...], unfinished: bool
) -> None:
    with RunDatabase.open(tmp_path) as journal:
        journal.append([records.RunOpened(run="r", settings="s")])
        for record in last:
            if isinstance(record, StateSaved):
                journal.write_history(0, [], record)
            else:
                journal.append([record])
    assert is_unfinished(RunFolder.open(tmp_path)) == unfinished


def test_streamed_rounds_are_shown_together_and_reported_when_done() -> None:
    stream = Terminal(moves=True)
    progress = Progress(3, stream)
    for number in (1, 2):
        progress.observe(records.RoundOpened(round=number, base="b", clients=("0", "1"), wanted=2, clock=0, steps=4))
    progress.observe(accepted("0"))
    assert "|" not in stream.getvalue()  # nobody has begun the other one
    progress.observe_heartbeat(
        Heartbeat(
            node="a",
            session="s",
            active_work=(ActiveWork(client="0", round=2, steps=3), ActiveWork(client="1", round=1, steps=1)),
        )
    )
    progress.print_line("")
    assert "round 1/3  waiting for client 1 at 1 of 4  |  round 2  0 at 3 of 4" in stream.getvalue()
    progress.observe(accepted("1"))
    progress.observe(accepted("0", round=2))
    assert "round 1/3  aggregating  |  round 2  1 of 2 here" in stream.getvalue()
    progress.observe(records.RoundCommitted(round=1, base="c", checkpoint="x", norm=1.0))
    assert re.search(r"round 1/3\S*  2 of 2 clients  8 steps", stream.getvalue())


def test_waiting_clients_are_cleared_after_the_round() -> None:
    stream = Terminal(moves=True)
    progress = Progress(1, stream)
    progress.observe(records.RoundOpened(round=1, base="b", clients=("0",), wanted=1, clock=0, steps=4))
    progress.observe(events.LogMessage(text="round 1: 0 of 1 updates; waiting for 0 (node a, step 2)"))
    progress.observe(accepted("0"))
    progress.observe(records.RoundCommitted(round=1, base="c", checkpoint="x", norm=1.0))
    progress.observe(records.RoundEvaluated(round=1, client=None, samples=1, metrics={"val/loss": 1.0}))
    assert "waiting for 0 (node a, step 2)" not in stream.getvalue()


# -- the page ------------------------------------------------------------------------------------------------------


def a_round(number: int, clients: list[str], **more: object) -> dict[str, object]:
    said = dict.fromkeys(clients, 1)
    return {
        "round": number, "clock": 5 * number, "contributors": clients, "samples": said, "tokens": said, "steps": said, "norm": 1.0,
        "norms": said, "drift": dict.fromkeys(clients, 0.5), "train": {c: {"train/loss": 1.0 / number} for c in clients},
        "metrics": {"val/loss": 2.0 / number}, "metrics_by_client": {}, "bytes_up": dict.fromkeys(clients, 1000),
        "bytes_down": dict.fromkeys(clients, 2000), "seconds": {"round": 2.0, "waiting": 1.5, "fold": 0.5},
        "seconds_by_client": dict.fromkeys(clients, 1.0), "refused": [], "failed": {}, **more,
    }  # fmt: skip


@pytest.mark.parametrize("count", [2, 40])
def test_the_page_names_excluded_clients_and_escapes_messages(tmp_path: Path, count: int) -> None:
    clients = [f"c{n}" for n in range(count)]
    refused = [{"client": "c1", "reason": "not_finite", "message": "<script>alert(1)</script>"}]
    rounds = [a_round(1, clients), a_round(2, clients[:1], refused=refused, failed={"c0": "its node was lost"})]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rounds))
    page = federated_report(tmp_path).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "its node was lost" in page
    assert page.index(">c2<") < page.index(">c10<") if count > 10 else "c1" in page
    assert ("largest of all clients" in page) == (count > 8)
    assert page.count("<th class=number>downloaded<") == 2, "by client and by round"
    assert "ε" not in page


def test_the_page_counts_an_excluded_client_once_and_a_returned_one_not() -> None:
    """A refused update is recorded as refused, and its client as failed; a client that failed is asked again in a retry."""
    refused = [{"client": "b", "reason": "not_finite", "message": "w is NaN"}]
    out = {"b": "its update was refused: w is NaN", "a": "its node was lost"}
    rounds = [a_round(1, ["a", "c"], refused=refused, failed=out), a_round(2, ["a", "b", "c"])]

    def excluded(table: str) -> list[str]:
        head, *rows = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[1:])
        return [row[head.index("excluded")] for row in rows]

    assert excluded(round_table(rounds)) == ["1", ""]
    assert excluded(client_table(rounds)) == ["0", "1", "0"]


def test_the_page_shows_the_privacy_budget_spent(lines: Path, typed: Typed, folder: Path) -> None:
    pytest.importorskip("dp_accounting")
    flags = (
        "--federation.weigh_by equal --federation.rounds 2 --federation.noise.clip 0.5 --federation.noise.multiplier 2"
    )
    status, _, err = typed(f"federate lines.toml {flags}")
    assert status == 0, err
    page = (folder / "runs/lines/1/report.html").read_text()
    spent = read_history(folder / "runs/lines/1")[-1]["epsilon"]
    assert f"After 2 rounds ε is {spent:.3g} at δ = 1e-05 (no bound was set)" in page
    assert "a norm of 0.5; the noise on their sum is 2 times that, added by the server" in page
