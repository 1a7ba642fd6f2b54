"""Secure sums in whole runs: several clients of several nodes, some of which drop out, seen through the public server."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.fakes import Quadratic

from arclight import recipe
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.clients import Outcome
from arclight.federated.clients.node import Node
from arclight.federated.clients.secure_sum_client import Identity, SecureSumClient
from arclight.federated.coordination.coordinator import Coordinator
from arclight.federated.coordination.records import RunEnded
from arclight.federated.coordination.run_database import read_journal
from arclight.federated.coordination.run_state import StateSaved
from arclight.federated.coordination.settings import Sampling, Waiting
from arclight.federated.errors import ClientError, FederatedError, LinkError, ProtocolError, RefusedError
from arclight.federated.masks.settings import Masks
from arclight.federated.masks.transfer_mask import TransferMask
from arclight.federated.privacy.key_agreement import PublicKeys
from arclight.federated.privacy.secure_aggregation import Participant
from arclight.federated.privacy.settings import SecureSum
from arclight.federated.protocol import (
    Fit,
    Join,
    Manifest,
    Message,
    Receipt,
    SecureSumReply,
    SecureSumRequest,
    Update,
    Welcome,
    keys_text,
)
from arclight.federated.server.published_weights import manifest_of
from arclight.federated.server.secure_sums import SecureSumRelay, cohort_of, refuse_unmasked_updates
from arclight.federated.server.server import Server
from arclight.federated.server.validation import Baseline, ExpectedUpdate, validate_update
from arclight.federated.settings import Checks, Federation
from arclight.federated.transports.authentication import Authenticator
from arclight.federated.transports.http_client import HttpLink
from arclight.federated.transports.http_server import HttpServer
from arclight.federated.transports.keys import NodeKey, Registry
from arclight.federated.transports.link import InProcessLink
from arclight.federated.transports.settings import Limits, Listening

START = {"w": torch.linspace(-1, 1, 3000).reshape(30, 100), "seen": torch.tensor(3)}


class Fails(Quadratic):
    """Breaks down in a round."""

    def fit(self, order: Any, weights: Mapping[str, torch.Tensor], progress: Any) -> Outcome:
        if order.round == 2:
            raise RuntimeError("this site has lost power")
        return super().fit(order, weights, progress)


@dataclass
class Site:
    """A client as a node's executor takes it, whose learner is known in closed form."""

    name: str
    goal: float
    kind: type[Quadratic] = Quadratic

    def learner(self, folder: Path) -> Quadratic:
        return self.kind(self.goal, samples=int(self.name) + 3)


@dataclass
class Tapped(InProcessLink):
    """A link that keeps what goes over it."""

    service: Any
    received: list[Message] = field(default_factory=list)
    lost: tuple[str, int] = ("", 0)
    """A client whose masked values do not get through, and in which round."""

    def __post_init__(self) -> None:
        super().__init__(self.service)

    silent: Callable[[SecureSumRequest], bool] = lambda message: False
    """Which parts of secrets do not get through."""

    def send(self, message: Message) -> Message:
        self.received.append(message)
        if isinstance(message, SecureSumRequest) and message.seed_shares is not None and self.silent(message):
            return SecureSumReply(finished=True)
        if isinstance(message, Update) and (message.client, message.round) == self.lost:
            raise RuntimeError("its line is cut")
        return super().send(message)


def trained(
    server: Server,
    nodes: list[list[Site]],
    lost: tuple[str, int] = ("", 0),
    silent: Callable[[SecureSumRequest], bool] = lambda message: False,
) -> list[Message]:
    said: list[Message] = []
    with server.opened() as run:
        threads = []
        for number, sites in enumerate(nodes):
            link = Tapped(run.service, said, lost, silent)
            executor: list[Any] = list(sites)
            node = Node(link, executor, Path(server.folder) / f"node{number}", f"n{number}", hold_s=1.0)
            threads.append(threading.Thread(target=node.run, daemon=True))
            threads[-1].start()
        run.runtime.wait(60)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a node has not ended within 60 s"
    return said


def settings(**given: Any) -> Federation:
    return Federation(**{"clients": 3, "rounds": 3, "local_steps": 4, "secure": SecureSum(step_timeout_s=5.0), **given})


def test_a_secure_run_is_the_plain_one_and_shows_no_single_change(tmp_path: Path) -> None:
    sites = [Site("0", 1.0), Site("1", -3.0), Site("2", 0.5)]
    plain = Server(settings(secure=None), START, folder=tmp_path / "plain")
    trained(plain, [sites])
    server = Server(settings(keep_rounds=0), START, folder=tmp_path / "run")
    said = trained(server, [sites[:2], sites[2:]])
    torch.testing.assert_close(server.weights()["w"], plain.weights()["w"], rtol=1e-6, atol=1e-7)
    assert torch.equal(server.weights()["seen"], START["seen"]), "integers are not sent"
    updates = [one for one in said if isinstance(one, Update)]
    assert len(updates) == 9
    assert {entry.dtype for one in updates for entry in one.manifest.tensors.values()} == {"I64"}
    assert [here.norms for here in server.history][1:] == [{"0": 0.0, "1": 0.0, "2": 0.0}] * 3
    assert server.history[3].norm == pytest.approx(plain.history[3].norm, rel=1e-6)
    assert not list((tmp_path / "run").glob("node*/**/masked/*"))


def test_a_node_cannot_speak_for_another_ones_client(tmp_path: Path) -> None:
    with Server(settings(), START, folder=tmp_path / "run").opened() as run:
        link = InProcessLink(run.service)
        welcome = link.send(Join(node="n0", clients=("0",), process="p"))
        assert isinstance(welcome, Welcome)
        told = link.send(SecureSumRequest(node="n0", session=welcome.session, client="0", round=1))
        assert isinstance(told, SecureSumReply)
        with pytest.raises(ProtocolError, match="n0 does not speak for client 1"):
            link.send(SecureSumRequest(node="n0", session=welcome.session, client="1", round=1))
        stranger = link.send(SecureSumRequest(node="n0", session="another", client="0", round=1))
        assert isinstance(stranger, Receipt)
        assert stranger.reason == "session"


@pytest.mark.parametrize("early", [True, False])
def test_a_client_that_drops_out_is_left_out_of_the_sum(tmp_path: Path, early: bool) -> None:
    """In round 2 the third client breaks down, before it has given keys, or once the others have masked for it."""
    some = {"waiting": Waiting(quorum=0.6, grace_s=20.0), "secure": SecureSum(threshold=0.6, step_timeout_s=5.0)}
    sites = [Site("0", 1.0), Site("1", -3.0), Site("2", 0.5, Fails if early else Quadratic)]
    plain = Server(settings(**{**some, "secure": None}), START, folder=tmp_path / "plain")
    trained(plain, [[*sites[:2], Site("2", 0.5, Fails)]])
    server = Server(settings(**some), START, folder=tmp_path / "run")
    said = trained(server, [sites], ("", 0) if early else ("2", 2))
    encrypted_shares = {
        one.client
        for one in said
        if isinstance(one, SecureSumRequest) and one.round == 2 and one.encrypted_shares is not None
    }
    assert encrypted_shares == ({"0", "1"} if early else {"0", "1", "2"})
    assert [here.contributors for here in server.history] == [here.contributors for here in plain.history]
    assert server.history[2].contributors == ["0", "1"]
    torch.testing.assert_close(server.weights()["w"], plain.weights()["w"], rtol=1e-6, atol=1e-7)


class Counted(Quadratic):
    """Count the trainings of all clients."""

    fits = 0

    def fit(self, order: Any, weights: Mapping[str, torch.Tensor], progress: Any) -> Outcome:
        Counted.fits += 1
        return super().fit(order, weights, progress)


def test_a_sum_that_cannot_be_opened_is_asked_for_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secure = SecureSum(step_timeout_s=3.0)
    sites = [Site(name, goal, Counted) for name, goal in (("0", 1.0), ("1", -3.0), ("2", 0.5))]
    undisturbed = Server(settings(secure=secure), START, folder=tmp_path / "undisturbed")
    trained(undisturbed, [sites])
    Counted.fits = 0
    server = Server(settings(secure=secure), START, folder=tmp_path / "run")
    with caplog.at_level(logging.INFO, "arclight.federated.server"):
        said = trained(
            server, [sites], silent=lambda told: told.round == 2 and told.attempt == 0 and told.client != "0"
        )
    assert "round 2 is discarded and asked for again: " in caplog.text
    assert "are needed to open round 2's sum; no message from: 1, 2" in caplog.text
    assert [one.attempt for one in said if isinstance(one, Update) and one.round == 2] == [0, 0, 0, 1, 1, 1]
    assert [here.base for here in server.history] == [here.base for here in undisturbed.history]
    assert Counted.fits == 9, "nobody trains for nothing"
    assert len(server.history[2].discarded) == 1
    left = {path.name for path in (tmp_path / "run" / "blobs").iterdir() if path.is_file()}
    assert left == {path.name for path in (tmp_path / "undisturbed" / "blobs").iterdir() if path.is_file()}


@dataclass
class Dies(Tapped):
    """The link of a node whose process ends when a client sends its shares of round 2: nothing comes from it any more."""

    dead: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def send(self, message: Message) -> Message:
        if isinstance(message, SecureSumRequest) and message.encrypted_shares is not None and message.round == 2:
            self.dead.set()
        if self.dead.is_set():
            self.over.wait(60)
            raise LinkError("its process has ended")
        return super().send(message)


@pytest.mark.slow
def test_a_node_that_is_started_again_within_a_round_costs_a_run_that_needs_everybody_one_sum(tmp_path: Path) -> None:
    """The secrets of its sum are gone; its client is asked again with all others, in another sum."""
    sites = [Site("0", 1.0), Site("1", -3.0), Site("2", 0.5)]
    some = settings(secure=SecureSum(step_timeout_s=3.0), waiting=Waiting(quorum=1.0))
    undisturbed = Server(some, START, folder=tmp_path / "undisturbed")
    trained(undisturbed, [[site] for site in sites])
    server = Server(some, START, folder=tmp_path / "run")
    with server.opened() as run:
        links = [Tapped(run.service), Tapped(run.service), Dies(run.service)]
        nodes = [
            Node(link, list[Any]([site]), tmp_path / f"node{site.name}", f"n{site.name}", hold_s=1.0)
            for link, site in zip(links, sites, strict=True)
        ]
        threads = [threading.Thread(target=node.run, daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        dying = links[2]
        assert isinstance(dying, Dies)
        assert dying.dead.wait(60)
        again = Node(Tapped(run.service), list[Any]([sites[2]]), tmp_path / "node2", "n2", hold_s=1.0)
        threads.append(threading.Thread(target=again.run, daemon=True))
        threads[-1].start()
        assert run.runtime.wait(60), run.coordinator.status(run.runtime.now())
        nodes[2].stop()
        dying.over.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert [here.contributors for here in server.history] == [[], *[["0", "1", "2"]] * 3]
    assert [here.base for here in server.history] == [here.base for here in undisturbed.history]


@pytest.mark.slow
def test_a_sum_that_can_never_be_opened_ends_the_run_which_can_be_taken_up(tmp_path: Path) -> None:
    sites = [Site("0", 1.0), Site("1", -3.0), Site("2", 0.5)]
    some = settings(secure=SecureSum(step_timeout_s=3.0), rounds=2)
    server = Server(some, START, folder=tmp_path / "run")
    trained(server, [sites], silent=lambda told: told.round == 2)
    *_, last = read_journal(tmp_path / "run")
    why = last.why if isinstance(last, RunEnded) else last.state.ended if isinstance(last, StateSaved) else None
    assert why is not None
    assert re.search(r"to open round 2's sum.*it was tried 2 times \(waiting.retries\)", why)
    with server.opened() as run:
        pass
    assert run.coordinator.state.ended is None, "it was taken up"
    trained(server, [sites])
    assert [here.contributors for here in server.history] == [[], ["0", "1", "2"], ["0", "1", "2"]]


def test_another_client_is_asked_in_the_place_of_one_that_was_lost_after_it_had_masked(tmp_path: Path) -> None:
    some = {"sampling": Sampling(per_round=3), "waiting": Waiting(quorum=1.0), "secure": SecureSum(step_timeout_s=5.0)}
    server = Server(settings(clients=6, rounds=2, **some), START, folder=tmp_path / "run")
    gone, *others = Coordinator(server.federation, 6, server.seed, "run").sampler.draw(2)
    sites = [Site(str(number), float(number) - 2, Counted) for number in range(6)]
    Counted.fits = 0
    trained(server, [sites], (gone, 2))
    here = server.history[2]
    assert len(here.contributors) == 3
    assert gone not in here.contributors
    assert set(others) <= set(here.contributors)
    assert len(here.discarded) == 1
    assert Counted.fits == 7, "those that are asked again do not train again"


def test_updates_masked_for_a_discarded_sum_are_refused(tmp_path: Path) -> None:
    sites = [Site("0", 1.0), Site("1", -3.0), Site("2", 0.5)]
    server = Server(settings(secure=SecureSum(step_timeout_s=3.0), rounds=1), START, folder=tmp_path / "run")
    refused: list[Message] = []

    def late(told: SecureSumRequest) -> bool:
        return told.attempt == 0

    class Late(Tapped):
        def send(self, message: Message) -> Message:
            old = [one for one in self.received if isinstance(one, Update) and one.attempt == 0]
            if isinstance(message, Update) and message.attempt == 1 and not refused:
                refused.append(super().send(next(one for one in old if one.client == message.client)))
            return super().send(message)

    with server.opened() as run:
        node = Node(Late(run.service, silent=late), list[Any](sites), tmp_path / "node", "n", hold_s=1.0)
        node.run()
        assert run.runtime.wait(60)
    assert isinstance(refused[0], Receipt)
    assert (refused[0].accepted, refused[0].reason) == (False, "stale")
    assert "masked it for a sum of round 1 that was discarded" in refused[0].message
    assert server.history[1].contributors == ["0", "1", "2"]


def test_secure_runs_refuse_unmasked_updates() -> None:
    for table, said in (
        ({"send": "weights"}, "send"),
        ({"up": "int8"}, "up"),
        ({"robust": "median"}, "robust"),
        ({"masks": {"frozen": ["w"]}}, "masks"),
        ({"noise": {"clip": 1, "multiplier": 1}, "weigh_by": "equal"}, "noise.by"),
        ({"waiting": {"quorum": 0.5}}, "secure.threshold"),
    ):
        with pytest.raises(recipe.RecipeError, match=said):
            recipe.read(Federation, {"secure": {}, **table})
    assert recipe.read(Federation, {"secure": {"partners": 4}}).secure == SecureSum(partners=4)


@pytest.mark.parametrize("earlier_version", [False, True])
def test_a_server_that_is_started_again_still_opens_the_sum(tmp_path: Path, earlier_version: bool) -> None:
    """Killed at every step of a round: keys, encrypted shares, and parts that came before it are in its file.

    Before the sum is opened the server is updated, or its file has the field names of the version before.
    """
    names, asked = ["a", "b", "c"], SecureSum(threshold=0.6, step_timeout_s=0.5)
    path = tmp_path / "secure.json"
    people = {name: Participant(name) for name in names}

    def restarted() -> SecureSumRelay:
        return SecureSumRelay(asked, "run", path, lambda number: set(names))

    def hear(client: str, **said: Any) -> SecureSumReply:
        return restarted().handle(SecureSumRequest(node="n", session="s", client=client, round=1, **said))

    for name, person in people.items():
        keys = person.keys
        hear(name, keys={"mask": keys.mask.hex(), "cipher": keys.cipher.hex(), "seal": keys.seal.hex()})
    cohort = cohort_of(asked, "run", 1, names)
    for name, person in people.items():
        told = hear(name, waits_for="cohort")
        assert told.cohort == tuple(names)
        given = {
            other: PublicKeys(client=other, **{what: bytes.fromhex(keys[what]) for what in ("mask", "cipher", "seal")})
            for other, keys in told.keys.items()
        }
        hear(name, encrypted_shares={to: text.hex() for to, text in person.share(cohort, given).items()})
    values = {name: torch.tensor([10 * k, -k]) for k, name in enumerate(names)}
    sums = torch.zeros(2, dtype=torch.int64)
    for name in names:
        told = hear(name, waits_for="encrypted_shares")
        received = {sender: bytes.fromhex(text) for sender, text in (told.encrypted_shares or {}).items()}
        assert not people[name].unreadable(received)
        hear(name, unreadable=())
        if name == "c":
            continue  # its values do not come in time
        sums += dict(people[name].mask(received, {"model/x": values[name]}))["model/x"]
    with pytest.raises(FederatedError, match="no message from: a, b"):
        restarted().open(1, ["a", "b"])
    assert hear("c", waits_for="survivors").finished
    for name in ("a", "b"):
        here = hear(name, waits_for="survivors").survivors
        assert here == ("a", "b")
        parts = people[name].reveal(here)
        told = hear(
            name,
            seed_shares={of: f"{part:x}" for of, part in parts.seeds.items()},
            key_shares={of: f"{part:x}" for of, part in parts.keys.items()},
        )
        assert told.finished
    if earlier_version:
        former = {"cohort": "circle", "encrypted_shares": "letters", "sharers": "written", "unreadable": "bad"}
        for name, other in {**former, "maskers": "sure", "survivors": "here"}.items():
            assert f'"{name}"' in path.read_text()
            path.write_text(path.read_text().replace(f'"{name}"', f'"{other}"'))
    restarted().open(1, ["a", "b"]).remove("model/x", sums)
    assert torch.equal(sums, values["a"] + values["b"])
    path.unlink()
    with pytest.raises(FederatedError, match=r"what opens them is gone: .*secure\.json"):
        restarted().open(1, ["a", "b"])


class Cut(InProcessLink):
    """A line that is away when client 2 tells its second update."""

    def send(self, message: Message) -> Message:
        if isinstance(message, Update) and (message.client, message.round) == ("2", 2):
            raise LinkError("its line is cut")
        return super().send(message)


@pytest.mark.slow
def test_masked_values_that_are_gone_from_the_servers_disk_discard_their_sum(tmp_path: Path) -> None:
    """Somebody removed a file: the others' masks fit no other values, so that all are asked for again."""
    sites = [Site("0", 1.0), Site("1", -3.0), Site("2", 0.5)]
    undisturbed = Server(settings(rounds=2), START, folder=tmp_path / "undisturbed")
    trained(undisturbed, [sites])
    server = Server(settings(rounds=2), START, folder=tmp_path / "run")
    with server.opened() as run:
        links = [Cut(run.service) for _ in range(2)]
        executors: list[list[Any]] = [list(sites[:2]), list(sites[2:])]
        nodes = [
            Node(link, executor, tmp_path / "run" / f"node{number}", f"n{number}", hold_s=1.0)
            for number, (link, executor) in enumerate(zip(links, executors, strict=True))
        ]
        threads = [threading.Thread(target=node.run, daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        assert run.runtime.until(lambda: len(run.runtime.spooled()) == 2 and run.coordinator.state.committed == 1, 60)
        for node in nodes:
            node.stop()
        for thread in threads:
            thread.join(60)
        gone = sorted(run.runtime.spooled())[0]
        blob = next(iter(manifest_of(run.service.blobs, gone).blobs))
        run.service.blobs.file(blob).unlink()
    again = Server(settings(rounds=2), folder=tmp_path / "run")
    trained(again, [sites[:2], sites[2:]])
    assert "not on the server's disk any more" in "".join(again.history[2].discarded)
    assert again.history[2].contributors == ["0", "1", "2"]
    assert again.history[2].base == undisturbed.history[2].base


def test_secure_settings_are_refused_over_plain_flower_messages() -> None:
    with pytest.raises(FederatedError, match="would be made on this machine"):
        refuse_unmasked_updates(settings())


def test_weights_above_max_weight_are_refused(tmp_path: Path) -> None:
    """Counts above ``max_weight`` were once cut off in silence: then all clients weighed the same."""
    sites = [Site("0", 1.0), Site("1", -3.0), Site("2", 0.5)]
    few = SecureSum(step_timeout_s=5.0, max_weight=10)
    with pytest.raises(
        FederatedError, match=r"has \d+ samples in round 1, and a secure sum weighs up to 10: raise sec"
    ):
        trained_here(Server(settings(secure=few, waiting=Waiting(retries=0)), START, folder=tmp_path / "run"), sites)


def test_a_server_takes_no_weight_beyond_what_was_masked(tmp_path: Path) -> None:
    with Server(settings(secure=SecureSum(max_weight=10)), START, folder=tmp_path / "run").opened() as run:
        base = run.weights.all()[-1].manifest
        asked = ExpectedUpdate(
            base=base, weights={}, transfer_mask=TransferMask(masks=Masks()), round=1, steps=4, weigh_by="samples", masked=True,
            max_weight=10,
        )  # fmt: skip
        sent = Manifest(kind="update", tensors={}, blobs={}, base=base.digest)
        update = Update(
            node="n", session="s", client="0", round=1, manifest=sent, samples=11, tokens=0, steps=4, seconds=1.0,
            secure=True,
        )  # fmt: skip
        with pytest.raises(RefusedError, match=r"samples = 11, and a secure sum weighs up to 10") as raised:
            validate_update(update, asked, Baseline(), Checks(), run.blobs)
        assert raised.value.reason == "weight"


def trained_here(server: Server, sites: list[Site]) -> None:
    with server.opened() as run:
        node = Node(InProcessLink(run.service), list[Any](sites), Path(server.folder) / "node", "n", hold_s=1.0)
        node.run()
        run.wait(60)


def test_clients_mask_with_those_alone_whose_nodes_have_signed(tmp_path: Path) -> None:
    """A server that puts keys of its own in the place of another client's is found out by nodes that have the file of nodes."""
    own, other, third, stranger = (NodeKey.make(tmp_path / f"{number}.key") for number in range(4))
    nodes = tmp_path / "nodes"
    nodes.write_text(f"{own.line('a', ['0'])}\n{other.line('b', ['1'])}\n{third.line('c', ['2'])}\n")
    identity = Identity(sign=own.sign, vouches=Registry(nodes).vouches)
    nothing = Manifest(kind="weights", tensors={}, blobs={})
    fit = Fit(
        run="run-1", client="0", round=3, steps=1, clock=0, base="", weights=nothing,
        privacy={"secure": {"clients": 2, "attempt": 1}},
    )  # fmt: skip
    update = Update(
        node="a", session="s", client="0", round=3, manifest=nothing, samples=1, tokens=1, steps=1, seconds=1.0
    )

    def keys_of(client: str, key: NodeKey, node: str = "b", **signed: Any) -> dict[str, str]:
        made = Participant(client).keys
        said = {"mask": made.mask.hex(), "cipher": made.cipher.hex(), "seal": made.seal.hex(), "node": node}
        about = {"run": "run-1", "number": 3, "attempt": 1, "client": client, **signed}
        return {**said, "signature": key.sign(keys_text(keys=said, **about))}

    def masked(theirs: dict[str, str]) -> Message:
        sent: list[SecureSumRequest] = []

        def say(make: Callable[[str], Message]) -> Message:
            message = make("s")
            assert isinstance(message, SecureSumRequest)
            sent.append(message)
            if message.waits_for == "cohort":
                mine = {**(message.keys or {}), "node": "a"}
                return SecureSumReply(cohort=("0", "1"), keys={"0": mine, "1": theirs})
            return SecureSumReply(finished=True)

        with pytest.raises(ClientError) as raised:
            SecureSumClient("a", fit, say, threading.Event(), 0.0, identity).masked(
                update, FolderStore(tmp_path), tmp_path
            )
        assert ("nothing is sent" in str(raised.value)) == (len(sent) == 1)
        return sent[-1]

    wrong = keys_of("1", other)
    for theirs in (
        {**wrong, "mask": Participant("1").keys.mask.hex()},
        {**wrong, "signature": ""},
        {name: text for name, text in wrong.items() if name != "signature"},
        keys_of("1", stranger),
        keys_of("1", other, node="c"),
        keys_of("1", other, node="nobody"),
        keys_of("1", own, node="a"),
        keys_of("1", other, run="run-2"),
        keys_of("1", other, number=2),
        keys_of("1", other, attempt=0),
    ):
        assert masked(theirs).encrypted_shares is None  # type: ignore[attr-defined]
    assert masked(keys_of("1", other)).encrypted_shares is not None, "signed by b for its own client"  # type: ignore[attr-defined]


def test_a_server_takes_no_keys_that_others_would_not_mask_with(tmp_path: Path) -> None:
    key = NodeKey.make(tmp_path / "a.key")
    (tmp_path / "nodes").write_text(key.line("a", ["0"]) + "\n")
    guard = Authenticator(Registry(tmp_path / "nodes"), run="run-1")
    guard.joined(Join(node="a", clients=("0",)), Welcome(session="s", run="run-1", heartbeat_interval_s=1.0))
    said = {"mask": "00", "cipher": "01", "seal": "02"}
    signed = {**said, "signature": key.sign(keys_text("run-1", 2, 0, "0", said))}
    guard.check(SecureSumRequest(node="a", session="s", client="0", round=2, keys=signed), "s", "")
    for client, keys, number in (
        ("0", said, 2),
        ("0", {**signed, "mask": "03"}, 2),
        ("0", signed, 3),
        ("1", signed, 2),
    ):
        with pytest.raises(ProtocolError, match=f"the keys of client {client} are not signed by the key of 'a'"):
            guard.check(SecureSumRequest(node="a", session="s", client=client, round=number, keys=keys), "s", "")
    Authenticator(None, run="run-1").joined(
        Join(node="a", clients=()), Welcome(session="s", run="run-1", heartbeat_interval_s=1.0)
    )


def test_nodes_that_know_each_other_sum_over_http(tmp_path: Path) -> None:
    """Registered nodes, of which the second holds the file of nodes too; the server holds no more answers than one."""
    sites = [Site("0", 1.0), Site("1", -3.0), Site("2", 0.5)]
    plain = Server(settings(secure=None, rounds=2), START, folder=tmp_path / "plain")
    trained(plain, [sites])
    keys = {name: NodeKey.make(tmp_path / f"{name}.key") for name in ("a", "b")}
    nodes = tmp_path / "nodes"
    nodes.write_text(f"{keys['a'].line('a', ['0', '1'])}\n{keys['b'].line('b', ['2'])}\n")
    server = Server(settings(rounds=2), START, folder=tmp_path / "run")
    listening = Listening(nodes=nodes, limits=Limits(held=1))
    with server.opened() as run, HttpServer(run.service, listening, run.blobs) as http:
        threads = []
        for name, executor, vouches in (("a", sites[:2], None), ("b", sites[2:], Registry(nodes).vouches)):
            link = HttpLink(http.address, tmp_path / name / "blobs", key=keys[name], retry_timeout_s=10)
            identity = Identity(sign=keys[name].sign, vouches=vouches)
            node = Node(link, list[Any](executor), tmp_path / name, name, hold_s=1.0, identity=identity)
            threads.append(threading.Thread(target=node.run, daemon=True))
            threads[-1].start()
        assert run.runtime.wait(60), run.coordinator.status(run.runtime.now())
        for thread in threads:
            thread.join(60)
    assert [here.contributors for here in server.history] == [[], ["0", "1", "2"], ["0", "1", "2"]]
    torch.testing.assert_close(server.weights()["w"], plain.weights()["w"], rtol=1e-6, atol=1e-7)
