"""Partitioners: every example exactly once, no empty client, the same result for the same seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixfed.data import partition
from mixfed.errors import InputError

Groups = list[np.ndarray]
seeds = st.integers(0, 2**32)
alphas = st.sampled_from([1e-4, 0.01, 0.1, 1.0, 100.0, 1e6])


def labels_of(counts: list[int], seed: int = 0) -> np.ndarray:
    """Shuffled labels, of which ``counts[k]`` are k."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def check(make: Callable[[int], Groups], n: int, clients: int, seed: int, least: int = 1) -> Groups:
    groups = make(seed)
    assert len(groups) == clients
    assert sorted(np.concatenate(groups)) == list(range(n))
    assert min(map(len, groups)) >= least
    assert all((np.diff(group) > 0).all() for group in groups)
    assert all(np.array_equal(one, other) for one, other in zip(groups, make(seed), strict=True))
    return groups


@given(st.integers(1, 200), st.integers(1, 30), seeds)
def test_iid_is_even(n: int, clients: int, seed: int) -> None:
    n = max(n, clients)
    groups = check(lambda seed: partition.iid(n, clients, seed), n, clients, seed)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_seeds_give_different_partitions() -> None:
    labels = labels_of([50] * 4)
    for make in (
        lambda seed: partition.iid(200, 5, seed),
        lambda seed: partition.quantity_skew(200, 5, seed=seed, sigma=1.0),
        lambda seed: partition.shards(labels, 5, 2, seed),
        lambda seed: partition.dirichlet(labels, 5, 1.0, seed),
        lambda seed: partition.dirichlet(labels, 5, 1.0, seed, sizes=[40] * 5),
    ):
        assert any(not np.array_equal(one, other) for one, other in zip(make(1), make(2), strict=True))


@given(st.lists(st.integers(0, 5), min_size=1))
def test_by_key_gives_one_client_per_key(keys: list[int]) -> None:
    groups = check(lambda _: partition.by_key(keys), len(keys), len(set(keys)), 0)
    assert [{keys[row] for row in group} for group in groups] == [{key} for key in sorted(set(keys))]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 100), alphas, st.booleans(), seeds)
def test_quantity_skew_respects_the_least_size(
    clients: int, least: int, more: int, spread: float, dirichlet: bool, seed: int
) -> None:
    n = clients * least + more
    skew = {"alpha": spread} if dirichlet else {"sigma": min(spread, 100.0)}
    check(lambda seed: partition.quantity_skew(n, clients, seed=seed, min_size=least, **skew), n, clients, seed, least)


def test_quantity_skew_follows_its_parameters() -> None:
    def largest(**skew: float) -> int:
        return max(map(len, partition.quantity_skew(10_000, 100, seed=1, **skew)))

    assert largest(alpha=0.1) > 3 * largest(alpha=100.0)
    assert largest(sigma=2.0) > 3 * largest(sigma=0.1)
    assert largest(alpha=1e6) <= 102


@given(st.lists(st.integers(30, 60), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 6), seeds)
def test_shards_give_exactly_the_asked_classes(counts: list[int], clients: int, asked: int, seed: int) -> None:
    asked = min(asked, len(counts))
    clients = max(clients, -(-len(counts) // asked))
    labels = labels_of(counts)
    groups = check(lambda seed: partition.shards(labels, clients, asked, seed), len(labels), clients, seed)
    assert all(len(np.unique(labels[group])) == asked for group in groups)
    holders = [sum(label in labels[group] for group in groups) for label in range(len(counts))]
    assert max(holders) - min(holders) <= 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 3), alphas, seeds)
def test_dirichlet_deals_everything(counts: list[int], clients: int, least: int, alpha: float, seed: int) -> None:
    labels = labels_of(counts)
    clients = max(1, min(clients, len(labels) // least))
    least = min(least, len(labels))
    make = lambda seed: partition.dirichlet(labels, clients, alpha, seed, min_size=least)  # noqa: E731
    check(make, len(labels), clients, seed, least)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data(), alphas, seeds)
def test_dirichlet_gives_the_asked_sizes(counts: list[int], data: st.DataObject, alpha: float, seed: int) -> None:
    labels = labels_of(counts)
    cuts = data.draw(st.sets(st.integers(1, len(labels)), max_size=12)) - {len(labels)}
    sizes = np.diff([0, *sorted(cuts), len(labels)])
    make = lambda seed: partition.dirichlet(labels, len(sizes), alpha, seed, sizes=sizes)  # noqa: E731
    groups = check(make, len(labels), len(sizes), seed)
    assert [len(group) for group in groups] == list(sizes)


def dominance(labels: np.ndarray, groups: Groups) -> float:
    """The mean share of a client's most frequent label: 0.1 for ten even classes, 1 for one class."""
    return float(np.mean([np.bincount(labels[group]).max() / len(group) for group in groups]))


@pytest.mark.parametrize("sizes", [None, [100] * 50])
def test_alpha_sets_the_skew_of_labels(sizes: list[int] | None) -> None:
    labels = labels_of([500] * 10)
    few, some, all_ = (
        dominance(labels, partition.dirichlet(labels, 50, alpha, 3, sizes=sizes)) for alpha in (0.01, 0.5, 1e4)
    )
    assert few > 0.85 > some > 0.3 > all_
    assert all_ < 0.13


def test_a_client_label_distribution_is_a_dirichlet_draw() -> None:
    """For Dirichlet(a) over K classes a share has variance (K - 1) / (K² (K a + 1)); many clients show it."""
    labels = labels_of([40_000] * 5)
    groups = partition.dirichlet(labels, 1000, 0.5, 1, sizes=[200] * 1000)
    shares = np.stack([np.bincount(labels[group], minlength=5) / 200 for group in groups])
    assert shares.var() == pytest.approx(4 / (25 * 3.5), rel=0.05)


def test_small_clients_with_many_classes_stay_mixed() -> None:
    labels = labels_of([100] * 100)
    groups = partition.dirichlet(labels, 1000, 1e6, 1, sizes=[10] * 1000)
    assert np.mean([len(np.unique(labels[group])) for group in groups]) > 9
    assert np.mean([labels[group].mean() for group in groups[:500]]) == pytest.approx(49.5, abs=2)


def test_label_split_separates_labels() -> None:
    labels = labels_of([10, 20, 30])
    clients, central = partition.label_split(labels, [0, 2])
    assert sorted([*clients, *central]) == list(range(60))
    assert set(labels[clients]) == {0, 2}
    assert set(labels[central]) == {1}


def test_label_split_can_overlap() -> None:
    labels = labels_of([10, 20, 30])
    clients, central = partition.label_split(labels, [2], seed=4, inside=0.8, outside=0.1)
    assert list(np.bincount(labels[clients])) == [1, 2, 24]
    assert list(np.bincount(labels[central])) == [9, 18, 6]


@pytest.mark.parametrize(
    "make",
    [
        lambda: partition.shards(labels_of([6000] * 10), 1000, 2, 0),
        lambda: partition.dirichlet(labels_of([6000] * 10), 1000, 0.1, 0),
        lambda: partition.dirichlet(labels_of([6000] * 10), 1000, 0.1, 0, sizes=[60] * 1000),
        lambda: partition.iid(2_000_000, 1_000_000, 0),
        lambda: partition.quantity_skew(2_000_000, 1_000_000, seed=0, sigma=1.0),
    ],
    ids=["shards", "dirichlet", "dirichlet with sizes", "iid, a million", "quantity, a million"],
)
def test_large_partitions_have_every_example(make: Callable[[], Groups]) -> None:
    """So large that work for every pair of a client and an example would not end."""
    groups = make()
    assert sum(map(len, groups)) in (60_000, 2_000_000)


some = labels_of([5, 5])
wrong = {
    "many clients": (lambda: partition.iid(3, 4, 0), "3 examples are too few for 4 clients"),
    "no clients": (lambda: partition.iid(3, 0, 0), "'clients' of iid must be at least 1"),
    "least": (lambda: partition.dirichlet(some, 3, 1.0, 0, min_size=4), "too few for 3 clients with at least 4"),
    "alpha": (lambda: partition.dirichlet(some, 2, 0.0, 0), "'alpha' of dirichlet must be a number above 0, not 0.0"),
    "nan": (lambda: partition.dirichlet(some, 2, float("nan"), 0), "'alpha' of dirichlet .* not nan"),
    "sizes": (lambda: partition.dirichlet(some, 2, 1.0, 0, sizes=[5, 6]), "sum to 10"),
    "both": (lambda: partition.quantity_skew(9, 2, seed=0, alpha=1.0, sigma=1.0), "exactly one"),
    "neither": (lambda: partition.quantity_skew(9, 2, seed=0), "exactly one"),
    "classes": (lambda: partition.shards(some, 2, 3, 0), "must be 1 to 2"),
    "slots": (lambda: partition.shards(labels_of([5] * 5), 2, 2, 0), "cannot hold all 5 classes"),
    "rare class": (lambda: partition.shards(labels_of([1, 20]), 4, 1, 0), "a class has 1 examples but 2 clients"),
    "two dimensions": (lambda: partition.by_key(np.zeros((2, 2), int)), "flat list"),
    "no labels": (lambda: partition.dirichlet(np.array([], int), 1, 1.0, 0), "flat list"),
    "unknown label": (lambda: partition.label_split(some, [7]), "no example has label 7"),
    "no centre": (lambda: partition.label_split(some, [0, 1]), "the centre would hold no example"),
    "no client": (lambda: partition.label_split(some, [0], inside=0.0), "the clients would hold no example"),
    "fraction": (lambda: partition.label_split(some, [0], inside=1.5), "fractions from 0 to 1"),
}


@pytest.mark.parametrize("name", wrong)
def test_impossible_requests_are_one_clear_sentence(name: str) -> None:
    call, message = wrong[name]
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
