"""Who may listen where, who may join, and whom nodes believe."""

import http.server
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.federated.transports.standin import StandIn

from arclight.federated.blobs.memory import MemoryStore
from arclight.federated.errors import FederatedError, LinkError, ProtocolError, UntrustedError
from arclight.federated.protocol import Join, Message, Welcome
from arclight.federated.transports import http_server, keys
from arclight.federated.transports.guard import Guard, signed_text
from arclight.federated.transports.http_link import HttpLink
from arclight.federated.transports.http_server import HttpServer
from arclight.federated.transports.keys import Certificate, NodeKey, Registry, fingerprint_of, make_certificate
from arclight.federated.transports.settings import Listening
from arclight.federated.transports.trust import check_certificate, explained


@pytest.fixture
def made(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path / "keys", ["localhost", "127.0.0.1"])


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "example.org"])
def test_off_loopback_a_server_needs_tls_and_registered_nodes(host: str, made: Certificate, tmp_path: Path) -> None:
    tls = {"certificate": made.certificate, "private_key": made.private_key}
    for given in ({}, tls, {"nodes": tmp_path / "nodes"}):
        with pytest.raises(ValueError, match="arclight federate keys server"):
            Listening(host=host, **given)  # type: ignore[arg-type]
    Listening(host=host, nodes=tmp_path / "nodes", **tls)
    with pytest.raises(ValueError, match="belong together"):
        Listening(certificate=made.certificate)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_on_loopback_it_needs_neither(host: str) -> None:
    Listening(host=host)


def test_a_node_does_not_speak_unencrypted_to_another_machine(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="https://"):
        HttpLink("http://10.0.0.7:80", tmp_path)
    for wrong in ("10.0.0.7", "https://", "https://10.0.0.7:port", "https://10.0.0.7:99999"):
        with pytest.raises(FederatedError, match="https://host:port"):
            HttpLink(wrong, tmp_path)


def test_keys_are_for_their_owner_and_are_never_overwritten(made: Certificate, tmp_path: Path) -> None:
    NodeKey.make(tmp_path / "node.key")
    for path in (tmp_path / "node.key", made.private_key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        NodeKey.make(tmp_path / "node.key")
    with pytest.raises(FileExistsError):
        make_certificate(tmp_path / "keys", ["localhost"])
    assert NodeKey.read(tmp_path / "node.key").public == NodeKey.read(tmp_path / "node.key").public


def test_a_file_that_is_no_key_is_told(made: Certificate, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(FederatedError, match="no node key"):
        NodeKey.read(tmp_path / "empty")
    with pytest.raises(FederatedError, match="another kind of key"):
        NodeKey.read(made.private_key)
    with pytest.raises(FederatedError, match="no PEM certificate"):
        fingerprint_of(tmp_path / "empty")


def test_a_private_key_that_others_can_read_is_not_used(made: Certificate, tmp_path: Path) -> None:
    NodeKey.make(tmp_path / "node.key")
    check_certificate(made.certificate, made.private_key)
    for path, use in (
        (tmp_path / "node.key", lambda: NodeKey.read(tmp_path / "node.key")),
        (made.private_key, lambda: check_certificate(made.certificate, made.private_key)),
    ):
        path.chmod(0o640)
        with pytest.raises(FederatedError, match=f"chmod 600 {path}"):
            use()


@pytest.mark.parametrize("host", ["https://example.org", "example.org:8470", "two words", "", "-x", "bücher.example"])
def test_a_certificate_is_for_hosts(host: str, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="a name or an address alone"):
        make_certificate(tmp_path / "keys", ["localhost", host])
    assert not (tmp_path / "keys").exists()


def test_a_half_overwritten_pair_is_never_left(made: Certificate, tmp_path: Path) -> None:
    made.private_key.unlink()
    with pytest.raises(FileExistsError):
        make_certificate(tmp_path / "keys", ["localhost"])
    assert not made.private_key.exists()


def test_a_certificate_that_no_node_would_believe_is_told(
    made: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_certificate(tmp_path / "other", ["example.org"])
    monkeypatch.setattr(keys, "_YEARS", 0)
    old = make_certificate(tmp_path / "old", ["example.org"])
    for certificate, key, words in (
        (made.certificate, other.private_key, "is not the private key of"),
        (made.private_key, made.private_key, "has no PEM certificate"),
        (tmp_path / "none", made.private_key, "there is no certificate"),
        (made.certificate, tmp_path / "none", "there is no private key"),
        (old.certificate, old.private_key, "no node believes it today"),
    ):
        with pytest.raises(FederatedError, match=words):
            check_certificate(certificate, key)


def test_a_certificate_is_believed_by_name_or_by_fingerprint(made: Certificate, tmp_path: Path) -> None:
    with HttpServer(
        StandIn(MemoryStore()), Listening(certificate=made.certificate, private_key=made.private_key)
    ) as served:
        assert served.fingerprint == made.fingerprint
        for number, trust in enumerate(
            (
                {"cafile": made.certificate},
                {"fingerprint": made.fingerprint},
                {"fingerprint": _colons(made.fingerprint)},
            )
        ):
            for host in ("127.0.0.1", "localhost"):
                link = HttpLink(f"https://{host}:{served.port}", tmp_path / str(number), patience=5, **trust)  # type: ignore[arg-type]
                assert isinstance(link.send(Join(node="a", clients=())), Welcome)
                link.close()


def _colons(fingerprint: str) -> str:
    return ":".join(fingerprint[i : i + 2] for i in range(0, 64, 2)).upper()


def test_a_wrong_certificate_is_refused_at_once(made: Certificate, tmp_path: Path) -> None:
    other = make_certificate(tmp_path / "other", ["localhost", "127.0.0.1"])
    elsewhere = make_certificate(tmp_path / "elsewhere", ["example.org"])
    server = StandIn(MemoryStore())
    with HttpServer(server, Listening(certificate=elsewhere.certificate, private_key=elsewhere.private_key)) as served:
        for trust, words in (
            ({}, "did not prove to be the server"),
            ({"cafile": other.certificate}, "did not prove to be the server"),
            ({"cafile": elsewhere.certificate}, "did not prove to be the server"),  # the right one, for another host
            ({"fingerprint": other.fingerprint}, elsewhere.fingerprint),
        ):
            link = HttpLink(served.address, tmp_path / "cache", patience=600, **trust)  # type: ignore[arg-type]
            with pytest.raises(LinkError, match=words):
                link.send(Join(node="a", clients=()))
            link.close()
    assert server.said == []


@pytest.mark.parametrize("kind", ["expired", "another host", "unknown"])
def test_why_a_certificate_is_not_believed_is_explained(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "expired":
        monkeypatch.setattr(keys, "_YEARS", 0)
        monkeypatch.setattr(http_server, "check_certificate", lambda *_: None)  # it was good when the server started
    shown = make_certificate(tmp_path / "keys", ["example.org" if kind == "another host" else "127.0.0.1"])
    words = {
        "expired": "has expired: the server needs a new one",
        "another host": "not for 127.0.0.1, but for example.org",
        "unknown": "give the server.pem that it uses as --ca",
    }[kind]
    with HttpServer(
        StandIn(MemoryStore()), Listening(certificate=shown.certificate, private_key=shown.private_key)
    ) as served:
        link = HttpLink(served.address, tmp_path, patience=600, cafile=None if kind == "unknown" else shown.certificate)
        with pytest.raises(UntrustedError) as raised:
            link.send(Join(node="a", clients=()))
        link.close()
        told = explained(raised.value, served.address)
    assert isinstance(told, UntrustedError)
    assert words in str(told)


@pytest.mark.parametrize("tls", [True, False])
def test_tls_where_there_is_none_and_none_where_there_is_are_told(tls: bool, made: Certificate, tmp_path: Path) -> None:
    listening = Listening(certificate=made.certificate, private_key=made.private_key) if tls else Listening()
    with HttpServer(StandIn(MemoryStore()), listening) as served:
        wrong = served.address.replace("https:", "http:") if tls else served.address.replace("http:", "https:")
        link = HttpLink(wrong, tmp_path, patience=0.1)
        with pytest.raises(LinkError) as raised:
            link.send(Join(node="a", clients=()))
        link.close()
        told = explained(raised.value, wrong)
        right = LinkError("it is only slow")
        assert explained(right, served.address) is right
    assert isinstance(told, UntrustedError)
    assert ("speaks TLS: join https://" if tls else "does not speak TLS") in str(told)
    assert explained(raised.value, wrong) is raised.value, "nobody is there any more"


def test_a_program_that_is_no_server_of_ours_is_told(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        link = HttpLink(f"http://127.0.0.1:{other.server_port}", tmp_path, patience=5)
        with pytest.raises(ProtocolError, match=r"nothing that an arclight server has \(501 .*see that the address"):
            link.send(Join(node="a", clients=()))
        link.close()
        other.shutdown()


def test_a_certificate_that_cannot_be_read_is_told_when_the_server_starts(made: Certificate, tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("junk")
    for certificate, words in (
        (tmp_path / "junk", "no PEM certificate"),
        (tmp_path / "gone", "there is no certificate"),
    ):
        listening = Listening(certificate=certificate, private_key=made.private_key)
        with pytest.raises(FederatedError, match=words):
            HttpServer(StandIn(MemoryStore()), listening).start()
    with pytest.raises(FederatedError, match="no PEM certificate"):
        HttpLink("https://localhost:1", tmp_path / "cache", cafile=tmp_path / "junk")
    with pytest.raises(FederatedError, match="cannot be read"):
        HttpServer(StandIn(MemoryStore()), Listening(nodes=tmp_path / "nobody"))


# -- nodes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> NodeKey:
    return NodeKey.make(tmp_path / "a.key")


@pytest.fixture
def nodes(key: NodeKey, tmp_path: Path) -> Path:
    path = tmp_path / "nodes"
    path.write_text("# who may join\n\n" + key.line("a", ["left", "right"]) + "\n")
    return path


def test_a_registered_node_joins_and_others_do_not(
    key: NodeKey, nodes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = StandIn(MemoryStore())
    stranger = NodeKey.make(tmp_path / "b.key")

    def join(node: str, key: NodeKey | None, clients: tuple[str, ...]) -> Message:
        link = HttpLink(served.address, tmp_path / "cache", key=key, patience=5)
        try:
            return link.send(Join(node=node, clients=clients))
        finally:
            link.close()

    with HttpServer(server, Listening(nodes=nodes)) as served:
        assert isinstance(join("a", key, ("left",)), Welcome)
        for node, of, clients, words in (
            ("b", stranger, ("left",), "'b' is not registered"),
            ("a", stranger, ("left",), "with another key"),
            ("a", None, ("left",), "join with that of 'a'"),
            ("a", key, ("left", "middle"), "not for middle"),
            ("a", key, (), "not for any client"),
        ):
            with pytest.raises(ProtocolError, match=words):
                join(node, of, clients)
        assert len(server.said) == 1
        with nodes.open("a") as file:
            file.write(stranger.line("b") + "\n")
        assert isinstance(join("b", stranger, ("anything",)), Welcome), "a node that was registered meanwhile"
        assert isinstance(join("b", stranger, ()), Welcome)
        with nodes.open("a") as file:
            file.write("c secret\n")
        with pytest.raises(ProtocolError, match="cannot use its file of nodes") as raised:
            join("a", key, ("left",))
    assert "secret" not in str(raised.value)
    assert "line 5" in caplog.text


def test_a_challenge_is_signed_once_with_the_whole_message(key: NodeKey, nodes: Path) -> None:
    guard = Guard(Registry(nodes))
    join = Join(node="a", clients=("left",), key=key.public)

    def signed(challenge: str) -> Join:
        return replace(join, signature=key.sign(signed_text(join, challenge)))

    challenge = guard.challenge()
    guard.check(signed(challenge), "", challenge)
    with pytest.raises(ProtocolError, match="used before"):
        guard.check(signed(challenge), "", challenge)
    with pytest.raises(ProtocolError, match="not this server's"):
        guard.check(signed("made up"), "", "made up")
    for changed in (
        replace(signed(challenge := guard.challenge()), clients=("right",)),
        signed("another"),
        replace(join, signature=""),
        replace(join, signature="!"),
        replace(join, signature="AAAA"),
    ):
        challenge = guard.challenge()
        with pytest.raises(ProtocolError, match="signature is not that of 'a'"):
            guard.check(changed, "", challenge)


def test_a_challenge_grows_old(key: NodeKey, nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    guard = Guard(Registry(nodes))
    join = Join(node="a", clients=("left",), key=key.public)
    challenge = guard.challenge()
    join = replace(join, signature=key.sign(signed_text(join, challenge)))
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(ProtocolError, match="too old"):
        guard.check(join, "", challenge)


@pytest.mark.parametrize(
    "line", ["a", "a notakey", "a b!=", "a {key} x y", "a b/c {key}", "a {key}\na {key}", "../a {key}"]
)
def test_a_file_of_nodes_that_is_none_is_told_with_its_line(line: str, key: NodeKey, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("# nodes\n" + line.format(key=key.public))
    with pytest.raises(FederatedError, match=f"line {2 + line.count(chr(10))}"):
        Registry(tmp_path / "nodes")


def test_names_that_would_break_the_file_are_refused(key: NodeKey) -> None:
    for node, clients in (("a b", []), ("a", ["x,y"]), ("a\n", []), ("", [])):
        with pytest.raises(FederatedError, match="registered name"):
            key.line(node, clients)
    assert os.linesep not in key.line("a", ["b"])
