"""What ranks tell each other, how work is dealt, and what of a run is done together."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.local_global import local_global
from mixfed.algorithms.mixed import example_transfer
from mixfed.backends.distributed.engine import Distributed
from mixfed.backends.distributed.ranks import Ranks, join_ranks
from mixfed.backends.distributed.shares import home_of, in_stretches, in_turn, longest_first, steps_of
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.loop import Result
from mixfed.core.optim import sgd
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.data import open_part, save_parts
from mixfed.data.parts import cuts_of
from mixfed.errors import InputError
from mixfed.evaluate.metrics import evaluator
from mixfed.evaluate.personal import averaged_test, combined, local_test, new_test
from mixfed.transforms.rows.exchange import exchange_rows
from tests.problems import blobs, small_mlp, small_table
from tests.ranks import on_ranks

FEDERATED, CENTRAL, TEST = blobs()


def talk(ranks: Ranks) -> list[Any]:
    long = "x" * (9000 if ranks.rank else 3)
    tensors = {"half": torch.full((2, 3), ranks.rank, dtype=torch.bfloat16), "none": torch.zeros(0)}
    found: list[Any] = [ranks.gather((long, tensors)), ranks.of(1, ranks.rank), ranks.any(ranks.rank == 1)]
    found += [ranks.sum(torch.tensor([1.0, ranks.rank])), ranks.to_first(ranks.rank)]
    refusals = []
    for kind in ("one", "none", "nested"):
        try:
            with ranks.agreed():
                if ranks.rank == 1 and kind != "none":
                    raise InputError("no such thing")
                if kind == "nested":
                    ranks.gather("never answered")
        except InputError as error:
            refusals.append(str(error))
    return [*found, refusals]


def test_ranks_tell_each_other_values_and_refusals() -> None:
    for rank, (gathered, second, any_of, total, on_first, refusals) in enumerate(on_ranks(talk)):
        for of, (text, tensors) in enumerate(gathered):
            assert len(text) == (9000 if of else 3)
            assert tensors["half"].dtype == torch.bfloat16
            assert tensors["half"].tolist() == [[of] * 3] * 2
            assert tensors["none"].shape == (0,)
        assert (second, any_of, total.tolist()) == (1, True, [2.0, 1.0])
        assert on_first == ([] if rank else [0, 1])
        text = "no such thing" if rank else "On rank 1: no such thing"
        assert refusals == [text, text]


def test_the_longest_are_dealt_first_and_clients_belong_to_stretches() -> None:
    steps = np.array([1, 8, 2, 2, 1, 8, 1, 1])
    assert np.bincount(longest_first(steps, 2), steps).tolist() == [12, 12]
    assert np.bincount(in_turn(steps, 2), steps).max() == 19
    for ranks, unit in product((1, 2, 3, 5), (1, 2, 3)):
        owner = in_stretches(steps, ranks, unit)
        assert (np.diff(owner) >= 0).all()
        assert set(owner) <= set(range(ranks))
        assert all(len(set(owner[i : i + unit])) == 1 for i in range(0, len(steps), unit))
    assert np.bincount(in_stretches(steps, 2), steps).tolist() == [11, 13]
    offsets = np.concatenate([[0], np.cumsum([5, 1, 1, 1, 9, 1])])
    assert cuts_of(offsets, 2).tolist() == [0, 4, 6]
    for ranks in (1, 2, 3, 7):
        cuts = cuts_of(offsets, ranks)
        owner = home_of(np.arange(6), cuts)
        assert [np.flatnonzero(owner == rank).tolist() for rank in range(ranks)] == [
            list(range(a, b)) for a, b in pairwise(cuts)
        ]
    assert steps_of(np.array([1, 5, 6]), Batching(5, epochs=2)).tolist() == [2, 2, 4]
    assert steps_of(np.array([1, 5, 6]), Batching(5, steps=3)).tolist() == [3, 3, 3]


def personal_run(backend: Simulator, folder: Path | None = None, **options: Any) -> Result:
    """Clients keep their first layer; all evaluations that ask clients' own models."""
    algorithm = local_global(fedavg(LocalTrainer(small_mlp(), sgd(0.1), Batching(3, steps=2))), lambda n: n[0] == "2")
    tests = [local_test(algorithm, FEDERATED), new_test(algorithm, TEST), averaged_test(algorithm, TEST)]
    evaluate = combined(evaluator(algorithm.model, TEST, personal=algorithm.personal), *tests)
    checkpoints = Checkpoints(folder, every=1) if folder else None
    how = {"rounds": 4, "cohort": 5, "evaluate": evaluate, "every": 2, "checkpoints": checkpoints} | options
    return run(algorithm, FEDERATED, backend=backend, **how)


def evaluated(ranks: Ranks) -> dict[str, float]:
    return personal_run(Distributed(ranks, "loop")).metrics


def test_all_ranks_know_the_metrics_of_all_clients_models() -> None:
    alone = personal_run(Simulator("loop")).metrics
    assert len(alone) == 5
    for found in on_ranks(evaluated, size=3):
        assert found == pytest.approx(alone, rel=1e-5)


def resumed(ranks: Ranks, folder: Path, on_disk: bool, stop: int) -> tuple[bool, int]:
    """The last rank alone asks for the stop."""
    rounds: list[int] = []
    result = personal_run(
        Distributed(ranks, "loop", private_folder=folder / "private" if on_disk else None),
        folder,
        resume=True,
        callbacks=[lambda record: rounds.append(record.round)],
        should_stop=lambda: ranks.rank == ranks.size - 1 and len(list(folder.glob("*.safetensors"))) >= stop,
    )
    return result.finished, len(rounds)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_run_goes_on_with_another_number_of_ranks(on_disk: bool, tmp_path: Path) -> None:
    """Three ranks have the first round, two the next ones, and one process the last."""
    straight = personal_run(Simulator("loop"))
    assert on_ranks(resumed, tmp_path, on_disk, 0, size=3) == [(False, 1), (False, 0), (False, 0)]
    assert on_ranks(resumed, tmp_path, on_disk, 2) == [(False, 2), (False, 0)]
    alone = personal_run(
        Simulator("loop", private_folder=tmp_path / "private" if on_disk else None), tmp_path, resume=True
    )
    assert [entry["round"] for entry in alone.history] == [2, 4]
    assert len(list(tmp_path.glob("private/*.rows"))) == (3 if on_disk else 0)
    for name, x in straight.params.items():
        torch.testing.assert_close(alone.params[name], x, rtol=1e-6, atol=1e-6)
    for (client, own), (other, theirs) in zip(
        straight.privates.items("clients"), alone.privates.items("clients"), strict=True
    ):
        assert client == other
        torch.testing.assert_close(own["local"], theirs["local"], rtol=1e-6, atol=1e-6)


def in_order(backend: Simulator, rows: bool) -> Params:
    """Ragged clients, several chunks, two of which lie on the border between ranks."""
    model = small_table() if rows else small_mlp()
    algorithm = fedavg(LocalTrainer(model, sgd(0.1), Batching(3, epochs=2)))
    return run(exchange_rows(algorithm) if rows else algorithm, FEDERATED, rounds=3, cohort=11, backend=backend).params


def all_in_order(ranks: Ranks) -> list[Params]:
    options = {"deterministic_sum": True, "chunk": 3}
    found = [in_order(Distributed(ranks, "vmap", **options), rows) for rows in (False, True)]
    return [*found, in_order(Distributed(ranks, "factored", **options), False)]


def test_a_deterministic_sum_has_the_same_bits_on_any_number_of_ranks() -> None:
    options = {"deterministic_sum": True, "chunk": 3}
    alone = [in_order(Simulator("vmap", **options), rows) for rows in (False, True)]
    alone.append(in_order(Simulator("factored", **options), False))
    for size in (2, 3):
        for found in on_ranks(all_in_order, size=size):
            for ours, wanted in zip(found, alone, strict=True):
                assert [n for n, x in wanted.items() if not torch.equal(x, ours[n])] == []


def test_clients_that_keep_something_run_one_by_one_in_order() -> None:
    with pytest.raises(InputError, match="choose the executor loop"):
        personal_run(Simulator("vmap", deterministic_sum=True))


def in_parts(ranks: Ranks, folder: Path) -> tuple[Params, int, str]:
    algorithm = example_transfer(LocalTrainer(small_mlp(), sgd(0.1), Batching(3, steps=2)), ratio=0.5)
    mine, other = (open_part(folder, rank, ranks.size) for rank in (ranks.rank, 1 - ranks.rank))
    how = {"rounds": 3, "cohort": 5, "central": CENTRAL, "backend": Distributed(ranks, "loop")}
    found = run(algorithm, mine, **how).params
    with pytest.raises(InputError) as refusal:
        run(algorithm, other, **how)
    return found, mine.examples, str(refusal.value)


@pytest.mark.parametrize("apart", [False, True])
def test_every_rank_opens_its_part_of_the_clients(apart: bool, tmp_path: Path) -> None:
    algorithm = example_transfer(LocalTrainer(small_mlp(), sgd(0.1), Batching(3, steps=2)), ratio=0.5)
    alone = run(algorithm, FEDERATED, rounds=3, cohort=5, central=CENTRAL, backend=Simulator("loop")).params
    if apart:
        save_parts(FEDERATED, tmp_path / "data", 2)
    else:
        FEDERATED.save(tmp_path / "data")
    (ours, mine, told), (_, theirs, _) = on_ranks(in_parts, tmp_path / "data")
    assert mine + theirs == FEDERATED.examples
    assert abs(mine - theirs) < 8
    assert "needs part 0 of 2" in told
    for name, x in alone.items():
        torch.testing.assert_close(ours[name], x, rtol=1e-6, atol=1e-6)
    part = open_part(tmp_path / "data", 1, 2)
    assert np.array_equal(part.client(11)["x"], FEDERATED.client(11)["x"])
    for refused in (lambda: part.client(0), lambda: part.split({"a": 1.0}, 0), lambda: open_part(tmp_path, 0, 2)):
        with pytest.raises(InputError):
            refused()


def test_ranks_are_started_by_torchrun() -> None:
    with pytest.raises(InputError, match="started by torchrun"), join_ranks():
        pass
