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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mixfed.algorithms.baselines import local_only
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import CLIENTS
from mixfed.core.batches import Batching
from mixfed.core.losses import squared_error
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.train import LocalTrainer
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
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
        result = run(local_only(trainer), data, rounds=1, cohort=self.devices, seed=seed, backend=Simulator("vmap"))
        assert result.privates is not None
        local = result.privates.gather(CLIENTS, range(self.devices))["params"]["weight"][:, 0].numpy()
        shared = local.mean(axis=0)
        x = generator(seed, "theory/test").uniform(-1, 1, (self.devices, self.test, self.dimension))
        errors = [np.square(np.einsum("mnd,md->mn", x, a * local + (1 - a) * shared - true)).mean() for a in alphas]
        return np.array(errors)


SETTINGS = (Linear(rho=0.5), Linear(rho=0.1), Linear(rho=0.06), Linear(rho=0.02))
"""The four settings of the paper: from where local models are best to where the global one is."""


def curves(
    settings: Sequence[Linear], alphas: Sequence[float], seeds: Sequence[int]
) -> list[tuple[Linear, Array, Array]]:
    """Of every setting: the closed form, and the measured errors [seeds, alphas]."""
    return [(s, s.error(np.array(alphas)), np.stack([s.measure(alphas, seed) for seed in seeds])) for s in settings]


def plot(found: Sequence[tuple[Linear, Array, Array]], alphas: Sequence[float], file: Path) -> None:
    """The curves side by side, the optimum marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(3.4 * len(found), 3), squeeze=False)
    for axis, (setting, closed, measured) in zip(axes[0], found, strict=True):
        mean, spread = measured.mean(axis=0), measured.std(axis=0)
        axis.plot(alphas, closed, color="black", label="closed form")
        axis.plot(alphas, mean, "o", markersize=4, color="#d1495b", label="measured")
        axis.fill_between(alphas, mean - spread, mean + spread, color="#d1495b", alpha=0.2)
        axis.axvline(setting.best, linestyle=":", color="grey", label=f"α* = {setting.best:.2f}")
        axis.set(title=f"σ = {setting.sigma}, ρ = {setting.rho}", xlabel="α (1: local, 0: global)")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("test error")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)
