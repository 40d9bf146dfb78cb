"""``keep_memory``: any algorithm whose clients' optimizers remember from round to round.

Momentum and Adam's moments usually begin anew in every round, because a client is not expected to keep anything. Here
they are a private part of the client: they stay on its device, and nothing more is sent.
"""

from __future__ import annotations

from dataclasses import replace

from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches, Memory
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.errors import InputError

MEMORY = "memory"


def keep_memory(algorithm: Algorithm, on_device: LocalTrainer) -> Algorithm:
    """The algorithm, whose clients train by ``on_device`` and keep what its optimizer remembers."""
    first = _memory_of(on_device, on_device.model.initial())
    if not first:
        raise InputError(f"The optimizer {on_device.optimizer.rule} remembers nothing that a client could keep.")
    if not algorithm.batching:
        raise InputError(f"{algorithm.name} has no clients that could keep something.")
    if algorithm.rows:
        raise InputError(f"The clients of {algorithm.name} exchange rows; put exchange_rows around keep_memory.")

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        memory = Memory(tree.unflatten(private[MEMORY]))
        rest = {part: leaves for part, leaves in private.items() if part != MEMORY}
        upload, kept = algorithm.client(message, rest, replace(batches, memory=memory))
        return upload, kept | {MEMORY: tree.flatten(memory.kept)}

    def private(params: Params) -> Private:
        return algorithm.own.first(params) | {MEMORY: first}

    return replace(algorithm, client=client, own=replace(algorithm.own, first=private))


def _memory_of(trainer: LocalTrainer, params: Params) -> Params:
    weights = tree.cast({name: params[name] for name in trainer.model.trainable}, trainer.model.dtype)
    moves = trainer.moves(trainer.own_loss, 0)
    found = {str(i): trainer.optimizer.init({n: weights[n] for n in m.names}) for i, m in enumerate(moves)}
    return tree.flatten({name: memory for name, memory in found.items() if memory})
