"""Transforms over algorithms under schedules: each works, or is refused when it is built; identities change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mixfed as mf
from mixfed.backends.loopback import Loopback
from mixfed.transforms import bounded, compress, quantize, top_k
from mixfed.transforms.rows.exchange import exchange_rows
from tests.adversarial.trial import Trial, Wrong, refusal
from tests.problems import blobs, small_mlp, small_table

FEDERATED, CENTRAL, _ = blobs()
ROUNDS = 4


@dataclass(frozen=True)
class Transform:
    """A transform, and whether it changes nothing."""

    apply: Callable[[mf.Algorithm], mf.Algorithm]
    identity: bool = False


def head(name: str) -> bool:
    """Whether a parameter belongs to the last layer."""
    return name.startswith(("2.", "network.2."))


TRANSFORMS: dict[str, Transform] = {
    "all of the uploads": Transform(lambda a: compress(a, upload={"delta": top_k(1.0)}), identity=True),
    "all of the uploads, with feedback": Transform(
        lambda a: compress(a, upload={"delta": top_k(1.0)}, error_feedback=True), identity=True
    ),
    "nothing compressed": Transform(lambda a: compress(a), identity=True),
    "8-bit uploads": Transform(lambda a: compress(a, upload={"delta": quantize(8)})),
    "sparse uploads with feedback": Transform(lambda a: compress(a, upload={"delta": top_k(0.3)}, error_feedback=True)),
    "8-bit messages with feedback": Transform(
        lambda a: compress(a, message={"params": quantize(8)}, error_feedback=True)
    ),
    "sparse corrections": Transform(lambda a: compress(a, message={"correction": top_k(0.3)})),
    "everything global": Transform(lambda a: mf.local_global(a, lambda name: True), identity=True),
    "head global": Transform(lambda a: mf.local_global(a, head)),
    "head global after a warm start": Transform(lambda a: mf.local_global(a, head, warm_start=2)),
    "a bound that nobody reaches": Transform(lambda a: bounded(a, 1e6), identity=True),
    "a bound": Transform(lambda a: bounded(a, 0.5)),
    "rows": Transform(exchange_rows, identity=True),
    "rows by touch": Transform(lambda a: exchange_rows(a, by_touch=True)),
    "rows in place": Transform(lambda a: exchange_rows(a, in_place=True), identity=True),
}
SCHEDULES: dict[str, mf.Schedule] = {
    "synchronous": mf.Schedule(4),
    "late": mf.Schedule(4, delays=mf.Dropouts(mf.HalfNormal(1.5), 0.05), late="use", patience=6),
    "late ones discarded": mf.Schedule(4, delays=mf.HalfNormal(1.0), late="discard"),
    "refilled": mf.Schedule(3, delays=mf.HalfNormal(1.0), concurrency=5, late="use"),
}


def setup(table: bool) -> mf.Setup:
    """A small problem, if wished on a model with a table; in 64 bits, so that round-off cannot hide a mistake."""
    model = small_table(dtype=torch.float64) if table else small_mlp(dtype=torch.float64)
    return mf.Setup(
        client=mf.LocalTrainer(model, mf.sgd(0.1), mf.Batching(3, steps=2)),
        server=mf.sgd(1.0),
        rounds=ROUNDS,
        centre=mf.LocalTrainer(model, mf.sgd(0.1), mf.Batching(8, steps=2)),
        weights=(0.5, 0.5),
    )


def case(trial: Trial) -> str:
    """One to three transforms of an algorithm, under a schedule."""
    name, schedule = trial.one_of(list(mf.ALGORITHMS)), trial.one_of(list(SCHEDULES))
    chosen = trial.draw.sample(list(TRANSFORMS), trial.one_of([1, 1, 2, 3]))
    table = any("rows" in transform for transform in chosen)
    executor = trial.one_of(["loop", "vmap", "factored", "loopback"])
    trial.note(" of ".join([*reversed(chosen), name]), f"({schedule}, {executor})")

    def plain() -> mf.Algorithm:
        return mf.ALGORITHMS[name].make(setup(table))

    def made() -> mf.Algorithm:
        algorithm = plain()
        for transform in chosen:
            algorithm = TRANSFORMS[transform].apply(algorithm)
        return algorithm

    def train(make: Callable[[], mf.Algorithm], rounds: int = ROUNDS, **options: Any) -> mf.Result:
        backend = Loopback() if executor == "loopback" else mf.Simulator(executor, threads=1)
        under = {"schedule": SCHEDULES[schedule], "backend": backend, "seed": 3} | options
        return mf.run(make(), FEDERATED, central=CENTRAL, rounds=rounds, **under)

    try:
        made()
    except mf.InputError as error:
        return refusal(error)
    rounds: list[int] = []
    try:
        whole = train(made, callbacks=[lambda record: rounds.append(record.round)])
    except mf.RunStopped as error:
        if "a bound" not in chosen:
            raise Wrong(f"stopped: {error}") from error
        return refusal(error)
    except mf.InputError as error:
        if rounds or "cannot train" in str(error):
            raise Wrong(f"built, and refused when it ran: {error}") from error
        return refusal(error)
    if not all(x.isfinite().all() for x in whole.params.values()):
        raise Wrong("parameters that are not finite")
    equal(whole, resumed(trial.folder, train, made), 0.0, "the resumed run")
    if all(TRANSFORMS[transform].identity for transform in chosen):
        equal(whole, train(plain), 1e-9, "the plain run")
    return "fine"


def resumed(folder: Path, train: Callable[..., mf.Result], made: Callable[[], mf.Algorithm]) -> mf.Result:
    """The result of a run that stopped half way and was taken up again."""
    train(made, rounds=ROUNDS // 2, checkpoints=mf.Checkpoints(folder / "half", every=1))
    return train(made, checkpoints=mf.Checkpoints(folder / "half", every=1), resume=True)


def equal(one: mf.Result, other: mf.Result, tolerance: float, what: str) -> None:
    """Whether two runs learnt the same."""
    for name, x in one.params.items():
        if not torch.allclose(x, other.params[name], rtol=tolerance, atol=tolerance):
            raise Wrong(f"{name} differs by {(x - other.params[name]).abs().max():.2g} from {what}")
