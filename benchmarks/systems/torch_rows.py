"""Row-sparse by hand, for W4: a client has only the rows that its examples name, and all clients' rows are one table.

The rows of client c with id i are numbered anew, client after client. A step is one lookup and one addition for the
whole cohort, and only what was looked up has a gradient.
"""

from itertools import count

import torch
import torch.nn.functional as F
from clock import Clock
from torch import Tensor
from workloads import Workload

from systems.torch_vmap import keep_memory


class Rows:
    """The rows of a table that a cohort touches: ``start`` and ``own`` [rows, d], and the ids and owners of rows."""

    def __init__(self, table: Tensor, ids: Tensor) -> None:
        """``ids`` are [clients, ...]."""
        keys = (ids + torch.arange(0, len(ids) * len(table), len(table)).view(-1, *(1,) * (ids.ndim - 1))).view(-1)
        touched = torch.zeros(len(ids) * len(table), dtype=torch.bool)
        touched[keys] = True
        self.ids = touched.nonzero().view(-1) % len(table)
        self.places = (touched.cumsum(0) - 1)[keys].view(ids.shape)
        self.start = table.index_select(0, self.ids)
        self.own = self.start.clone()

    def add(self, places: Tensor, change: Tensor) -> None:
        width = self.own.shape[1]
        change = change.view(len(change), 1, width).expand(-1, places.numel() // len(change), -1)
        self.own.index_add_(0, places.reshape(-1), change.reshape(-1, width))


def run(workload: Workload, clock: Clock, cores: int) -> None:
    if workload.name != "W4":
        raise NotImplementedError("row-sparse clients are written by hand for W4 alone")
    keep_memory()
    torch.set_num_threads(cores)
    x, y = workload.data()
    tables = {name: p.detach().clone() for name, p in workload.model().named_parameters()}
    columns = [workload.tables[name] for name in tables]
    for round in count():
        cohort = torch.tensor(workload.cohort(round))
        ids, wanted = x[cohort].view(workload.clients, workload.steps, workload.batch, -1), y[cohort]
        wanted = wanted.view(workload.clients, workload.steps, workload.batch)
        bag, item = (Rows(t, ids[..., c]) for t, c in zip(tables.values(), columns, strict=True))
        for k in range(workload.steps):
            many, one = bag.places[:, k].reshape(-1, bag.places.shape[-1]), item.places[:, k].reshape(-1)
            left = F.embedding_bag(many, bag.own, mode="mean").requires_grad_()
            right = item.own.index_select(0, one).requires_grad_()
            loss = workload.criterion((left * right).sum(-1), wanted[:, k].reshape(-1)).sum() / workload.batch
            d_left, d_right = torch.autograd.grad(-workload.rate * loss, (left, right))
            bag.add(many, d_left / many.shape[1])
            item.add(one, d_right)
        for table, rows in zip(tables.values(), (bag, item), strict=True):
            table.index_add_(0, rows.ids, rows.own - rows.start, alpha=1 / workload.clients)
        if not clock.lap(lambda: tables):
            break
