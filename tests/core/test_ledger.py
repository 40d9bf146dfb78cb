"""The ledger: bytes, examples and FLOPs against counts made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mixfed.algorithms.asynchronous import ca2fl
from mixfed.algorithms.baselines import center
from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.feddle.guidance import Head
from mixfed.algorithms.feddle.search import Search, feddle
from mixfed.core.algorithm import CLIENTS, Message
from mixfed.core.batches import Batching, Sample
from mixfed.core.ledger import Cost, Ledger, count_work
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import adam, sgd
from mixfed.core.train import LocalTrainer
from mixfed.models.networks import cnn
from tests.core.helpers import averaging, clients, train


def one_layer() -> Model:
    return Model(nn.Linear(3, 4), cross_entropy)


def two_layers() -> Model:
    return Model(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), cross_entropy)


FLOPS = {
    # A product of [n, 3] and [3, 4] is 2·12·n; forward, and backward for the weight (the input needs no gradient).
    "one": (one_layer, 24 + 24),
    # As above, and 2·8·n forward, backward for the weight, and backward for the hidden layer.
    "two": (two_layers, 24 + 24 + 16 + 16 + 16),
}


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("name", FLOPS)
@pytest.mark.parametrize("optimizer", [sgd(0.1), adam(0.1)], ids=["sgd", "adam"])
def test_clients(name: str, executor: str, optimizer: object) -> None:
    """Two rounds of two epochs over 3 + 7 + 5 examples are 60 examples."""
    make, per_example = FLOPS[name]
    model = make()
    result = train(averaging(model, Batching(2, epochs=2), optimizer), clients([3, 7, 5]), executor, rounds=2)
    size = 4 * sum(x.numel() for x in model.initial().values())
    expected = {"bytes_down": 6 * size, "bytes_up": 6 * size, "client_examples": 60, "client_flops": 60 * per_example}
    expected["bytes_kept"] = size  # plain averaging keeps the model
    assert result.ledger == dict.fromkeys(result.ledger, 0) | expected


def test_what_the_server_keeps() -> None:
    """CA2FL: the model, the mean and an update of each of three clients. Feddle: the model and five anchors, with a few
    numbers for each."""
    data, local = clients([3, 7, 5], classes=4), LocalTrainer(one_layer(), sgd(0.1), Batching(2, epochs=2))
    size = 4 * 16
    kept = train(ca2fl(local, buffer=3), data, rounds=2).ledger["bytes_kept"]
    assert kept == size * (1 + 1 + 3)
    guided = feddle(local, Search(Batching(3, steps=2)), atlas=5)
    kept = train(guided, data, rounds=2, central=data.pooled()).ledger["bytes_kept"]
    assert size * 6 < kept < size * 6 + 5 * 64


def test_centre() -> None:
    """Three rounds of four steps on batches 3, 3, 1, 3 | 3, 1, 3, 3 | 1, 3, 3, 1 of seven examples are 28 examples."""
    algorithm = center(LocalTrainer(one_layer(), sgd(0.1), Batching(3, steps=4)))
    result = train(algorithm, {}, rounds=3, central=clients([7]).pooled())
    expected = {"server_examples": 28, "server_flops": 28 * 48, "bytes_kept": 4 * 16}
    assert result.ledger == dict.fromkeys(result.ledger, 0) | expected


def test_work_on_the_parameters_counts_once_a_step() -> None:
    """A loss with a product of the weight with itself: 2·4·3·4 forward and twice that backward, whatever the batch."""

    def loss(params: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        w = params["weight"]
        return model.loss(params, batch) + (w @ w.T).sum()

    model = one_layer()
    algorithm = fedavg(LocalTrainer(model, sgd(0.1), Batching(2, epochs=1), loss=loss))
    result = train(algorithm, clients([3, 7]), rounds=1)  # 2 + 4 steps, 10 examples
    assert result.ledger["client_flops"] == 10 * 48 + 6 * 3 * 2 * 4 * 3 * 4


def test_bytes_are_those_of_the_tensors_that_travel() -> None:
    """Messages of mixed types: what each tensor's elements weigh, times the cohort."""
    base = averaging(one_layer())
    more = {"extra": {"a": torch.zeros(5, dtype=torch.int8), "b": torch.zeros(3, dtype=torch.float64)}}

    def broadcast(state, server):  # type: ignore[no-untyped-def]
        message = base.broadcast(state, server)[0][CLIENTS]
        return {CLIENTS: Message(message.payload | more, message.round)}, state

    result = train(replace(base, broadcast=broadcast), clients([3, 7]), rounds=1)
    assert result.ledger["bytes_down"] == 2 * (4 * 16 + 5 + 24)
    assert result.ledger["bytes_up"] == 2 * 4 * 16


def test_dropped_updates_have_been_sent_and_cost_what_they_cost() -> None:
    data = clients([4, 4])
    data.arrays["x"][5] = np.nan
    result = train(averaging(one_layer()), data, rounds=1)
    assert result.dropped == 1
    assert result.ledger["bytes_up"] == 2 * 4 * 16
    assert result.ledger["client_examples"] == 16


def test_totals_come_back_from_a_checkpoint() -> None:
    ledger = Ledger(bytes_down=1, client_flops=2)
    again = Ledger()
    again.restore(ledger.totals())
    assert again == ledger
    promised = {"bytes_down", "bytes_up", "client_examples", "server_examples", "client_flops", "server_flops"}
    assert promised <= set(ledger.totals())


NETWORKS = {
    "cnn": (lambda: cnn(2, 8, 3, (4, 5), 6, dropout=0.5), (2, 8, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (4, 8)),
    "recurrent": (lambda: nn.GRU(8, 5, batch_first=True), (4, 8)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_flops_as_torch_counts_them(name: str) -> None:
    make, shape = NETWORKS[name]
    module, x = make(), torch.randn(3, *shape)

    def step() -> None:
        outputs = module(x)
        (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()

    with FlopCounterMode(display=False) as reference:
        step()
    assert count_work(step)[0] == reference.get_total_flops() > 0


def test_the_backward_pass_of_a_convolution_in_groups_is_twice_its_forward_pass() -> None:
    """A depthwise convolution: 8·8 places, 9 weights for each of 32 channels, 3 images, 2 operations each."""
    layer, x = nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), torch.randn(3, 32, 8, 8, requires_grad=True)
    forward = 2 * 3 * 8 * 8 * 9 * 32
    assert count_work(lambda: layer(x))[0] == forward
    assert count_work(lambda: layer(x).sum().backward())[0] == 3 * forward


def test_the_average_product_of_a_step() -> None:
    """One layer of 3 × 4: 24 FLOPs an example forward, 24 for the weights' gradient; a loss without data adds a product
    of 2·3·4·3 = 72 at every step. On five examples that is (72 + 5·48)/3 a product."""
    weights = torch.randn(4, 3, requires_grad=True)

    def step(examples: int) -> tuple[int, int]:
        return count_work(lambda: (torch.randn(examples, 3) @ weights.T).sum().backward())

    own = count_work(lambda: weights.T @ weights)
    cost = Ledger().cost("a step", lambda n: (step(n)[0] + own[0], step(n)[1] + own[1]))
    assert cost == Cost(72, 48, 3)
    assert cost.of_a_product(5) == (72 + 5 * 48) / 3
    assert cost.flops(2, 5) == 2 * 72 + 5 * 48
    assert Cost(0, 0, 0).of_a_product(5) == 0


def test_parametrized_modules_are_counted() -> None:
    """torch's own counter fails on them, because a module's input is a parameter."""
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    x = torch.randn(5, 3)
    assert count_work(lambda: module(x).sum().backward())[0] == 5 * 48


def test_examples_that_are_sent_down_are_counted() -> None:
    """Two clients receive three examples each, of 3 float32 numbers and an int64 label."""
    base = averaging(one_layer())

    def broadcast(state, server):  # type: ignore[no-untyped-def]
        messages, state = base.broadcast(state, server)
        return {CLIENTS: replace(messages[CLIENTS], examples=Sample("centre", count=3))}, state

    data = clients([3, 7])
    result = train(replace(base, broadcast=broadcast), data, rounds=1, central=data.pooled())
    assert result.ledger["bytes_down"] == 2 * (4 * 16 + 3 * (3 * 4 + 8))
    assert result.ledger["client_examples"] == 2 * (3 + 3 + 7 + 3)


def test_a_search_costs_fine_tuning_and_two_products_with_the_anchors() -> None:
    """Two steps on batches of 3 examples at 48 (as above), and in each the sum of the three anchors that came and the
    projection on them, 2·3·16 each: 4·atlas·d."""
    data = clients([3, 7, 5], classes=4)
    local = LocalTrainer(one_layer(), sgd(0.1), Batching(2, epochs=2))
    ledger = train(feddle(local, Search(Batching(3, steps=2)), atlas=3), data, rounds=1, central=data.pooled()).ledger
    assert ledger["server_examples"] == 6
    assert ledger["server_flops"] == 6 * 48 + 2 * 4 * 3 * 16


def test_a_head_of_another_domain_and_compared_gradients_count() -> None:
    """Two layers, d = 3·4 + 4 + 4·2 + 2 = 26, three anchors, one search step on 3 examples, a head of 5 outputs.

    Fitting the head, 4 steps of 3 examples: forward through the body 24 and the head 2·4·5, backward only for the
    head's weight, 2·4·5. The search and the gradient of the other domain, 3 examples each: 24 + 24 for the first layer,
    40 forward through the head and 40 backward to the hidden layer (the head is fixed), and 4·3·26 of anchors. The
    gradient of the task: 3 examples at 96 (as above), and 4·3·26.
    """
    data, ours = clients([3, 7, 5]), clients([7]).pooled()
    other = clients([6], classes=5).pooled()
    other.arrays["y"][:] = 4
    local = LocalTrainer(two_layers(), sgd(0.1), Batching(2, epochs=2))
    search = Search(Batching(3, steps=1), "out_of_domain", compare="ours", head=Head(steps=4))
    central = {"centre": other, "ours": ours}
    ledger = train(feddle(local, search, atlas=3), data, rounds=1, central=central).ledger
    assert ledger["server_examples"] == 4 * 3 + 3 + 3 + 3
    assert ledger["server_flops"] == 12 * (24 + 40 + 40) + 6 * (24 + 24 + 40 + 40) + 3 * 96 + 3 * 4 * 3 * 26
