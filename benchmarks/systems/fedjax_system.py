"""FedJAX: its federated averaging, with one jitted step after another. Its way to use several devices at once needs
functions that JAX has dropped.

The models are written in JAX with the names and the starts of the workload's own. PyTorch is loaded for the data and
the starts alone, and its share is in the memory that is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import torch
from clock import Clock
from jax import lax
from workloads import Workload

jax.tree_map = jax.tree_util.tree_map  # FedJAX 0.0.17 calls it by the name that JAX has dropped
Params = dict[str, Any]


def smile(p: Params, x: Any) -> Any:
    return (jax.nn.relu(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"])[:, 0]


def pictures(p: Params, x: Any) -> Any:
    for layer in ("0", "2"):
        x = lax.conv(x, p[f"{layer}.weight"], (1, 1), "VALID") + p[f"{layer}.bias"][:, None, None]
        x = jax.nn.relu(x)
    x = lax.reduce_window(x, -float("inf"), lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ p["6.weight"].T + p["6.bias"])
    return x @ p["8.weight"].T + p["8.bias"]


def characters(p: Params, x: Any) -> Any:
    inputs = p["embedding.weight"][x] @ p["recurrent.weight_ih_l0"].T + p["recurrent.bias_ih_l0"]

    def step(h: Any, given: Any) -> tuple[Any, Any]:
        fed = h @ p["recurrent.weight_hh_l0"].T + p["recurrent.bias_hh_l0"]
        reset, update = jnp.split(jax.nn.sigmoid(given[:, :256] + fed[:, :256]), 2, axis=-1)
        new = jnp.tanh(given[:, 256:] + reset * fed[:, 256:])
        h = new + update * (h - new)
        return h, h

    _, states = jax.lax.scan(step, jnp.zeros((len(x), 128)), inputs.swapaxes(0, 1))
    return states.swapaxes(0, 1) @ p["output.weight"].T + p["output.bias"]


def towers(p: Params, x: Any) -> Any:
    return (p["left.weight"][x[:, :10]].mean(1) * p["right.weight"][x[:, 10]]).sum(-1)


def losses(workload: str) -> Callable[[Params, Any, Any], Any]:
    """The loss of every example of a batch."""

    def of_class(logits: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)[..., 0]

    known: dict[str, Callable[[Params, Any, Any], Any]] = {
        "W1": lambda p, x, y: jnp.logaddexp(0, smile(p, x)) - y * smile(p, x),
        "W2": lambda p, x, y: of_class(pictures(p, x), y),
        "W3": lambda p, x, y: of_class(characters(p, x), y).mean(-1),
        "W4": lambda p, x, y: jax.nn.relu(1 - y * towers(p, x)),
    }
    if workload not in known:
        raise NotImplementedError(f"JAX's networks are written for {', '.join(known)} alone")
    return known[workload]


def run(workload: Workload, clock: Clock, cores: int) -> None:
    x, y = (part.numpy().astype(np.float32 if part.is_floating_point() else np.int32) for part in workload.data())
    per_example = losses(workload.name)

    @jax.grad
    def gradient(params: Params, batch: Any) -> Any:
        return per_example(params, batch["x"], batch["y"]).mean()

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        lambda params, batch, rng: gradient(params, batch),
        fedjax.optimizers.sgd(workload.rate),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(workload.batch, num_steps=workload.steps, skip_shuffle=True),
    )
    state = algorithm.init({name: p.detach().numpy() for name, p in workload.model().named_parameters()})
    clients = [fedjax.ClientDataset({"x": x[c], "y": y[c]}) for c in range(workload.population)]
    key = jax.random.PRNGKey(0)
    for round in count():
        state, _ = algorithm.apply(state, [(c, clients[c], key) for c in workload.cohort(round)])
        jax.block_until_ready(state.params)
        if not clock.lap(lambda p=state.params: {n: torch.tensor(np.asarray(v)) for n, v in p.items()}):
            break
