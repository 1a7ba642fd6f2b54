"""Refused updates leave no trace in the weights."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.fakes import CALM, Quadratic, ScriptedNode

from arclight.federated.blobs.manifest_io import Encoded, write_blobs
from arclight.federated.clients import Outcome
from arclight.federated.errors import ProtocolError
from arclight.federated.protocol import Close, Evaluate, Evaluated, Failed, Fit, Heartbeat, Receipt, Update, read
from arclight.federated.server import service
from arclight.federated.server.server import Server
from arclight.federated.server.server_run import ServerRun
from arclight.federated.server.validation import ValidUpdate, validate_update
from arclight.federated.settings import Federation
from arclight.federated.transports.link import InProcessLink

START = {"w": torch.linspace(-1, 1, 12).reshape(3, 4), "b": torch.ones(5)}


@dataclasses.dataclass
class Bench:
    """A run with two clients; a round is open and "0" has its order."""

    run: ServerRun
    server: Server
    script: ScriptedNode
    order: Fit
    update: Update
    """A sound one for it, its blobs put, not sent."""

    def change(self, **tensors: torch.Tensor) -> Update:
        """The sound update with other tensors."""
        change = {f"model/{name}": torch.zeros_like(tensor) for name, tensor in START.items()}
        change |= {f"model/{name}": tensor for name, tensor in tensors.items()}
        return self.script.packed(self.order, change, Outcome(samples=32, steps=4))

    def refused(self, update: Update) -> Receipt:
        receipt = self.script.send(update)
        assert not receipt.accepted
        return receipt

    def goes_on(self) -> None:
        """The run ends as one does in which nothing was refused."""
        assert self.script.send(self.update).accepted
        self.script.work()
        assert self.run.runtime.wait(60)
        decay, goal = (1 - 0.1) ** 8, (1.0 - 3.0) / 2
        for name, tensor in self.server.weights().items():
            torch.testing.assert_close(tensor, goal + decay * (START[name] - goal), rtol=1e-6, atol=1e-6)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    server = Server(Federation(clients=2, rounds=2, local_steps=4, waiting=CALM), START, folder=tmp_path / "run")
    with server.opened() as run:
        script = ScriptedNode(InProcessLink(run.service), {"0": Quadratic(1.0), "1": Quadratic(-3.0)})
        script.join()
        order = script.ask()
        assert isinstance(order, Fit)
        yield Bench(run, server, script, order, script.trained(order))


@pytest.mark.parametrize(
    ("changed", "reason", "says"),
    [
        ({"samples": 0}, "weight", "samples = 0: by these it is to be weighed"),
        ({"samples": -1}, "weight", "a count is not negative"),
        ({"steps": 5}, "weight", "5 steps: 4 were asked for"),
        ({"seconds": -1.0}, "weight", "-1.0 seconds"),
        ({"round": 7}, "stale", "round 7 has not begun"),
        ({"client": "9"}, "unknown_client", "no client '9'"),
        ({"session": "x"}, "session", "join again"),
    ],
)
def test_claims_that_cannot_be_are_refused(bench: Bench, changed: dict[str, object], reason: str, says: str) -> None:
    receipt = bench.refused(dataclasses.replace(bench.update, **changed))  # type: ignore[arg-type]
    assert receipt.reason == reason
    assert says in receipt.message


@pytest.mark.parametrize(
    ("tensors", "reason", "says"),
    [
        ({"w": torch.full((3, 4), float("nan"))}, "not_finite", "model/w"),
        ({"b": torch.tensor([1, 2, float("inf"), 4, 5])}, "not_finite", "model/b"),
        ({"w": torch.zeros(4, 3)}, "wrong_shape", "shape [4, 3], not [3, 4]"),
        ({"b": torch.zeros(5, dtype=torch.int64)}, "wrong_shape", "type I64, not F32"),
        ({"more": torch.zeros(2)}, "wrong_names", "model/more, which was not asked for"),
        ({"w": torch.full((3, 4), 1e3)}, "too_large", "times the weights' own"),
    ],
)
def test_tensors_that_cannot_be_are_refused(
    bench: Bench, tensors: dict[str, torch.Tensor], reason: str, says: str
) -> None:
    given = {name: tensor for name, tensor in tensors.items() if not bool(torch.isnan(tensor.float()).any())}
    if len(given) == len(tensors) and reason != "not_finite":
        update = bench.change(**tensors)
    else:  # an honest node does not send these
        whole = {
            **{f"model/{n}": torch.zeros_like(t) for n, t in START.items()},
            **{f"model/{n}": t for n, t in tensors.items()},
        }
        manifest = write_blobs(
            {k: Encoded.raw(t) for k, t in whole.items()}, bench.script.own, kind="update", base=bench.order.base
        )
        for digest in manifest.blobs:
            bench.script.link.blobs.put(digest, bench.script.own.file(digest))
        update = dataclasses.replace(bench.update, manifest=manifest)
    receipt = bench.refused(update)
    assert receipt.reason == reason
    assert says in receipt.message


def test_a_norm_far_above_those_accepted_before_is_refused_and_the_round_goes_on_without(bench: Bench) -> None:
    assert bench.script.send(bench.update).accepted
    order = bench.script.ask()
    assert isinstance(order, Fit)
    assert order.client == "1"
    large = {f"model/{name}": torch.full_like(tensor, 100.0) for name, tensor in START.items()}
    receipt = bench.refused(bench.script.packed(order, large, Outcome(samples=32, steps=4)))
    assert receipt.reason == "too_large"
    assert "times the median of those accepted before" in receipt.message
    assert bench.server.history[1].refused[0]["client"] == "1"
    assert bench.server.history[1].refused[0]["reason"] == "too_large"


def test_samples_far_above_those_accepted_before_would_outweigh_all_others(bench: Bench) -> None:
    assert bench.script.send(bench.update).accepted
    order = bench.script.ask()
    assert isinstance(order, Fit)
    receipt = bench.refused(dataclasses.replace(bench.script.trained(order), samples=10**9))
    assert receipt.reason == "weight"
    assert "outweigh" in receipt.message


def test_bytes_that_are_missing_cut_or_changed_are_asked_for_again(bench: Bench) -> None:
    blobs, update = bench.run.blobs, bench.update
    (digest,) = update.manifest.blobs
    whole = bench.script.own.file(digest).read_bytes()
    path = blobs.file(digest)

    def there(content: bytes | None) -> None:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)

    there(None)
    assert bench.refused(update).reason == "damaged"
    there(whole[:-8])
    assert "bytes, its manifest says" in bench.refused(update).message
    there(whole)
    bench.goes_on()


def test_an_update_that_comes_twice_counts_once(bench: Bench) -> None:
    assert bench.script.send(bench.update).accepted
    assert bench.script.send(bench.update).accepted
    other = bench.refused(bench.change(w=torch.ones(3, 4)))
    assert other.reason == "duplicate"
    bench.goes_on()
    assert bench.server.history[1].contributors == ["0", "1"]


def test_updates_for_clients_of_another_node_are_refused(tmp_path: Path) -> None:
    """One who may join for a site of his own cannot speak for another's."""
    server = Server(
        Federation(clients=2, rounds=1, local_steps=4, evaluate_on="clients", waiting=CALM),
        START,
        folder=tmp_path / "run",
    )
    with server.opened() as run:
        own = ScriptedNode(InProcessLink(run.service), {"0": Quadratic(1.0)}, name="own")
        other = ScriptedNode(InProcessLink(run.service), {"1": Quadratic(-3.0)}, name="other")
        own.join()
        other.join()
        about = {"node": "own", "session": own.session, "client": "1"}
        false = Evaluated(**about, round=0, samples=1, metrics={"loss": 0.0})
        for said in (false, Failed(**about, round=0, error="!"), Failed(**about, round=1, error="!")):
            receipt = run.service.answer(said)
            assert isinstance(receipt, Receipt)
            assert (receipt.accepted, receipt.reason) == (False, "unknown_client"), said
        order = own.work(lambda message: isinstance(message, Fit))
        assert isinstance(order, Fit)
        forged = dataclasses.replace(own.trained(order), client="1")
        receipt = own.send(forged)
        assert (receipt.accepted, receipt.reason) == (False, "unknown_client")
        assert "node own has joined for 0, not for 1" in receipt.message


@pytest.mark.parametrize(("value", "samples"), [(float("nan"), 1), (float("inf"), 1), (1e308, 100), (1.0, 10**400)])
def test_a_measurement_that_cannot_be_averaged_does_not_end_the_run(tmp_path: Path, value: float, samples: int) -> None:
    """The mean would be NaN or infinite, which no journal takes: not now, and not after any restart."""
    settings = Federation(clients=2, rounds=2, local_steps=4, evaluate_on="clients", waiting=CALM)
    server = Server(settings, START, folder=tmp_path / "run")
    with server.opened() as run:
        script = ScriptedNode(InProcessLink(run.service), {"0": Quadratic(1.0), "1": Quadratic(-3.0)})
        script.join()
        order = script.work(lambda message: isinstance(message, Evaluate))
        assert isinstance(order, Evaluate)
        receipt = run.service.answer(
            Evaluated(
                node="n", session=script.session, client=order.client, round=order.round, samples=samples,
                metrics={"val/loss": value},
            )
        )  # fmt: skip
        assert isinstance(receipt, Receipt)
        assert receipt.reason == ("weight" if samples > 100 else "not_finite")
        script.send(Heartbeat(node="n", session=script.session))
        script.work()
        assert run.runtime.wait(60)
    assert [sorted(here.metrics_by_client) for here in server.history][-1] == ["0", "1"]
    assert all(math.isfinite(here.metrics["val/loss"]) for here in server.history)


def test_an_update_of_a_round_that_is_over_is_stale(bench: Bench) -> None:
    bench.goes_on()
    receipt = bench.refused(dataclasses.replace(bench.change(w=torch.ones(3, 4)), round=1))
    assert receipt.reason in ("stale", "duplicate")


def test_another_version_is_refused_with_advice(bench: Bench) -> None:
    text = bench.update.to_json().replace('"version": 3}', '"version": 1}')
    assert text != bench.update.to_json()
    with pytest.raises(ProtocolError, match="speaks version 1, this one 3: install the same arclight"):
        read(text)
    assert read(text, stored=True) == bench.update, "what a node has kept since before is not lost"
    with pytest.raises(ProtocolError, match="speaks version 0"):
        read(text.replace('"version": 1}', '"version": 0}'), stored=True)


def test_blobs_of_rounds_that_are_over_do_not_pile_up(bench: Bench) -> None:
    bench.goes_on()
    bench.run.runtime.close()
    offered = {digest for weights in bench.run.weights.all() for digest in weights.manifest.blobs}
    assert set(bench.run.blobs) == offered


def test_as_many_updates_are_checked_at_once_as_there_are_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check has memory of its own: it does not grow with the clients that send at the same time."""
    under_way, seen, lock, two = 0, list[int](), threading.Lock(), threading.Barrier(2)

    def slowly(*given: Any) -> ValidUpdate:
        nonlocal under_way
        with lock:
            under_way += 1
            seen.append(under_way)
        two.wait(60)
        time.sleep(0.05)  # so that a third one would be seen
        found = validate_update(*given)
        with lock:
            under_way -= 1
        return found

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(service, "validate_update", slowly)
    settings = Federation(clients=6, rounds=1, local_steps=4, evaluate_every=0, waiting=CALM)
    server = Server(settings, START, folder=tmp_path / "run")
    with server.opened() as run, ThreadPoolExecutor(6) as pool:
        scripts = [ScriptedNode(InProcessLink(run.service), {str(n): Quadratic(1.0)}, name=f"n{n}") for n in range(6)]
        for done in [pool.submit(script.work) for script in scripts]:
            assert isinstance(done.result(), Close)
    assert len(seen) == 6
    assert max(seen) == 2
