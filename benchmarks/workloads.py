"""The work that every system does: model, start, data, cohorts and batches are functions of a workload and a round.

A client holds exactly ``steps * batch`` examples and takes them in stored order: batch k is rows
``k * batch : (k + 1) * batch``, never shuffled. Clients run plain SGD on the mean loss of a batch. The server replaces
the parameters by the clients' average, weighted by their examples (FedAvg, server rate 1). No system may skip a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from repeated import POOL, repeated
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """``criterion(outputs, y)`` gives one loss per example; x and y are [population, steps * batch, ...].

    ``tables`` are parameters that are only looked up, with the columns of x that hold their ids; a system may use it.
    """

    name: str
    title: str
    clients: int
    batch: int
    steps: int
    rate: float
    population: int
    module: Callable[[], nn.Module]
    criterion: Callable[[Tensor, Tensor], Tensor]
    generate: Callable[[int, int, torch.Generator], Data]
    tables: Mapping[str, slice] = field(default_factory=dict)

    @property
    def spec(self) -> str:
        """By which :func:`named` knows the workload."""
        usual = WORKLOADS[self.name]
        if self.generate is not usual.generate:
            return f"{self.name}:{self.clients}:{self.population}"
        return self.name if self.clients == usual.clients else f"{self.name}:{self.clients}"

    @property
    def examples(self) -> int:
        """How many examples each client holds, which is also its weight."""
        return self.steps * self.batch

    def model(self) -> nn.Module:
        """A fresh module that always starts from the same parameters."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.module()

    def data(self) -> Data:
        """The whole population's examples; the same numbers in every process."""
        return self.generate(self.population, self.examples, torch.Generator().manual_seed(2))

    def cohort(self, round: int) -> list[int]:
        """The clients of a round (from 0): distinct, spread over the population, and different in the next round."""
        return [(round * self.clients + i) * 7 % self.population for i in range(self.clients)]

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of one batch."""
        return self.criterion(model(x), y).mean()


class Smile(nn.Sequential):
    """W1: 2352-64-1, a classifier of small colour pictures."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2352, 64), nn.ReLU(), nn.Linear(64, 1))


def smile_data(population: int, examples: int, seed: torch.Generator) -> Data:
    x = torch.rand(population, examples, 2352, generator=seed) - 0.5
    return x, (x[..., :1176].mean(-1) > x[..., 1176:].mean(-1)).float()


def smile_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), y, reduction="none")


class CNN(nn.Sequential):
    """W2: conv 32, conv 64 (both 3x3, no padding), pool, dense 128, dense 62 on 28x28 pictures."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 62),
        )  # fmt: skip


def picture_data(population: int, examples: int, seed: torch.Generator) -> Data:
    y = torch.randint(62, (population, examples), generator=seed)
    prototypes = torch.rand(62, 1, 28, 28, generator=seed)
    return (prototypes[y] + torch.rand(population, examples, 1, 28, 28, generator=seed)) / 2, y


def class_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


class Characters(nn.Module):
    """W3: embedding 64, recurrent layer of 128, vocabulary 90; predicts the next character at each of 50 positions."""

    def __init__(self, layer: Callable[..., nn.RNNBase] = nn.GRU, **options: int | bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(90, 64)
        self.recurrent = layer(64, 128, batch_first=True, **options)
        self.output = nn.Linear(128 * (1 + self.recurrent.bidirectional), 90)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.recurrent(self.embedding(x))[0])


class Transformer(nn.Module):
    """W5: 2 layers of width 64 with 4 heads, vocabulary 90; predicts the next character at each of 32 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(90, 64)
        self.position = nn.Parameter(0.1 * torch.randn(32, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(64, 90)
        self.register_buffer("later", torch.ones(32, 32, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.layers(self.embedding(x) + self.position, mask=self.later, is_causal=True))


def text_data(population: int, examples: int, seed: torch.Generator, length: int = 50) -> Data:
    jumps = torch.randint(3, (population, examples, length + 1), generator=seed)
    jumps[..., 0] = torch.randint(90, (population, examples), generator=seed)
    text = jumps.cumsum(-1) % 90
    return text[..., :-1].contiguous(), text[..., 1:].contiguous()


def text_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.movedim(-1, -2), y, reduction="none").mean(-1)


class DualEncoder(nn.Module):
    """W4: two tables 4,000 x 32. The left tower is the mean of a bag of 10 ids, the right one looks up a single id.

    An example is 11 ids and a label of -1 or 1 (was the last id seen together with the bag?); the score is the dot
    product of the towers, the loss its hinge max(0, 1 - y * score).
    """

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Embedding(4000, 32)
        self.right = nn.Embedding(4000, 32)
        for table in self.parameters():
            nn.init.normal_(table, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.left(x[..., :10]).mean(-2) * self.right(x[..., 10])).sum(-1)


def bag_data(population: int, examples: int, seed: torch.Generator) -> Data:
    x = torch.randint(4000, (population, examples, 11), generator=seed)
    return x, 1.0 - 2.0 * ((x[..., 0] + x[..., 10]) % 2)


BAG_AND_ITEM = {"left.weight": slice(0, 10), "right.weight": slice(10, 11)}


def hinge_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return (1 - y * outputs).relu()


def characters(name: str, title: str, layer: Callable[..., nn.RNNBase], **options: int | bool) -> Workload:
    """W3 with this layer."""
    return Workload(name, title, 20, 8, 4, 0.5, 200, partial(Characters, layer, **options), text_loss, text_data)


STANDARD = {
    w.name: w
    for w in (
        Workload("W1", "smile MLP", 100, 5, 2, 0.05, 1000, Smile, smile_loss, smile_data),
        Workload("W2", "CNN", 20, 20, 3, 0.1, 200, CNN, class_loss, picture_data),
        characters("W3", "character GRU", nn.GRU),
        Workload("W4", "embeddings", 100, 16, 10, 5.0, 1000, DualEncoder, hinge_loss, bag_data, BAG_AND_ITEM),
        Workload("W5", "transformer", 20, 8, 4, 0.1, 200, Transformer, text_loss, partial(text_data, length=32)),
    )
}
"""What is measured unless other workloads are asked for."""

WORKLOADS = STANDARD | {
    w.name: w
    for w in (
        characters("W3-lstm", "character LSTM", nn.LSTM),
        characters("W3-rnn", "simple RNN", nn.RNN),
        characters("W3-deep", "GRU, two layers, both directions", nn.GRU, num_layers=2, bidirectional=True),
        replace(characters("W3-many", "character GRU, 80 clients", nn.GRU), clients=80),
    )
}

FOLDER = "MIXFED_BENCHMARK_DATA"
"""The environment variable that names the folder with the examples of workloads of other sizes."""


def named(spec: str) -> Workload:
    """The workload ``W1``, ``W1:50`` with 50 clients a round, or ``W1:100:10000`` with 100 of 10,000, data in files."""
    name, *sizes = spec.split(":")
    found = replace(WORKLOADS[name], clients=int(sizes[0])) if sizes else WORKLOADS[name]
    return replace(found, population=int(sizes[1]), generate=_mapped(name)) if len(sizes) > 1 else found


def file_of(name: str, field: str) -> Path:
    """Where a workload's x or y is, of the clients whose examples repeat."""
    return Path(os.environ[FOLDER], f"{name}-{field}")


def write(workload: Workload) -> None:
    """The examples that repeat, in files."""
    x, y = workload.generate(POOL, workload.examples, torch.Generator().manual_seed(2))
    x.numpy().tofile(file_of(workload.name, "x"))
    y.numpy().tofile(file_of(workload.name, "y"))


def _mapped(name: str) -> Callable[[int, int, torch.Generator], Data]:
    def generate(population: int, examples: int, seed: torch.Generator) -> Data:
        like = dict(zip("xy", WORKLOADS[name].generate(1, examples, seed), strict=True))
        found = {
            field: repeated(file_of(name, field), t.numpy().dtype, (population, *t.shape[1:]))
            for field, t in like.items()
        }
        return torch.from_numpy(found["x"]), torch.from_numpy(found["y"])

    return generate
