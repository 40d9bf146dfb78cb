"""``local_global``: the ends of the scale, a round by hand, and what never travels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixfed.algorithms.baselines import local
from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.local_global import global_layers, layers, lg_fedavg, local_global, named
from mixfed.algorithms.mixed import gradient_2way
from mixfed.algorithms.registry import ALGORITHMS
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import optim, tree
from mixfed.core.algorithm import Algorithm, Message, Private, Reply, Server, Upload
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import Scripted
from mixfed.core.losses import cross_entropy, squared_error
from mixfed.core.model import Model
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.evaluate.personal import models
from mixfed.transforms import compress, quantize
from tests.algorithms.test_table import CENTRAL, FEDERATED, learnt, setup, train
from tests.problems import small_mlp


def head(name: str) -> bool:
    return name.startswith("2.")


class Idle(nn.Module):
    """A network with one more parameter that its outputs do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Linear(2, 3)
        self.idle = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x) + 0 * self.idle.sum()
        return logits


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("name", ["fedavg", "fedadam", "gradient_1way", "gradient_2way", "fedbuff", "hfcl", "ca2fl"])
def test_all_parameters_global_is_the_base_algorithm(name: str, executor: str) -> None:
    """Also where the machinery is at work: a parameter without any influence is local."""
    base = ALGORITHMS[name].make(setup(model=Model(Idle(), cross_entropy)))
    assert local_global(base, lambda name: True) is base
    a, b = train(base, executor), train(local_global(base, lambda name: name != "idle"), executor)
    for n, x in a.params.items():
        torch.testing.assert_close(b.params[n], x, rtol=1e-6, atol=1e-7)
    spared = a.ledger["bytes_up"] - b.ledger["bytes_up"]
    assert spared == 2 / (12 if name == "gradient_2way" else 11) * a.ledger["bytes_up"]  # which also sends its steps


def test_no_parameter_global_is_local_only() -> None:
    alone, none = train(local(setup().client)), train(local_global(fedavg(setup().client), lambda name: False))
    own = dict(none.privates.items("clients"))  # type: ignore[union-attr]
    theirs = dict(alone.privates.items("clients"))  # type: ignore[union-attr]
    assert own.keys() == theirs.keys()
    for client, private in theirs.items():
        for leaf, x in private["params"].items():
            torch.testing.assert_close(own[client]["local"][leaf], x, rtol=1e-6, atol=1e-6)
    assert none.ledger["bytes_down"] == none.ledger["bytes_up"] == 0
    assert all(torch.equal(x, none.params[n]) for n, x in setup().client.model.initial().items())


@pytest.mark.parametrize("settings", [{}, {"names": ["2."]}])
def test_lg_fedavg_by_the_settings_of_recipes(settings: dict[str, list[str]]) -> None:
    """The last layer is global unless something else is said."""
    found = learnt(train(lg_fedavg(setup().client, warm_start=1, names=settings.get("names", ()))))
    expected = learnt(train(local_global(fedavg(setup().client), head, warm_start=1)))
    assert all(torch.equal(x, expected[n]) for n, x in found.items())


def test_clients_that_send_nothing_are_timed_too() -> None:
    """The choice of an execution looks at the uploads, of which there are none."""
    algorithm = local_global(fedavg(setup().client), lambda name: False)
    chosen, looped = (
        learnt(run(algorithm, FEDERATED, rounds=2, cohort=5, seed=1, backend=Simulator(executor)))
        for executor in ("auto", "loop")
    )
    assert all(torch.allclose(x, looped[n], rtol=1e-5, atol=1e-6) for n, x in chosen.items())


SEVERAL = FEDERATED.select(FEDERATED.sizes() > 1)
"""Clients with more than one example, which BatchNorm needs."""


@pytest.mark.parametrize("policy", ["average", "private", "server"])
def test_no_parameter_global_is_local_only_for_every_policy_of_buffers(policy: str) -> None:
    """Clients' own models are the same, statistics included, and so is what the local test says of them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model = Model(module, cross_entropy, buffers=policy)
    trainer = LocalTrainer(model, optim.sgd(0.2), Batching(0, epochs=3))
    found = []
    for algorithm in (local(trainer), local_global(fedavg(trainer), lambda name: False)):
        result = run(algorithm, SEVERAL, rounds=5, cohort=7, backend=Simulator("loop"))
        assert result.privates is not None
        found.append(dict(models(algorithm.personal, result.params, result.privates)))  # type: ignore[arg-type]
    alone, none = found
    for client, own in alone.items():
        for name, x in own.items():
            torch.testing.assert_close(none[client][name], x, rtol=1e-5, atol=1e-6)
        moved = not torch.equal(own["1.running_mean"], model.initial()["1.running_mean"])
        assert moved == (policy != "server")


def test_private_statistics_make_a_model_ones_own() -> None:
    """FedAvg whose clients keep their statistics is evaluated with them, not with those that the server began with."""
    model = Model(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)), cross_entropy, buffers="private")
    algorithm = fedavg(LocalTrainer(model, optim.sgd(0.1), Batching(0, epochs=2)))
    result = run(algorithm, SEVERAL, rounds=3, cohort=len(SEVERAL), backend=Simulator("loop"))
    assert algorithm.personal is not None
    assert result.privates is not None
    for client, own in models(algorithm.personal, result.params, result.privates):
        assert torch.equal(own["0.running_mean"], result.privates.get("clients", client)["buffers"]["0.running_mean"])
        assert torch.equal(own["1.weight"], result.params["1.weight"])
        assert not torch.equal(own["0.running_mean"], result.params["0.running_mean"])


@pytest.mark.parametrize("name", ["local", "lg_fedavg"])
def test_who_reports_in_vain_keeps_what_is_its_own(name: str) -> None:
    """Updates of late clients are discarded; what they learnt of their own parts never needed the server."""
    algorithm = ALGORITHMS[name].make(setup())
    late = Schedule(4, Scripted({}, 1.5), late="discard")
    result = run(algorithm, FEDERATED, rounds=5, schedule=late, backend=Simulator("loop"))
    assert result.privates is not None
    assert len(result.privates.seen("clients")) > 4
    assert result.ledger["bytes_up"] == 0
    part = "params" if name == "local" else "local"
    for _, private in result.privates.items("clients"):
        assert not torch.equal(private[part]["0.weight"], algorithm.model.initial()["0.weight"])


class Product(nn.Module):
    """ŷ = g·ℓ·x with a local factor ℓ and a global factor g."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Parameter(torch.tensor(1.0))
        self.shared = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.shared * self.local * x


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_rounds_by_hand(executor: str) -> None:
    # ½(gℓx − y)² with x = 1: ∂ℓ = (gℓ − y)g, ∂g = (gℓ − y)ℓ. One step of rate 0.1 from ℓ = 1, g = 2.
    # A has one example y = 1: residual 1, ℓ_A = 1 − 0.1·2 = 0.8, Δg = −0.1.
    # B has three examples y = 4: residual −2, ℓ_B = 1 + 0.1·4 = 1.4, Δg = +0.2.
    # Weighted by examples: g = 2 + (1·(−0.1) + 3·0.2)/4 = 2.125.
    # Round 2. A: residual 2.125·0.8 − 1 = 0.7, ℓ_A = 0.8 − 0.07·2.125 = 0.65125, Δg = −0.056.
    # B: residual 2.125·1.4 − 4 = −1.025, ℓ_B = 1.4 + 0.1025·2.125 = 1.6178125, Δg = 0.1435.
    # g = 2.125 + (−0.056 + 3·0.1435)/4 = 2.218625.
    data = FederatedData.from_datasets(
        [{"x": np.ones((n, 1)), "y": np.full((n, 1), y)} for n, y in ((1, 1.0), (3, 4.0))]
    )
    model = Model(Product(), squared_error, dtype=torch.float64)
    algorithm = local_global(
        fedavg(LocalTrainer(model, optim.sgd(0.1), Batching(0, steps=1))), lambda name: name == "shared"
    )
    for rounds, g, own in ((1, 2.125, (0.8, 1.4)), (2, 2.218625, (0.65125, 1.6178125))):
        result = run(algorithm, data, rounds=rounds, cohort=2, backend=Simulator(executor))
        assert float(result.params["shared"]) == pytest.approx(g, abs=1e-12)
        assert float(result.params["local"]) == 1.0
        found = [float(p["local"]["local"]) for _, p in result.privates.items("clients")]  # type: ignore[union-attr]
        assert found == pytest.approx(own, abs=1e-12)
    assert result.ledger["bytes_down"] == result.ledger["bytes_up"] == 2 * 2 * 8
    assert result.ledger["bytes_once"] == 2 * 8


def spied(algorithm: Algorithm, first: int = 0) -> tuple[Algorithm, list[dict[str, object]], list[Private]]:
    """The algorithm, and what its messages, uploads and private parts were, from some round on."""
    sent: list[dict[str, object]] = []
    kept: list[Private] = []

    def client(message: Message, private: Private, batches: object) -> tuple[Upload, Private]:
        upload, after = algorithm.client(message, private, batches)  # type: ignore[arg-type]
        if message.round >= first:
            sent.append({"payload": message.payload, "values": upload.values})
            kept.append(after)
        return upload, after

    return replace(algorithm, client=client), sent, kept


ROWS = ["fedavg", "parallel", "gradient_1way", "gradient_2way, momentum", "fedbuff", "ca2fl", "hfcl", "feddle"]


@pytest.mark.parametrize("warm_start", [0, 2])
@pytest.mark.parametrize("row", ROWS)
def test_private_parts_are_in_no_message(row: str, warm_start: int) -> None:
    """The bytes of every leaf that a client keeps are searched for in all bytes that travel."""
    s = setup(optim.sgd(0.05, momentum=0.5)) if "momentum" in row else setup()
    base = ALGORITHMS[row.partition(",")[0]].make(s)
    algorithm, sent, kept = spied(local_global(base, head, warm_start=warm_start), warm_start)
    run(algorithm, FEDERATED, central=CENTRAL, rounds=4 + warm_start, cohort=7, backend=Simulator("loop", threads=1))
    travelled = b"\0".join(x.contiguous().numpy().tobytes() for tree_ in sent for x in tree.leaves(tree_))
    assert len(sent) > 15
    for private in kept:
        for x in private["local"].values():
            assert x.numpy().tobytes() not in travelled
            assert x.flatten()[:4].numpy().tobytes() not in travelled  # nor a piece of it
    names = {name for tree_ in sent for name in tree.flatten(tree_)}  # type: ignore[arg-type]
    assert not any("/0." in name for name in names)
    assert any(name.endswith("/2.weight") for name in names)


def test_only_the_global_part_is_paid_for() -> None:
    whole, split = train(fedavg(setup().client)), train(local_global(fedavg(setup().client), head))
    sizes = {n: x.numel() for n, x in small_mlp().initial().items()}
    share = sum(s for n, s in sizes.items() if head(n)) / sum(sizes.values())
    assert split.ledger["bytes_up"] == pytest.approx(share * whole.ledger["bytes_up"])
    assert split.ledger["bytes_down"] == pytest.approx(share * whole.ledger["bytes_down"])
    clients = len(list(split.privates.items("clients")))  # type: ignore[union-attr]
    assert split.ledger["bytes_once"] == clients * 4 * sum(s for n, s in sizes.items() if not head(n))


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_warm_start(executor: str) -> None:
    """The first rounds are the base algorithm's; then a client starts from where they ended, and is sent that once."""
    base = fedavg(setup().client)
    warm = train(base, executor, rounds=3)
    started = train(local_global(base, head, warm_start=3), executor, rounds=3)
    assert all(torch.equal(x, started.params[n]) for n, x in warm.params.items())
    assert warm.ledger == started.ledger
    after = train(local_global(base, head, warm_start=3), executor, rounds=5)
    for name, x in warm.params.items():
        assert torch.equal(after.params[name], x) == (not head(name))
    seen = len(list(after.privates.items("clients")))  # type: ignore[union-attr]
    sizes = {n: 4 * x.numel() for n, x in base.model.initial().items()}
    sent = sum(s for n, s in sizes.items() if head(n))
    kept = sum(sizes.values()) - sent
    assert after.ledger["bytes_down"] == warm.ledger["bytes_down"] + 2 * 7 * sent + seen * kept


def test_two_way_transfer_touches_only_what_travels() -> None:
    """The centre's representation is its own: it learns, and no client gradient is mixed into it."""
    s = setup()
    result = train(local_global(gradient_2way(s.population(), s.central_source()), head), rounds=4)
    for shared in result.state["gradients"].values():
        assert set(shared) == {"2.weight", "2.bias"}
    assert not torch.equal(result.params["0.weight"], s.client.model.initial()["0.weight"])


@pytest.mark.parametrize("name", ["fedavg", "fedbuff", "ca2fl", "feddle"])
def test_what_comes_late_from_the_warm_start_counts_without_its_local_part(name: str) -> None:
    algorithm = local_global(ALGORITHMS[name].make(setup()), head, warm_start=2)
    start = algorithm.model.initial()
    late = Reply({"delta": {n: torch.full_like(x, 0.1) for n, x in start.items()}}, 1.0, (0,), staleness=1)
    for at in (1, 2):
        server = Server(at, 0, algorithm.model, {"centre": CENTRAL}, clients={"clients": 20})
        params = algorithm.step(algorithm.init(start), [late], server)["params"]
        moved = {n for n, x in params.items() if not torch.equal(x, start[n])}
        assert moved == {n for n in start if head(n) or at < 2}


def test_hfcl_keeps_the_local_part_of_the_server_to_itself() -> None:
    """FedBuff divides by two replies, so the head moves by half of both; the centre's own layer by its whole change."""
    s = setup()
    algorithm = local_global(ALGORITHMS["hfcl"].make(s), head)
    start = algorithm.model.initial()
    server = Server(0, 0, algorithm.model, {"centre": CENTRAL})
    centre = server.train(s.at_centre(), start).params
    reply = Reply({"delta": {n: torch.full_like(x, 0.2) for n, x in start.items() if head(n)}}, 1.0, (0,))
    params = algorithm.step(algorithm.init(start), [reply], server)["params"]
    for n, x in start.items():
        torch.testing.assert_close(params[n], x + (0.2 + centre[n] - x) / 2 if head(n) else centre[n])


def test_clients_that_send_models_keep_where_they_ended() -> None:
    """With α = 1 and one client, FedAsync's model is the client's: the same rounds as Local only."""
    data = FEDERATED.select([0])
    mixed = run(local_global(ALGORITHMS["fedasync"].make(setup(), alpha=1.0), head), data, rounds=3, cohort=1)
    alone = run(local(setup().client), data, rounds=3, cohort=1)
    for result in (mixed, alone):
        assert result.privates is not None
    own = mixed.params | mixed.privates.get("clients", 0)["local"]
    for n, x in alone.privates.get("clients", 0)["params"].items():
        torch.testing.assert_close(own[n], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["local", "mtl"])
def test_a_base_that_sends_no_parameters_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="choose another base"):
        train(local_global(ALGORITHMS[name].make(setup()), head), rounds=1)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("warm_start", [0, 2])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_resumed_with_private_state_is_byte_identical(
    executor: str, warm_start: int, where: str, tmp_path: Path
) -> None:
    def algorithm() -> Algorithm:
        return local_global(fedavg(setup().client), head, warm_start=warm_start)

    def private(name: str) -> dict[str, object]:
        return {"private_folder": tmp_path / name / "private"} if where == "disk" else {}

    straight = train(algorithm(), executor, checkpoints=Checkpoints(tmp_path / "a", every=2), **private("a"))
    train(algorithm(), executor, rounds=4, checkpoints=Checkpoints(tmp_path / "b", every=1), **private("b"))
    resumed = train(
        algorithm(), executor, checkpoints=Checkpoints(tmp_path / "b", every=1), resume=True, **private("b")
    )
    a, b = learnt(straight), learnt(resumed)
    assert a.keys() == b.keys()
    assert all(x.numpy().tobytes() == b[n].numpy().tobytes() for n, x in a.items())
    assert straight.ledger == resumed.ledger
    assert straight.history == resumed.history


def test_compressed_outside() -> None:
    algorithm = compress(local_global(fedavg(setup().client), head), upload={"delta": quantize(8)}, error_feedback=True)
    plain = train(local_global(fedavg(setup().client), head))
    small = train(algorithm)
    assert small.ledger["bytes_up"] < 0.4 * plain.ledger["bytes_up"]
    for how in ({"message": {"params": quantize(8)}}, {"upload": {"delta": quantize(8)}}):
        with pytest.raises(InputError, match="put compress around local_global"):
            local_global(compress(fedavg(setup().client), **how), head)


def test_the_split_by_layers_and_by_name() -> None:
    model = small_mlp()
    assert layers(model) == ["0", "2"]
    last, first = global_layers(model, 1), global_layers(model, 1, "first")
    assert [n for n in model.trainable if last(n)] == ["2.weight", "2.bias"]
    assert [n for n in model.trainable if first(n)] == ["0.weight", "0.bias"]
    assert [n for n in model.trainable if named(["2.b"])(n)] == ["2.bias"]
    with pytest.raises(InputError, match="has 2 layers, so 3"):
        global_layers(model, 3)
    with pytest.raises(InputError, match="'warm_start' of local_global"):
        local_global(fedavg(setup().client), head, warm_start=-1)
