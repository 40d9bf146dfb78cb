"""``compress``: any algorithm with parts of its messages and uploads encoded on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mixfed import rng
from mixfed.core import algorithm as core
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private, Reply, Server, State, Upload
from mixfed.core.batches import Batches
from mixfed.core.tree import Params
from mixfed.errors import InputError
from mixfed.transforms.codecs import Codec


def compress(
    algorithm: Algorithm,
    *,
    message: Mapping[str, Codec] | None = None,
    upload: Mapping[str, Codec] | None = None,
    error_feedback: bool = False,
) -> Algorithm:
    """The algorithm with the named trees of its messages (``correction``, ``params``) or uploads (``delta``) encoded.

    With ``error_feedback`` what a codec lost is added to the next tree it encodes: e ← (x + e) − decode(encode(x + e)).
    The server remembers its own e in the state, a client its own on the device.
    """
    down, up = dict(message or {}), dict(upload or {})
    if algorithm.rows:
        raise InputError("Rows that clients exchange cannot be compressed; compress or exchange rows, not both.")
    model = algorithm.model
    whole, trained = model.initial(), model.trained(model.initial())
    likes = {"params": core.sent_down(model, whole), "delta": core.change(model, whole, whole)}

    def like(name: str, encoded: Params | None = None) -> Params:
        """Names, shapes and precision of what travels under a name; both ends know them from the model.

        Of an encoded tree: of the leaves that are in it (a client may keep some to itself).
        """
        leaves = likes.get(name, trained)
        if encoded is not None:
            present = {path.rpartition(":")[0] for path in encoded}
            leaves = {n: x for n, x in leaves.items() if n in present}
        return tree.cast(leaves, model.dtype)

    def init(params: Params) -> State:
        lost = {source: {n: tree.zeros(like(n)) for n in down} for source in algorithm.batching}
        return {"inner": algorithm.init(params)} | ({"lost": lost} if error_feedback and down else {})

    def broadcast(state: State, server: Server) -> dict[str, Message]:
        messages: dict[str, Message] = {}
        lost: dict[str, dict[str, Params]] = {}
        for source, sent in algorithm.broadcast(state["inner"], server).items():
            payload, lost[source] = dict(sent.payload), {}
            for name, codec in down.items():
                if name not in payload:
                    raise InputError(f"{algorithm.name} sends no '{name}' that could be compressed.")
                key = torch.tensor(rng.key(server.seed, f"compress/{source}/{name}", server.round))
                memory = state["lost"][source][name] if "lost" in state else None
                payload[name], lost[source][name] = _encode(codec, payload[name], key, memory)
            messages[source] = replace(sent, payload=payload)
        server.notes["lost"] = lost
        return messages

    def client(received: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        payload = {n: down[n].decode(x, like(n, x)) if n in down else x for n, x in received.payload.items()}
        inner = {n: p for n, p in private.items() if not n.startswith("lost:")}
        sent, inner = algorithm.client(replace(received, payload=payload), inner, batches)
        values = dict(sent.values)
        lost: Private = {}
        for number, (name, codec) in enumerate(up.items()):
            if name not in values:
                raise InputError(f"{algorithm.name} uploads no '{name}' that could be compressed.")
            memory = private.get(f"lost:{name}")
            values[name], rest = _encode(codec, values[name], batches.key + number + 1, memory)
            lost |= {f"lost:{name}": rest} if error_feedback else {}
        return Upload(values, sent.weight), inner | lost

    def arrive(values: dict[str, Params]) -> dict[str, Params]:
        return algorithm.arrive({n: up[n].decode(x, like(n, x)) if n in up else x for n, x in values.items()})

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        after = {"lost": state["lost"] | server.notes["lost"]} if "lost" in state else {}
        return {"inner": algorithm.step(state["inner"], replies, server)} | after

    def private(params: Params) -> Private:
        lost = {f"lost:{n}": tree.zeros(like(n)) for n in up} if error_feedback else {}
        return algorithm.private(params) | lost

    def restored(state: State, device: torch.device) -> State:
        lost = {name: tree.to_device(x, device) for name, x in state.items() if name != "inner"}
        return {"inner": algorithm.restored(state["inner"], device)} | lost

    return replace(
        algorithm,
        init=init,
        broadcast=broadcast,
        client=client,
        step=step,
        arrive=arrive,
        private=private,
        params=lambda state: algorithm.params(state["inner"]),
        diagnostics=lambda state: algorithm.diagnostics(state["inner"]),
        restored=restored,
    )


def _encode(codec: Codec, x: Params, key: Tensor, lost: Params | None) -> tuple[Params, Params]:
    """The encoded tree and what it lost; what was lost before is sent along."""
    wanted = x if lost is None else tree.add(x, lost)
    encoded = codec.encode(wanted, key)
    return encoded, tree.sub(wanted, codec.decode(encoded, wanted))
