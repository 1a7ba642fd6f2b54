"""The server's side of secure sums: what a message costs with many clients, and what one of them can do to the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.fakes import Quadratic

from arclight.federated.clients.node import Node
from arclight.federated.privacy.key_agreement import PublicKeys
from arclight.federated.privacy.secure_aggregation import ENCRYPTED_SHARE_BYTES, Participant
from arclight.federated.privacy.settings import SecureSum
from arclight.federated.protocol import Message, SecureSumReply, SecureSumRequest
from arclight.federated.server.secure_sums import SecureSumRelay, cohort_of
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.transports.link import InProcessLink

Said = dict[str, Any]


@dataclass
class Sum:
    """One round of an `SecureSumRelay`, played by its clients; ``changed`` may put something else in the place of what one sends."""

    path: Path
    names: list[str]
    settings: SecureSum = field(default_factory=lambda: SecureSum(threshold=0.6, step_timeout_s=30.0))
    changed: Callable[[str, Said], Said] = lambda client, said: said
    expected: set[str] = field(default_factory=set)
    seconds: float = 0.0
    messages: int = 0

    def __post_init__(self) -> None:
        self.expected = self.expected or set(self.names)
        self.people = {name: Participant(name) for name in self.names}
        self.exchange = SecureSumRelay(self.settings, "run", self.path, lambda number: self.expected)
        self.values = {name: torch.tensor([7 * k + 1, -k]) for k, name in enumerate(self.names)}
        self.over: set[str] = set()

    def hear(self, client: str, **said: Any) -> SecureSumReply:
        began = time.thread_time()
        told = self.exchange.handle(
            SecureSumRequest(node="n", session="s", client=client, round=1, **self.changed(client, said))
        )
        self.seconds, self.messages = self.seconds + time.thread_time() - began, self.messages + 1
        if told.finished:
            self.over.add(client)
        return told

    @property
    def left(self) -> list[str]:
        return [name for name in self.names if name not in self.over]

    def played(self) -> tuple[list[str], torch.Tensor]:
        """Return the clients whose values are in the sum, and the sum."""
        for name in self.names:
            keys = self.people[name].keys
            self.hear(name, keys={"mask": keys.mask.hex(), "cipher": keys.cipher.hex(), "seal": keys.seal.hex()})
        for name in self.left:
            told = self.hear(name, waits_for="cohort")
            if told.finished:
                continue
            cohort = cohort_of(self.settings, "run", 1, told.cohort or ())
            keys = {
                other: PublicKeys(
                    client=other, **{what: bytes.fromhex(said[what]) for what in ("mask", "cipher", "seal")}
                )
                for other, said in told.keys.items()
            }
            self.hear(
                name, encrypted_shares={to: text.hex() for to, text in self.people[name].share(cohort, keys).items()}
            )
        inbox = {}
        for name in self.left:
            told = self.hear(name, waits_for="encrypted_shares")
            if told.finished:
                continue
            inbox[name] = {sender: bytes.fromhex(text) for sender, text in (told.encrypted_shares or {}).items()}
            self.hear(name, unreadable=self.people[name].unreadable(inbox[name]))
        sums = torch.zeros(2, dtype=torch.int64)
        for name in self.left:
            told = self.hear(name, waits_for="maskers")
            if not told.finished:
                received = {sender: text for sender, text in inbox[name].items() if sender in (told.maskers or ())}
                sums += dict(self.people[name].mask(received, {"x": self.values[name]}))["x"]
        here = self.left
        opening = threading.Thread(target=self._reveal, args=(here,), daemon=True)
        opening.start()
        self.exchange.open(1, here).remove("x", sums)
        opening.join(30)
        return here, sums

    def _reveal(self, here: list[str]) -> None:
        for name in here:
            said = self.hear(name, waits_for="survivors", hold_s=20.0).survivors
            assert said is not None
            parts = self.people[name].reveal(said)
            self.hear(
                name,
                seed_shares={of: f"{part:x}" for of, part in parts.seeds.items()},
                key_shares={of: f"{part:x}" for of, part in parts.keys.items()},
            )

    def exact(self, here: list[str]) -> torch.Tensor:
        return torch.stack([self.values[name] for name in here]).sum(0)


def names(count: int) -> list[str]:
    return [f"c{k:03d}" for k in range(count)]


def keys_that_are(keys: Mapping[str, str]) -> Callable[[str, Said], Said]:
    return lambda client, said: (
        {**said, "keys": {**said["keys"], **keys}} if client == "c001" and "keys" in said else said
    )


def letters_that_are(text: Callable[[str], str]) -> Callable[[str, Said], Said]:
    def changed(client: str, said: Said) -> Said:
        if client != "c001" or "encrypted_shares" not in said:
            return said
        return {**said, "encrypted_shares": {to: text(sealed) for to, sealed in said["encrypted_shares"].items()}}

    return changed


def without_letters(client: str, said: Said) -> Said:
    return {**said, "encrypted_shares": {}} if client == "c001" and "encrypted_shares" in said else said


def liar(client: str, said: Said) -> Said:
    return {**said, "unreadable": ("c000", "c002", "c003")} if client == "c001" and "unreadable" in said else said


INSIDERS = {
    "no hexadecimal": keys_that_are({"mask": "zz" * 32}),
    "short": keys_that_are({"cipher": "00ff"}),
    "no keys": lambda client, said: {**said, "keys": {}} if client == "c001" and "keys" in said else said,
    "low order": keys_that_are({"mask": "00" * 32}),
    "another low order": keys_that_are({"cipher": "01" + "00" * 31}),
    "no encrypted shares": without_letters,
    "encrypted shares of no hexadecimal": letters_that_are(lambda text: "g" + text[1:]),
    "encrypted shares cut short": letters_that_are(lambda text: text[:-2]),
    "encrypted shares that nobody can open": letters_that_are(lambda text: "00" * ENCRYPTED_SHARE_BYTES),
    "lies about encrypted shares": liar,
}  # fmt: skip


@pytest.mark.parametrize("what", INSIDERS)
def test_an_insider_is_left_out_and_the_sum_of_the_others_is_opened(tmp_path: Path, what: str) -> None:
    round_ = Sum(tmp_path / "secure.json", names(5), changed=INSIDERS[what])
    here, sums = round_.played()
    assert here == ["c000", "c002", "c003", "c004"]
    assert torch.equal(sums, round_.exact(here))


def test_another_clients_keys_are_no_ones_else(tmp_path: Path) -> None:
    first: dict[str, str] = {}

    def copied(client: str, said: Said) -> Said:
        if "keys" in said and client == "c000":
            first.update(said["keys"])
        return (
            {**said, "keys": {**first, "mask": first["mask"].upper()}} if "keys" in said and client == "c001" else said
        )

    here, _ = Sum(tmp_path / "secure.json", names(4), changed=copied).played()
    assert here == ["c000", "c002", "c003"]


def test_wrong_parts_of_one_partner_are_left_out(tmp_path: Path) -> None:
    def wrong(client: str, said: Said) -> Said:
        if client != "c001" or "seeds" not in said:
            return said
        return {**said, "seeds": {name: f"{int(part, 16) ^ 1:x}" for name, part in said["seeds"].items()}}

    round_ = Sum(tmp_path / "secure.json", names(6), changed=wrong)
    here, sums = round_.played()
    assert here == names(6)
    assert torch.equal(sums, round_.exact(here))


def test_one_bad_letter_costs_its_writer_the_round_and_not_its_reader(tmp_path: Path) -> None:
    def one(client: str, said: Said) -> Said:
        if client == "c003" and "encrypted_shares" in said:
            return {**said, "encrypted_shares": {**said["encrypted_shares"], "c000": "00" * ENCRYPTED_SHARE_BYTES}}
        return said

    here, _ = Sum(tmp_path / "secure.json", names(4), changed=one).played()
    assert here == ["c000", "c001", "c002"]


@pytest.mark.parametrize("when", ["keys", "encrypted_shares"])
def test_a_round_goes_on_with_or_without_a_client_that_was_started_again(tmp_path: Path, when: str) -> None:
    """Its secrets are gone. Before the cohort is settled its new keys count; after that the others go on."""
    round_ = Sum(tmp_path / "secure.json", names(4))
    again = Participant("c000")
    fresh = {"mask": again.keys.mask.hex(), "cipher": again.keys.cipher.hex(), "seal": again.keys.seal.hex()}

    def restarted(client: str, said: Said) -> Said:
        if when == "keys" and client == "c001" and "keys" in said:
            round_.people["c000"] = again
            assert not round_.exchange.handle(
                SecureSumRequest(node="n", session="s", client="c000", round=1, keys=fresh)
            ).finished
        if when == "encrypted_shares" and client == "c000" and "encrypted_shares" in said:
            return {"keys": fresh}
        return said

    round_.changed = restarted
    here, sums = round_.played()
    assert here == (names(4) if when == "keys" else ["c001", "c002", "c003"])
    assert torch.equal(sums, round_.exact(here))


def test_a_truncated_file_gives_its_complete_messages(tmp_path: Path) -> None:
    path = tmp_path / "secure.json"
    round_ = Sum(path, names(3))
    for name in names(3):
        keys = round_.people[name].keys
        round_.hear(name, keys={"mask": keys.mask.hex(), "cipher": keys.cipher.hex(), "seal": keys.seal.hex()})
    whole = path.read_bytes()
    assert round_.hear("c000", waits_for="cohort").cohort == tuple(names(3))
    for cut in range(len(whole) - 40, len(whole)):
        path.write_bytes(whole[:cut])
        state = SecureSumRelay(round_.settings, "run", path, lambda number: set(names(3)))
        assert not state.handle(SecureSumRequest(node="n", session="s", client="c000", round=1)).finished
        assert path.read_bytes().endswith(b"\n")
        assert b"\n\n" not in path.read_bytes()


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = Sum(tmp_path / "secure.json", names(2))
    keys = round_.people["c000"].keys
    said = {"mask": keys.mask.hex(), "cipher": keys.cipher.hex(), "seal": keys.seal.hex()}
    round_.hear("c001", waits_for="cohort")
    before = round_.path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", _full(Path.open))
        with pytest.raises(OSError, match="no room"):
            round_.hear("c000", keys=said)
    assert round_.path.read_bytes() == before
    round_.hear("c000", keys=said)
    assert b'"c000"' in round_.path.read_bytes(), "said again, it is written down"


def _full(real: Callable[..., Any]) -> Callable[..., Any]:
    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def tell(self) -> int:
            return int(self._file.tell())

        def write(self, data: bytes) -> None:
            self._file.write(data[:9])
            self._file.flush()

        def flush(self) -> None:
            raise OSError(28, "no room")

    return lambda path, mode="r", **more: Full(real(path, mode, **more)) if mode == "ab" else real(path, mode, **more)


def test_polling_cost_per_client_does_not_grow_with_the_clients(tmp_path: Path) -> None:
    def polls(count: int) -> tuple[float, int]:
        round_ = Sum(tmp_path / f"{count}.json", names(count))
        for name in round_.names:
            keys = round_.people[name].keys
            round_.hear(name, keys={"mask": keys.mask.hex(), "cipher": keys.cipher.hex(), "seal": keys.seal.hex()})
        round_.hear(round_.names[0], waits_for="cohort")
        size = round_.path.stat().st_size
        for name in round_.names[1:]:
            said = {other: "00" * ENCRYPTED_SHARE_BYTES for other in round_.names if other != name}
            round_.hear(name, encrypted_shares=said)
        round_.seconds = 0.0
        for _ in range(10):
            for name in round_.names[1:9]:
                assert round_.hear(name, waits_for="encrypted_shares") == SecureSumReply()
        assert round_.path.stat().st_size > size
        return round_.seconds / 80, round_.path.stat().st_size

    few, _ = polls(12)
    many, _ = polls(96)
    assert many < 10 * few + 1e-3, "with a cost of the square of the clients it was 64 times"


def test_an_answer_is_held_until_there_is_one(tmp_path: Path) -> None:
    round_ = Sum(tmp_path / "secure.json", names(2))
    given = [round_.people[name].keys for name in round_.names]
    said = [{"mask": one.mask.hex(), "cipher": one.cipher.hex(), "seal": one.seal.hex()} for one in given]
    told: list[SecureSumReply] = []
    waiting = threading.Thread(
        target=lambda: told.append(round_.hear("c000", keys=said[0], waits_for="cohort", hold_s=30.0)), daemon=True
    )
    waiting.start()
    time.sleep(0.05)
    assert not told
    round_.hear("c001", keys=said[1])
    waiting.join(60)
    assert told[0].cohort == ("c000", "c001")
    waiting = threading.Thread(
        target=lambda: told.append(round_.hear("c000", waits_for="encrypted_shares", hold_s=30.0)), daemon=True
    )
    waiting.start()
    round_.exchange.close()
    waiting.join(60)
    assert told[1] == SecureSumReply(), "a server that stops holds nobody"


@dataclass
class Site:
    """A client as a node's executor takes it."""

    name: str

    def learner(self, folder: Path) -> Quadratic:
        return Quadratic(float(int(self.name) % 7), samples=int(self.name) + 1)


@pytest.mark.parametrize("count", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_many_clients_sum_in_secret(tmp_path: Path, count: int) -> None:
    """A whole round over the public server; its mean is the open one's, and what messages cost the server is bounded."""
    start = {"w": torch.linspace(-1, 1, 60)}
    sites: list[Any] = [Site(str(number)) for number in range(count)]

    def trained(folder: Path, secure: SecureSum | None) -> Server:
        asked = Federation(clients=count, rounds=1, local_steps=2, evaluate_every=0, secure=secure)
        server = Server(asked, start, folder=folder)
        with server.opened() as run:
            node = Node(InProcessLink(Watched(run.service)), sites, folder / "node", "n", hold_s=10.0)
            node.run()
            assert run.runtime.wait(60)
        return server

    cost = {"seconds": 0.0, "messages": 0}
    lock = threading.Lock()

    class Watched:
        def __init__(self, service: Any) -> None:
            self._service, self.blobs, self.reserve_upload = service, service.blobs, service.reserve_upload
            self.largest_message = service.largest_message

        def answer(self, message: Message) -> Message:
            began = time.thread_time()
            answer: Message = self._service.answer(message)
            if isinstance(message, SecureSumRequest):
                with lock:
                    cost["seconds"] += time.thread_time() - began
                    cost["messages"] += 1
            return answer

    plain = trained(tmp_path / "plain", None)
    assert cost["messages"] == 0
    secure = trained(tmp_path / "secure", SecureSum(step_timeout_s=100.0, partners=min(16, count // 2)))
    torch.testing.assert_close(secure.weights()["w"], plain.weights()["w"], rtol=1e-6, atol=1e-7)
    assert len(secure.history[1].contributors) == count
    assert cost["messages"] < 12 * count, "five messages each, and those of whoever waits for long"
    assert cost["seconds"] < 5, "of the server's processor, where each poll of each client once took 0.1"
