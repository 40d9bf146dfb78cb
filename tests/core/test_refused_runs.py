"""What cannot be trained says so before the first round, and a weight that is not finite is dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mixfed.core.algorithm import Message, Private, Upload
from mixfed.core.batches import Batches
from mixfed.errors import InputError
from tests.core.helpers import averaging, clients, train
from tests.problems import small_mlp


def test_nothing_is_trained_in_inference_mode() -> None:
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode"):
        train(averaging(small_mlp()), clients([4, 4], shape=(2,)))


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_an_update_whose_weight_is_not_finite_is_dropped(executor: str) -> None:
    base = averaging(small_mlp())

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        upload, private = base.client(message, private, batches)
        few = batches.examples < 10  # the first of the two clients
        return replace(upload, weight=torch.where(few, float("nan"), upload.weight)), private

    data = clients([3, 8], shape=(2,))
    result = train(replace(base, client=client), data, executor, rounds=1)
    assert result.dropped == 1
    assert all(x.isfinite().all() for x in result.params.values())
