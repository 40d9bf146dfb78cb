"""Models, data and optimizers that cannot work, through the Python interface: refused, or right all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mixfed as mf
from tests.adversarial.trial import Trial, Wrong, refusal


def clients(labels: Any = None, x: Any = None) -> mf.FederatedData:
    """Five clients of four examples of three numbers, of ten classes."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(20, 3)).astype(np.float32) if x is None else x
    return mf.FederatedData.from_arrays(
        {"x": x, "y": np.arange(20) % 10 if labels is None else labels}, np.arange(20) // 4
    )


def trained(
    trial: Trial,
    module: nn.Module | None = None,
    criterion: Any = mf.cross_entropy,
    data: mf.FederatedData | None = None,
    optimizer: Callable[[], mf.Optimizer] = lambda: mf.sgd(0.1),
    steps: int = 2,
    **options: Any,
) -> mf.Result:
    """A short run of FedAvg."""
    torch.manual_seed(0)
    model = mf.Model(module or nn.Linear(3, 10), criterion)
    algorithm = mf.fedavg(mf.LocalTrainer(model, optimizer(), mf.Batching(2, steps=steps)))
    backend = mf.Simulator(options.pop("executor", None) or trial.one_of(["loop", "vmap", "auto"]), threads=1)
    return mf.run(algorithm, data or clients(), **{"rounds": 3, "cohort": 3, "backend": backend} | options)


class Noisy(nn.Linear):
    """A layer that draws random numbers of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape))


class Bounded(nn.Module):
    """A table that changes its own rows when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 10, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table(x)
        return rows


def noisy(trial: Trial) -> None:
    """Random numbers in the forward pass: a run and its resumption agree, or it is refused."""
    options: dict[str, Any] = {"module": None, "executor": trial.one_of(["loop", "vmap"])}

    def run(rounds: int, **more: Any) -> mf.Result:
        torch.manual_seed(0)
        return trained(trial, **options | {"module": Noisy(3, 10), "rounds": rounds} | more)

    whole = run(4)
    run(2, checkpoints=mf.Checkpoints(trial.folder / "c", every=1))
    torch.randn(3)
    again = run(4, checkpoints=mf.Checkpoints(trial.folder / "c", every=1), resume=True)
    if any(not torch.equal(x, again.params[n]) for n, x in whole.params.items()):
        raise Wrong("random numbers of a forward pass make a resumed run differ")


def bounded(trial: Trial) -> None:
    """A table with max_norm: the executors agree, or it is refused."""
    data = clients(x=np.arange(20) % 10)
    found = []
    for executor in ("loop", "vmap"):
        torch.manual_seed(0)
        found.append(trained(trial, Bounded(), data=data, executor=executor).params)
    if any(not torch.allclose(x, found[1][n], atol=1e-5) for n, x in found[0].items()):
        raise Wrong("a table with max_norm gives another model under loop than under vmap")


def without_gradients(trial: Trial) -> None:
    """A run in a context without gradients trains all the same, or is refused."""
    context = trial.one_of([torch.inference_mode, torch.no_grad])
    plain = trained(trial, executor="loop").params
    with context():
        found = trained(trial, executor="loop").params
    if any(not torch.equal(x, found[n]) for n, x in plain.items()):
        raise Wrong(f"{context.__name__} trains nothing, and nobody is told")


def good_run(trial: Trial) -> None:
    """A run that must end well, so that this kind is known to see what it looks for."""
    if not trained(trial).params["weight"].isfinite().all():
        raise Wrong("parameters that are not finite")


RIGHT: dict[str, Callable[[Trial], None]] = {
    "random numbers in a forward pass": noisy,
    "max_norm": bounded,
    "no gradients": without_gradients,
    "a good run": good_run,
}
REFUSED: dict[str, Callable[[Trial], object]] = {
    "binary cross-entropy of ten classes": lambda t: trained(t, nn.Linear(3, 1), mf.binary_cross_entropy),
    "squared error of ten classes": lambda t: trained(t, nn.Linear(3, 10), mf.squared_error),
    "cross-entropy of fractions": lambda t: trained(t, data=clients(np.linspace(0, 1, 20, dtype=np.float32))),
    "labels out of range": lambda t: trained(t, data=clients(np.arange(20))),
    "negative labels": lambda t: trained(t, data=clients(np.arange(20) - 30)),
    "too few outputs": lambda t: trained(t, nn.Linear(3, 4)),
    "inputs that do not fit": lambda t: trained(t, nn.Linear(7, 10)),
    "numbers that are text": lambda t: trained(t, data=clients(x=np.array(["a"] * 20))),
    "a negative decay": lambda t: trained(t, optimizer=lambda: mf.sgd(0.1, decay=-1.0)),
    "a momentum of 5": lambda t: trained(t, optimizer=lambda: mf.sgd(0.1, momentum=5.0)),
    "betas of 2 and 3": lambda t: trained(t, optimizer=lambda: mf.adam(0.1, betas=(2.0, 3.0))),
    "a negative epsilon": lambda t: trained(t, optimizer=lambda: mf.adam(0.1, epsilon=-1.0)),
    "a negative weight decay": lambda t: trained(t, optimizer=lambda: mf.sgd(0.1, weight_decay=-5.0)),
    "a rate that is no number": lambda t: trained(t, optimizer=lambda: mf.sgd(float("nan"))),
    "examples that are not finite": lambda t: trained(t, data=clients(x=np.full((20, 3), np.nan, np.float32))),
    "a huge number of steps": lambda t: trained(t, steps=10**13),
    "a cohort that is too large": lambda t: trained(t, cohort=9),
    "no rounds": lambda t: trained(t, rounds=0),
    "a negative delay": lambda t: trained(t, schedule=mf.Schedule(3, delays=mf.HalfNormal(-1.0))),
    "a delay that is no number": lambda t: trained(t, schedule=mf.Schedule(3, delays=mf.HalfNormal(float("nan")))),
    "a model without parameters": lambda t: trained(t, nn.Flatten()),
}  # fmt: skip


def case(trial: Trial) -> str:
    """One of the cases above."""
    what = trial.one_of([*RIGHT, *REFUSED])
    trial.note(what)
    try:
        (RIGHT | REFUSED)[what](trial)
    except (mf.InputError, mf.RunStopped) as error:
        return refusal(error)
    if what in REFUSED:
        raise Wrong("accepted")
    return "fine"
