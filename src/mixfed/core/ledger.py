"""The ledger: what a run costs, counted where the cost arises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mixfed.models.products import ONEDNN

if TYPE_CHECKING:
    from mixfed.core.batches import Batches


def _backward_of_convolution(*given: Any, out_val: Any) -> int:
    """PyTorch's formula takes every weight of a convolution in groups for one between all channels; they are fewer."""
    *others, groups, (of_input, of_weight, _) = given
    formula = flop_registry[torch.ops.aten.convolution_backward]
    parts = [(of_input, [True, False, False], 1), (of_weight, [False, True, False], groups)]
    return sum(formula(*others, groups, mask, out_val=out_val) // shared for asked, mask, shared in parts if asked)


_OWN_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.dot: lambda a, b, **_: 2 * a.numel(),
    torch.ops.aten.mv: lambda matrix, vector, **_: 2 * matrix.numel(),
    torch.ops.aten.addmv: lambda onto, matrix, vector, **_: 2 * matrix.numel(),
    torch.ops.aten.convolution_backward: _backward_of_convolution,
}
if ONEDNN:
    _OWN_FORMULAS[torch.ops.mkldnn._linear_pointwise] = lambda x, weight, *_, **__: 2 * x.numel() * weight.shape[0]
"""What PyTorch's table lacks or has wrong. Products with vectors, and those of matrices that oneDNN does, count two
operations for each element, as other products do."""


@dataclass(frozen=True)
class Cost:
    """What a step costs: base + slope·examples FLOPs, in so many matrix products (and products with vectors)."""

    base: int
    slope: int
    products: int

    def flops(self, steps: int, examples: int) -> int:
        """FLOPs of steps on so many examples all in all."""
        return self.base * steps + self.slope * examples

    def of_a_product(self, examples: float) -> float:
        """FLOPs of the average product of a step on so many examples."""
        return (self.base + self.slope * examples) / max(self.products, 1)


@dataclass
class Ledger:
    """Totals of a run. Bytes are those of the tensors that travel; FLOPs are those of matrix products and
    convolutions, forward and backward, as PyTorch's own counter sees them (and those of products with vectors).

    ``bytes_once`` is not part of the training: it is what clients would send up once, at the end, so that an unknown
    device could use their own parts of the model (nothing where they have none). ``bytes_kept`` is the most that the
    server kept from one step to the next: the algorithm's state, which is the model (of it what travels), the memory of
    optimizers, an atlas or cached updates."""

    bytes_down: int = 0
    bytes_up: int = 0
    client_examples: int = 0
    server_examples: int = 0
    client_flops: int = 0
    server_flops: int = 0
    bytes_once: int = 0
    bytes_kept: int = 0
    _costs: dict[Any, Cost] = field(default_factory=dict, repr=False, compare=False)

    def totals(self) -> dict[str, int]:
        """The totals by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}

    def restore(self, totals: Mapping[str, int]) -> None:
        """Takes up the totals of an earlier part of the run."""
        for name, value in totals.items():
            setattr(self, name, int(value))

    def cost(self, kind: Any, measure: Callable[[int], tuple[int, int]]) -> Cost:
        """What a step costs, from ``measure(examples)``, which gives FLOPs and products, at two and three, once."""
        if kind not in self._costs:
            (two, products), (three, _) = measure(2), measure(3)
            self._costs[kind] = Cost(3 * two - 2 * three, three - two, products)
        return self._costs[kind]

    def count_clients(self, cost: Cost, steps: int, examples: int) -> None:
        """Adds the work of a cohort: its steps and examples at the measured cost of a step."""
        self.client_examples += examples
        self.client_flops += cost.flops(steps, examples)

    def count_at_server(self, kind: Any, measure: Callable[[int], tuple[int, int]], batches: Batches) -> None:
        """Adds central work at the measured cost of a step of its kind."""
        cost = self.cost(("server", kind), measure)
        self.server_examples += int(batches.examples)
        self.server_flops += cost.flops(int(batches.steps), int(batches.examples))


def count_work(function: Callable[[], Any]) -> tuple[int, int]:
    """The floating-point operations of a call, and how many products they are in."""
    counter = _Flops()  # type: ignore[no-untyped-call]
    with counter:
        function()
    return counter.total, counter.products


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what PyTorch's formulas say of every operation.

    PyTorch's own ``FlopCounterMode`` also hooks every module, and fails on modules whose input is a parameter.
    """

    total: int = 0
    products: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and asking for it imports the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = _OWN_FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=out))
            self.products += 1
        return out
