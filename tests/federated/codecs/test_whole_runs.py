"""Federations with codecs and masks, from public server to trainers and back: bytes on the wire, and what comes of training."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.clients.sites import Rows
from torch import nn

from arclight import Module
from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.codecs.settings import BF16, Codec, Int4, Int8, Raw, TopK
from arclight.federated.coordination.settings import Streaming
from arclight.federated.masks.settings import Experts, Masks
from arclight.federated.protocol import Manifest
from arclight.federated.server.published_weights import PublishedWeights
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.transports.link import InProcessLink


class Wide(Module):
    """Large enough for headers not to count."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:-1]:
            x = torch.relu(block(x))
        return self.blocks[-1](x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def loss_of(weights: Any) -> dict[str, float]:
    model = Wide()
    model.load_state_dict({name: weights[name].clone() for name in model.state_dict()})
    x, y = Rows(count=400).rows.tensors
    with torch.no_grad():
        return {"val/loss": float(nn.functional.cross_entropy(model(x), y))}


def run(folder: Path, rounds: int = 4, clients: int = 2, module: type[Wide] = Wide, **given: Any) -> Server:
    """Clients on nodes of their own, in threads."""
    torch.manual_seed(1)
    federation = Federation(clients=clients, rounds=rounds, local_steps=6, keep_rounds=0, **given)
    server = Server(federation, module(), folder=folder / "run", evaluate=loss_of, seed=3)
    with server.opened() as opened:
        nodes = []
        for name in map(str, range(clients)):
            client = Client(name, module(), Rows(seed=int(name), count=96), trainer={"accelerator": "cpu"}, seed=7)
            nodes.append(Node(InProcessLink(opened.service), [client], folder / f"node-{name}", f"n{name}", hold_s=0.5))
        threads = [threading.Thread(target=node.run, daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        assert opened.runtime.wait(90), "the run has not ended within 90 s"
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    return server


FP32 = sum(p.numel() * 4 for p in Wide().parameters())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss that training without codecs comes to."""
    return loss_of(run(tmp_path_factory.mktemp("plain")).weights())["val/loss"]


@pytest.mark.parametrize(
    ("up", "down", "most_up", "most_down", "within"),
    [
        (Int8(), Int8(), 0.28, 0.28, 0.01),
        pytest.param(Int4(), BF16(), 0.17, 0.53, 0.05, marks=pytest.mark.slow),
        pytest.param(TopK(), Raw(), 0.055, 1.02, 1.0, marks=pytest.mark.slow),
    ],
)
def test_bytes_are_few_and_training_gets_as_far(
    tmp_path: Path, plain: float, up: Codec, down: Codec, most_up: float, most_down: float, within: float
) -> None:
    """Biases and the small first and last weights of this model go raw: 2.8 % of its bytes."""
    coded = run(tmp_path, up=up, down=down)
    for number, here in enumerate(coded.history):
        assert all(size <= most_up * FP32 for size in here.bytes_up.values())
        if number > 1:  # the first weights come whole
            assert all(size <= most_down * FP32 for size in here.bytes_down.values()), number
    first = loss_of(coded.rounds.tensors(0, "model"))["val/loss"]
    last = loss_of(coded.weights())["val/loss"]
    assert last < first
    assert abs(last - plain) <= within * first, (first, last, plain)


def test_nodes_hold_the_weights_that_the_server_records(tmp_path: Path) -> None:
    server = run(tmp_path, up=TopK(share=0.1), down=Int8())
    base = server.history[3].base
    for node in ("node-0", "node-1"):
        (held,) = [path for path in (tmp_path / node).rglob(base) if path.is_file()]
        assert held.parent.name == "weights"


@pytest.mark.parametrize(
    ("personal", "down", "before", "after"),
    [
        # of 274,440 bytes; Raw sends whole weights where most of them change
        (("blocks.0.", "blocks.2."), Raw(), [274_440] * 3, [263_168] * 3),
        (("blocks.1.",), Raw(), [274_440, 11_272, 11_272], [11_272] * 3),
        (("blocks.1.",), Int8(), [274_440, 5000, 5000], [11_272, 5000, 5000]),
    ],
)
def test_client_initialised_tensors_are_not_downloaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    personal: tuple[str, ...],
    down: Codec,
    before: list[int],
    after: list[int],
) -> None:
    """And the rounds have the same bits; headers and names are 1 kB at most."""
    given: dict[str, Any] = {
        "clients": 1, "rounds": 3, "down": down, "evaluate_on": "clients", "evaluate_every": 0,
        "masks": Masks(personal=personal, personal_from="client"),
    }  # fmt: skip
    less = run(tmp_path / "less", **given)
    monkeypatch.setattr(PublishedWeights, "_initialised_by_clients", lambda self, own: set())
    whole = run(tmp_path / "whole", **given)
    for server, expected in ((whole, before), (less, after)):
        assert [sum(here.bytes_down.values()) for here in server.history][1:] == pytest.approx(expected, abs=1000)
    for number in range(4):
        digests = [server.rounds.open(number).files["model.safetensors"].sha256 for server in (whole, less)]
        assert digests[0] == digests[1]
    own = {name for name in Wide().state_dict() if name.startswith(personal)}
    (held,) = filter(Path.is_file, (tmp_path / "less" / "node-0").rglob(less.history[2].base))
    assert not own & {key.removeprefix("model/") for key in Manifest.from_json(held.read_bytes()).tensors}


class Headed(Wide):
    """With a large head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = nn.Linear(256, 128)


def test_personal_tensors_are_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the rounds have the same bits; headers are 1 kB at most."""
    given: dict[str, Any] = {
        "clients": 1, "rounds": 3, "evaluate_on": "clients", "evaluate_every": 0, "module": Headed, "masks": Masks(personal=("blocks.2.",)),
    }  # fmt: skip
    less = run(tmp_path / "less", **given)
    monkeypatch.setattr(PublishedWeights, "_kept_by_clients", lambda self, own: set())
    whole = run(tmp_path / "whole", **given)
    for server, expected in ((whole, [404_000] * 3), (less, [404_000, 272_400, 272_400])):
        assert [sum(here.bytes_down.values()) for here in server.history][1:] == pytest.approx(expected, abs=1000)
    for number in range(4):
        digests = [server.rounds.open(number).files["model.safetensors"].sha256 for server in (whole, less)]
        assert digests[0] == digests[1]


@pytest.mark.slow
def test_local_moments_in_their_periods(tmp_path: Path) -> None:
    """All go in the first round; coarse codecs leave them in bfloat16, as values."""
    masks = Masks(periods={"exp_avg": 2, "exp_avg_sq": 3})
    server = run(tmp_path, rounds=6, moments=("exp_avg", "exp_avg_sq"), masks=masks, up=Int8(), down=Int8())
    sizes = [sum(here.bytes_up.values()) / (2 * FP32) for here in server.history]
    expected = [0, 0.25 + 0.5 + 0.5, 0.25 + 0.5, 0.25 + 0.5, 0.25 + 0.5, 0.25, 0.25 + 0.5 + 0.5]
    assert sizes == pytest.approx(expected, abs=0.08)
    moments = server.rounds.tensors(6, "moments")
    assert set(moments) == {f"{s}/{name}" for s in ("exp_avg", "exp_avg_sq") for name in Wide().state_dict()}
    assert all(bool((value >= 0).all()) for key, value in moments.items() if key.startswith("exp_avg_sq/"))
    assert loss_of(server.weights())["val/loss"] < loss_of(server.rounds.tensors(0, "model"))["val/loss"]


@pytest.mark.slow
def test_fragments_take_turns(tmp_path: Path) -> None:
    """Long enough to have learned in whatever order the two threads draw from the process's generator when they shuffle."""
    server = run(tmp_path, rounds=18, streaming=Streaming(fragments=3, overlap=1, mix=0.5), up=Int8(), down=Int8())
    before = server.rounds.tensors(0, "model")
    for number in range(1, 19):
        after = server.rounds.tensors(number, "model")
        moved = {name.split(".")[1] for name in after if not torch.equal(after[name], before[name])}
        assert moved == {str(number % 3)}
        before = after
    assert loss_of(before)["val/loss"] < loss_of(server.rounds.tensors(0, "model"))["val/loss"]


class Mixture(Wide):
    """With something like experts, all of which act on every input."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.experts = nn.ParameterDict({"w": nn.Parameter(torch.randn(count, 2, 2))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.experts["w"].mean(0)


@pytest.mark.parametrize(
    ("form", "held"),
    [
        ("weights", 2),
        ("delta", 4),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in (("weights", 4), ("delta", 2))),
    ],
)
def test_experts_of_clients_come_together(tmp_path: Path, form: str, held: int) -> None:
    """Each expert has one client, so the server's are the clients' own: bit for bit where weights are sent."""
    masks = Masks(experts=Experts(tensors=("experts.",), per_client=2))
    federation = Federation(clients=2, rounds=2, local_steps=3, send=form, masks=masks, moments=("exp_avg",))  # type: ignore[arg-type]
    torch.manual_seed(1)
    server, modules = Server(federation, Mixture(), folder=tmp_path / "run"), [Mixture(held), Mixture(held)]
    with server.opened() as opened:
        clients = [
            Client(str(n), module, Rows(seed=n), trainer={"accelerator": "cpu"}) for n, module in enumerate(modules)
        ]
        node = threading.Thread(
            target=Node(InProcessLink(opened.service), clients, tmp_path / "node", "n", hold_s=0.5).run, daemon=True
        )
        node.start()
        assert opened.runtime.wait(60)
        node.join(30)
        assert not node.is_alive()
    after = server.weights()["experts.w"]
    own = [module.experts["w"].detach() for module in modules]
    expected = torch.cat([own[0][:2], own[1][-2:]])
    if form == "weights":
        assert torch.equal(after, expected)
    else:
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(after[0], server.rounds.tensors(1, "model")["experts.w"][0])
    assert server.rounds.tensors(2, "moments")["exp_avg/experts.w"].shape == (4, 2, 2)
