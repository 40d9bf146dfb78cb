"""From measured dissimilarity to advice: which mixed method, what central batch, which step sizes, and why.

The 2022 paper bounds the rounds to reach E‖∇f‖² ≤ ε on non-convex problems (Table 1) by::

    Parallel Training:    (σ² + S·σ_c²)·βF/(K·S·ε²)   + G·√β/ε^(3/2) + B²·βF/ε
    1-way transfer:       (σ² + K·S·σ_c²)·βF/(K·S·ε²) + βF/ε
    2-way transfer:       (σ² + S·σ_c²)·βF/(K·S·ε²)   + βF/ε

Here ε is a hundredth of the squared gradient norm at the start, F the loss at the start, β an estimate from below, and
(G, B) = (G̃, 1), which satisfies the paper's definition on the sampled gradients. Only ratios of bounds are used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, sqrt
from typing import Any

from mixfed.evaluate.probe.dissimilarity import Dissimilarity

LARGE = 1.0
"""From this max G̃² on, gradients are called unlike. The paper's three problems have 49.04 (Parallel Training is
slower than the transfers), 0.03 and 0.03 (all methods converge alike)."""

TARGET = 0.01
"""The bounds are compared for bringing ‖∇f‖² down to this share of what it was at the start."""


@dataclass(frozen=True)
class Advice:
    """What to use. ``slowdown`` is Parallel Training's bound over 2-way transfer's, ``noise`` the same for 1-way's."""

    algorithm: str
    slowdown: float
    noise: float
    central_batch: dict[str, int]
    largest_rate: dict[str, float]
    reasons: list[str]


def advise(found: Dissimilarity, *, cohort: int, steps: int, server_rate: float, central_examples: int) -> Advice:
    """Advice for a cohort of S clients that take K steps each with the server rate η_s."""
    bounds = _bounds(found, cohort, steps)
    slowdown, noise = bounds["parallel"] / bounds["gradient_2way"], bounds["gradient_1way"] / bounds["gradient_2way"]
    batch = _central_batches(found, cohort, steps)
    rates = _largest_rates(found, steps, server_rate)
    reasons = [_on_dissimilarity(found, slowdown)]
    if found.largest("G2") < LARGE:
        algorithm = "parallel"
        reasons.append("It is as good as a transfer here and sends nothing extra.")
    elif not found.central_batch:
        algorithm = "gradient_1way"
        reasons.append("1-way transfer takes larger step sizes than 2-way transfer, which diverges first.")
    elif batch["gradient_1way"] <= central_examples:
        algorithm = "gradient_1way"
        reasons.append(
            f"1-way transfer needs a central batch of about {batch['gradient_1way']:,}, which the centre can give, and"
            " takes larger step sizes than 2-way transfer, which diverges first."
        )
    else:
        algorithm = "gradient_2way"
        reasons.append(
            f"1-way transfer would need a central batch of about {batch['gradient_1way']:,} to keep the centre's"
            f" variance down, more than the {central_examples:,} examples there are; 2-way transfer needs K times less."
        )
    reasons.append(_on_variance(found, batch))
    reasons.append(
        f"The smoothness is estimated (from below) as β ≈ {found.smoothness:.3g}; with it, client rates up to"
        f" {rates['parallel']:.2g} (parallel), {rates['gradient_1way']:.2g} (gradient_1way) and"
        f" {rates['gradient_2way']:.2g} (gradient_2way) satisfy Table 4. The proofs need that; practice allows"
        f" far larger ones, in the same order. Table 5 assumes η_m ≥ 1, and η_s ≥ √S = {sqrt(cohort):.3g} for 1-way."
    )
    return Advice(algorithm, slowdown, noise, batch, rates, reasons)


def as_json(found: Dissimilarity, advice: Advice) -> dict[str, Any]:
    """The probe's result for scripts."""
    largest = {name: found.largest(name) for name in ("G2", "B2", "sigma2", "sigma_c2")}
    typical = {name: found.typical(name) for name in ("G2", "B2", "sigma2", "sigma_c2", "gradient2")}
    return {"max": largest, "median": typical, "smoothness": found.smoothness, "advice": asdict(advice)}


def _on_dissimilarity(found: Dissimilarity, slowdown: float) -> str:
    alike = found.largest("G2") < LARGE
    return (
        f"The gradients of clients and centre are {'alike' if alike else 'unlike'}: max G̃² ="
        f" {found.largest('G2'):.3g} (the paper: 49 where parallel training was slower, 0.03 where not), max B̃² ="
        f" {found.largest('B2'):.3g}; to bring ‖∇f‖² to a hundredth of its start, Table 1 gives parallel training"
        f" {slowdown:.2g} times the rounds of 2-way transfer."
    )


def _on_variance(found: Dissimilarity, batch: dict[str, int]) -> str:
    if not found.central_batch:
        return (
            "The centre minimises a regulariser, which needs no data, so that its gradient has no variance:"
            f" σ² = {found.typical('sigma2'):.3g}, σ_c² = 0."
        )
    return (
        f"A central batch of {batch['parallel']:,} (parallel, gradient_2way) or {batch['gradient_1way']:,}"
        f" (gradient_1way) makes the centre's variance matter no more than the clients':"
        f" σ² = {found.typical('sigma2'):.3g}, σ_c² = {found.typical('sigma_c2'):.3g}"
        f" at a central batch of {found.central_batch:,}."
    )


def _bounds(found: Dissimilarity, cohort: int, steps: int) -> dict[str, float]:
    epsilon, beta = max(TARGET * float(found.measured["gradient2"][:, :3].mean()), 1e-12), max(found.smoothness, 1e-12)
    start = max(float(found.measured["loss"][:, 0].mean()), 1e-12)
    sigma, central, dissimilarity = found.typical("sigma2"), found.typical("sigma_c2"), found.typical("G2")
    progress = beta * start / epsilon

    def noise(central_share: float) -> float:
        return (sigma + central_share * central) * beta * start / (steps * cohort * epsilon**2)

    drift = sqrt(max(dissimilarity, 0.0) * beta) / epsilon**1.5
    return {
        "parallel": noise(cohort) + drift + progress,
        "gradient_1way": noise(steps * cohort) + progress,
        "gradient_2way": noise(cohort) + progress,
    }


def _central_batches(found: Dissimilarity, cohort: int, steps: int) -> dict[str, int]:
    """|B_c| with S·σ_c² = σ² (1-way: K·S·σ_c² = σ²), as σ_c² falls with 1/|B_c|; 0 where there are no batches."""
    if not found.central_batch:
        return dict.fromkeys(("parallel", "gradient_1way", "gradient_2way"), 0)
    per_example = found.typical("sigma_c2") * found.central_batch
    needed = max(1, ceil(cohort * per_example / max(found.typical("sigma2"), 1e-12)))
    return {"parallel": needed, "gradient_1way": needed * steps, "gradient_2way": needed}


def _largest_rates(found: Dissimilarity, steps: int, server_rate: float) -> dict[str, float]:
    """Table 4, non-convex: η·η_s·K at most 1/(6(1 + B²)β), 1/(18β) and 1/(24β), with B² = 1."""
    unit = 1.0 / (max(found.smoothness, 1e-12) * steps * server_rate)
    return {"parallel": unit / 12, "gradient_1way": unit / 18, "gradient_2way": unit / 24}
