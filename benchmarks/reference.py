"""The parameters after the first round, computed by the most naive code there is, and how far a system is from them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from workloads import Workload

TOLERANCE = 1e-3


def first_round(workload: Workload) -> dict[str, Tensor]:
    """A deep copy and a new optimizer per client, one client after the other, averaged in float64."""
    server = workload.model()
    x, y = workload.data()
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in server.named_parameters()}
    for client in workload.cohort(0):
        model = copy.deepcopy(server)
        optimizer = torch.optim.SGD(model.parameters(), lr=workload.rate)
        for k in range(workload.steps):
            rows = slice(k * workload.batch, (k + 1) * workload.batch)
            optimizer.zero_grad()
            workload.loss(model, x[client, rows], y[client, rows]).backward()
            optimizer.step()
        for name, p in model.named_parameters():
            total[name] += workload.examples * p.detach().double()
    weight = workload.examples * workload.clients
    return {name: t / weight for name, t in total.items()}


def error(workload: Workload, reference: dict[str, Tensor], params: dict[str, Tensor]) -> float:
    """The worst tensor's distance from the reference, relative to how far the first round moved that tensor.

    Relative to the movement and not to the size, so that a system that did nothing at all has an error of 1.
    """
    start = dict(workload.model().named_parameters())
    if params.keys() != reference.keys():
        return float("inf")
    errors = []
    for name, wanted in reference.items():
        moved = (wanted - start[name].detach().double()).norm()
        errors.append(((params[name].double() - wanted).norm() / moved).item())
    return max(errors)
