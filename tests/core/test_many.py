"""Many models answer at once what each answers alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.predict import answers
from mixfed.data.store import CentralData, FederatedData
from mixfed.evaluate import many

SIZES = np.array([3, 1, 7, 2, 5, 4])


class Stubborn(nn.Linear):
    """Looks at its numbers, which vmap does not allow."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (2.0 if bool(input.sum() > 0) else 1.0)


class Pair(nn.Linear):
    """Answers with more than a tensor."""

    def forward(self, input: Tensor) -> Any:
        return {"scores": super().forward(input)}


def network(last: type[nn.Linear]) -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), last(5, 3)), cross_entropy)


def owned(model: Model, names: list[str]) -> list[many.Owned]:
    """Every client has leaves of its own; the last has the common model."""
    common = model.initial()
    draw = torch.Generator().manual_seed(1)
    own = [{n: torch.randn(common[n].shape, generator=draw) for n in names} for _ in SIZES]
    return [*((client, common | mine) for client, mine in enumerate(own[:-1])), (len(SIZES) - 1, common)]


DATA = FederatedData(
    {"x": np.random.default_rng(0).normal(size=(SIZES.sum(), 6)).astype(np.float32), "y": np.zeros(SIZES.sum(), int)},
    np.concatenate([[0], np.cumsum(SIZES)]),
)


@pytest.fixture(params=["together", "in small groups"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "together":
        monkeypatch.setattr(many, "ROWS", 8)


def scores(outputs: Any) -> Tensor:
    found: Tensor = outputs["scores"] if isinstance(outputs, dict) else outputs
    return found


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("last", [nn.Linear, Stubborn, Pair])
@pytest.mark.parametrize("names", [["2.weight", "2.bias"], ["0.weight", "2.bias"]])
def test_each_answers_its_own_examples(last: type[nn.Linear], names: list[str]) -> None:
    model = network(last)
    models = owned(model, names)
    shared = models[-1][1]
    seen: dict[int, list[Tensor]] = {}
    for theirs, batch, outputs in many.own_examples(model, shared, models, DATA):
        each = torch.split(scores(outputs), list(theirs.values()))
        assert sum(theirs.values()) == len(batch["x"])
        for (client, _), found, x in zip(
            theirs.items(), each, torch.split(batch["x"], list(theirs.values())), strict=True
        ):
            seen.setdefault(client, []).append(found)
            assert torch.equal(x, torch.from_numpy(DATA.client(client)["x"]))
    assert list(seen) == list(range(len(SIZES)))
    for client, own in models:
        ((_, wanted),) = answers(model, own, CentralData(DATA.client(client)))
        torch.testing.assert_close(torch.cat(seen[client]), scores(wanted))


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("last", [nn.Linear, Stubborn, Pair])
@pytest.mark.parametrize("batch_size", [4, 100])
def test_all_answer_the_same_examples(last: type[nn.Linear], batch_size: int) -> None:
    model, data = network(last), DATA.pooled()
    models = owned(model, ["2.weight"])
    shared = models[-1][1]
    answered = 0
    waiting = [list(answers(model, own, data, batch_size)) for _, own in models]
    for number, batch, outputs in many.same_examples(model, shared, models, data, batch_size):
        for place, found in enumerate(outputs):
            wanted_batch, wanted = waiting[answered + place][number]
            assert torch.equal(batch["x"], wanted_batch["x"])
            torch.testing.assert_close(scores(found), scores(wanted))
        if (number + 1) * batch_size >= len(data):
            answered += len(outputs)
    assert answered == len(models)


def test_models_answer_together_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six models of their own heads take one call of the network."""
    calls: list[int] = []
    answer = many.answer

    def counted(*given: Any) -> Any:
        calls.append(1)
        return answer(*given)

    monkeypatch.setattr(many, "answer", counted)
    model = network(nn.Linear)
    models = owned(model, ["2.weight", "2.bias"])
    list(many.own_examples(model, models[-1][1], models, DATA))
    assert len(calls) == 1
