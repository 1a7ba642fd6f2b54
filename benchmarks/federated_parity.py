"""Federated training of a small Llama beside the same training in one place: as many tokens, the same ones at IID clients."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import arclight as al
from arclight.federated import Client, DiLoCo, Federation, Server
from arclight.federated.clients.node import Node
from arclight.federated.codecs.settings import Codec, Int8, Raw
from arclight.federated.coordination.settings import Waiting
from arclight.federated.transports.link import InProcessLink
from arclight.text.families.llama import Llama, LlamaConfig

CLIENTS, SEQUENCES, LENGTH, LOCAL_STEPS = 4, 8, 64, 50
MODEL = LlamaConfig(
    vocab_size=128, dim=64, layers=2, heads=4, kv_heads=4, hidden=176, max_positions=LENGTH, rope_theta=10_000.0
)
OUTER = DiLoCo(lr=0.7, momentum=0.6)


def corpus(shared: Path) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Characters to train on and to measure with, and what they are."""
    if shared.is_file():
        text, about = shared.read_bytes(), "Shakespeare's plays"
    else:
        import os

        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        text, about = b"".join(one.read_bytes() for one in sources)[:1_200_000], "the standard library's sources"
    all_of_it = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=127)
    cut = int(0.95 * len(all_of_it))
    return all_of_it[:cut], all_of_it[cut:], about


@dataclass
class Drawn(Dataset[torch.Tensor]):
    """Sequences of one client, or with ``client`` None those of all, batch by batch: where each begins follows from seed and number."""

    text: torch.Tensor
    seed: int
    iid: bool
    client: int | None
    steps: int

    def __len__(self) -> int:
        return self.steps * SEQUENCES * (CLIENTS if self.client is None else 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        step, client = divmod(index, SEQUENCES), self.client
        number, place = step
        if client is None:
            number, client = divmod(number, CLIENTS)
        share = len(self.text) // CLIENTS
        first, last = (0, len(self.text)) if self.iid else (client * share, (client + 1) * share)
        generator = torch.Generator().manual_seed(((self.seed * 10_007 + number) * 64 + client) * 64 + place)
        start = int(torch.randint(first, last - LENGTH - 1, (1,), generator=generator))
        return self.text[start : start + LENGTH + 1]


class Batches(al.DataModule):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(
            self.drawn, batch_size=SEQUENCES * (CLIENTS if self.drawn.client is None else 1), shuffle=False
        )


class Characters(al.Module):
    """A Llama of 0.1 million parameters; the rate rises for 20 steps and falls to a twentieth of itself over ``steps``."""

    def __init__(self, lr: float, steps: int, start: dict[str, torch.Tensor] | None = None, fall: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model, self.lr, self.steps, self.fall = Llama(MODEL), lr, steps, fall
        if start is not None:
            self.load_state_dict(start)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)

        def rate(step: int) -> float:
            cosine = 0.5 * (1 + math.cos(math.pi * min(step / self.steps, 1)))
            return min(1.0, (step + 1) / 20) * (0.05 + 0.95 * cosine if self.fall else 1.0)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


QUIET = {
    "accelerator": "cpu", "gradient_clip_val": 1.0, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


def measure(weights: dict[str, torch.Tensor], text: torch.Tensor) -> float:
    """Mean loss of 512 sequences of text that nobody has trained on."""
    module = Characters(1.0, 1, weights).eval()
    generator = torch.Generator().manual_seed(7)
    starts = torch.randint(0, len(text) - LENGTH - 1, (512,), generator=generator).tolist()
    with torch.no_grad():
        return float(module.loss(torch.stack([text[start : start + LENGTH + 1] for start in starts])))


def central(
    train: Drawn, lr: float, start: dict[str, torch.Tensor] | None, folder: Path, *, fall: bool = True
) -> dict[str, torch.Tensor]:
    """The weights that one Trainer comes to on all clients' batches together."""
    module = Characters(lr, train.steps, start, fall)
    trainer = al.Trainer(max_steps=train.steps, default_root_dir=folder, **QUIET)
    trainer.fit(module, datamodule=Batches(train))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def federated(
    text: torch.Tensor,
    seed: int,
    lr: float,
    steps: int,
    start: dict[str, torch.Tensor],
    folder: Path,
    *,
    iid: bool,
    codec: Codec,
) -> dict[str, torch.Tensor]:
    """The weights that a federation of four clients comes to, each on its own batches."""
    federation = Federation(
        clients=CLIENTS, rounds=steps // LOCAL_STEPS, local_steps=LOCAL_STEPS, strategy=OUTER, up=codec, down=codec,
        evaluate_every=0, checkpoint_every_steps=10**6, waiting=Waiting(lease_s=600.0),
    )  # fmt: skip

    def client(number: int) -> Client:
        return Client(
            str(number), Characters(lr, steps), Batches(Drawn(text, seed, iid, number, steps)), trainer=QUIET, seed=seed
        )

    server = Server(federation, Characters(lr, steps, start), folder=folder / "run", seed=seed)
    run_here(server, [client(number) for number in range(CLIENTS)], folder)
    return server.weights()


def run_here(server: Server, clients: list[Client], folder: Path, seconds: float = 3600.0) -> None:
    """Server and clients in this process, to the run's end."""
    failed: list[BaseException] = []
    with server.opened() as run:
        node = Node(InProcessLink(run.service), clients, folder / "node", "here")

        def work() -> None:
            try:
                node.run()
            except BaseException as error:  # told below
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while not run.runtime.wait(0.05):
            seconds -= 0.05
            if failed or seconds < 0:
                raise RuntimeError(f"the run in {folder} did not end") from (failed[0] if failed else None)
        run.wait()
        thread.join(60)


@dataclass(frozen=True)
class Parity:
    """Losses of one seed."""

    central: float
    iid: float
    skewed: float
    int8: float


def parity(
    shared: Path, folder: Path, *, seeds: int, warm: int, steps: int, rates: tuple[float, ...]
) -> tuple[float, list[Parity], str]:
    """The loss to start from, the losses of each seed, and what the text is. The central loss is the best over ``rates``."""
    text, held_out, about = corpus(shared)
    start = central(Drawn(text, 0, True, None, warm), 4e-3, None, folder / "warm", fall=False)
    found = []
    for seed in range(1, seeds + 1):
        here = folder / str(seed)
        alone = [
            measure(central(Drawn(text, seed, True, None, steps), lr, start, here / f"central-{lr}"), held_out)
            for lr in rates
        ]
        losses = {}
        for name, iid, codec in (("iid", True, Raw()), ("skewed", False, Raw()), ("int8", True, Int8())):
            losses[name] = measure(
                federated(text, seed, rates[0], steps, start, here / name, iid=iid, codec=codec), held_out
            )
        found.append(Parity(min(alone), losses["iid"], losses["skewed"], losses["int8"]))
    return measure(start, held_out), found, about
