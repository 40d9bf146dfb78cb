"""Asynchronous methods against values derived by hand, on a scripted clock.

One weight w. A client with the target a takes one step of rate η = ½ on ½(w − a)², so its update from a start s is
Δ = ½(a − s), and its model ½(a + s).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from mixfed.algorithms.asynchronous import ca2fl, discount, fedasync, fedbuff
from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.mixed import Population, parallel
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.batches import Batching
from mixfed.core.delays import Dropouts, HalfNormal, Scripted, none
from mixfed.core.loop import Result
from mixfed.core.optim import sgd
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.errors import InputError, RunStopped
from tests.problems import blobs, point, small_mlp, targets, trainer


def one_weight(schedule: Schedule, make: object, rounds: int, clients: int = 2) -> tuple[list[float], Result]:
    """The weight after every round; client i has the target 4·(i + 1), and w starts at 0."""
    model = point([0.0])
    seen: list[float] = []
    result = run(
        make(trainer(model, 0.5)),  # type: ignore[operator]
        targets(*([[4.0 * (i + 1)]] for i in range(clients))),
        rounds=rounds,
        schedule=schedule,
        backend=Simulator("loop", threads=1),
        callbacks=[lambda record: seen.append(float(record.params["w"][0]))],
    )
    return seen, result


# Both clients are asked in round 0 (w = 0). Client 0 (a = 4) reports at once: Δ = 2. Client 1 (a = 8) reports in round
# 1: Δ = 4, staleness 1. In round 1 client 0 is asked alone (client 1 is busy) and reports in that round.
LATE = Scripted({(0, 1): 1.0, (1, 0): 0.5})


def test_fedavg_discards_late_updates_unless_told_otherwise() -> None:
    # Round 0: w = 0 + 2. Round 1: client 0 from w = 2: Δ = ½(4 − 2) = 1. Client 1's Δ = 4 is late.
    seen, result = one_weight(Schedule(2, delays=LATE), fedavg, 2)
    assert seen == [2.0, 3.0]
    # What was trained in vain is counted, what was not fetched is not: three jobs down, two up.
    assert result.ledger["client_examples"] == 3
    assert result.ledger["bytes_down"] == 3 * 8
    assert result.ledger["bytes_up"] == 2 * 8
    # Used: the mean of 1 and 4 (one example each).
    assert one_weight(Schedule(2, delays=LATE, late="use"), fedavg, 2)[0] == [2.0, 4.5]


def test_fedbuff_discounts_by_staleness_and_divides_by_the_number_of_updates() -> None:
    # Round 0: w = 2. Round 1: (1/2)·(1 + 4/√2).
    seen, _ = one_weight(Schedule(2, delays=LATE), lambda t: fedbuff(t, buffer=0), 2)
    assert seen == pytest.approx([2.0, 2.0 + (1 + 4 / 2**0.5) / 2], rel=1e-12)
    # Two to a buffer: nothing in round 0, where one has come; the first two of round 1 (client 0's first update, then
    # client 1's at time 1.0) both are of the version 0: w = (2 + 4)/2 = 3. Client 0 was busy until then.
    seen, _ = one_weight(Schedule(2, delays=LATE), lambda t: fedbuff(t, buffer=2), 2)
    assert seen == [0.0, 3.0]


def test_fedbuff_takes_a_server_rate_and_other_rules() -> None:
    half = partial(fedbuff, buffer=0, server=sgd(0.5), rule="constant")
    # Round 0: w = 1. Round 1: client 0 from 1: Δ = 1.5; w = 1 + ½·(1.5 + 4)/2.
    assert one_weight(Schedule(2, delays=LATE), half, 2)[0] == [1.0, 2.375]


@pytest.mark.parametrize(
    ("rule", "shares"),
    # τ of the two updates of round 1: client 1's came first (time 1.0), is of version 0, and one version has passed;
    # client 0's (time 1.5) is of version 1, and one more has passed by the mixing of client 1's: 1 as well.
    [("constant", (0.5, 0.5)), ("polynomial", (0.5 / 2**0.5, 0.5 / 2**0.5)), ("hinge", (0.5 / 3, 0.5 / 3))],
)
def test_fedasync_mixes_models_one_by_one(rule: str, shares: tuple[float, float]) -> None:
    # Round 0, τ = 0: w = ½·0 + ½·2 = 1. Round 1: the models are ½(8 + 0) = 4 and ½(4 + 1) = 2.5.
    mixed = partial(fedasync, alpha=0.5, rule=rule, a=2.0 if rule == "hinge" else 0.5, b=0.0)
    seen, _ = one_weight(Schedule(2, delays=LATE), mixed, 2)
    w = 1.0 + shares[0] * (4.0 - 1.0)
    assert seen == pytest.approx([1.0, w + shares[1] * (2.5 - w)], rel=1e-12)


def test_staleness_rules_by_hand() -> None:
    assert [discount("constant")(t) for t in (0, 9)] == [1.0, 1.0]
    assert [discount("polynomial", 0.5)(t) for t in (0, 3, 8)] == pytest.approx([1.0, 0.5, 1 / 3])
    assert [discount("hinge", 10.0, 6.0)(t) for t in (0, 6, 7, 16)] == pytest.approx([1.0, 1.0, 1 / 11, 1 / 101])
    with pytest.raises(InputError):
        discount("linear")  # type: ignore[arg-type]


def test_ca2fl_by_hand() -> None:
    # Three clients (targets 4, 8, 12), all asked in round 0 at w = 0: Δ = 2, 4, 6. Clients 0 and 1 report at once.
    # First buffer: h̄ = 0, v = (2 + 4)/2 = 3, which is FedBuff without discount: w = 3. Then h = (2, 4, 0), h̄ = 6/3 = 2.
    # Round 1: clients 0 and 1 are asked at w = 3: Δ = ½, 2½, but 1 never reports; client 2's Δ = 6 comes in round 1,
    # before client 0's. Second buffer: v = 2 + ½·((6 − 0) + (½ − 2)) = 4.25, w = 7.25. Then h = (½, 4, 6), h̄ = 10.5/3.
    delays = Scripted({(0, 2): 1.0, (1, 0): 0.5, (1, 1): np.inf})
    seen, result = one_weight(Schedule(3, delays=delays), lambda t: ca2fl(t, buffer=2), 2, clients=3)
    assert seen == [3.0, 7.25]
    assert float(result.state["mean"]["w"]) == pytest.approx(3.5)
    assert {c: float(h["w"]) for c, h in result.state["cache"].items()} == {"0": 0.5, "1": 4.0, "2": 6.0}


def test_the_cache_of_ca2fl_keeps_no_more_than_it_shows() -> None:
    """An update of a vmapped chunk is a view of the whole chunk."""
    federated, _, _ = blobs()
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(2, steps=1))
    result = run(ca2fl(local, buffer=6), federated, rounds=1, cohort=6, backend=Simulator("vmap", threads=1))
    kept = [x for update in result.state["cache"].values() for x in update.values()]
    assert len(kept) == 6 * 4
    assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in kept)


def test_a_round_in_which_nothing_arrives_changes_nothing() -> None:
    slow = Scripted({}, otherwise=2.0)
    seen, _ = one_weight(Schedule(2, delays=slow), lambda t: fedbuff(t, buffer=0), 4)
    # Version 0 is current until the updates of round 0 come in round 2, undiscounted: (2 + 4)/2.
    assert seen == [0.0, 0.0, 3.0, 3.0]


def test_fedasync_with_one_client_in_flight_and_alpha_1_is_sequential_training() -> None:
    # Every model replaces the last one: w ← ½(a + w), over whichever client comes.
    seen, _ = one_weight(Schedule(1, concurrency=1, delays=HalfNormal(3.0)), lambda t: fedasync(t, alpha=1.0), 8)
    w = 0.0
    for now in seen:
        assert now in (0.5 * (4 + w), 0.5 * (8 + w))
        w = now


@pytest.mark.parametrize("concurrency", [0, 5])
def test_fedbuff_without_delay_is_uniform_fedavg(concurrency: int) -> None:
    """Buffer = concurrency = cohort; steps, not epochs, so that FedAvg weighs all clients alike."""
    federated, _, _ = blobs()
    model = small_mlp()
    local = LocalTrainer(model, sgd(0.1), Batching(1, steps=3))
    how = {"rounds": 5, "seed": 2, "backend": Simulator("loop", threads=1)}
    one = run(fedavg(local), federated, cohort=5, **how)  # type: ignore[arg-type]
    two = run(fedbuff(local, buffer=5), federated, schedule=Schedule(5, concurrency=concurrency), **how)  # type: ignore[arg-type]
    for name, x in one.params.items():
        torch.testing.assert_close(x, two.params[name], rtol=1e-6, atol=1e-6)


def test_refilling_keeps_the_clients_busy_and_a_step_takes_the_first_to_arrive() -> None:
    # Two of three clients are busy at all times. Times: both first ones report at 1 and 2 (in order of asking), the one
    # that is asked at time 1 needs 10. A buffer of two: the round ends at time 2.
    federated = targets([[4.0]], [[8.0]], [[12.0]])
    asked: list[tuple[int, list[int]]] = []

    class Watched(Simulator):
        def submit(self, jobs, message):  # type: ignore[no-untyped-def]
            super().submit(jobs, message)
            asked.append((message.round, jobs.clients.tolist()))

    def slow(seed: int, round: int, source: str, clients: np.ndarray) -> np.ndarray:
        first = len(asked) == 0
        return np.array([1.0, 2.0]) if first else np.full(len(clients), 10.0)

    run(
        fedbuff(trainer(point([0.0]), 0.5), buffer=2),
        federated,
        rounds=2,
        schedule=Schedule(2, concurrency=2, delays=slow),
        backend=Watched("loop", threads=1),
    )
    (first, second, third) = asked[:3]
    assert len(first[1]) == 2
    assert len(second[1]) == 1
    assert second[0] == 0
    assert set(first[1]) | set(second[1]) == {0, 1, 2}
    assert third[0] == 1
    assert len(third[1]) == 1


LOST = Scripted({}, otherwise=np.inf)


def test_a_run_whose_clients_are_all_lost_stops_with_a_sentence() -> None:
    one = partial(fedbuff, buffer=1)
    with pytest.raises(RunStopped, match=r"2 clients .* busy will never report.*patience"):
        one_weight(Schedule(1, concurrency=2, delays=LOST), one, 3, clients=3)
    with pytest.raises(RunStopped, match=r"All clients .* none of them will ever report.* round 3.*patience"):
        one_weight(Schedule(1, delays=LOST), one, 9, clients=3)
    # Client 0 reports once, and waits for a second update that nobody can send: the buffer is too large.
    alone = Scripted({(0, 0): 0.0}, otherwise=np.inf)
    with pytest.raises(RunStopped, match="smaller buffer"):
        one_weight(Schedule(2, delays=alone), lambda t: fedbuff(t, buffer=2), 9)
    # As many as are to be busy could be: what is missing is clients to ask.
    with pytest.raises(RunStopped, match=r"only 1 of the 2 updates .* round 1; choose a smaller buffer"):
        one_weight(Schedule(2, delays=alone, concurrency=2), lambda t: fedbuff(t, buffer=2), 9)
    # Those that are given up may be asked again, and nothing is wrong with waiting.
    late = Scripted({(4, 0): 0.0, (4, 1): 0.0}, otherwise=np.inf)
    assert one_weight(Schedule(2, delays=late, patience=2.0), lambda t: fedbuff(t, buffer=2), 6)[0][-1] == 3.0


def test_what_no_population_can_give_is_refused() -> None:
    for schedule in (Schedule(2, buffer=3), Schedule(1, concurrency=2, buffer=3), Schedule(0, concurrency=2)):
        with pytest.raises(InputError, match="A step cannot be made of"):
            one_weight(schedule, fedavg, 2)
    with pytest.raises(InputError, match="A step cannot be made of 10 updates of the 2 clients"):
        one_weight(Schedule(2), fedbuff, 2)
    with pytest.raises(InputError, match="below 1"):
        Dropouts(none, 1.0)


def test_an_update_that_waits_for_its_buffer_to_fill_is_not_late() -> None:
    """Three clients (targets 4, 8, 12), two in a round, none late, buffers of three: the mean of 2, 4 and 6."""
    assert one_weight(Schedule(2, buffer=3), fedavg, 2, clients=3)[0] == [0.0, 4.0]


def test_what_waits_is_kept_where_what_is_late_is_discarded() -> None:
    """Buffers of three of three clients: 0 and 2 come in round 0 and wait, 1 comes in round 1, is discarded, and is
    asked again in round 2."""
    seen, result = one_weight(Schedule(3, buffer=3, delays=Scripted({(0, 1): 1.0})), fedavg, 3, clients=3)
    assert seen == [0.0, 0.0, 4.0]
    assert (result.ledger["bytes_down"], result.ledger["bytes_up"]) == (4 * 8, 3 * 8)
    # All three come at once, a round takes one of them (Δ = 2, 4, 6), and the others wait for their rounds.
    assert one_weight(Schedule(3, concurrency=3, buffer=1), fedavg, 3, clients=3)[0] == [2.0, 6.0, 12.0]


def test_clients_of_one_version_run_as_one_cohort_and_messages_are_let_go() -> None:
    sizes: list[int] = []

    class Watched(Simulator):
        def _plan(self, source, clients, message, round):  # type: ignore[no-untyped-def]
            sizes.append(len(clients))
            return super()._plan(source, clients, message, round)

    backend = Watched("loop", threads=1)
    federated, _, _ = blobs()
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(2, steps=1))
    # Everyone asked in an even round reports two rounds later, together.
    delays = Scripted({(r, c): 2.0 for r in range(0, 20, 2) for c in range(12)})
    run(fedbuff(local, buffer=0), federated, rounds=3, schedule=Schedule(4, delays=delays), backend=backend)
    # Round 1's at once, then in round 2 those of round 0; those of round 2 are still in flight.
    assert sizes == [4, 4]
    assert list(backend.state()["messages"]["clients"]["rounds"]) == ["2"]


def test_two_populations_may_be_late_each_by_itself() -> None:
    """Targets 4 ("near") and 8 ("far"), w = 0 at the start, one client each, Δ = ½(a − s) as above.

    Parallel training adds the populations' updates, late ones included. Round 0: both are asked, near reports: Δ = 2,
    w = 2. Round 1: near again from 2, Δ = 1, and far's first, from 0: Δ = 4: w = 2 + 1 + 4 = 7. Round 2: far is asked
    again but stays away, near from 7: Δ = −1.5: w = 5.5.
    """
    local = trainer(point([0.0]), 0.5)
    both = parallel([Population(local, name="near"), Population(local, name="far")])
    data = {"near": targets([[4.0]]), "far": targets([[8.0]])}

    class FarIsLate:
        def __call__(self, seed: int, round: int, source: str, clients: np.ndarray) -> np.ndarray:
            return np.full(len(clients), 1.0 if source == "far" else 0.0)

    def seen(schedule: Schedule, rounds: int) -> list[float]:
        found: list[float] = []
        run(
            both,
            data,
            rounds=rounds,
            schedule=schedule,
            backend=Simulator("loop", threads=1),
            callbacks=[lambda record: found.append(float(record.params["w"][0]))],
        )
        return found

    late = Schedule(1, delays=FarIsLate(), late="use")
    assert seen(late, 3) == [2.0, 7.0, 5.5]
    with pytest.raises(InputError, match="concurrency"):
        seen(Schedule(1, delays=FarIsLate(), concurrency=1), 1)


def test_a_buffer_is_filled_by_each_population_and_a_step_takes_one_of_each() -> None:
    """Two clients each, all on time, buffers of one: two steps in a round, each with one update of both.

    From w = 0, near's targets 4 and 6 (Δ = 2, 3) and far's 8 and 10 (Δ = 4, 5): w = (2 + 4) + (3 + 5) = 14. A buffer of
    two makes one step of the means: 2.5 + 4.5 = 7.
    """
    local = trainer(point([0.0]), 0.5)
    both = parallel([Population(local, name="near"), Population(local, name="far")])
    data = {"near": targets([[4.0]], [[6.0]]), "far": targets([[8.0]], [[10.0]])}
    for buffer, expected in ((1, 14.0), (2, 7.0)):
        result = run(both, data, rounds=1, schedule=Schedule(2, buffer=buffer), backend=Simulator("loop", threads=1))
        assert float(result.params["w"][0]) == pytest.approx(expected)
