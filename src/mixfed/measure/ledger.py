"""The ledger: what a run costs, counted where the cost arises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.flop_counter import FlopCounterMode

from mixfed.tree import Params

if TYPE_CHECKING:
    from mixfed.batches import Batches
    from mixfed.local import LocalTrainer


@dataclass
class Ledger:
    """Totals of a run. Bytes are those of the tensors that travel; FLOPs are those of matrix products and
    convolutions, forward and backward, as PyTorch's own counter sees them."""

    bytes_down: int = 0
    bytes_up: int = 0
    client_examples: int = 0
    server_examples: int = 0
    client_flops: int = 0
    server_flops: int = 0
    _costs: dict[Any, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)

    def totals(self) -> dict[str, int]:
        """The six totals by name."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    def restore(self, totals: Mapping[str, int]) -> None:
        """Takes up the totals of an earlier part of the run."""
        for name, value in totals.items():
            setattr(self, name, int(value))

    def cost(self, kind: Any, measure: Callable[[int], int]) -> tuple[int, int]:
        """FLOPs of a step as base + slope·examples, from ``measure(examples)`` at two and three examples, once."""
        if kind not in self._costs:
            two, three = measure(2), measure(3)
            self._costs[kind] = (3 * two - 2 * three, three - two)
        return self._costs[kind]

    def count_clients(self, kind: Any, measure: Callable[[int], int], steps: int, examples: int) -> None:
        """Adds the work of a cohort: its steps and examples at the measured cost of a step."""
        base, slope = self.cost(kind, measure)
        self.client_examples += examples
        self.client_flops += base * steps + slope * examples

    def count_server(self, trainer: LocalTrainer, params: Params, batches: Batches) -> None:
        """Adds central training on these batches."""
        examples = int(batches.examples)
        base, slope = self.cost(
            ("server", id(trainer)), lambda n: count_flops(lambda: trainer.train(params, batches.first(n)))
        )
        self.server_examples += examples
        self.server_flops += base * int(batches.steps) + slope * examples


def count_flops(function: Callable[[], Any]) -> int:
    """The floating-point operations of a call."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter:
        function()
    return int(counter.get_total_flops())


class _NoModules:
    """Counts everything as one: the usual tracker hooks every module, and fails where a module's input is a leaf."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...
