"""From measured dissimilarity to advice: which mixed method, what central batch, which step sizes, and why.

The 2022 paper bounds the rounds to reach E‖∇f‖² ≤ ε on non-convex problems (Table 1) by::

    Parallel Training:    (σ² + S·σ_c²)·βF/(K·S·ε²)   + G·√β/ε^(3/2) + B²·βF/ε
    1-way transfer:       (σ² + K·S·σ_c²)·βF/(K·S·ε²) + βF/ε
    2-way transfer:       (σ² + S·σ_c²)·βF/(K·S·ε²)   + βF/ε

Here ε is a hundredth of the squared gradient norm at the start, F the loss at the start, β an estimate from below, and
(G, B) = (G̃, 1), which satisfies the paper's definition on the sampled gradients. On convex problems the rounds are to
reach f − f* ≤ ε, a hundredth of F, and D², the squared distance to the optimum, stands for βF before 1/ε² and βD² for
βF before 1/ε. D² is at least 2F/β, which is what it is taken for. Only ratios of bounds are used.

Clients that are unlike add K·σ_f² to σ², where σ_f² is the variance between them. What is measured is σ² + σ_f², which
counts that variance once, so that the noise of clients is understated and a central batch is asked for that is large
enough in any case.
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
"""The bounds are compared for bringing ‖∇f‖² (convex: the loss) down to this share of what it was at the start."""

LARGEST = {
    "non-convex": {"parallel": 12, "gradient_1way": 18, "gradient_2way": 24},
    "convex": {"parallel": 12, "gradient_1way": 8, "gradient_2way": 81},
}
"""Table 4: η·η_s·K is at most 1/(β·this). Parallel Training has 6(1 + B²) with B² = 1."""


@dataclass(frozen=True)
class Advice:
    """What to use. ``slowdown`` is Parallel Training's bound over 2-way transfer's, ``noise`` the same for 1-way's;
    ``convex`` says which rows of the paper's tables they are from."""

    algorithm: str
    slowdown: float
    noise: float
    central_batch: dict[str, int]
    largest_rate: dict[str, float]
    reasons: list[str]
    convex: bool = False


def advise(
    found: Dissimilarity, *, cohort: int, steps: int, server_rate: float, central_examples: int, convex: bool = False
) -> Advice:
    """Advice for a cohort of S clients that take K steps each with the server rate η_s."""
    bounds = _bounds(found, cohort, steps, convex)
    slowdown, noise = bounds["parallel"] / bounds["gradient_2way"], bounds["gradient_1way"] / bounds["gradient_2way"]
    batch = _central_batches(found, cohort, steps)
    rates = _largest_rates(found, steps, server_rate, convex)
    reasons = [_on_dissimilarity(found, slowdown, convex)]
    if found.largest("G2") < LARGE:
        algorithm = "parallel"
        reasons.append("It is as good as a transfer here and sends nothing extra.")
    elif not found.central_batch:
        algorithm = "gradient_1way"
        reasons.append(_on_large_rates(steps))
    elif batch["gradient_1way"] <= central_examples:
        algorithm = "gradient_1way"
        reasons.append(
            f"1-way transfer needs a central batch of about {batch['gradient_1way']:,}, which the centre can give."
            f" {_on_large_rates(steps)}"
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
        f" {rates['gradient_2way']:.2g} (gradient_2way) satisfy Table 4 ({_row(convex)}). The proofs need that;"
        " practice allows far larger ones, and not always in this order. Table 5 assumes η_m ≥ 1, and"
        f" η_s ≥ √S = {sqrt(cohort):.3g} for 1-way."
    )
    return Advice(algorithm, slowdown, noise, batch, rates, reasons, convex)


def as_json(found: Dissimilarity, advice: Advice) -> dict[str, Any]:
    """The probe's result for scripts."""
    largest = {name: found.largest(name) for name in ("G2", "B2", "sigma2", "sigma_c2")}
    typical = {name: found.typical(name) for name in ("G2", "B2", "sigma2", "sigma_c2", "gradient2")}
    return {"max": largest, "median": typical, "smoothness": found.smoothness, "advice": asdict(advice)}


def _row(convex: bool) -> str:
    return "convex" if convex else "non-convex"


def _on_large_rates(steps: int) -> str:
    """Which transfer bears the larger rate: with one local step as the paper says, with many the other way round."""
    if steps == 1:
        return (
            "With one local step it bears larger rates than 2-way transfer, which goes about twice as far in a round."
        )
    return (
        f"At large rates it may be the first to diverge, because it repeats one central gradient in all K = {steps}"
        " local steps; with five and more 2-way transfer bore a larger rate (docs/results.md), so try both at yours."
    )


def _on_dissimilarity(found: Dissimilarity, slowdown: float, convex: bool) -> str:
    alike = found.largest("G2") < LARGE
    return (
        f"The gradients of clients and centre are {'alike' if alike else 'unlike'}: max G̃² ="
        f" {found.largest('G2'):.3g} (the paper: 49 where parallel training was slower, 0.03 where not), max B̃² ="
        f" {found.largest('B2'):.3g}; to bring {'the loss' if convex else '‖∇f‖²'} to a hundredth of its start, Table 1"
        f" ({_row(convex)}) gives parallel training {slowdown:.2g} times the rounds of 2-way transfer."
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
        f" at a central batch of {found.central_batch:,}. Some of σ² is how unlike clients are, which the bounds count"
        " K times: the more of it, the smaller a batch will do, down to a K-th."
    )


def _bounds(found: Dissimilarity, cohort: int, steps: int, convex: bool) -> dict[str, float]:
    beta = max(found.smoothness, 1e-12)
    start = max(float(found.measured["loss"][:, 0].mean()), 1e-12)
    reached = start if convex else float(found.measured["gradient2"][:, :3].mean())
    epsilon = max(TARGET * reached, 1e-12)
    sigma, central, dissimilarity = found.typical("sigma2"), found.typical("sigma_c2"), found.typical("G2")
    distance = 2 * start / beta
    of_noise, of_progress = (distance, beta * distance) if convex else (beta * start, beta * start)

    def noise(central_share: float) -> float:
        return (sigma + central_share * central) * of_noise / (steps * cohort * epsilon**2)

    drift, progress = sqrt(max(dissimilarity, 0.0) * beta) / epsilon**1.5, of_progress / epsilon
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


def _largest_rates(found: Dissimilarity, steps: int, server_rate: float, convex: bool) -> dict[str, float]:
    unit = 1.0 / (max(found.smoothness, 1e-12) * steps * server_rate)
    return {name: unit / factor for name, factor in LARGEST[_row(convex)].items()}
