"""``mixfed.run``: the loop with the simulator, unless another backend is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from mixfed.backends.distributed.engine import Distributed, Together
from mixfed.backends.simulator import Simulator
from mixfed.core.algorithm import Algorithm
from mixfed.core.backend import Backend
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.loop import Callback, Evaluate, Evaluation, Result, train
from mixfed.core.schedule import Schedule
from mixfed.data.store import CentralData, FederatedData


def run(
    algorithm: Algorithm,
    data: FederatedData | Mapping[str, FederatedData] | None,
    *,
    rounds: int,
    cohort: int | Mapping[str, int] = 10,
    schedule: Schedule | None = None,
    central: CentralData | Mapping[str, CentralData] | None = None,
    seed: int = 0,
    evaluate: Evaluate | None = None,
    every: int = 1,
    backend: Backend | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Trains for a number of rounds and returns the model, its metrics and what it cost.

    ``data`` are the clients (several populations by name), ``central`` is what the server holds. Every round asks a
    ``cohort`` and waits for it, unless a ``schedule`` says otherwise (delays, buffer, concurrency, a client that joins
    later). The model is evaluated ``every`` so many rounds and after the last. With ``checkpoints`` the run can be
    resumed at any round and ends bit for bit as if it had never stopped. ``should_stop`` is asked after every round; a
    run that stops early has ``finished = False``. Clients are simulated in this process, unless a ``backend`` is given;
    with :class:`mixfed.Distributed` all ranks call this with the same arguments, and all get the result.
    """
    backend = backend or Simulator()
    around = Together(evaluate, callbacks, checkpoints, should_stop)
    ranks = backend.ranks if isinstance(backend, Distributed) else None
    with ranks.agreed() if ranks else nullcontext():
        around = around.on(ranks) if ranks else around
        return train(
            algorithm,
            data,
            backend,
            schedule or Schedule(cohort),
            rounds=rounds,
            central=central,
            seed=seed,
            evaluation=Evaluation(around.evaluate, every),
            callbacks=around.callbacks,
            checkpoints=around.checkpoints,
            resume=resume,
            should_stop=around.should_stop,
        )
