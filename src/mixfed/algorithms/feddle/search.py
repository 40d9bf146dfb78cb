"""Feddle: the server's data guides how client updates are merged (federated dual learning).

The updates of clients are kept as anchors of an atlas, and every round the server searches for the coefficients with
which they are best added to the model. A coefficient may be negative: an update may be walked backwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.feddle.atlas import Atlas, flat
from mixfed.algorithms.feddle.central import CentralAnchor
from mixfed.algorithms.feddle.fallbacks import (
    Arrived,
    Fallback,
    by_algorithm,
    by_coefficients,
    change_in,
    check_fallback,
    like_fedbuff,
)
from mixfed.algorithms.feddle.guidance import Guide, Head, Merged, Objective, head_of
from mixfed.core import optim, tree
from mixfed.core.algorithm import CENTRE, Algorithm, AtCentre, Reply, Server, State
from mixfed.core.batches import Batches, Batching
from mixfed.core.storage import Place
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.errors import InputError
from mixfed.ranges import Bits, Count, NotNegative, Share, within_ranges


@within_ranges()
@dataclass(frozen=True)
class Search:
    """How coefficients are searched: Adam on mini-batches of the server's data, and which parts are switched on.

    The switches are those of the paper's ablation (Table 5): ``normalise`` the anchors to the median of their norms,
    replace the anchor of lowest score (``by_score``; else the oldest), start at the fallback's coefficients
    (``fallback_start``; else at zero), and pull towards them with λ (``regularisation``). Without ``active`` the
    fallback's coefficients are final.

    ``objective``: the task's own loss on data like the clients' (in_domain), or on other data the loss of the body with
    a ``head`` of its own, fitted first, that says the server's labels (out_of_domain) or by how many quarter turns an
    image was turned, which needs no labels (rotation). ``compare`` names a central source with labelled examples of the
    clients' domain: the cosine between the gradients that they and the objective give at the start of the search is
    recorded, which costs two more gradients a round and changes nothing.

    A search ends where the noise of its last batches has brought it. Two options against that, which are not in the
    paper: with ``cosine`` the rate falls along ½(1 + cos(πk/K)) over the K steps, and ``tail`` is the share of the last
    steps over which the coefficients are averaged (0: the last ones are taken).
    """

    batching: Batching
    objective: Objective = "in_domain"
    learning_rate: NotNegative = 1e-3
    regularisation: NotNegative = 0.0
    normalise: bool = True
    by_score: bool = True
    fallback_start: bool = True
    active: bool = True
    head: Head = field(default_factory=Head)
    compare: str = ""
    cosine: bool = False
    tail: Share = 0.0

    def __post_init__(self) -> None:
        if self.objective not in ("in_domain", "out_of_domain", "rotation"):
            raise InputError(f"The objective '{self.objective}' is not in_domain, out_of_domain or rotation.")
        if self.compare and not (self.active and self.objective != "in_domain"):
            raise InputError("Gradients are compared with those of a search on data of another domain.")

    def last(self, steps: int) -> int:
        """The number of the last steps whose coefficients are averaged."""
        return max(1, round(self.tail * steps))


@within_ranges()
def feddle(
    trainer: LocalTrainer,
    search: Search,
    *,
    atlas: Count = 20,
    bits: Bits = 32,
    place: Place = "device",
    fallback: Fallback | Algorithm | None = None,
    central: CentralAnchor | None = None,
) -> Algorithm:
    """Feddle: ĉ = argmin_c ℓ(D_S, x + Σ cₘāₘ) + λ/2·Σ(cₘ − c′ₘ)², x ← x + Σ ĉₘāₘ, scores ← |ĉₘ|   (Eq. 4–10).

    A reply becomes an anchor aₘ; āₘ is aₘ scaled to the median of all norms. c′ is what the ``fallback`` (FedBuff)
    would do: η_s/(n·√(1 + τ)) times ‖aₘ‖/median for anchors received since the last search, zero for older ones. An
    update that finds no room in the atlas is added with the fallback's coefficient, outside the search.

    The fallback may also be any other algorithm whose clients send a change or a model (FedAdam, FedAsync, CA2FL),
    whose step need not be a sum of the updates: then its clients train, its step makes x, and the search goes on from
    there, c′ = 0. What it remembers (an optimizer's memory, a cache) is kept.

    ``atlas`` is the number of anchors (the paper: twice the clients of a round), ``bits`` and ``place`` how and where
    they are kept. Averaged buffers (BatchNorm's statistics) are no directions to search in: they follow the fallback.
    The anchors are written in place, so a step can be taken only once from a state.

    With a ``central`` anchor the server's own update is one more direction of every search (:func:`feddle_plus`).
    """
    model = trainer.model
    names = model.trainable
    if search.objective != "in_domain":
        head_of(model, search.head.name)
    if isinstance(fallback, Algorithm):
        check_fallback(fallback, model, is_start=search.fallback_start)
        base, begun = fallback, by_algorithm(fallback)
    else:
        base = replace(fedavg(trainer), init=lambda params: {"params": params})
        begun = by_coefficients(model, fallback or like_fedbuff())
    width = sum(int(torch.Size(model.shapes[n]).numel()) for n in names)

    def init(params: Params) -> State:
        some = params[names[0]]
        empty = Atlas.empty(atlas, width, bits, some.device, some.dtype, place)
        found = {"coefficients": some.new_zeros(0), "ages": some.new_zeros(0)}
        return base.init(params) | {"atlas": empty.tree(), "searched": found}

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        params = base.params(state)
        unmoved = tree.zeros(model.trained(params))  # for leaves that clients keep to themselves
        updates = [flat(unmoved | change_in(r, params), names) for r in replies]
        anchors, places = Atlas(**state["atlas"]).with_updates(updates, server.round, by_score=search.by_score)
        factors = anchors.factors(normalise=search.normalise)
        after, start = begun(_without_atlas(state), Arrived(replies, updates, places, factors), server)
        models, judge = Merged(model, base.params(after), anchors, factors), server
        if central is not None:
            models, start, judge = central.added(models, start, server, normalise=search.normalise)
        found, noted = searched(models, search, start, judge) if search.active and len(anchors) else (start, {})
        if models.more is not None:
            noted |= {"central_share": float(found[-1] * models.factors[-1])}
        of_anchors = found[: len(anchors)]
        return base.with_params(after, tree.clone(models.at(found))) | {
            "atlas": replace(anchors, scores=of_anchors.abs()).tree(),
            "searched": {"coefficients": of_anchors, "ages": server.round - anchors.born, **noted},
        }

    def restore(state: State, device: torch.device) -> State:
        kept = Atlas(**state["atlas"]).kept_at(place, device).tree()
        return base.restore(_without_atlas(state), device) | {
            "atlas": kept,
            "searched": tree.to_device(state["searched"], device),
        }

    return replace(
        base,
        name="feddle" if central is None else "feddle_plus",
        init=init,
        step=step,
        uploads="each",
        lateness=replace(base.lateness, late="use"),
        rows=replace(base.rows, untouched_stay=False),
        centre=_at_centre(search, base) if central is None else AtCentre.of(central.trainer),
        restore=restore,
        diagnostics=diagnostics,
    )


def feddle_plus(trainer: LocalTrainer, search: Search, central: CentralAnchor, **options: Any) -> Algorithm:
    """Feddle+: guided merging that can leave the span of the clients' updates (of this library, not of the paper).

    x′ = x + Σ c′ₘāₘ is where the fallback would go, and d the change that fine-tuning at the centre makes of x′. The
    search has d̄, which is d scaled as an anchor, as one more direction: ĉ, ê = argmin ℓ(D_S, x + Σ cₘāₘ + e·d̄). It
    begins at c′ and at all of d (or a share of it), so that without a search it is Fed+FT, and without d Feddle. d is
    fitted on some of the server's examples, and the search goes by the others (:class:`CentralAnchor`).

    ``options`` are those of :func:`feddle`.
    """
    if search.objective != "in_domain":
        raise InputError("Feddle+ trains on the server's labels as the task's; for data of another domain use feddle.")
    if central.trainer.model is not trainer.model:
        raise InputError("Clients and centre train one model; build their trainers from the same Model.")
    return feddle(trainer, search, central=central, **options)


def _at_centre(search: Search, base: Algorithm) -> AtCentre:
    """The search goes by the task's labels in-domain only, and finds nothing beyond what clients have sent."""
    judged = (CENTRE,) if search.active and search.objective == "in_domain" else ()
    return AtCentre(judged or base.centre.judged, guides=() if base.centre.judged else judged)


def _without_atlas(state: State) -> State:
    return {name: x for name, x in state.items() if name not in ("atlas", "searched")}


def searched(models: Merged, search: Search, fallback: Tensor, server: Server) -> tuple[Tensor, dict[str, float]]:
    """ĉ: Adam on the coefficients, from the fallback's (or zero), over a round's batches of the server's data; and what
    was noted on the way."""
    model, batches = models.model, server.batches(search.batching)
    start = fallback if search.fallback_start else torch.zeros_like(fallback)
    guide = Guide(model.loss)
    if search.objective != "in_domain":
        body = tree.cast(models.at(start), model.dtype)
        guide = search.head.fitted(model, search.objective, body, search.batching, server)
    optimizer = optim.adam(search.learning_rate)

    def run(batches: Batches) -> Tensor:
        c, memory, steps = start, optimizer.init({"c": start}), batches.length
        total, last = torch.zeros_like(start), search.last(steps)
        for k, (batch, _) in enumerate(batches):
            gradient = models.gradient(guide, c, batch)
            if search.regularisation:
                gradient = gradient + search.regularisation * (c - fallback)
            direction, memory = optimizer.direction({"c": gradient}, memory, {"c": c})
            share = 0.5 * (1 + math.cos(math.pi * k / steps)) if search.cosine else 1.0
            c = tree.add({"c": c}, direction, -search.learning_rate * share)["c"]
            if k >= steps - last:
                total = total + c
        return total / last

    noted = {"cosine": _agreement(models, search, guide, start, server)} if search.compare else {}
    return server.work(("feddle", len(start)), run, batches), noted


def _agreement(models: Merged, search: Search, guide: Guide, start: Tensor, server: Server) -> float:
    """The cosine between ∂ℓ/∂c on examples of the clients' domain and ∂h/∂c on the server's, a batch of each."""
    one = replace(search.batching, steps=1, epochs=None)

    def gradient(guide: Guide, source: str) -> Tensor:
        kind = ("compare", source, len(models.atlas))
        return server.work(
            kind, lambda batches: models.gradient(guide, start, next(iter(batches))[0]), server.batches(one, source)
        )

    ours, theirs = gradient(Guide(models.model.loss), search.compare), gradient(guide, CENTRE)
    return float(torch.cosine_similarity(ours, theirs, dim=0))


def diagnostics(state: State) -> dict[str, float]:
    """What the last search found: range and signs of the coefficients, the age of the anchors in rounds, and, where
    there are such, the cosine of the gradients that were compared and how much of the server's update was taken."""
    found, ages = state["searched"]["coefficients"], state["searched"]["ages"]
    if not len(found):
        return {}
    noted = {n: x for n, x in state["searched"].items() if n not in ("coefficients", "ages")}
    return {
        "coefficient_min": float(found.min()),
        "coefficient_max": float(found.max()),
        "negative_share": float((found < 0).double().mean()),
        "anchor_age_mean": float(ages.mean()),
        "anchor_age_max": float(ages.max()),
        **noted,
    }
