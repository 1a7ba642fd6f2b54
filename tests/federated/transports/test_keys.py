"""Keys and certificates decide who may listen, who may join, and which servers nodes trust."""

import http.server
import json
import os
import socket
import ssl
import stat
import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
from cryptography import x509
from tests.federated.fakes import EchoServer, TemporaryStore

from arclight.fabric.serving import certificates
from arclight.fabric.serving.certificates import Certificate, CertificateError, fingerprint_of, make_certificate
from arclight.federated.blobs.object_store import ObjectStore
from arclight.federated.errors import FederatedError, LinkError, ProtocolError, UntrustedError
from arclight.federated.protocol import Join, Message, Welcome, read
from arclight.federated.transports import http_server
from arclight.federated.transports.authentication import Authenticator, signed_text
from arclight.federated.transports.http_client import HttpLink
from arclight.federated.transports.http_server import HttpServer
from arclight.federated.transports.keys import NodeKey, Registry
from arclight.federated.transports.settings import Listening
from arclight.federated.transports.tls import check_certificate, explain_link_error


@pytest.fixture
def made(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path / "keys", ["localhost", "127.0.0.1"], extra="federated")


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
    listening = Listening(host=host)
    assert (listening.certificate, listening.nodes) == (None, None)


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
        make_certificate(tmp_path / "keys", ["localhost"], extra="federated")
    assert NodeKey.read(tmp_path / "node.key").public == NodeKey.read(tmp_path / "node.key").public


def test_a_file_that_is_no_key_is_refused(made: Certificate, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(FederatedError, match="no node key"):
        NodeKey.read(tmp_path / "empty")
    with pytest.raises(FederatedError, match="another kind of key"):
        NodeKey.read(made.private_key)
    with pytest.raises(CertificateError, match="no PEM certificate"):
        fingerprint_of(tmp_path / "empty", extra="federated")


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
    with pytest.raises(CertificateError, match="a name or an address alone"):
        make_certificate(tmp_path / "keys", ["localhost", host], extra="federated")
    assert not (tmp_path / "keys").exists()


def test_a_half_overwritten_pair_is_never_left(made: Certificate, tmp_path: Path) -> None:
    made.private_key.unlink()
    with pytest.raises(FileExistsError):
        make_certificate(tmp_path / "keys", ["localhost"], extra="federated")
    assert not made.private_key.exists()


def test_unusable_certificates_are_refused_with_the_reason(
    made: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_certificate(tmp_path / "other", ["example.org"], extra="federated")
    monkeypatch.setattr(certificates, "_YEARS", 0)
    old = make_certificate(tmp_path / "old", ["example.org"], extra="federated")
    for certificate, key, words in (
        (made.certificate, other.private_key, "is not the private key of"),
        (made.private_key, made.private_key, "has no PEM certificate"),
        (tmp_path / "none", made.private_key, "there is no certificate"),
        (made.certificate, tmp_path / "none", "there is no private key"),
        (old.certificate, old.private_key, "clients do not trust it today"),
    ):
        with pytest.raises(FederatedError, match=words):
            check_certificate(certificate, key)


def test_a_certificate_is_believed_by_name_or_by_fingerprint(made: Certificate, tmp_path: Path) -> None:
    with HttpServer(
        EchoServer(TemporaryStore()), Listening(certificate=made.certificate, private_key=made.private_key)
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
                link = HttpLink(f"https://{host}:{served.port}", tmp_path / str(number), retry_timeout_s=5, **trust)  # type: ignore[arg-type]
                assert isinstance(link.send(Join(node="a", clients=())), Welcome)
                link.close()


def _colons(fingerprint: str) -> str:
    return ":".join(fingerprint[i : i + 2] for i in range(0, 64, 2)).upper()


def test_a_wrong_certificate_is_refused_at_once(made: Certificate, tmp_path: Path) -> None:
    other = make_certificate(tmp_path / "other", ["localhost", "127.0.0.1"], extra="federated")
    elsewhere = make_certificate(tmp_path / "elsewhere", ["example.org"], extra="federated")
    server = EchoServer(TemporaryStore())
    with HttpServer(server, Listening(certificate=elsewhere.certificate, private_key=elsewhere.private_key)) as served:
        for trust, words in (
            ({}, "did not prove to be the server"),
            ({"cafile": other.certificate}, "did not prove to be the server"),
            ({"cafile": elsewhere.certificate}, "did not prove to be the server"),  # the right one, for another host
            ({"fingerprint": other.fingerprint}, elsewhere.fingerprint),
        ):
            link = HttpLink(served.address, tmp_path / "cache", retry_timeout_s=600, **trust)  # type: ignore[arg-type]
            with pytest.raises(LinkError, match=words):
                link.send(Join(node="a", clients=()))
            link.close()
    assert server.received == []


@pytest.mark.parametrize("kind", ["expired", "another host", "unknown"])
def test_untrusted_certificates_are_explained(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "expired":
        monkeypatch.setattr(certificates, "_YEARS", 0)
        monkeypatch.setattr(http_server, "check_certificate", lambda *_: None)  # it was good when the server started
    shown = make_certificate(
        tmp_path / "keys", ["example.org" if kind == "another host" else "127.0.0.1"], extra="federated"
    )
    words = {
        "expired": "has expired: the server needs a new one",
        "another host": "not for 127.0.0.1, but for example.org",
        "unknown": "give the server.pem that it uses as --ca",
    }[kind]
    with HttpServer(
        EchoServer(TemporaryStore()), Listening(certificate=shown.certificate, private_key=shown.private_key)
    ) as served:
        link = HttpLink(
            served.address, tmp_path, retry_timeout_s=600, cafile=None if kind == "unknown" else shown.certificate
        )
        with pytest.raises(UntrustedError) as raised:
            link.send(Join(node="a", clients=()))
        link.close()
        told = explain_link_error(raised.value, served.address)
    assert isinstance(told, UntrustedError)
    assert words in str(told)


@pytest.mark.parametrize("tls", [True, False])
def test_tls_mismatches_of_node_and_server_are_explained(tls: bool, made: Certificate, tmp_path: Path) -> None:
    listening = Listening(certificate=made.certificate, private_key=made.private_key) if tls else Listening()
    with HttpServer(EchoServer(TemporaryStore()), listening) as served:
        wrong = served.address.replace("https:", "http:") if tls else served.address.replace("http:", "https:")
        link = HttpLink(wrong, tmp_path, retry_timeout_s=0.1)
        with pytest.raises(LinkError) as raised:
            link.send(Join(node="a", clients=()))
        link.close()
        told = explain_link_error(raised.value, wrong)
        right = LinkError("it is only slow")
        assert explain_link_error(right, served.address) is right
    assert isinstance(told, UntrustedError)
    assert ("speaks TLS: join https://" if tls else "does not speak TLS") in str(told)
    assert explain_link_error(raised.value, wrong) is raised.value, "nobody is there any more"


def test_a_server_of_another_program_is_reported(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        link = HttpLink(f"http://127.0.0.1:{other.server_port}", tmp_path, retry_timeout_s=5)
        with pytest.raises(ProtocolError, match=r"nothing that an arclight server has \(501 .*see that the address"):
            link.send(Join(node="a", clients=()))
        link.close()
        other.shutdown()


def test_an_unreadable_certificate_is_reported_when_the_server_starts(made: Certificate, tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("junk")
    for certificate, words in (
        (tmp_path / "junk", "no PEM certificate"),
        (tmp_path / "gone", "there is no certificate"),
    ):
        listening = Listening(certificate=certificate, private_key=made.private_key)
        with pytest.raises(FederatedError, match=words):
            HttpServer(EchoServer(TemporaryStore()), listening).start()
    with pytest.raises(FederatedError, match="no PEM certificate"):
        HttpLink("https://localhost:1", tmp_path / "cache", cafile=tmp_path / "junk")
    with pytest.raises(FederatedError, match="cannot be read"):
        HttpServer(EchoServer(TemporaryStore()), Listening(nodes=tmp_path / "nobody"))


# -- nodes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> NodeKey:
    return NodeKey.make(tmp_path / "a.key")


@pytest.fixture
def nodes(key: NodeKey, tmp_path: Path) -> Path:
    path = tmp_path / "nodes"
    path.write_text("# who may join\n\n" + key.line("a", ["left", "right"]) + "\n")
    return path


def test_a_file_of_nodes_may_have_a_byte_order_mark_and_must_be_text(nodes: Path) -> None:
    whole = nodes.read_bytes().partition(b"\n\n")[2]
    nodes.write_bytes(b"\xef\xbb\xbf" + whole.replace(b"\n", b"\r\n"))
    assert list(Registry(nodes).nodes()) == ["a"]
    nodes.write_bytes(b"\xff\xfe" + whole)
    with pytest.raises(FederatedError, match="cannot be read"):
        Registry(nodes).nodes()


def test_a_registered_node_joins_and_others_do_not(
    key: NodeKey, nodes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = EchoServer(TemporaryStore())
    stranger = NodeKey.make(tmp_path / "b.key")

    def join(node: str, key: NodeKey | None, clients: tuple[str, ...]) -> Message:
        link = HttpLink(served.address, tmp_path / "cache", key=key, retry_timeout_s=5)
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
        assert len(server.received) == 1
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
    guard = Authenticator(Registry(nodes))
    join = Join(node="a", clients=("left",), key=key.public)
    assert Authenticator(None).challenge() != Authenticator(None).challenge()

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


def test_a_join_is_for_one_server_and_one_run(key: NodeKey, nodes: Path) -> None:
    """Somebody who shows a certificate of their own passes on another server's challenge, and then what the node has signed."""
    honest = Authenticator(Registry(nodes), fingerprint="b" * 64, run="run-1")
    challenge = honest.challenge()

    def signed(**said: str) -> Join:
        join = Join(node="a", clients=("left",), key=key.public, **said)
        return replace(join, signature=key.sign(signed_text(join, challenge)))

    for relayed, words in (
        (signed(server="a" * 64, run="run-1"), "shows the certificate of fingerprint aaaa.*and this one has bbbb"),
        (signed(run="run-1"), "a server without TLS, and this one has bbbb"),
        (signed(server="b" * 64, run="run-2"), "joins run 'run-2', and this server is at run 'run-1'"),
    ):
        with pytest.raises(ProtocolError, match=words):
            honest.check(relayed, "", challenge)
    claimed = replace(signed(server="a" * 64, run="run-1"), server="b" * 64)
    with pytest.raises(ProtocolError, match="signature is not that of 'a'"):
        honest.check(claimed, "", challenge)
    honest.check(signed(server="b" * 64, run="run-1"), "", challenge)


def test_a_node_signs_for_the_certificate_that_it_sees(
    key: NodeKey, nodes: Path, made: Certificate, tmp_path: Path
) -> None:
    server = EchoServer(TemporaryStore())
    listening = Listening(nodes=nodes, certificate=made.certificate, private_key=made.private_key)
    with HttpServer(server, listening) as served:
        for trust in ({"cafile": made.certificate}, {"fingerprint": made.fingerprint}):
            link = HttpLink(served.address, tmp_path / "cache", key=key, retry_timeout_s=5, **trust)  # type: ignore[arg-type]
            assert isinstance(link.send(Join(node="a", clients=("left",))), Welcome)
            link.close()
    joins = [one for one in server.received if isinstance(one, Join)]
    assert [(one.server, one.run) for one in joins] == [(made.fingerprint, "run")] * 2


def test_challenges_use_no_memory_and_do_not_expire_others(key: NodeKey, nodes: Path) -> None:
    guard = Authenticator(Registry(nodes))
    join, first = Join(node="a", clients=("left",), key=key.public), guard.challenge()
    before = sys.getsizeof(vars(guard)), sum(sys.getsizeof(value) for value in vars(guard).values())
    for _ in range(2000):
        guard.challenge()
    assert (sys.getsizeof(vars(guard)), sum(sys.getsizeof(value) for value in vars(guard).values())) == before
    guard.check(replace(join, signature=key.sign(signed_text(join, first))), "", first)
    wrong = replace(join, signature=key.sign(signed_text(join, "another")))
    for _ in range(3):
        with pytest.raises(ProtocolError, match="signature is not"):
            guard.check(wrong, "", challenge := guard.challenge())
    guard.check(replace(join, signature=key.sign(signed_text(join, challenge))), "", challenge)


def test_older_versions_say_which_they_are(key: NodeKey, nodes: Path, tmp_path: Path) -> None:
    told = json.loads(Join(node="a", clients=("left",)).to_json())
    with pytest.raises(ProtocolError, match="the other side speaks version 1, this one 3: install the same arclight"):
        read(json.dumps({**told, "version": 1}))

    class Old(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"challenge": "c", "version": 1}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Old) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        link = HttpLink(f"http://127.0.0.1:{other.server_port}", tmp_path, key=key, retry_timeout_s=5)
        with pytest.raises(ProtocolError, match="the server speaks version 1, this node 3: install the same arclight"):
            link.send(Join(node="a", clients=("left",)))
        link.close()
        other.shutdown()


def test_tls_below_1_3_is_refused(made: Certificate, tmp_path: Path) -> None:
    listening = Listening(certificate=made.certificate, private_key=made.private_key)
    with HttpServer(EchoServer(TemporaryStore()), listening) as served:
        for newest, fine in ((ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)):
            context = ssl.create_default_context(cafile=made.certificate)
            context.verify_flags |= ssl.VERIFY_X509_STRICT  # as later versions of Python are by themselves
            context.maximum_version = newest
            with socket.create_connection(("127.0.0.1", served.port)) as line:
                if fine:
                    assert context.wrap_socket(line, server_hostname="127.0.0.1").version() == "TLSv1.3"
                    continue
                with pytest.raises(ssl.SSLError):
                    context.wrap_socket(line, server_hostname="127.0.0.1")
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    older.load_cert_chain(made.certificate, made.private_key)
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        other.socket = older.wrap_socket(other.socket, server_side=True)
        threading.Thread(target=other.serve_forever, daemon=True).start()
        link = HttpLink(f"https://127.0.0.1:{other.server_port}", tmp_path, cafile=made.certificate, retry_timeout_s=5)
        with pytest.raises(UntrustedError, match=r"does not speak TLS 1\.3"):
            link.send(Join(node="a", clients=()))
        link.close()
        other.shutdown()


def test_a_certificate_vouches_for_itself_alone(made: Certificate) -> None:
    read_in = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    basic = read_in.extensions.get_extension_for_class(x509.BasicConstraints).value
    usage = read_in.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (basic.ca, usage.key_cert_sign, usage.crl_sign, usage.digital_signature) == (False, False, False, True)


def test_keys_that_may_speak_for_any_client_are_named_in_the_log(
    key: NodeKey, nodes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    HttpServer(EchoServer(TemporaryStore()), Listening(nodes=nodes))
    assert "speak for any client" not in caplog.text
    nodes.write_text(nodes.read_text() + NodeKey.make(nodes.parent / "b.key").line("b") + "\n")
    HttpServer(EchoServer(TemporaryStore()), Listening(nodes=nodes))
    assert "lets b speak for any client" in caplog.text


def test_a_challenge_grows_old(key: NodeKey, nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    guard = Authenticator(Registry(nodes))
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
def test_a_malformed_node_key_file_is_refused_with_its_line(line: str, key: NodeKey, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("# nodes\n" + line.format(key=key.public))
    with pytest.raises(FederatedError, match=f"line {2 + line.count(chr(10))}"):
        Registry(tmp_path / "nodes")


def test_names_that_would_break_the_file_are_refused(key: NodeKey) -> None:
    for node, clients in (("a b", []), ("a", ["x,y"]), ("a\n", []), ("", [])):
        with pytest.raises(FederatedError, match="registered name"):
            key.line(node, clients)
    assert os.linesep not in key.line("a", ["b"])


# -- places --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "stores", "fine"),
    [
        ("memory://bucket/run", (), False),
        ("memory://bucket/run", ("memory://bucket/run",), True),
        ("memory://bucket/run/", ("memory://other", "memory://bucket"), True),
        ("memory://bucket-of-others/run", ("memory://bucket",), False),
        ("memory://bucket/../others", ("memory://bucket",), False),
        ("file:///etc", (), False),
        ("s3://127.0.0.1/run", (), False),
    ],
)
def test_a_node_uses_only_object_stores_that_its_site_allows(
    address: str, stores: tuple[str, ...], fine: bool, tmp_path: Path
) -> None:
    class Elsewhere(EchoServer):
        def answer(self, message: Message) -> Message:
            answer = super().answer(message)
            return replace(answer, blob_address=address) if isinstance(answer, Welcome) else answer

    with HttpServer(Elsewhere(TemporaryStore())) as served:
        link = HttpLink(served.address, tmp_path, retry_timeout_s=5, stores=stores)
        if fine:
            assert isinstance(link.send(Join(node="a", clients=())), Welcome)
            assert isinstance(link.blobs, ObjectStore)
        else:
            with pytest.raises(UntrustedError, match=f"join with --blobs {address}"):
                link.send(Join(node="a", clients=()))
            assert not isinstance(link.blobs, ObjectStore)
        link.close()


# -- uvicorn -------------------------------------------------------------------------------------------------------


def test_the_server_goes_with_versions_of_uvicorn_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads are received by taking over its connections, which another minor may have changed. Tests with Flower have the oldest."""
    wanted = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    (pin,) = [one for one in wanted["project"]["optional-dependencies"]["federated"] if one.startswith("uvicorn")]
    (_, oldest), (_, newest) = http_server.UVICORN
    assert pin == f"uvicorn>=0.{oldest},<0.{newest + 1}"
    assert tuple(map(int, uvicorn.__version__.split(".")[:2])) == http_server.UVICORN[1], (
        "the newest is the one that is tested here"
    )
    for other in (f"0.{oldest - 1}.9", f"0.{newest + 1}.0", "1.0.0"):
        monkeypatch.setattr(uvicorn, "__version__", other)
        with pytest.raises(
            FederatedError, match=rf"needs uvicorn 0\.{oldest} to 0\.{newest}, and {other} is installed"
        ):
            HttpServer(EchoServer(TemporaryStore())).start()
