"""Define Lightning's demo language models, on a text file of the user's.

User code imports these as ``pytorch.demos``, by the table in `names`; nothing in Arclight calls them. Names, sizes and shapes are Lightning's
and stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, random_split

from arclight.trainer.module import Module

_VOCABULARY = 33278  # of WikiText-2


class Dictionary:
    """Words and their numbers, in the order in which they came."""

    def __init__(self) -> None:
        self.word2idx: dict[str, int] = {}
        self.idx2word: list[str] = []

    def add_word(self, word: str) -> int:
        if word not in self.word2idx:
            self.word2idx[word] = len(self.idx2word)
            self.idx2word.append(word)
        return self.word2idx[word]

    def __len__(self) -> int:
        return len(self.idx2word)


def tokenize(path: Path) -> tuple[Tensor, Dictionary]:
    """Return the word ids of a text file, each line ended by ``<eos>``, and the words."""
    words = Dictionary()
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return torch.tensor([words.add_word(word) for line in lines for word in [*line.split(), "<eos>"]]), words


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of ``block_size`` words of ``wikitext-2.txt``, and the same one word on.

    The file is in ``data_dir``.

    Raises FileNotFoundError if the file is missing: it is not downloaded, whatever ``download`` says.
    """

    def __init__(self, data_dir: Path = Path("./data"), block_size: int = 35, download: bool = False) -> None:
        self.path = Path(data_dir) / "wikitext-2.txt"
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} is missing; put a text of yours there: nothing is downloaded")
        self.data, self.dictionary = tokenize(self.path)
        self.block_size = block_size

    @property
    def vocab_size(self) -> int:
        return len(self.dictionary)

    def __len__(self) -> int:
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start, end = index * self.block_size, (index + 1) * self.block_size
        return self.data[start:end], self.data[start + 1 : end + 1]


class SequenceSampler(Sampler[list[int]]):
    """Sampler of ``batch_size`` indices, a chunk apart, so that rows continue across batches."""

    def __init__(self, dataset: Sized, batch_size: int) -> None:
        self.batch_size, self.chunk_size = batch_size, len(dataset) // batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.chunk_size):
            yield [first + row * self.chunk_size for row in range(self.batch_size)]

    def __len__(self) -> int:
        return self.chunk_size


class PositionalEncoding(nn.Module):
    """Add sines and cosines of the position to (N, T, ``dim``).

    "Attention Is All You Need", 3.5.
    """

    table: Tensor

    def __init__(self, dim: int, dropout: float = 0.1, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        angles = torch.arange(max_len).unsqueeze(1) * torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :dim]
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.table[: x.size(1)])  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Transformer over word ids (N, T), with log probabilities (N * T, vocabulary)."""

    def __init__(
        self, vocab_size: int = _VOCABULARY, ninp: int = 200, nhead: int = 2, nhid: int = 200, nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ninp, self.vocab_size = ninp, vocab_size
        self.embedding, self.pos_encoder = nn.Embedding(vocab_size, ninp), PositionalEncoding(ninp, dropout)
        self.transformer = nn.Transformer(ninp, nhead, nlayers, nlayers, nhid, dropout, batch_first=True)
        self.decoder = nn.Linear(ninp, vocab_size)

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(inputs.size(1), inputs.device)
        source, goal = (self.pos_encoder(self.embedding(words) * math.sqrt(self.ninp)) for words in (inputs, target))
        return F.log_softmax(self.decoder(self.transformer(source, goal, tgt_mask=mask)), dim=-1).flatten(0, 1)


class LightningTransformer(Module):
    """Module that predicts the next word of a :class:`WikiText2`."""

    def __init__(self, vocab_size: int = _VOCABULARY) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return self.model(inputs, target)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = batch
        return F.nll_loss(self(inputs, target), target.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        text = WikiText2()
        held_out = len(text) // 10
        return DataLoader(random_split(text, [len(text) - held_out, held_out])[0])


class SimpleLSTM(nn.Module):
    """LSTM from word ids (N, T) and a state to log probabilities and the next state."""

    def __init__(
        self, vocab_size: int = _VOCABULARY, ninp: int = 512, nhid: int = 512, nlayers: int = 4, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.vocab_size, self.nlayers, self.nhid = vocab_size, nlayers, nhid
        self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(vocab_size, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, vocab_size)
        for weight in (self.encoder.weight, self.decoder.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1), hidden

    def init_hidden(self, batch_size: int) -> tuple[Tensor, Tensor]:
        shape = (self.nlayers, batch_size, self.nhid)
        return self.decoder.weight.new_zeros(shape), self.decoder.weight.new_zeros(shape)


class LightningLSTM(Module):
    """Language model of a :class:`WikiText2`, its state carried from batch to batch."""

    def __init__(self, vocab_size: int = _VOCABULARY) -> None:
        super().__init__()
        self.model = SimpleLSTM(vocab_size=vocab_size)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def on_train_epoch_end(self) -> None:
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = batch
        hidden = self.model.init_hidden(inputs.size(0)) if self.hidden is None else self.hidden
        output, hidden = self.model(inputs, hidden)
        self.hidden = (hidden[0].detach(), hidden[1].detach())
        loss = F.nll_loss(output, target.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def train_dataloader(self) -> Any:
        text = WikiText2()
        return DataLoader(text, batch_sampler=SequenceSampler(text, batch_size=20))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=20.0)
