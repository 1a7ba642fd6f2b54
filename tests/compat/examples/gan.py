"""Two networks against each other with manual optimization: points around (2, -1) out of noise."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight.compat.lightning as L

CENTRE = torch.tensor([2.0, -1.0])


def layers(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Linear(16, outputs))


class Adversaries(L.LightningModule):
    def __init__(self, noise=4, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.critic = layers(noise, 2), layers(2, 1)
        self.trained_together = 0

    def forward(self, noise):
        return self.generator(noise)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        optimizer_g, optimizer_c = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(optimizer_g)
        self.trained_together += any(p.requires_grad for p in self.critic.parameters())
        made = self(torch.randn(len(real), self.hparams.noise))
        loss_g = F.binary_cross_entropy_with_logits(self.critic(made), ones)
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_c)
        self.trained_together += any(p.requires_grad for p in self.generator.parameters())
        loss_c = F.binary_cross_entropy_with_logits(self.critic(real), ones)
        loss_c = (loss_c + F.binary_cross_entropy_with_logits(self.critic(made.detach()), zeros)) / 2
        optimizer_c.zero_grad()
        self.manual_backward(loss_c)
        optimizer_c.step()
        self.untoggle_optimizer(optimizer_c)
        self.log_dict({"g_loss": loss_g, "c_loss": loss_c}, prog_bar=True)

    def configure_optimizers(self):
        options = {"lr": self.hparams.lr, "betas": (0.5, 0.999)}
        return [
            torch.optim.Adam(self.generator.parameters(), **options),
            torch.optim.Adam(self.critic.parameters(), **options),
        ], []


def main(folder):
    L.seed_everything(0)
    real = CENTRE + 0.5 * torch.randn(512, 2)
    model = Adversaries()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=30, logger=False, enable_checkpointing=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(real), batch_size=64, shuffle=True, drop_last=True))
    with torch.no_grad():
        made = model(torch.randn(512, 4))
    distance = (made.mean(0) - CENTRE).norm().item()
    assert distance < 1.0, distance
    assert model.trained_together == 0, "an optimizer's turn left the other network's parameters open"
    assert trainer.global_step == 2 * 30 * 8, trainer.global_step
    assert set(trainer.callback_metrics) == {"g_loss", "c_loss"}


if __name__ == "__main__":
    main(sys.argv[1])
