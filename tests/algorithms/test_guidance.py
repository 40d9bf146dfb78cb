"""What guides Feddle: data of another domain, what its diagnostics say, and what its anchors cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mixfed.algorithms.feddle.atlas import Atlas, flat, unflat
from mixfed.algorithms.feddle.guidance import Guide, Head, Merged
from mixfed.algorithms.feddle.search import Search, feddle
from mixfed.algorithms.hybrid import feddf
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import tree
from mixfed.core.algorithm import Server
from mixfed.core.batches import Batching, gather
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import HalfNormal
from mixfed.core.loop import Result
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.evaluate.metrics import evaluator
from tests.peak import Peak
from tests.problems import blobs, small_mlp

CLASSES, WIDTH = 8, 16


def unlike_domains(seed: int) -> tuple[FederatedData, CentralData, CentralData, CentralData]:
    """Clients that mostly have one of eight classes of points; then 120 such points, 120 of six other classes at other
    places, and a test set."""
    draw = np.random.default_rng(seed)
    ours, theirs = 0.9 * draw.normal(size=(CLASSES, WIDTH)), 0.9 * draw.normal(size=(6, WIDTH))

    def points(middles: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": (middles[labels] + draw.normal(size=(len(labels), WIDTH))).astype(np.float32), "y": labels}

    owners = np.repeat(np.arange(24), 20)
    labels = np.where(draw.random(len(owners)) < 0.3, draw.integers(0, CLASSES, len(owners)), owners % CLASSES)
    return (
        FederatedData.from_arrays(points(ours, labels), owners),
        CentralData(points(ours, draw.integers(0, CLASSES, 120))),
        CentralData(points(theirs, draw.integers(0, 6, 120))),
        CentralData(points(ours, draw.integers(0, CLASSES, 400))),
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_data_of_another_domain_leads_nowhere_without_the_fallbacks_start(seed: int) -> None:
    """Table 5 of the paper: chance (here 1/8) where the search starts at zero, while data of the clients' domain finds
    the way from there."""
    federated, own, other, test = unlike_domains(seed)

    def accuracy(central: CentralData, **how: Any) -> float:
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        model = Model(network, cross_entropy)
        trainer = LocalTrainer(model, sgd(0.1), Batching(10, epochs=2))
        search = Search(Batching(40, steps=6), head=Head(rate=0.05, steps=20), **how)
        result = run(
            feddle(trainer, search, atlas=10),
            federated,
            central=central,
            rounds=20,
            schedule=Schedule(5, delays=HalfNormal(2.0)),
            seed=seed,
            evaluate=evaluator(model, test, ["accuracy"]),
            every=20,
            backend=Simulator("loop", threads=1),
        )
        return result.metrics["accuracy"]

    there: dict[str, Any] = {"objective": "out_of_domain", "regularisation": 0.01}
    assert accuracy(other, **there) > 0.65
    assert accuracy(other, fallback_start=False, **there) < 0.3
    assert accuracy(own, fallback_start=False, learning_rate=0.05) > 0.6


def test_the_cosine_is_that_of_the_gradients_that_autograd_finds() -> None:
    """One round from the fallback's coefficients, both data sets as one batch each."""
    federated, _, test = blobs()
    other = CentralData({"x": test.arrays["x"][:50] * 2 + 1, "y": test.arrays["y"][:50] + 2})
    model = small_mlp(dtype=torch.float64)
    whole = Batching(0, steps=1)
    search = Search(whole, "out_of_domain", compare="mine", head=Head(rate=0.1, steps=5))
    result = run(
        feddle(LocalTrainer(model, sgd(0.3), Batching(0, steps=2)), search, atlas=5),
        federated,
        central={"centre": other, "mine": test},
        rounds=1,
        cohort=4,
        backend=Simulator("loop", threads=1),
    )
    (noted,) = result.diagnostics

    atlas, params = Atlas(**result.state["atlas"]), model.initial()
    factors, names = atlas.factors(), model.trainable
    x = flat(params, names)
    start = (0.25 / factors).detach()  # every anchor is new and on time: 1/(n·√1)
    body = unflat(x + (start * factors) @ atlas.rows[0, :4], params, names)
    guide = Head(rate=0.1, steps=5).fitted(model, "out_of_domain", body, whole, Server(0, 0, model, {"centre": other}))
    gradients = []
    for loss, head, data in ((model.loss, {}, test), (guide.loss, guide.head, other)):
        c = start.clone().requires_grad_()
        there = unflat(x + (c * factors) @ atlas.rows[0, :4], params, names)
        batch = gather(data, np.arange(len(data)), model.device)
        gradients += torch.autograd.grad(loss(there | head, batch), c)
    assert noted["cosine"] == pytest.approx(float(torch.cosine_similarity(*gradients, dim=0)), abs=1e-6)
    assert 0 < abs(noted["cosine"]) < 0.9999


def test_gradients_are_compared_where_there_are_two() -> None:
    with pytest.raises(InputError, match="another domain"):
        Search(Batching(8, steps=1), compare="validation")
    federated, central, _ = blobs()
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(3, steps=1))
    with pytest.raises(InputError, match="'validation'"):
        run(
            feddle(local, Search(Batching(8, steps=1), "out_of_domain", compare="validation")),
            federated,
            central=central,
            rounds=1,
        )


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_anchors_may_be_kept_elsewhere(bits: int, place: Any, tmp_path: Any) -> None:
    federated, central, _ = blobs()
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(3, steps=1))

    def trained(place: Any, rounds: int = 4, **options: Any) -> Result:
        guided = feddle(local, Search(Batching(8, steps=2)), atlas=5, bits=bits, place=place)
        how = {"backend": Simulator("loop"), "cohort": 3} | options
        return run(guided, federated, central=central, rounds=rounds, **how)

    expected = trained("device")
    trained(place, rounds=2, checkpoints=Checkpoints(tmp_path))
    resumed = trained(place, checkpoints=Checkpoints(tmp_path), resume=True)
    for result in (trained(place), resumed):
        assert all(torch.equal(x, expected.params[n]) for n, x in result.params.items())
    with pytest.raises(InputError, match="on disk"):
        trained("attic")


@pytest.mark.parametrize(("bits", "place", "bytes_each"), [(32, "device", 4), (8, "device", 1), (32, "disk", 0)])
def test_anchors_take_the_room_of_as_many_models_and_nothing_more(bits: int, place: Any, bytes_each: int) -> None:
    """Twenty more anchors: the peak of a whole run, with searches and replacements, grows by twenty models."""
    model = Model(nn.Linear(512, 512), cross_entropy)
    size = tree.nbytes(model.initial()) // 4
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(80, 512)).astype(np.float32), draw.integers(0, 512, 80)
    federated = FederatedData.from_arrays({"x": x, "y": y}, np.arange(80) % 20)
    central = CentralData({"x": x[:10], "y": y[:10]})
    trainer = LocalTrainer(model, sgd(0.1), Batching(4, steps=1))

    def peak(atlas: int) -> int:
        guided = feddle(trainer, Search(Batching(5, steps=2)), atlas=atlas, bits=bits, place=place)
        with Peak() as seen:
            run(guided, federated, central=central, rounds=8, cohort=6, backend=Simulator("loop", threads=1))
        return seen.bytes

    few, many = peak(20), peak(40)
    assert abs((many - few) - 20 * size * bytes_each) < 2 * size * 4
    assert few > (20 * bytes_each + 6 * 4) * size  # it sees the anchors and the updates that come


def test_merged_models_follow_the_coefficients() -> None:
    model = small_mlp(dtype=torch.float64)
    names, params = model.trainable, model.initial()
    width = sum(params[n].numel() for n in names)
    empty = Atlas.empty(2, width, 32, torch.device("cpu"), torch.float64)
    atlas, _ = empty.with_updates([torch.ones(width, dtype=torch.float64), torch.arange(width).double()], 0)
    models = Merged(model, params, atlas, torch.tensor([2.0, 1.0], dtype=torch.float64))
    there = models.at(torch.tensor([0.5, -1.0], dtype=torch.float64))
    moved = torch.cat([(there[n] - params[n]).reshape(-1) for n in names])
    torch.testing.assert_close(moved, 1.0 - torch.arange(width).double())
    flat_loss = Guide(lambda p, batch: p[names[0]].sum())
    gradient = models.gradient(flat_loss, torch.zeros(2, dtype=torch.float64), {})
    first = params[names[0]].numel()
    assert gradient.tolist() == pytest.approx([2.0 * first, first * (first - 1) / 2])


def examples(width: int = 2, labels: int | None = 3, **more: Any) -> CentralData:
    x = np.random.default_rng(0).normal(size=(12, width)).astype(np.float32)
    return CentralData({"x": x} if labels is None else {"x": x, "y": np.arange(12) % labels - more.get("lower", 0)})


@pytest.mark.parametrize(
    ("objective", "central", "sentence"),
    [
        ("in_domain", examples(width=5), "does not take the central examples .*: mat1 and mat2"),
        ("in_domain", examples(labels=9), "of the central examples go from 0 to 8"),
        ("in_domain", examples(labels=None), "needs labels 'y', and the central examples have 'x'"),
        ("out_of_domain", examples(width=5), "cannot work on 'centre': mat1 and mat2"),
        ("out_of_domain", examples(lower=1), "cannot work on 'centre': Target -1"),
        ("feddf", examples(width=5), "cannot work on 'centre': mat1 and mat2"),
    ],
)
def test_central_data_that_does_not_fit_is_one_sentence(objective: Any, central: CentralData, sentence: str) -> None:
    federated, _, _ = blobs()
    local, batching = LocalTrainer(small_mlp(), sgd(0.1), Batching(3, steps=1)), Batching(12, steps=1)
    algorithm = feddf(local, batching) if objective == "feddf" else feddle(local, Search(batching, objective))
    with pytest.raises(InputError, match=sentence) as caught:
        run(algorithm, federated, central=central, rounds=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("hidden", [8, 3])
def test_a_layer_in_the_middle_is_no_head(hidden: int) -> None:
    """Also where its new outputs happen to be as many as the next layer takes."""
    federated, _, _ = blobs()
    model = Model(nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 3)), cross_entropy)
    search = Search(Batching(12, steps=1), "out_of_domain", head=Head("0"))
    with pytest.raises(InputError, match="'0' is not the model's linear head"):
        run(
            feddle(LocalTrainer(model, sgd(0.1), Batching(3, steps=1)), search), federated, central=examples(), rounds=1
        )


def test_only_square_images_are_turned() -> None:
    images = CentralData({"x": np.zeros((6, 1, 3, 4), np.float32)})
    federated = FederatedData.from_datasets([{"x": images.arrays["x"], "y": np.zeros(6, np.int64)}] * 2)
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), cross_entropy)
    local = LocalTrainer(model, sgd(0.1), Batching(3, steps=1))
    with pytest.raises(InputError, match="square images"):
        run(feddle(local, Search(Batching(6, steps=1), "rotation")), federated, central=images, rounds=1, cohort=2)
