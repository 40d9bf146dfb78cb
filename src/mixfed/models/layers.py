"""A recurrent layer over a whole sequence and its gradient, for N networks at once; tensors are plain here.

Shapes: ``x`` [N, T, B, I], weights [N, G·H, I] and [N, G·H, H], biases [N, G·H], carried tensors [N, B, H].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mixfed.models.cells import CELLS, Cell, Run, Tensors
from mixfed.models.products import by_rows, linears


class Layer(Protocol):
    """``carried`` tensors go from step to step. Where a layer ``folds``, clients that share their weights may be one
    batch, and the tensors of its trace are [N, T, B, …]; else they are each a single network's."""

    @property
    def carried(self) -> int: ...

    @property
    def folds(self) -> bool: ...

    def forward(self, x: Tensor, weights: Tensors, carry: Tensors) -> Run:
        """The states, the last carried tensors, and the trace that the gradient needs."""

    def backward(
        self, d_states: Tensor, d_last: Tensors, x: Tensor, weights: Tensors, carry: Tensors, run: Run, clients: int
    ) -> tuple[Tensor, ...]:
        """The gradients by x, weights and carry. A batch that is made of several ``clients`` (0: it is not) has
        gradients by weights [N, clients, …]."""


@dataclass(frozen=True)
class Stepped:
    """A cell, step by step.

    What does not hang on the step before is one product for all steps: the inputs' share in the gates, and the
    gradients of weights.
    """

    cell: Cell
    folds: bool = True

    @property
    def carried(self) -> int:
        """As many as the cell says."""
        return self.cell.carried

    def forward(self, x: Tensor, weights: Tensors, carry: Tensors) -> Run:
        """See :class:`Layer`."""
        w_in, weight, b_in, bias = weights
        x = _by_time(x)
        given = by_rows(x.flatten(0, 1), w_in, b_in + self.cell.added(bias)).view(*x.shape[:3], -1)
        run = self.cell.forward(given, tuple(c.transpose(0, 1) for c in carry), weight, bias)
        last = (c.transpose(0, 1).contiguous() for c in run.last)
        return Run(_by_network(run.states), tuple(last), tuple(map(_by_network, run.trace)))

    def backward(
        self, d_states: Tensor, d_last: Tensors, x: Tensor, weights: Tensors, carry: Tensors, run: Run, clients: int
    ) -> tuple[Tensor, ...]:
        """See :class:`Layer`."""
        w_in, weight, _, _ = weights
        d = d_states.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format)
        last = tuple(c.transpose(0, 1) for c in d_last)
        d[-1] += last[0]
        found = self.cell.backward(d, last, weight, tuple(map(_by_time, run.trace)))
        fed, given = _by_network(found.fed), _by_network(found.given)
        d_x = _by_network(by_rows(found.given.flatten(0, 1), w_in.mT).view(*found.given.shape[:3], -1))
        before = run.trace[0][:, :-1]
        if found.fed is found.given:  # one product is faster than two
            d_both = _product(fed, torch.cat([x, before], -1), clients)
            d_w_in, d_weight = d_both[..., : x.shape[-1]], d_both[..., x.shape[-1] :]
        else:
            d_w_in, d_weight = _product(given, x, clients), _product(fed, before, clients)
        d_b_in = _total(given, clients)
        d_bias = torch.cat([d_b_in[..., : found.alike], _total(fed[..., found.alike :], clients)], -1)
        return d_x, d_w_in, d_weight, d_b_in, d_bias, *(c.transpose(0, 1) for c in found.first)


@dataclass(frozen=True)
class OneDnnLSTM:
    """The LSTM of oneDNN, one network after the other: all steps are a single operator, which is faster.

    ``nn.LSTM`` uses it too, but not under vmap.
    """

    carried: int = 2
    folds: bool = False

    def forward(self, x: Tensor, weights: Tensors, carry: Tensors) -> Run:
        """See :class:`Layer`."""
        size = carry[0].shape[-1]
        with torch.enable_grad():  # else it keeps nothing for its gradient
            each = [
                torch.ops.aten.mkldnn_rnn_layer(*one, False, [], _LSTM, size, 1, True, False, False, True)
                for one in _networks(x.detach(), *weights, *carry)
            ]
        states, *last = (_stack(some) for some in list(zip(*each, strict=True))[:3])
        return Run(states, tuple(last), tuple(workspace for *_, workspace in each))

    def backward(
        self, d_states: Tensor, d_last: Tensors, x: Tensor, weights: Tensors, carry: Tensors, run: Run, clients: int
    ) -> tuple[Tensor, ...]:
        """See :class:`Layer`."""
        size, known = carry[0].shape[-1], _networks(x, *weights, *carry, run.states, *run.last, d_states, *d_last)
        each = [
            torch.ops.aten.mkldnn_rnn_layer_backward(
                *one, False, _LSTM, size, 1, True, True, False, [], False, workspace
            )
            for one, workspace in zip(known, run.trace, strict=True)
        ]
        return tuple(map(_stack, zip(*each, strict=True)))


def _by_time(x: Tensor) -> Tensor:
    """[N, T, B, …] as [T, B, N, …], in which order it is in memory."""
    return x.permute(1, 2, 0, 3).contiguous()


def _by_network(x: Tensor) -> Tensor:
    """The same the other way round, without a copy."""
    return x.permute(2, 0, 1, 3)


def _networks(*tensors: Tensor) -> list[Tensors]:
    """The tensors of every network."""
    return list(zip(*(x.detach().contiguous().unbind() for x in tensors), strict=True))


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].clone()[None]  # type: ignore[arg-type]


def _product(d: Tensor, inputs: Tensor, clients: int) -> Tensor:
    """Σ dᵀ·inputs over steps and batch: [N, G, I], or [N, clients, G, I]."""
    if not clients:
        return linears(d.flatten(1, 2).mT, inputs.flatten(1, 2).mT)
    d, inputs = (parted(x, 2, clients).movedim(2, 1).flatten(2, 3).flatten(0, 1) for x in (d, inputs))
    found = linears(d.mT, inputs.mT)
    return found.view(-1, clients, *found.shape[1:])


def _total(d: Tensor, clients: int) -> Tensor:
    """Σ d over steps and batch: [N, G], or [N, clients, G]."""
    return parted(d, 2, clients).sum(3).sum(1) if clients else d.sum((1, 2))  # two sums take a tenth of one


def parted(x: Tensor, place: int, clients: int) -> Tensor:
    """The tensor with the dimension at this place in two: clients, and what each has of it."""
    return x.view(*x.shape[:place], clients, x.shape[place] // clients, *x.shape[place + 1 :])


_LSTM = 2
"""The number of an LSTM among oneDNN's layers."""

LAYERS: dict[str, Layer] = {name: Stepped(cell) for name, cell in CELLS.items()} | {"LSTM_ONEDNN": OneDnnLSTM()}
"""By the names that PyTorch has for cells."""

_HAS_ONEDNN = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def has_onednn(cell: str, x: Tensor) -> bool:
    """Whether oneDNN has the layer of this cell for such inputs."""
    return _HAS_ONEDNN and cell == "LSTM" and x.dtype == torch.float32 and x.device.type == "cpu"


def layer_for(cell: str, x: Tensor) -> str:
    """The name of the layer that suits a cell and its inputs best."""
    return f"{cell}_ONEDNN" if has_onednn(cell, x) else cell
