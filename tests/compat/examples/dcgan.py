"""A convolutional GAN with a loop of its own: two models and two optimizers of one Fabric draw a bright square."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight.compat.lightning as L

NOISE = 8


def squares(samples):
    images = torch.full((samples, 1, 8, 8), -0.8)
    images[:, :, 2:6, 2:6] = 0.8
    return TensorDataset((images + 0.1 * torch.randn_like(images)).clamp(-1, 1))


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip


def critic():
    return nn.Sequential(nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4), nn.Flatten())


def main(folder):
    L.seed_everything(0)
    fabric = L.Fabric(accelerator="cpu", devices=1)
    net_g, net_c = generator(), critic()
    net_g, optimizer_g = fabric.setup(net_g, torch.optim.Adam(net_g.parameters(), lr=0.005, betas=(0.5, 0.999)))
    net_c, optimizer_c = fabric.setup(net_c, torch.optim.Adam(net_c.parameters(), lr=0.005, betas=(0.5, 0.999)))
    loader = fabric.setup_dataloaders(DataLoader(squares(256), batch_size=32, shuffle=True))

    for _ in range(15):
        for (real,) in loader:
            noise = torch.randn(len(real), NOISE, 1, 1, device=fabric.device)
            made = net_g(noise)
            ones, zeros = (
                torch.ones(len(real), 1, device=fabric.device),
                torch.zeros(len(real), 1, device=fabric.device),
            )

            optimizer_c.zero_grad()
            fabric.backward(F.binary_cross_entropy_with_logits(net_c(real), ones))
            fabric.backward(F.binary_cross_entropy_with_logits(net_c(made.detach()), zeros))
            optimizer_c.step()

            optimizer_g.zero_grad()
            fabric.backward(F.binary_cross_entropy_with_logits(net_c(made), ones))
            optimizer_g.step()

    net_g.eval()
    with torch.no_grad():
        images = net_g(torch.randn(64, NOISE, 1, 1, device=fabric.device))
    inside, outside = images[:, :, 2:6, 2:6].mean().item(), images[:, :, 0].mean().item()
    assert inside - outside > 0.8, (inside, outside)

    path = Path(folder) / "networks.ckpt"
    fabric.save(path, {"generator": net_g, "critic": net_c})
    fresh = fabric.setup(generator())
    rest = fabric.load(path, {"generator": fresh})
    assert set(rest) == {"critic"}, rest.keys()
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), net_g.parameters(), strict=True))


if __name__ == "__main__":
    main(sys.argv[1])
