"""Deep Q-learning along a corridor, the batches drawn from a replay buffer that grows while it trains."""

import random
import sys
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import arclight.compat.lightning as L

LENGTH = 6


class Corridor:
    """One step left or right at a time; the right end is worth 1."""

    def __init__(self):
        self.place = 0

    def step(self, action):
        before, self.place = self.place, max(0, self.place + (1 if action else -1))
        done = self.place == LENGTH - 1
        after = self.place
        if done:
            self.place = 0
        return before, action, float(done), done, after


def seen(places):
    return F.one_hot(torch.as_tensor(places), LENGTH).float()


class Experience(IterableDataset):
    """``samples`` draws from what is in the buffer when an epoch asks for them."""

    def __init__(self, buffer, samples):
        self.buffer, self.samples = buffer, samples

    def __iter__(self):
        yield from random.sample(self.buffer, self.samples)


class Agent(L.LightningModule):
    def __init__(self, gamma=0.9, lr=0.01, sync_every=10, samples=64):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(LENGTH, 32), nn.ReLU(), nn.Linear(32, 2))
        self.target = nn.Sequential(nn.Linear(LENGTH, 32), nn.ReLU(), nn.Linear(32, 2)).requires_grad_(False)
        self.target.load_state_dict(self.net.state_dict())
        self.world, self.buffer, self.goals = Corridor(), deque(maxlen=500), 0
        for _ in range(200):
            self.play(epsilon=1.0)

    @torch.no_grad()
    def play(self, epsilon):
        explore = random.random() < epsilon
        action = random.randrange(2) if explore else int(self.net(seen([self.world.place])).argmax())
        self.buffer.append(self.world.step(action))
        self.goals += self.buffer[-1][3]

    def training_step(self, batch, batch_idx):
        self.play(epsilon=max(0.1, 1 - self.global_step / 200))
        before, actions, rewards, dones, after = batch
        values = self.net(seen(before)).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            future = self.target(seen(after)).max(1).values.masked_fill(dones, 0)
        loss = F.mse_loss(values, rewards.float() + self.hparams.gamma * future)
        if self.global_step % self.hparams.sync_every == 0:
            self.target.load_state_dict(self.net.state_dict())
        self.log("loss", loss)
        self.log("goals", float(self.goals), prog_bar=True)
        return loss

    def train_dataloader(self):
        return DataLoader(Experience(self.buffer, self.hparams.samples), batch_size=16)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)


def main(folder):
    L.seed_everything(0)
    agent = Agent()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=100, logger=False, enable_checkpointing=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(agent)
    assert trainer.global_step == 400, trainer.global_step
    choices = agent.net(seen(list(range(LENGTH - 1)))).argmax(1).tolist()
    assert choices == [1] * (LENGTH - 1), f"the way is always to the right, not {choices}"
    value = agent.net(seen([0])).max().item()
    assert abs(value - 0.9 ** (LENGTH - 2)) < 0.2, value


if __name__ == "__main__":
    main(sys.argv[1])
