"""What a cohort is likely to take by each execution, before anything is timed.

The figures are rough ones of one core. They put the executions in an order, in which they are timed; a run that is too
short to time any takes the first. What decides most often: under vmap everyone waits for the client with the most
steps, in batches that are all full, and the numbers of many clients' models go through main memory, where those of one
client stay in the cache. One client after another pays for the calls of every operator.
"""

from __future__ import annotations

import numpy as np

from mixfed.backends.simulator.execution import Execution
from mixfed.core.batches import Plan
from mixfed.core.ledger import Cost

CALLS = {"loop": 30e-6, "vmap": 120e-6, "factored": 120e-6}
"""Seconds for what is around each matrix product of a step."""

NUMBER = {"loop": 0.7e-9, "vmap": 1.3e-9, "factored": 1.3e-9}
"""Seconds for each number of a model in a step of SGD; other optimizers take longer, above all under vmap."""

MASKED = 1.5
"""Where clients differ in their steps, numbers under vmap are also chosen from before and after the step."""

FLOP = 1 / 50e9
"""Seconds for a floating-point operation in a matrix product."""

CONVOLVED = 5.0
"""Convolutions of many clients at once take so many times as long as one client after another."""


def seconds(how: Execution, plan: Plan, cost: Cost, numbers: int, *, convolves: bool) -> float:
    """What the cohort is likely to take, with chunks as ``how`` has them and so many ``numbers`` of a model in each
    client."""
    steps, calls, number = plan.steps, CALLS[how.name] * cost.products, NUMBER[how.name] * numbers
    if not how.chunk:
        flops = cost.flops(int(steps.sum()), int(plan.examples.sum()))
        return float(steps.sum()) * (calls + number) + FLOP * flops
    flop = FLOP * (CONVOLVED if convolves else 1.0) * cost.flops(1, plan.rows.shape[2])
    total = 0.0
    for begin in range(0, len(plan), how.chunk):
        own = steps[begin : begin + how.chunk]
        masked = MASKED if np.ptp(own) else 1.0
        total += float(own.max()) * (calls + len(own) * (number * masked + flop))
    return total
