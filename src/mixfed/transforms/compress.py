"""``compress``: any algorithm with parts of its messages and uploads encoded on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mixfed import rng
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private, Reply, Server, State, Upload
from mixfed.core.batches import Batches
from mixfed.core.tree import Params
from mixfed.errors import InputError
from mixfed.transforms.codecs import Codec
from mixfed.transforms.travel import Trees, what_travels


def compress(
    algorithm: Algorithm,
    *,
    message: Mapping[str, Codec] | None = None,
    upload: Mapping[str, Codec] | None = None,
    error_feedback: bool = False,
) -> Algorithm:
    """The algorithm with the named trees of its messages (``correction``, ``params``) or uploads (``delta``) encoded.

    With ``error_feedback`` what a codec lost is added to the next tree it encodes: e ← (x + e) − decode(encode(x + e)).
    The server remembers its own e in the state, a client its own on the device. So all that was ever sent adds up to
    all that was meant, but for the last e.
    """
    down, up = dict(message or {}), dict(upload or {})
    if algorithm.rows:
        raise InputError("Rows that clients exchange cannot be compressed; compress or exchange rows, not both.")
    if algorithm.decode is not None:
        raise InputError(f"What {algorithm.name} sends is compressed already; name all codecs in one compress.")
    travels = what_travels(algorithm)
    sent_down = {source: travels.down(source) for source in algorithm.batching}
    sent_up = travels.up()
    _check(algorithm, "sends", down, sent_down.values())
    _check(algorithm, "uploads", up, [sent_up])
    known_down: Trees = {name: leaves for trees in sent_down.values() for name, leaves in trees.items()}

    def init(params: Params) -> State:
        state: State = {"inner": algorithm.init(params)}
        if error_feedback and down:
            state["lost"] = {
                source: {name: tree.zeros(trees[name]) for name in down if name in trees}
                for source, trees in sent_down.items()
            }
        return state

    def broadcast(state: State, server: Server) -> tuple[dict[str, Message], State]:
        messages: dict[str, Message] = {}
        plain, inner = algorithm.broadcast(state["inner"], server)
        lost = dict(state.get("lost", {}))
        for source, sent in plain.items():
            payload = dict(sent.payload)
            for name in (name for name in down if name in payload):
                key = torch.tensor(rng.key(server.seed, f"compress/{source}/{name}", server.round))
                memory = lost[source][name] if lost else None
                payload[name], rest = _encode(down[name], payload[name], key, memory)
                if lost:
                    lost[source] = lost[source] | {name: rest}
            messages[source] = replace(sent, payload=payload)
        return messages, state | {"inner": inner} | ({"lost": lost} if lost else {})

    def client(received: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        payload = {n: _decode(down[n], x, known_down[n]) if n in down else x for n, x in received.payload.items()}
        inner = {n: p for n, p in private.items() if not n.startswith("lost:")}
        sent, inner = algorithm.client(replace(received, payload=payload), inner, batches)
        values = dict(sent.values)
        lost: Private = {}
        for number, (name, codec) in enumerate(up.items()):
            memory = private.get(f"lost:{name}")
            values[name], rest = _encode(codec, values[name], batches.key + number + 1, memory)
            lost |= {f"lost:{name}": rest} if error_feedback else {}
        return Upload(values, sent.weight), inner | lost

    def decode(values: Trees) -> Trees:
        return {n: _decode(up[n], x, sent_up[n]) if n in up else x for n, x in values.items()}

    def first(params: Params) -> Private:
        lost = {f"lost:{n}": tree.zeros(sent_up[n]) for n in up} if error_feedback else {}
        return algorithm.own.first(params) | lost

    def restore(state: State, device: torch.device) -> State:
        lost = {name: tree.to_device(x, device) for name, x in state.items() if name != "inner"}
        return lost | {"inner": algorithm.restore(state["inner"], device)}

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        return state | {"inner": algorithm.step(state["inner"], replies, server)}

    return replace(
        algorithm,
        init=init,
        broadcast=broadcast,
        client=client,
        step=step,
        decode=decode,
        own=replace(algorithm.own, first=first),
        params=lambda state: algorithm.params(state["inner"]),
        with_params=lambda state, params: state | {"inner": algorithm.with_params(state["inner"], params)},
        diagnostics=lambda state: algorithm.diagnostics(state["inner"]),
        restore=restore,
    )


def _check(algorithm: Algorithm, verb: str, codecs: Mapping[str, Codec], travelling: Iterable[Trees]) -> None:
    """Refuses a codec for a tree that never travels."""
    names = {name: None for trees in travelling for name in trees}
    for name in codecs:
        if name not in names:
            told = f"it {verb} {', '.join(names)}" if names else f"it {verb} nothing"
            raise InputError(f"{algorithm.name} {verb} no '{name}' that could be compressed; {told}.")


def _encode(codec: Codec, x: Params, key: Tensor, lost: Params | None) -> tuple[Params, Params]:
    """The encoded tree and what is lost now; what was lost of these leaves before is sent along."""
    wanted = x if lost is None else {n: leaf + lost[n] for n, leaf in x.items()}
    encoded = codec.encode(wanted, key)
    return encoded, (lost or {}) | tree.sub(wanted, codec.decode(encoded, wanted))


def _decode(codec: Codec, encoded: Params, known: Params) -> Params:
    """The tree of those leaves that are in an encoded one (a client may keep some to itself)."""
    present = {path.rpartition(":")[0] for path in encoded}
    return codec.decode(encoded, {n: x for n, x in known.items() if n in present})
