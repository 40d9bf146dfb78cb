"""Random draws are a function of (seed, purpose, counters) and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixfed import rng

int64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(int64, int64), min_size=1, max_size=20))
def test_numpy_and_torch_draw_the_same_bits(pairs: list[tuple[int, int]]) -> None:
    keys, counters = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    theirs = rng.tensor_bits(torch.from_numpy(keys), torch.from_numpy(counters)).numpy()
    assert np.array_equal(rng.bits(keys, counters), theirs.view(np.uint64))


def test_bits_as_splitmix64() -> None:
    """SplitMix64's first outputs from state 0 are known; ours applies its finaliser once more."""
    first = 0xE220A8397B1DCDAF

    def finalise(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    assert finalise(0x9E3779B97F4A7C15) == first
    assert int(rng.bits(0, 0)) == finalise(first)


@given(int64)
def test_signed_is_twos_complement(x: int) -> None:
    assert rng.signed(x + 2**64) == x == rng.signed(x - 2**64)


def test_uniform() -> None:
    """20,000 draws: mean within 5 standard errors of ½, and every tenth within 5 of its share."""
    keys = torch.arange(4)[:, None] * 7919
    draws = rng.tensor_uniform(keys, torch.arange(5000)).flatten()
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    assert float(draws.mean()) == pytest.approx(0.5, abs=5 * (1 / 12 / 20000) ** 0.5)
    tenths = torch.histc(draws, 10, 0, 1)
    assert float((tenths - 2000).abs().max()) < 5 * (2000 * 0.9) ** 0.5
    # Neighbouring counters are not correlated (|r| < 5/√n), nor are neighbouring keys.
    per_key = draws.view(4, 5000)
    pairs = [(draws[:-1], draws[1:]), *itertools.pairwise(per_key)]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 5 / len(a) ** 0.5 for a, b in pairs)


def test_keys_differ() -> None:
    tuples = list(itertools.product(range(5), ["batches", "cohort/clients", "model"], range(10), range(10)))
    keys = {rng.key(seed, purpose, a, b) for seed, purpose, a, b in tuples}
    assert len(keys) == len(tuples)
    assert all(0 <= k < 2**63 for k in keys)
    assert rng.key(1, "x", 23) != rng.key(12, "x", 3) != rng.key(1, "x", 2, 3)


def test_keys_are_the_same_on_every_machine() -> None:
    """A changed hash would change every seed's result; the bytes are from ``printf 0/batches/1 | b2sum -l 64``."""
    digest = bytes.fromhex("db18ab63e8035be6")
    assert rng.key(0, "batches", 1) == int.from_bytes(digest, "little") >> 1


def test_draws_do_not_depend_on_what_was_drawn_before() -> None:
    alone = rng.generator(3, "cohort", 7).random(4)
    rng.generator(3, "cohort", 6).random(100)
    assert np.array_equal(rng.generator(3, "cohort", 7).random(4), alone)
    whole = rng.bits(5, np.arange(100))
    assert np.array_equal(rng.bits(5, np.arange(100)[::-1]), whole[::-1])
    assert np.array_equal(
        np.concatenate([rng.bits(5, np.arange(60, 100)), rng.bits(5, np.arange(60))]), np.roll(whole, 40)
    )
