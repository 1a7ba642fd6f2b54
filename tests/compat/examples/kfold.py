"""Cross-validation with a loop of its own: Fabric sets up models, optimizers and loaders, saves and loads."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from arclight.compat.lightning.fabric import Fabric, seed_everything


def moons(samples):
    angle = torch.rand(samples) * torch.pi
    upper = torch.arange(samples) % 2
    points = torch.stack((angle.cos() + (1 - upper), torch.where(upper == 1, angle.sin(), 0.5 - angle.sin())), 1)
    return TensorDataset(points + 0.1 * torch.randn(samples, 2), upper)


def train_epoch(fabric, model, optimizer, loader):
    model.train()
    for points, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), labels)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    return loss.detach()


@torch.no_grad()
def accuracy(fabric, model, loader):
    model.eval()
    right = sum((model(points).argmax(1) == labels).sum() for points, labels in loader)
    return (fabric.all_reduce(right.float(), reduce_op="sum") / len(loader.dataset)).item()


def main(folder, folds=3, epochs=12):
    seed_everything(0)
    fabric = Fabric(accelerator="cpu", devices=1, loggers=[])
    fabric.launch()
    data = moons(240)
    turns = torch.randperm(len(data)) % folds
    results = []
    for fold in range(folds):
        with fabric.init_module():
            net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.03))
        train, held_out = fabric.setup_dataloaders(
            DataLoader(Subset(data, (turns != fold).nonzero().flatten().tolist()), batch_size=16, shuffle=True),
            DataLoader(Subset(data, (turns == fold).nonzero().flatten().tolist()), batch_size=16),
        )
        for _ in range(epochs):
            train_epoch(fabric, model, optimizer, train)
        results.append(accuracy(fabric, model, held_out))
        fabric.print(f"fold {fold}: {results[-1]:.3f}")
        fabric.save(Path(folder) / f"fold-{fold}.ckpt", {"model": model, "optimizer": optimizer, "fold": fold})
    assert min(results) > 0.8, results

    state = {"model": model, "optimizer": optimizer, "fold": -1}
    fabric.load(Path(folder) / "fold-0.ckpt", state)
    assert state["fold"] == 0
    assert accuracy(fabric, model, fabric.setup_dataloaders(DataLoader(data, batch_size=80))) > 0.8


if __name__ == "__main__":
    main(sys.argv[1])
