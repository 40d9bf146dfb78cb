"""Trackers: a run's metrics and costs in TensorBoard, MLflow or Weights & Biases, as callbacks with an end.

All keep their files inside the run folder unless told otherwise, and go on with the same curve when a run is
resumed: a round that is run again is not shown twice.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from mixfed.core.loop import Record
from mixfed.core.tree import flatten
from mixfed.errors import InputError, from_extra
from mixfed.experiments.recipe import Recipe


class Tracker(Protocol):
    """A callback with an end."""

    def __call__(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars for TensorBoard under ``folder/tensorboard``: metrics by name, costs under ``ledger/``."""

    def __init__(self, folder: Path, recipe: Recipe, resume: bool = False) -> None:
        from_extra("tensorboard", "tensorboard", "Tracking with tensorboard")
        self._make = import_module("torch.utils.tensorboard").SummaryWriter
        self._folder = folder / "tensorboard"
        self._recipe = recipe
        self._resume = resume
        self._writer: Any = None

    def __call__(self, record: Record) -> None:
        """Writes one round."""
        if self._writer is None:
            purge = record.round if self._resume else None
            self._writer = self._make(str(self._folder), purge_step=purge)
            self._writer.add_text("config", f"```\n{self._recipe.toml()}\n```", record.round)
        for name, value in _values(record).items():
            self._writer.add_scalar(name, value, record.round)

    def close(self) -> None:
        """Flushes what is still buffered."""
        if self._writer is not None:
            self._writer.close()


_REFUSED = re.compile(r"[^/\w.\- :]")
"""What MLflow does not take in the name of a metric; ``recall@10`` and classes of a user's own may have it."""


class MLflow:
    """An MLflow run (the whole recipe as parameters) in ``folder/mlflow.db``, or where MLFLOW_TRACKING_URI points.

    The run's identity is kept in ``folder/mlflow-run-id``, so that a resumed run goes on in the same MLflow run.
    """

    def __init__(self, folder: Path, recipe: Recipe, resume: bool = False) -> None:
        from_extra("mlflow", "mlflow", "Tracking with mlflow")
        tracking = import_module("mlflow.tracking")
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._client = tracking.MlflowClient(tracking_uri=where)
        self._identity = folder / "mlflow-run-id"
        self._artifacts = (folder.resolve() / "mlflow-artifacts").as_uri()
        going_on = resume and self._identity.is_file()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = self._identity.read_text() if going_on else self._open(recipe)
        self._reported = self._last_round() if going_on else 0

    def __call__(self, record: Record) -> None:
        """Writes one round, unless it was reported before the run was interrupted."""
        if record.round <= self._reported:
            return
        for name, value in _values(record).items():
            self._client.log_metric(self._run, _REFUSED.sub("_", name), value, step=record.round)

    def close(self) -> None:
        """Marks the run as ended."""
        self._client.set_terminated(self._run)

    def _open(self, recipe: Recipe) -> str:
        name = recipe.name or "mixfed"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name, self._artifacts)
        run: str = self._client.create_run(experiment, run_name=f"{recipe.algorithm}-seed{recipe.seed}").info.run_id
        for name, value in flatten(recipe.table()).items():
            self._client.log_param(run, name.replace("/", "."), value)
        self._identity.write_text(run)
        return run

    def _last_round(self) -> int:
        steps = [m.step for m in self._client.get_metric_history(self._run, "ledger/bytes_down")]
        return max(steps, default=0)


class WandB:
    """A Weights & Biases run in ``folder/wandb``; WANDB_MODE and the other variables of wandb say where it goes.

    A resumed run goes on in the same one, which is kept in ``folder/wandb-run-id``.
    """

    def __init__(self, folder: Path, recipe: Recipe, resume: bool = False) -> None:
        wandb = from_extra("wandb", "wandb", "Tracking with wandb")
        folder.mkdir(parents=True, exist_ok=True)
        identity = folder / "wandb-run-id"
        if not (resume and identity.is_file()):
            identity.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=recipe.name or "mixfed",
            name=f"{recipe.algorithm}-seed{recipe.seed}",
            id=identity.read_text(),
            resume="allow",
            dir=str(folder),
            config=recipe.table(),
        )

    def __call__(self, record: Record) -> None:
        """Writes one round."""
        if values := _values(record):
            self._run.log(values, step=record.round)

    def close(self) -> None:
        """Marks the run as ended."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Path, Recipe, bool], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}


HELPS = {
    "mlflow": "look at MLFLOW_TRACKING_URI",
    "wandb": "log in with 'wandb login', or keep the run on this machine with WANDB_MODE=offline",
}


def tracker(name: str, folder: Path, recipe: Recipe, resume: bool) -> Tracker:
    """The tracker of this name; what its package refuses (nobody is logged in, no server is there) is one sentence."""
    try:
        return TRACKERS[name](folder, recipe, resume)
    except InputError:
        raise
    except Exception as error:  # each package has errors of its own
        told = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        way_out = f"; {HELPS[name]}" if name in HELPS else ""
        raise InputError(f"The run cannot be tracked with {name} ({told[:200]}){way_out}.") from error


def _values(record: Record) -> dict[str, float]:
    """The metrics of an evaluated round, and the costs so far."""
    if not record.metrics:
        return {}
    return dict(record.metrics) | {f"ledger/{name}": float(value) for name, value in record.ledger.items()}
