"""The federation's logic against a scripted grid: late, lost, duplicate and malformed answers, and a server's death."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mixfed as mf
from mixfed.backends import wire
from mixfed.backends.federation import Terms
from mixfed.backends.parcels import Parcel
from mixfed.backends.site import Holding, Site
from mixfed.core.checkpoint import Checkpoints
from mixfed.evaluate.personal import local_test
from mixfed.transforms import compress, quantize
from tests.algorithms.test_table import CENTRAL, FEDERATED, ROWS, assert_equal, every_row, own_parts, plain, train
from tests.flower.scripted import EXPERIMENT, Fate, Script, ScriptedGrid, sites_of

FOUR = mf.Schedule(4)


def grid_of(row: str, folder: Path, script: Script = lambda node, parcel: Fate()) -> ScriptedGrid:
    return ScriptedGrid(sites_of(ROWS[row].make(), FEDERATED, folder), script)


def on(grid: ScriptedGrid, row: str = "fedavg", **options: Any) -> mf.Result:
    how = {"rounds": 4, "seed": 3, "schedule": FOUR, "central": CENTRAL} | options
    backend = how.pop("backend", None) or grid.backend(**{k: how.pop(k) for k in ("say", "observe") if k in how})
    return mf.run(ROWS[row].make(), FEDERATED, backend=backend, **how)


@every_row
def test_over_a_federation_everything_is_the_same(row: str, tmp_path: Path) -> None:
    """Every algorithm, synchronous: the simulator's parameters and private parts to the last bit, and its ledger.
    Sites answer in an order of their own."""
    grid = grid_of(row, tmp_path, lambda node, parcel: Fate(0.3 * (7 - node)))
    here, there = plain(row, "loop", "synchronous"), train(ROWS[row].make(), backend=grid.backend())
    assert_equal(here.params, there.params)
    assert here.ledger == there.ledger
    seen = here.privates.seen("clients").tolist()
    kept = [(c, grid.sites[1 + c % 4]._kept["clients", c].get("clients", c)) for c in seen]
    assert_equal(own_parts(here.privates.items("clients")), own_parts(kept))


@every_row
def test_the_clients_of_a_site_run_as_a_cohort(row: str, tmp_path: Path) -> None:
    """Every algorithm, two sites with six clients each: the numbers of clients one by one, to round-off."""
    told: list[str] = []
    algorithm = ROWS[row].make()
    found = []
    for executor in ("loop", "factored"):
        sites = sites_of(algorithm, FEDERATED, tmp_path / executor, count=2, executor=executor)
        for site in sites.values():
            site.say = told.append
        grid = ScriptedGrid(sites)
        result = train(algorithm, backend=grid.backend(), rounds=1 if ROWS[row].rounds_off else 4)
        asked = [(site, c) for site in sites.values() for source, c in site._kept if source == "clients"]
        kept = [(c, site._kept["clients", c].get("clients", c)) for site, c in asked]
        found.append((result, dict(result.params) | own_parts(kept)))
    (one, learnt), (other, learnt_together) = found
    assert not told
    assert one.ledger == other.ledger
    assert learnt.keys() == learnt_together.keys()
    for name, x in learnt.items():
        tolerance = 2e-5 if ROWS[row].rounds_off else ROWS[row].tolerance
        torch.testing.assert_close(x, learnt_together[name], rtol=tolerance, atol=tolerance)


def test_clients_that_cannot_run_together_run_one_by_one(tmp_path: Path) -> None:
    told: list[str] = []
    grid = grid_of("fedavg", tmp_path)
    algorithm = grid.sites[1].algorithm

    def client(message: Any, private: Any, batches: Any) -> Any:
        float(next(iter(message["params"].values())).sum() + batches.steps)  # a number of each client: not under vmap
        return algorithm.client(message, private, batches)

    other = replace(algorithm, client=client)
    for site in (sites := sites_of(other, FEDERATED, tmp_path / "vmap", executor="vmap")).values():
        site.say = told.append
    assert_equal(on(grid, schedule=mf.Schedule(12)).params, on(ScriptedGrid(sites), schedule=mf.Schedule(12)).params)
    assert len(told) == 4
    assert all("run one by one: The vmap executor cannot run this model" in sentence for sentence in told)


def test_one_parcel_carries_all_clients_of_a_site(tmp_path: Path) -> None:
    grid = grid_of("fedavg", tmp_path)
    on(grid, schedule=mf.Schedule(12))
    trained = [parcel for _, parcel in grid.sent if parcel.header["kind"] == "train"]
    assert [len(parcel.header["clients"]) for parcel in trained] == [3] * 16
    assert all(len(parcel.common) > len(b"".join(parcel.blocks)) for parcel in trained)


def test_real_bytes_are_counted_beside_the_ledger(tmp_path: Path) -> None:
    grid = grid_of("fedavg", tmp_path)
    backend = grid.backend()
    result = on(grid, backend=backend, schedule=mf.Schedule(12))
    assert backend.traffic.bytes_down == sum(parcel.nbytes for _, parcel in grid.sent) < backend.letters.wire_down
    assert result.ledger["bytes_up"] < backend.traffic.bytes_up == backend.letters.wire_up
    assert backend.traffic.jobs == 48


def test_compression_makes_real_bytes_fewer(tmp_path: Path) -> None:
    """A network of 6,003 numbers: four bits each travel up, and little beside them."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 3))
    trainer = mf.LocalTrainer(mf.Model(module, mf.cross_entropy), mf.sgd(0.1), mf.Batching(3, steps=1))
    plainly = mf.fedavg(trainer)
    found = []
    for algorithm in (plainly, compress(plainly, upload={"delta": quantize(4)})):
        backend = ScriptedGrid(sites_of(algorithm, FEDERATED, tmp_path / str(len(found)))).backend()
        result = mf.run(algorithm, FEDERATED, rounds=1, cohort=12, backend=backend)
        found.append(backend.traffic.bytes_up)
        assert result.ledger["bytes_up"] < found[-1] < result.ledger["bytes_up"] + 12 * 2000
    assert found[1] < found[0] / 5


def test_a_site_that_is_slow_misses_the_round_and_no_more(tmp_path: Path) -> None:
    """Its update is late and discarded; the run goes on with the rest after the deadline, and asks it again."""
    first = []

    def script(node: int, parcel: Parcel) -> Fate:
        slow = node == 2 and parcel.header["kind"] == "train" and not first
        first.extend([node] if slow else [])
        return Fate(14.0 if slow else 0.5)

    grid = grid_of("fedavg", tmp_path, script)
    backend = grid.backend()
    result = on(grid, backend=backend, schedule=mf.Schedule(12))
    assert result.rounds == 4
    assert backend.traffic.jobs == 3 * 4 * 4 - 3  # its three clients were still busy when the second round began
    assert backend.traffic.unwanted == 3
    assert 10 < grid.now < 20


def test_what_the_server_does_between_rounds_takes_nothing_from_them(tmp_path: Path) -> None:
    """Neither waiting for a site that never comes nor a long evaluation."""

    def evaluating(record: mf.Record) -> None:
        grid.now += 30

    grid = grid_of("fedavg", tmp_path, lambda node, parcel: Fate(4.0))
    del grid.sites[4]
    backend = grid.backend()
    on(grid, backend=backend, schedule=mf.Schedule(12), callbacks=[evaluating])
    assert backend.traffic.jobs == 4 * 9


def test_a_site_that_never_answers_is_given_up_and_asked_again(tmp_path: Path) -> None:
    silent: list[int] = []

    def script(node: int, parcel: Parcel) -> Fate:
        hushed = node == 2 and parcel.header["kind"] == "train" and len(silent) < 1
        silent.extend([node] if hushed else [])
        return Fate(np.inf if hushed else 0.5)

    grid = grid_of("fedavg", tmp_path, script)
    backend = grid.backend()
    assert on(grid, backend=backend, schedule=mf.Schedule(12, patience=1.5)).rounds == 4
    assert backend.traffic.jobs == 3 * 4 * 4 - 3 - 3


def test_a_site_that_has_gone_is_waited_for_no_longer_and_may_come_back(tmp_path: Path) -> None:
    """Also under another number, as a node without authentication does."""
    told: list[str] = []
    grid = grid_of("fedavg, head global", tmp_path)
    gone = grid.sites[2]

    def at_round(record: mf.Record) -> None:
        if record.round == 1:
            del grid.sites[2]
        if record.round == 3:
            grid.sites[9] = gone
            grid.now += 3

    backend = grid.backend(say=told.append)
    result = on(grid, "fedavg, head global", backend=backend, schedule=mf.Schedule(12), callbacks=[at_round], rounds=5)
    assert result.rounds == 5
    assert "Site 2 has gone." in told
    assert backend.traffic.jobs == 12 + 9 + 9 + 9 + 12  # it greets in the round in which it comes back
    assert grid.now < 40


def test_asynchronous_sites_never_wait_for_a_dead_one(tmp_path: Path) -> None:
    """FedBuff, four busy at all times; the delays that were seen can be simulated, round by round and client by
    client."""
    seen: list[tuple[int, int, float]] = []
    grid = grid_of("fedbuff", tmp_path, lambda node, parcel: Fate(np.inf if node == 3 else node * 1.0))
    alive = ScriptedGrid({n: site for n, site in grid.sites.items() if n != 3}, grid.script)
    result = on(
        alive,
        "fedbuff",
        rounds=6,
        schedule=mf.Schedule(2, concurrency=4, buffer=2, late="use"),
        observe=lambda source, client, round, delay: seen.append((client, round, delay)),
    )
    assert result.rounds == 6
    assert alive.now < 40
    assert {client % 4 for client, _, _ in seen} <= {0, 1, 3}
    trace = tmp_path / "delays.csv"
    trace.write_text("client,round,delay\n" + "".join(f"{c},{r},{d}\n" for c, r, d in seen))
    delays = mf.Trace(str(trace))
    for client, round, delay in seen:
        assert delays(0, round, "clients", np.array([client]))[0] == pytest.approx(delay)


def change_values(parcel: Parcel, change: Any) -> Parcel:
    blocks = []
    for block in parcel.blocks:
        told, trees = wire.unpack(block)
        blocks.append(wire.pack(told, trees | {"values": change(trees["values"])}))
    return replace(parcel, blocks=blocks)


def nan(values: Any) -> Any:
    return {part: {n: torch.full_like(x, torch.nan) for n, x in leaves.items()} for part, leaves in values.items()}


def of_other_shape(values: Any) -> Any:
    return {part: {n: x[..., :1] for n, x in leaves.items()} for part, leaves in values.items()}


def with_less(values: Any) -> Any:
    return {part: dict(list(leaves.items())[1:]) for part, leaves in values.items()}


MALFORMED = {
    "not finite": (lambda parcel: change_values(parcel, nan), "not finite"),
    "other shapes": (lambda parcel: change_values(parcel, of_other_shape), "has the shape"),
    "a part missing": (lambda parcel: change_values(parcel, with_less), "has other parts"),
    "no update": (lambda parcel: replace(parcel, blocks=[wire.pack({"finite": True})] * 3), "not one to a request"),
    "noise": (lambda parcel: replace(parcel, blocks=[b"noise"] * 3), "no message that mixfed wrote"),
    "too few": (lambda parcel: replace(parcel, blocks=parcel.blocks[1:]), "is for 2 clients, and 3 were asked"),
    "of another run": (
        lambda parcel: replace(parcel, header=parcel.header | {"experiment": "another"}),
        "their recipes differ",
    ),
    "of another version": (
        lambda parcel: replace(parcel, header=parcel.header | {"mixfed": "0.0"}),
        "install the same version",
    ),
}


@pytest.mark.parametrize("how", MALFORMED)
def test_a_malformed_update_is_dropped_counted_and_named(how: str, tmp_path: Path) -> None:
    """The rest of the round counts: the result is that of a run in which these clients were never asked."""
    change, why = MALFORMED[how]
    told: list[str] = []
    grid = grid_of(
        "fedavg",
        tmp_path,
        lambda node, parcel: Fate(change=change if node == 2 and parcel.header["kind"] == "train" else lambda p: p),
    )
    result = on(grid, schedule=mf.Schedule(12), rounds=1, say=told.append)
    assert result.dropped == 3
    assert sum(why in sentence and "lient" in sentence for sentence in told) == 3
    without = on(
        grid_of("fedavg", tmp_path / "b", lambda n, p: Fate(error="" if n != 2 or p.common == b"" else "off")),
        schedule=mf.Schedule(12),
        rounds=1,
    )
    assert_equal(result.params, without.params)


def test_a_run_whose_updates_are_all_malformed_says_so(tmp_path: Path) -> None:
    def script(node: int, parcel: Parcel) -> Fate:
        return Fate(change=MALFORMED["of another version"][0]) if parcel.header["kind"] == "train" else Fate()

    with pytest.raises(mf.RunStopped, match="The last 12 updates of the clients 'clients' could not be used"):
        on(grid_of("fedavg", tmp_path, script), schedule=mf.Schedule(12))


def test_a_second_answer_changes_nothing(tmp_path: Path) -> None:
    twice = on(grid_of("fedbuff", tmp_path, lambda node, parcel: Fate(times=2)), "fedbuff")
    assert_equal(twice.params, on(grid_of("fedbuff", tmp_path / "once"), "fedbuff").params)


class Killed(Exception):
    """The server has died."""


def killed_after(round: int) -> Any:
    def kill(record: mf.Record) -> None:
        if record.round == round:
            raise Killed

    return kill


@pytest.mark.parametrize("row", ["fedavg, head global", "ca2fl", "gradient_2way, rows", "example_transfer"])
def test_a_killed_server_ends_as_if_it_had_never_died(row: str, tmp_path: Path) -> None:
    """The devices were two rounds ahead of the checkpoint, with private parts of their own."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=2)
    with pytest.raises(Killed):
        on(grid_of(row, tmp_path), row, rounds=7, checkpoints=checkpoints, callbacks=[killed_after(5)])
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=2)
    after, other = (grid_of(row, place).backend() for place in (tmp_path, tmp_path / "straight"))
    resumed = on(ScriptedGrid({}), row, rounds=7, checkpoints=checkpoints, resume=True, backend=after)
    straight = on(ScriptedGrid({}), row, rounds=7, backend=other)
    assert_equal(straight.params, resumed.params)
    assert (after.traffic.bytes_up, after.traffic.jobs) == (other.traffic.bytes_up, other.traffic.jobs)
    assert len(list(tmp_path.glob("*/scripted/clients/*/*.safetensors"))) <= 4 * 12


def test_messages_in_flight_are_sent_again(tmp_path: Path) -> None:
    def script(node: int, parcel: Parcel) -> Fate:
        return Fate(25.0 if node == 2 and parcel.header["kind"] == "train" else 0.5)

    def part(grid: ScriptedGrid, **options: Any) -> mf.Result:
        checkpoints = Checkpoints(tmp_path / "checkpoints", every=1)
        return on(grid, "fedbuff", rounds=6, schedule=mf.Schedule(12, buffer=3), checkpoints=checkpoints, **options)

    def sent_to_two(grid: ScriptedGrid) -> list[Parcel]:
        return [parcel for node, parcel in grid.sent if node == 2 and parcel.header["kind"] == "train"]

    before, after = grid_of("fedbuff", tmp_path, script), grid_of("fedbuff", tmp_path, script)
    with pytest.raises(Killed):
        part(before, callbacks=[killed_after(2)])
    backend = after.backend()
    assert part(after, resume=True, backend=backend).rounds == 6
    first, again = sent_to_two(before)[0], sent_to_two(after)[0]
    assert (again.common, again.blocks) == (first.common, first.blocks)
    assert backend.traffic.jobs >= 3 * 9 + 3


def test_devices_evaluate_on_their_own_examples(tmp_path: Path) -> None:
    held = FEDERATED
    algorithm = ROWS["fedavg, head global"].make()
    evaluate = local_test(algorithm, held, ("loss", "accuracy"))
    grid = ScriptedGrid(sites_of(algorithm, FEDERATED, tmp_path, tests={"test": held}))
    how: dict[str, Any] = {"rounds": 3, "seed": 3, "schedule": mf.Schedule(12), "evaluate": evaluate}
    there = mf.run(algorithm, FEDERATED, backend=grid.backend(), **how)
    here = mf.run(algorithm, FEDERATED, backend=mf.Simulator("loop", threads=1), **how)
    assert there.metrics == pytest.approx(here.metrics, rel=1e-6)


def test_nobody_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    empty = ScriptedGrid({})
    with pytest.raises(mf.RunStopped, match="No site has joined the run within 5 seconds"):
        on(empty)
    assert empty.now < 6
    other = sites_of(ROWS["fedavg"].make(), FEDERATED, tmp_path)
    for site in other.values():
        site.experiment = "another"
    with pytest.raises(mf.RunStopped, match="their recipes differ, or code of your own"):
        on(ScriptedGrid(other))


def test_a_long_wait_for_clients_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    grid = grid_of("fedavg", tmp_path)
    del grid.sites[4]
    backend = grid.backend(say=told.append)
    backend.terms = Terms(deadline=10.0, assemble=30.0)
    assert on(grid, backend=backend, schedule=mf.Schedule(12), rounds=1).rounds == 1
    absent = "3 of 12 clients are not there yet (client 3 of 'clients', 7 of 'clients', 11 of 'clients');"
    assert told == [f"{absent} the run waits for up to 30 seconds.", f"{absent} the run goes on without them."]


def test_clients_on_two_sites_are_told_and_asked_once(tmp_path: Path) -> None:
    """Site 5 has two of the three clients of site 1, which keeps the third."""
    told: list[str] = []
    grid = grid_of("fedavg", tmp_path)
    both = np.array([0, 4])
    holding = Holding(both.tolist(), FEDERATED.select(both))
    grid.sites[5] = Site(ROWS["fedavg"].make(), {"clients": holding}, EXPERIMENT, tmp_path / "five")
    backend = grid.backend(say=told.append)
    assert on(grid, backend=backend, schedule=mf.Schedule(12), rounds=2).rounds == 2
    assert told == ["2 clients are on site 1 and on site 5 (client 0 of 'clients'); the latter is asked."]
    assert (backend.traffic.jobs, backend.traffic.lost) == (24, 0)
    trains = [(node, parcel.header["clients"]) for node, parcel in grid.sent if parcel.header["kind"] == "train"]
    assert [node for node, clients in trains if ["clients", 8] in clients] == [1, 1]
    assert [node for node, clients in trains if ["clients", 4] in clients] == [5, 5]


def test_nobody_is_waited_for_when_all_sites_that_there_can_be_were_refused(tmp_path: Path) -> None:
    """Sites of another experiment, whose app fails, or whose processes have ended. One of four may still come."""
    grid = grid_of("fedavg", tmp_path, lambda node, parcel: Fate(error="no module named net" if node == 4 else ""))
    for node in (1, 2, 3):
        grid.sites[node].experiment = "another"
    with pytest.raises(mf.RunStopped, match="No site joins the run: One side runs the experiment"):
        on(grid, backend=grid.backend(possible=lambda: 4))
    assert grid.now < 2
    with pytest.raises(mf.RunStopped, match="within 5 seconds"):
        on(grid, backend=grid.backend(possible=lambda: 5))
    with pytest.raises(mf.RunStopped, match="all of them have ended"):
        on(ScriptedGrid({}), backend=ScriptedGrid({}).backend(possible=lambda: 0))


def test_sites_that_always_fail_stop_the_run(tmp_path: Path) -> None:
    def script(node: int, parcel: Parcel) -> Fate:
        return Fate(error="no such file" if parcel.header["kind"] == "train" else "")

    with pytest.raises(mf.RunStopped, match=r"jobs were all lost.*no such file"):
        on(grid_of("fedavg", tmp_path, script), schedule=mf.Schedule(12), rounds=50)


def test_a_site_without_its_clients_or_with_them_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mf.InputError, match="2 numbers for the data of 3 clients"):
        Holding([1, 2], FEDERATED.select(np.arange(3)))
    holding = Holding([4], FEDERATED.select(np.array([4])))
    with pytest.raises(mf.InputError, match="named by letters"):
        Site(ROWS["fedavg"].make(), {"clients": holding}, "../elsewhere", tmp_path)
    site = Site(ROWS["fedavg"].make(), {"clients": holding}, EXPERIMENT, tmp_path)
    header = {"experiment": EXPERIMENT, "mixfed": mf.__version__, "kind": "train", "clients": [["clients", 5]]}
    answer = site.answer(Parcel(header | {"settled": 0}, wire.pack({"round": 0}), [b""]))
    assert wire.unpack(answer.blocks[0])[0]["refused"] == "This site does not hold client 5 of 'clients'."
