"""Hand-written factored clients for W1: no client's weights of the wide layer ever exist.

A client's first layer after some steps is W − η·Σ δⱼaⱼᵀ with the inputs aⱼ and output gradients δⱼ of its examples so
far, so that one product x·Wᵀ serves all clients, the inner products of a client's own examples give the rest, and the
mean of all first layers is one product again. The small tensors (bias and second layer) are kept for each client.
"""

from itertools import count

import torch
from clock import Clock
from workloads import Workload

from systems.torch_vmap import keep_memory


def run(workload: Workload, clock: Clock, cores: int) -> None:
    if workload.name != "W1":
        raise NotImplementedError("factored clients are written by hand for W1 alone")
    keep_memory()
    torch.set_num_threads(cores)
    torch.set_grad_enabled(False)
    x, y = workload.data()
    clients, batch, steps, rate = workload.clients, workload.batch, workload.steps, workload.rate
    names = [name for name, _ in workload.model().named_parameters()]
    W, b, V, c = (p.detach().clone() for p in workload.model().parameters())
    for round in count():
        cohort = torch.tensor(workload.cohort(round))
        inputs, wanted = x.index_select(0, cohort), y[cohort]  # [clients, examples, 2352] and [clients, examples]
        shared = (inputs.flatten(0, 1) @ W.T).view(clients, workload.examples, -1)
        inner = torch.bmm(inputs, inputs.mT)
        b_of, V_of, c_of = b.repeat(clients, 1), V.repeat(clients, 1), c.repeat(clients, 1)
        changes = torch.empty_like(shared)  # −η·δ
        for k in range(steps):
            rows, before = slice(k * batch, (k + 1) * batch), slice(0, k * batch)
            z = shared[:, rows] + b_of[:, None]
            if k:
                z = torch.baddbmm(z, inner[:, rows, before], changes[:, before])
            h = z.relu()
            outputs = torch.bmm(h, V_of[:, :, None]).squeeze(-1) + c_of
            change = (torch.sigmoid(outputs) - wanted[:, rows]) * (-rate / batch)
            torch.mul(change[:, :, None] * V_of[:, None], z > 0, out=changes[:, rows])
            V_of += torch.bmm(change[:, None], h).squeeze(1)
            c_of += change.sum(1, keepdim=True)
            b_of += changes[:, rows].sum(1)
        W = torch.addmm(W, changes.flatten(0, 1).T, inputs.flatten(0, 1), alpha=1 / clients)
        b, V, c = b_of.mean(0), V_of.mean(0, keepdim=True), c_of.mean(0)
        if not clock.lap(lambda new=(W, b, V, c): dict(zip(names, new, strict=True))):
            break
