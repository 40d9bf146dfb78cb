"""torch.func: ``vmap`` over clients in chunks, all cores inside each operator, and a malloc that keeps its memory."""

import ctypes
import sys
from itertools import count

import torch
import torch.nn.functional as F
from clock import Clock
from torch import Tensor
from torch.func import functional_call, grad, vmap
from workloads import Workload

CHUNKS = {"W1": 50, "W2": 4, "W3": 20, "W4": 50, "W5": 10}
Params = dict[str, Tensor]


def gru_outputs(params: Params, x: Tensor) -> Tensor:
    """W3's forward pass with a GRU in plain operators; under vmap ``nn.GRU`` is slower."""
    embedded = F.embedding(x, params["embedding.weight"])
    inputs = F.linear(embedded, params["recurrent.weight_ih_l0"], params["recurrent.bias_ih_l0"])
    h = torch.zeros_like(embedded[:, 0, :1]).expand(-1, 128)
    states = []
    for given in inputs.unbind(1):
        fed = F.linear(h, params["recurrent.weight_hh_l0"], params["recurrent.bias_hh_l0"])
        reset, update = (given[:, :256] + fed[:, :256]).sigmoid().chunk(2, -1)
        new = (given[:, 256:] + reset * fed[:, 256:]).tanh()
        h = new + update * (h - new)
        states.append(h)
    return F.linear(torch.stack(states, 1), params["output.weight"], params["output.bias"])


def keep_memory() -> None:
    """Freed blocks stay with the process (glibc): on W1 vmap is otherwise half allocation."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        for option, value in ((-3, 2**25), (-1, 2**30), (-2, 2**26)):  # mmap threshold, trim threshold, top pad
            libc.mallopt(option, value)


def run(workload: Workload, clock: Clock, cores: int) -> None:
    keep_memory()
    torch.set_num_threads(cores)
    x, y = workload.data()
    model = workload.model()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(p: Params, inputs: Tensor, wanted: Tensor) -> Tensor:
        outputs = gru_outputs(p, inputs) if workload.name == "W3" else functional_call(model, p, (inputs,))
        return workload.criterion(outputs, wanted).mean()

    def client(p: Params, inputs: Tensor, wanted: Tensor) -> Params:
        for k in range(workload.steps):
            rows = slice(k * workload.batch, (k + 1) * workload.batch)
            gradient = grad(loss)(p, inputs[rows], wanted[rows])
            p = {name: p[name] - workload.rate * g for name, g in gradient.items()}
        return p

    many = vmap(client, in_dims=(None, 0, 0))
    for round in count():
        total = {name: torch.zeros_like(p) for name, p in params.items()}
        for chunk in torch.tensor(workload.cohort(round)).split(CHUNKS.get(workload.name, 20)):
            for name, p in many(params, x[chunk], y[chunk]).items():
                total[name] += p.sum(0) / workload.clients
        params = total
        if not clock.lap(lambda new=total: new):
            break
