"""Files of a user's own: a network, a criterion, a metric and an algorithm, as a recipe names them."""

from __future__ import annotations

from pathlib import Path

NET = """
import torch.nn.functional as F
from torch import nn

from layers import block


class Net(nn.Module):
    def __init__(self, inputs, outputs, width=8):
        super().__init__()
        self.body = block(inputs, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        return self.head(self.body(x))


def halved(outputs, batch):
    return F.cross_entropy(outputs, batch["y"].long(), reduction="none") / 2


def confidence(outputs, batch):
    return outputs.softmax(-1).amax(-1)


ready = Net(4, 2)
"""
LAYERS = """
from torch import nn


def block(inputs, width):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU())
"""
METHOD = '''
from dataclasses import replace

from mixfed import tree
from mixfed.algorithms.fedavg import fedavg


def shortened(trainer, *, share=1.0):
    """FedAvg that goes only a share of the way."""
    base = fedavg(trainer, name="shortened")

    def step(state, replies, server):
        before, after = base.params(state), base.step(state, replies, server)
        moved = tree.sub(base.params(after), before)
        return base.with_params(after, tree.add(before, tree.scale(moved, share)))

    return replace(base, step=step)


def of_setup(setup):
    return fedavg(setup.client, server=setup.server)


def none(trainer):
    return 3


def wants_more(trainer, *, k):
    return fedavg(trainer)
'''
RECIPE = """
base = "digits"
rounds = 2
cohort = 3
algorithm = "method.py:shortened"

[data.partition]
clients = 10

[model]
name = "net.py:Net"
hidden = 0
"""


def write_code(folder: Path) -> None:
    """The files of this module, for a recipe in the folder."""
    for name, text in {"net.py": NET, "layers.py": LAYERS, "method.py": METHOD}.items():
        (folder / name).write_text(text)
