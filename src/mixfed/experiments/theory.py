"""Why part of the model should be local: the linear case, in closed form and measured (Liang et al., 2020, Section 4).

Device m has y = u_mᵀx + ε with u_m = v + r_m, r_m ~ N(0, ρ²I), ε ~ N(0, σ²), and N examples of dimension d with
E[xxᵀ] = κI. Its least-squares û_m has data variance, the mean v̂ of all û_m has device variance, and the interpolation
αû_m + (1 − α)v̂ has the error

    α²·dσ²/N + (1 − α)²·((M − 1)/M)·κdρ² + (1 − α²)·dσ²/(MN),   least at  α* = κρ² / (κρ² + σ²/N).

The paper writes this for one κ; inputs drawn from U[−1, 1] have κ = 1/3. It is exact for N ≫ d: the data variance of a
finite sample is larger by about N/(N − d − 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mixfed.algorithms.baselines import local
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import CLIENTS
from mixfed.core.batches import Batching
from mixfed.core.losses import squared_error
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.train import LocalTrainer
from mixfed.data.store import FederatedData
from mixfed.errors import InputError, require_memory
from mixfed.experiments.recipe import Recipe, Theory
from mixfed.experiments.report.files import write_json
from mixfed.experiments.report.plot import plot_theory
from mixfed.rng import generator

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Linear:
    """The problem: σ of the labels' noise, ρ of the devices' teachers, M devices with N examples of dimension d."""

    sigma: float = 1.5
    rho: float = 0.1
    dimension: int = 20
    devices: int = 100
    examples: int = 2000
    test: int = 1000
    kappa: float = 1 / 3

    def __post_init__(self) -> None:
        if min(self.sigma, self.rho) < 0 or min(self.dimension, self.test) < 1 or self.devices < 2:
            raise InputError("Variances cannot be negative, and there are at least 2 devices, 1 dimension and 1 test.")
        if self.examples < 2 * self.dimension:
            raise InputError(
                f"{self.examples} examples in {self.dimension} dimensions are far from the closed form;"
                f" give at least {2 * self.dimension}, and many more to be near it."
            )

    def error(self, alpha: Array | float) -> Array:
        """The closed form, for one α or many."""
        a = np.asarray(alpha, np.float64)
        d, m, n = self.dimension, self.devices, self.examples
        data, device = d * self.sigma**2 / n, (m - 1) / m * self.kappa * d * self.rho**2
        found: Array = a**2 * data + (1 - a) ** 2 * device + (1 - a**2) * data / m
        return found

    @property
    def best(self) -> float:
        """α*, where the closed form is least."""
        noise = self.sigma**2 / self.examples
        device = self.kappa * self.rho**2
        return float(device / (device + noise)) if device + noise else 0.0

    def draw(self, seed: int) -> tuple[FederatedData, Array]:
        """Everyone's training examples, and the true u_m."""
        random = generator(seed, "theory")
        true = random.uniform(0, 1, self.dimension) + random.normal(0, self.rho, (self.devices, self.dimension))
        x = random.uniform(-1, 1, (self.devices, self.examples, self.dimension))
        y = np.einsum("mnd,md->mn", x, true) + random.normal(0, self.sigma, (self.devices, self.examples))
        owners = np.repeat(np.arange(self.devices), self.examples)
        return FederatedData.from_arrays({"x": x.reshape(-1, self.dimension), "y": y.reshape(-1)}, owners), true

    def measure(self, alphas: Sequence[float], seed: int) -> Array:
        """The error of the interpolation for every α, on fresh inputs, after training by this library.

        Local only with full batches reaches û_m to round-off: with a rate of 1/λ_max every step contracts the distance
        by at least 1 − λ_min/λ_max, of the eigenvalues of all devices' Hessians XᵀX/N.
        """
        data, true = self.draw(seed)
        x = data.arrays["x"].reshape(self.devices, self.examples, self.dimension)
        curvature = np.linalg.eigvalsh(np.einsum("mni,mnj->mij", x, x) / self.examples)
        slowest = curvature.min() / curvature.max()
        steps = 1 if slowest >= 1 else math.ceil(-40 / math.log1p(-slowest))
        model = Model(nn.Linear(self.dimension, 1, bias=False), squared_error, dtype=torch.float64)
        trainer = LocalTrainer(model, sgd(1 / float(curvature.max())), Batching(0, steps=steps, shuffle=False))
        result = run(local(trainer), data, rounds=1, cohort=self.devices, seed=seed, backend=Simulator("vmap"))
        assert result.privates is not None
        own = result.privates.gather(CLIENTS, range(self.devices))["params"]["weight"][:, 0].numpy()
        shared = own.mean(axis=0)
        x = generator(seed, "theory/test").uniform(-1, 1, (self.devices, self.test, self.dimension))
        errors = [np.square(np.einsum("mnd,md->mn", x, a * own + (1 - a) * shared - true)).mean() for a in alphas]
        return np.array(errors)


SETTINGS = (Linear(rho=0.5), Linear(rho=0.1), Linear(rho=0.06), Linear(rho=0.02))
"""The four settings of the paper: from where local models are best to where the global one is."""


Curve = tuple[Linear, Array, Array]
"""A setting, its closed form, and the measured errors [seeds, alphas]."""


def curves(settings: Sequence[Linear], alphas: Sequence[float], seeds: Sequence[int]) -> list[Curve]:
    """The curve of every setting."""
    return [(s, s.error(np.array(alphas)), np.stack([s.measure(alphas, seed) for seed in seeds])) for s in settings]


def theory(recipe: Recipe, out: str | Path) -> tuple[list[float], list[Curve]]:
    """The values of α and the curves of a recipe with a theory; writes ``theory.json`` and ``theory.png``."""
    section, out = recipe.theory, Path(out)
    if section.alphas < 2 or section.seeds < 1:
        raise InputError("A curve takes at least 2 values of alpha and 1 seed; set theory.alphas and theory.seeds.")
    if (out / "theory.json").exists():
        raise InputError(f"{out} already holds this theory; choose another folder with --out.")
    alphas = values_of_alpha(section)
    settings = [setting_of(section, rho) for rho in section.rho]
    numbers = section.devices * max(section.examples, section.test) * section.dimension
    require_memory("The data of the theory", 8 * numbers, "lower theory.devices, theory.examples or theory.dimension")
    found = curves(settings, alphas, range(recipe.seed, recipe.seed + section.seeds))
    write_json(out / "theory.json", as_json(alphas, found))
    plot_theory(out / "theory.png", alphas, {_title(s): (s.best, closed, measured) for s, closed, measured in found})
    return alphas, found


def values_of_alpha(section: Theory) -> list[float]:
    """From 0, the global model, to 1, local ones."""
    return [i / (section.alphas - 1) for i in range(section.alphas)]


def setting_of(section: Theory, rho: float) -> Linear:
    """The problem with this ρ."""
    return Linear(section.sigma, rho, section.dimension, section.devices, section.examples, section.test)


def as_json(alphas: Sequence[float], found: Sequence[Curve]) -> dict[str, Any]:
    """What theory.json holds: of every setting the best α, the closed form and the mean of what was measured."""
    settings = [
        {"rho": s.rho, "best": s.best, "closed": closed.tolist(), "measured": measured.mean(axis=0).tolist()}
        for s, closed, measured in found
    ]
    return {"alphas": list(alphas), "settings": settings}


def _title(setting: Linear) -> str:
    return f"σ = {setting.sigma}, ρ = {setting.rho}"
