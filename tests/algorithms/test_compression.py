"""Compression: what a codec keeps, what it costs, and that error feedback makes up for what is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mixfed import rng
from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.mixed import gradient_1way
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import tree
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.transforms import compress, quantize, top_k
from tests.problems import point, trainer

floats = arrays(np.float32, st.integers(1, 30), elements=st.floats(-100, 100, width=32))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantisation_is_unbiased(bits: int) -> None:
    codec = quantize(bits)
    x = {"a": torch.tensor([0.3, -1.7, 0.0, 2.5, 1e-3]), "b": torch.randn(7, 3)}
    draws = [codec.decode(codec.encode(x, torch.tensor(rng.key(0, "test", i))), x) for i in range(4000)]
    mean = {name: torch.stack([d[name] for d in draws]).mean(0) for name in x}
    for name, value in x.items():
        level = value.abs().max() / (2 ** (bits - 1) - 1)
        assert torch.all((mean[name] - value).abs() < 5 * 0.5 * level / 4000**0.5 + 1e-7)


@pytest.mark.parametrize("bits", [8, 4])
@given(values=floats)
def test_quantisation_errs_by_less_than_a_level(bits: int, values: np.ndarray) -> None:
    x = {"a": torch.from_numpy(values)}
    codec = quantize(bits)
    encoded = codec.encode(x, torch.tensor(5))
    level = float(x["a"].abs().max()) / (2 ** (bits - 1) - 1)
    assert torch.all((codec.decode(encoded, x)["a"] - x["a"]).abs() <= level * (1 + 1e-5) + 1e-37)
    assert tree.nbytes(encoded) == (len(values) if bits == 8 else -(-len(values) // 2)) + 4


@pytest.mark.parametrize("bits", [8, 4])
def test_quantisation_does_not_depend_on_the_order_of_names(bits: int) -> None:
    """A resumed run may have its leaves in another order."""
    x = {"b": torch.randn(50), "a": torch.randn(50)}
    turned = dict(reversed(x.items()))
    one, other = (quantize(bits).encode(leaves, torch.tensor(7)) for leaves in (x, turned))
    assert all(torch.equal(found, other[name]) for name, found in one.items())


@given(values=floats, share=st.floats(0.01, 1.0))
def test_top_k_keeps_exactly_the_largest(values: np.ndarray, share: float) -> None:
    x = {"a": torch.from_numpy(values)}
    codec = top_k(share)
    encoded = codec.encode(x, torch.tensor(0))
    decoded = codec.decode(encoded, x)["a"]
    kept = max(1, round(share * len(values)))
    assert tree.nbytes(encoded) == kept * (4 + 4)
    support = encoded["a:indices"].long()
    assert len(set(support.tolist())) == kept
    assert torch.equal(decoded[support], x["a"][support])
    outside = torch.ones(len(values), dtype=torch.bool)
    outside[support] = False
    assert torch.all(decoded[outside] == 0)
    if outside.any():
        assert x["a"][outside].abs().max() <= x["a"][support].abs().min()


def different_clients() -> FederatedData:
    """Four clients in four dimensions, each with a large target of its own; the mean of the targets is (1, 1, 1, 1)."""
    return FederatedData.from_arrays({"x": 8.0 * np.eye(4) - 1.0}, np.arange(4))


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_error_feedback_on_uploads_finds_the_optimum_that_plain_sparsification_misses(executor: str) -> None:
    model = point([0.0] * 4)

    def distance(error_feedback: bool) -> float:
        algorithm = compress(fedavg(trainer(model, 0.05)), upload={"delta": top_k(0.25)}, error_feedback=error_feedback)
        result = run(algorithm, different_clients(), rounds=600, cohort=4, backend=Simulator(executor))
        assert result.ledger["bytes_up"] == 600 * 4 * (8 + 4)
        return float((result.params["w"] - 1.0).norm())

    assert distance(True) < 0.5
    assert distance(False) > 2.0


def test_error_feedback_on_the_transferred_gradient() -> None:
    # Clients at (2, 2), the centre at (−4, 0): the optimum of the sum is their mean (−1, 1).
    model = point([0.0, 0.0])
    clients = FederatedData.from_arrays({"x": np.full((3, 2), 2.0)}, np.arange(3))
    centre = CentralData({"x": np.array([[-4.0, 0.0]])})
    base = gradient_1way(trainer(model, 0.05, 2), trainer(model, 0.05))

    def end(**options: object) -> torch.Tensor:
        algorithm = compress(base, message={"correction": top_k(0.5)}, **options)  # type: ignore[arg-type]
        return run(algorithm, clients, central=centre, rounds=400, cohort=3).params["w"]

    optimum = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    assert (end(error_feedback=True) - optimum).norm() < 0.2
    assert (end() - optimum).norm() > 0.3


def test_bytes_of_a_compressed_gradient_are_in_the_ledger() -> None:
    model = point([0.0] * 10)
    clients = FederatedData.from_arrays({"x": np.ones((3, 10))}, np.arange(3))
    centre = CentralData({"x": np.zeros((1, 10))})
    base = gradient_1way(trainer(model, 0.05), trainer(model, 0.05))
    plain, compressed = (
        run(a, clients, central=centre, rounds=2, cohort=3).ledger["bytes_down"]
        for a in (base, compress(base, message={"correction": quantize(8)}))
    )
    assert plain == 2 * 3 * (80 + 80)
    assert compressed == 2 * 3 * (80 + 10 + 4)


def test_what_cannot_be_compressed_is_refused() -> None:
    model = point([0.0])
    clients = FederatedData.from_arrays({"x": np.ones((1, 1))}, np.arange(1))
    with pytest.raises(InputError, match="no 'correction'"):
        run(compress(fedavg(trainer(model, 0.1)), message={"correction": quantize()}), clients, rounds=1, cohort=1)
    with pytest.raises(InputError, match="no 'gradient'"):
        run(compress(fedavg(trainer(model, 0.1)), upload={"gradient": quantize()}), clients, rounds=1, cohort=1)
    with pytest.raises(InputError, match="8 or 4"):
        quantize(3)
    with pytest.raises(InputError, match="share"):
        top_k(0.0)
