"""LG-FedAvg: part of the model stays on the client, the rest is learnt together (Liang et al., 2020).

The model is g ∘ ℓ by the names of its parameters: the local ℓ_m of client m stays on its device from round to round,
and only the global g travels. Both are trained end to end on the client's loss, and g is averaged by N_m/N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from mixfed.algorithms.fedavg import fedavg
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, OwnParts, Private, Reply, Server, State, Upload
from mixfed.core.batches import Batches
from mixfed.core.model import Model
from mixfed.core.optim import Optimizer
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.errors import InputError
from mixfed.models.parts import AUXILIARY
from mixfed.ranges import CountOrNone, within_ranges
from mixfed.transforms.travel import what_travels

LOCAL = "local"


@within_ranges()
def local_global(base: Algorithm, is_global: Callable[[str], bool], *, warm_start: CountOrNone = 0) -> Algorithm:
    """Any algorithm in which the parameters that do not match ``is_global`` stay on the client.

    The first ``warm_start`` rounds are the base algorithm on the whole model; a client then starts from the local
    part that the server has, which it is sent once, the first time it is asked. Without a warm start every client
    starts from the model's initial values, which it knows. The server's own copy of the local part stays as the warm
    start left it, unless a centre trains it: then it is the centre's own representation, as of one more device.

    All parameters global is the base algorithm; none is Local only.
    """
    model = base.model
    local = _local_names(model, is_global)
    if not local:
        return base
    _check_base(base, local)

    def travelling(leaves: Params) -> Params:
        return {n: x for n, x in leaves.items() if n not in local}

    def own(params: Params) -> Params:
        return tree.cast({n: params[n] for n in local}, model.dtype)

    def broadcast(state: State, server: Server) -> tuple[dict[str, Message], State]:
        messages, state = base.broadcast(state, server)
        if server.round < warm_start:
            return messages, state
        sent = {}
        for source, message in messages.items():
            whole = message["params"]
            payload = {name: travelling(leaves) for name, leaves in message.payload.items()}
            sent[source] = replace(message, payload=payload, first={LOCAL: own(whole)} if warm_start else message.first)
        return sent, state

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        if message.round < warm_start:
            return base.client(message, private, batches)
        mine = private[LOCAL]
        whole = message.payload | {"params": message["params"] | mine}
        kept = {part: leaves for part, leaves in private.items() if part != LOCAL}
        upload, kept = base.client(replace(message, payload=whole), kept, batches)
        values = {name: travelling(leaves) for name, leaves in upload.values.items()}
        return Upload(values, upload.weight), kept | {LOCAL: _trained(mine, upload)}

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        if server.round >= warm_start:  # what comes late from the warm start still has the local part
            replies = [replace(r, values={name: travelling(v) for name, v in r.values.items()}) for r in replies]
        return base.step(state, replies, server)

    def private(params: Params) -> Private:
        return base.own.first(params) | ({} if warm_start else {LOCAL: own(params)})

    def personal(params: Params, private: Private) -> Params:
        inner = base.personal(params, private) if base.personal else params
        return inner | private.get(LOCAL, {})

    return replace(
        base,
        name=f"lg_{base.name}",
        broadcast=broadcast,
        step=step,
        client=client,
        own=OwnParts(private, personal, settles=True),
        lateness=replace(base.lateness, same_in_every_round=base.lateness.same_in_every_round and not warm_start),
    )


def lg_fedavg(
    trainer: LocalTrainer,
    *,
    layers: int = 1,
    side: Literal["last", "first"] = "last",
    names: Sequence[str] = (),
    warm_start: int = 0,
    server: Optimizer | None = None,
) -> Algorithm:
    """LG-FedAvg: :func:`local_global` of FedAvg, by the settings that recipes have.

    ``layers`` of the model on one ``side`` are global, or the parameters whose names begin with ``names``.
    """
    return local_global(
        fedavg(trainer, server=server), global_part(trainer.model, layers, side, names), warm_start=warm_start
    )


def global_part(model: Model, layers: int, side: str, names: Sequence[str]) -> Callable[[str], bool]:
    """What is global: so many layers on a side, or the parameters whose names begin so."""
    return named(names, model) if names else global_layers(model, layers, side)


def _check_base(base: Algorithm, local: Sequence[str]) -> None:
    """Refuses an algorithm of which nothing can stay at home, in the first round or later."""
    if base.decode is not None:
        raise InputError(f"{base.name} is compressed; put compress around local_global, not inside.")
    if base.rows:
        raise InputError(
            f"The clients of {base.name} exchange rows; put exchange_rows around local_global, not inside."
        )
    travels = what_travels(base)
    for source in base.batching:
        plain = travels.messages.get(source) and all(
            set(local) <= set(message.payload.get("params", {})) for message in travels.messages[source]
        )
        comes = all(
            any(set(local) <= set(values.get(name, {})) for name in ("model", "delta"))
            for values in travels.uploads.get(source, [])
        )
        if not plain or not comes:
            raise InputError(
                f"{base.name} sends its clients no plain parameters, or takes none from them, of which a part could"
                " stay at home; choose another base."
            )
    if not base.batching:
        raise InputError(f"{base.name} has no clients on which a part could stay; choose another base.")


def layers(model: Model) -> list[str]:
    """The layers that have parameters, in the order of the module; those of an auxiliary model are none of them."""
    names = [name for name in model.trainable if not name.startswith(AUXILIARY)]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def global_layers(model: Model, count: int, side: str = "last") -> Callable[[str], bool]:
    """Whether a parameter (or buffer) belongs to the last or first ``count`` layers."""
    known = layers(model)
    if not 0 <= count <= len(known):
        raise InputError(f"The model has {len(known)} layers, so {count} of them cannot be global.")
    chosen = known[len(known) - count :] if side == "last" else known[:count]
    return lambda name: name.rpartition(".")[0] in chosen


def named(prefixes: Sequence[str], model: Model | None = None) -> Callable[[str], bool]:
    """Whether a parameter's name begins with one of these; with a ``model``, each has to fit some of its parameters."""
    known = [name for name in model.trainable if not name.startswith(AUXILIARY)] if model else []
    for prefix in prefixes if model else ():
        if not any(name.startswith(prefix) for name in known):
            raise InputError(f"No parameter that could be global begins with '{prefix}'; there are {', '.join(known)}.")
    return lambda name: name.startswith(tuple(prefixes)) and not name.startswith(AUXILIARY)


def _trained(start: Params, upload: Upload) -> Params:
    """Where training ended on these leaves, from an upload of the whole model's change or of the model itself."""
    model, delta = upload.values.get("model", {}), upload.values.get("delta", {})
    if start.keys() <= model.keys():
        return {n: model[n] for n in start}
    return {n: x + delta[n] for n, x in start.items()}


def _local_names(model: Model, is_global: Callable[[str], bool]) -> tuple[str, ...]:
    shared = model.trainable + (model.buffers if model.buffer_policy == "average" else ())
    return tuple(name for name in shared if not is_global(name))
