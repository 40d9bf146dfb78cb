"""The inner loop that the three hand-written loops share: one model, reused for one client after another."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from workloads import Workload


class Worker:
    """Trains clients one after the other in place and averages them, weighted by examples: all hold equally many."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.model = workload.model()
        self.layout = torch.contiguous_format
        if any(isinstance(m, nn.Conv2d) for m in self.model.modules()):
            self.layout = torch.channels_last
            self.model.to(memory_format=self.layout)
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):  # large tables: only touched rows have gradients
                module.sparse = module.num_embeddings > 1000
        self.params = list(self.model.parameters())
        self.start = [p.detach().clone() for p in self.params]
        self.total = [torch.zeros_like(p) for p in self.start]

    def train(self, x: Tensor, y: Tensor, clients: list[int]) -> None:
        """Fills ``total`` with these clients' share of the cohort's average, all of them coming from ``start``."""
        w = self.workload
        torch._foreach_zero_(self.total)
        for client in clients:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.start)
            for k in range(w.steps):
                rows = slice(k * w.batch, (k + 1) * w.batch)
                inputs = x[client, rows]
                if self.layout is torch.channels_last:
                    inputs = inputs.contiguous(memory_format=self.layout)
                gradients = torch.autograd.grad(w.loss(self.model, inputs, y[client, rows]), self.params)
                self._descend(gradients)
            with torch.no_grad():
                torch._foreach_add_(self.total, self.params, alpha=1 / w.clients)

    @torch.no_grad()
    def _descend(self, gradients: tuple[Tensor, ...]) -> None:
        if not gradients[0].is_sparse:
            torch._foreach_add_(self.params, gradients, alpha=-self.workload.rate)
            return
        for p, g in zip(self.params, gradients, strict=True):
            p.index_add_(0, g._indices()[0], g._values(), alpha=-self.workload.rate)

    def named(self) -> dict[str, Tensor]:
        """The server's parameters by name."""
        return dict(zip((name for name, _ in self.model.named_parameters()), self.start, strict=True))
