"""The demo transformer learns a made-up language in which every word decides the next."""

import math
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import arclight.compat.lightning as L
from arclight.compat.lightning.pytorch.demos import Transformer

WORDS, LENGTH = 12, 8


class Text(Dataset):
    """Windows of a text in which word ``w`` is followed by ``5 w + 1`` nine times in ten."""

    def __init__(self, words, seed):
        generator = torch.Generator().manual_seed(seed)
        text = [0]
        for surprise in (torch.rand(words, generator=generator) < 0.1).tolist():
            other = int(torch.randint(WORDS, (), generator=generator))
            text.append(other if surprise else (5 * text[-1] + 1) % WORDS)
        self.text = torch.tensor(text)

    def __len__(self):
        return len(self.text) // LENGTH - 1

    def __getitem__(self, index):
        start = index * LENGTH
        return self.text[start : start + LENGTH], self.text[start + 1 : start + LENGTH + 1]


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Transformer(vocab_size=WORDS, ninp=32, nhead=2, nhid=32, nlayers=1, dropout=0.0)

    def _loss(self, batch):
        inputs, following = batch
        # the decoder is shown no word of the answer
        output = self.model(inputs, inputs)
        return F.nll_loss(output, following.reshape(-1))

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(folder):
    L.seed_everything(0)
    model = LanguageModel()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=6, gradient_clip_val=1.0, accumulate_grad_batches=2, val_check_interval=0.5,
        logger=False, enable_checkpointing=False, default_root_dir=folder, enable_progress_bar=False,
    )  # fmt: skip
    train = DataLoader(Text(4096, seed=0), batch_size=16, shuffle=True)
    (before,) = trainer.validate(model, DataLoader(Text(512, seed=1), batch_size=16), verbose=False)
    trainer.fit(model, train, DataLoader(Text(512, seed=1), batch_size=16))
    (after,) = trainer.validate(model, DataLoader(Text(512, seed=1), batch_size=16), verbose=False)
    assert before["val_loss"] > 0.8 * math.log(WORDS), before
    assert after["val_loss"] < 1.2, after


if __name__ == "__main__":
    main(sys.argv[1])
