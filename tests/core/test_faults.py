"""Bad updates are dropped and counted; bad input gets one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mixfed.algorithms.baselines import center, local
from mixfed.algorithms.fedavg import fedavg
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.losses import binary_cross_entropy, cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError, RunStopped
from tests.core.helpers import assert_close, averaging, clients, train
from tests.problems import point, small_mlp, targets, trainer

GOOD = [[[1.0], [2.0]], [[5.0]], [[-3.0], [0.0], [4.0]]]


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_bad_update_is_dropped_and_the_others_are_averaged(executor: str, bad: float, threads: int) -> None:
    with_bad = targets(GOOD[0], [[bad]], *GOOD[1:], [[1.0], [bad]])
    algorithm = fedavg(trainer(point([0.5]), 0.5, steps=2))
    result = train(algorithm, with_bad, executor, rounds=3, threads=threads)
    expected = train(algorithm, targets(*GOOD), executor, rounds=3)
    assert result.dropped == 2 * 3
    assert expected.dropped == 0
    assert_close(result.params, expected.params, 1e-12)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_clients_own_model_is_not_spoilt(executor: str) -> None:
    """Local only sends nothing up; a client whose model would become NaN keeps the one it had."""
    result = train(local(trainer(point([0.5]), 0.5)), targets([[1.0]], [[float("nan")]]), executor, rounds=2)
    assert result.dropped == 2
    assert [client for client, _ in result.privates.items("clients")] == [0]


def test_callbacks_hear_of_dropped_updates() -> None:
    heard: list[int] = []
    data = targets([[1.0]], [[float("nan")]])
    train(fedavg(trainer(point([0.5]), 0.5)), data, rounds=3, callbacks=[lambda record: heard.append(record.dropped)])
    assert heard == [1, 2, 3]


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_bad_updates_only_stop_the_run_at_its_last_good_checkpoint(executor: str, tmp_path: Path) -> None:
    """Rate 1e200: w = 1e200 after the first round, and its square is out of range from the second on."""
    algorithm = fedavg(trainer(point([0.0]), 1e200))
    with pytest.raises(RunStopped, match=r"last 12 updates .* round 2; lower the learning rate or clip"):
        train(algorithm, targets(*[[[1.0]]] * 12), executor, rounds=5, checkpoints=Checkpoints(tmp_path, every=1))
    saved = Checkpoints(tmp_path).load()
    assert saved["round"] == 1
    assert float(saved["state"]["params"]["w"]) == pytest.approx(1e200)


@pytest.mark.parametrize("schedule", [Schedule(1), Schedule(4, buffer=1), Schedule(4, concurrency=2)])
def test_one_client_with_bad_data_does_not_stop_the_run(schedule: Schedule) -> None:
    """Though it may be the only one of a round or of a step."""
    data = targets([[1.0]], [[2.0]], [[float("nan")]], [[3.0]])
    result = train(fedavg(trainer(point([0.5]), 0.5)), data, rounds=20, schedule=schedule)
    assert result.dropped >= 4
    assert 1.0 < float(result.params["w"][0]) < 3.0


def test_where_every_update_is_bad_small_cohorts_stop_after_five_of_them_resumed_or_not(tmp_path: Path) -> None:
    """The first round is good; then two updates a round: five, and one more, are there in round 4."""
    algorithm, data = fedavg(trainer(point([0.0]), 1e200)), targets([[1.0]], [[1.0]])
    with pytest.raises(RunStopped, match=r"last 6 updates .* round 4;"):
        train(algorithm, data, rounds=9)
    train(algorithm, data, rounds=2, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(RunStopped, match=r"last 6 updates .* round 4;"):
        train(algorithm, data, rounds=9, checkpoints=Checkpoints(tmp_path), resume=True)


def refused(sentence: str, run: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        run()
    assert "\n" not in str(caught.value)


def test_cohort_and_population() -> None:
    data = clients([3, 3])
    model = Model(nn.Linear(3, 2), cross_entropy)
    refused("cohort of 3 clients cannot be drawn from the 2 clients", lambda: train(averaging(model), data, cohort=3))
    refused("cohort of 0 clients", lambda: train(averaging(model), data, cohort=0))
    refused("names no cohort for the clients 'clients'", lambda: train(averaging(model), data, cohort={"others": 1}))
    refused("trains on clients 'clients', and the run has none", lambda: train(averaging(model), {}))
    refused("rounds", lambda: train(averaging(model), data, rounds=0))


def test_empty_clients() -> None:
    data = FederatedData({"x": np.zeros((3, 3), np.float32), "y": np.zeros(3, np.int64)}, np.array([0, 2, 2, 3]))
    refused("client 1 has no examples", lambda: train(averaging(Model(nn.Linear(3, 2), cross_entropy)), data, cohort=1))


@pytest.mark.parametrize("label", [-1, 2, 99])
def test_labels_out_of_range(label: int) -> None:
    data = clients([3, 4])
    data.arrays["y"][5] = label
    model = Model(nn.Linear(3, 2), cross_entropy)
    refused(
        r"labels 'y' of the examples of 'clients' go from .* outputs for 0 to 1 only; .*\(see client 1\)",
        lambda: train(averaging(model), data),
    )
    at_centre = center(LocalTrainer(model, sgd(0.1), Batching(0, steps=1)))
    sentence = "labels 'y' of the central examples go from .* outputs for 0 to 1 only"
    refused(sentence, lambda: train(at_centre, {}, central=data.pooled()))


NO_FIT: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(4, 2), (3,)),
    "convolution": (nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()), (1, 8, 8)),
    "batch norm": (nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()), (3,)),
    "embedding": (nn.Sequential(nn.Embedding(5, 4), nn.Flatten()), (3,)),
}


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("name", NO_FIT)
def test_shapes_that_do_not_fit(name: str, executor: str) -> None:
    module, shape = NO_FIT[name]
    refused(
        rf"The model does not take the examples of 'clients' \(of shapes x \[{', '.join(map(str, shape))}\], y \[\]\)",
        lambda: train(averaging(Model(module, cross_entropy)), clients([3, 4], shape), executor),
    )


def test_a_criterion_that_does_not_fit_the_labels() -> None:
    """Two logits where binary cross-entropy wants one."""
    model = Model(nn.Linear(3, 2), binary_cross_entropy)
    refused("needs one output and one label for each", lambda: train(averaging(model), clients([3, 4])))


def test_missing_fields() -> None:
    model = small_mlp()
    unlabelled = FederatedData.from_datasets([{"x": np.zeros((3, 2), np.float32)}])
    refused("The criterion needs labels 'y'", lambda: train(averaging(model), unlabelled))
    unnamed = FederatedData.from_datasets([{"pixels": np.zeros((3, 2), np.float32), "y": np.zeros(3, np.int64)}])
    refused(
        "asks for a field 'x', and the examples of 'clients' have 'pixels', 'y'",
        lambda: train(averaging(model), unnamed),
    )


def test_no_central_data() -> None:
    algorithm = center(LocalTrainer(small_mlp(), sgd(0.1), Batching(0, steps=1)))
    refused("needs central data 'centre', and the run was given none", lambda: train(algorithm, {}))
    nothing = CentralData({"x": np.zeros((0, 2), np.float32), "y": np.zeros(0, np.int64)})
    refused("The central examples are empty", lambda: train(algorithm, {}, central=nothing))


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_failing_client_is_one_sentence(executor: str) -> None:
    """An embedding looked up beyond its end, in an example that is not the first."""
    draw = np.random.default_rng(0)
    data = FederatedData.from_datasets(
        [{"x": draw.integers(0, 5, (3, 2)), "y": np.zeros(3, np.int64)} for _ in range(3)]
    )
    data.arrays["x"][4, 0] = 77
    model = Model(nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)), cross_entropy)
    who = "Client 1 of 'clients' cannot train" if executor == "loop" else "vmap executor cannot run"
    refused(f"{who}.*index out of range", lambda: train(averaging(model), data, executor))


def test_torch_threads_are_left_as_they_were() -> None:
    before = torch.get_num_threads()
    train(averaging(small_mlp()), clients([3, 4], (2,), 3), threads=3)
    assert torch.get_num_threads() == before
