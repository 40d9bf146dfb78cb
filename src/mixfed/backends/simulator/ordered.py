"""Sums whose additions have an order that does not depend on who makes them: not on threads, and not on ranks.

A cohort is cut into units (a client, or a chunk of a fixed number of clients), numbered from 0. Neighbours are added
first: node (l, j) is the sum of the units j·2ˡ, …, (j + 1)·2ˡ − 1, and is made of the nodes (l − 1, 2j) and
(l − 1, 2j + 1). A rank that runs a stretch of units makes the nodes that lie within the stretch, and keeps few of them;
whoever has the nodes of all stretches makes the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from mixfed.backends.simulator import cores
from mixfed.backends.simulator.executors import Cohort, execute_unit
from mixfed.backends.simulator.gathered import Gathered
from mixfed.core.algorithm import Algorithm
from mixfed.core.ledger import Cost
from mixfed.core.private import PrivateStore

UNIT = 16
"""Clients in a chunk, unless another number is given."""


@dataclass
class Ladder:
    """The nodes of some units so far, in the order of the units: the level, the index, and what was gathered."""

    nodes: list[tuple[int, int, Gathered]] = field(default_factory=list)

    def add(self, level: int, index: int, gathered: Gathered) -> None:
        """Takes the next node, and makes all nodes of which both halves are there now."""
        while self.nodes and index % 2 and self.nodes[-1][:2] == (level, index - 1):
            *_, left = self.nodes.pop()
            left.merge(gathered)
            level, index, gathered = level + 1, index // 2, left
        self.nodes.append((level, index, gathered))

    def total(self) -> Gathered:
        """The sum of all units: of the nodes that are left, from the first to the last."""
        (*_, first), *others = self.nodes
        for *_, gathered in others:
            first.merge(gathered)
        return first


def execute_in_order(algorithm: Algorithm, part: Cohort, first: int, privates: PrivateStore, cost: Cost) -> Ladder:
    """The work of a stretch of a cohort, whose first client begins a unit, in one thread on one core.

    ``first`` is the place of that client in the whole cohort.
    """
    ladder, size = Ladder(), part.how.chunk or 1
    with torch.no_grad(), cores.in_operators(1):
        for unit in part.units():
            gathered = Gathered.by(algorithm)
            execute_unit(algorithm, part, unit, privates, partial(_same, gathered))
            gathered.examples = int(part.plan.examples[unit].sum())
            gathered.flops = cost.flops(int(part.plan.steps[unit].sum()), gathered.examples)
            ladder.add(0, (first + unit.start) // size, gathered)
    return ladder


def _same(gathered: Gathered, message: int) -> Gathered:
    return gathered
