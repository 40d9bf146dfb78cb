"""The server's own update as one more anchor of a search: with it Feddle+ leaves the span of client updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mixfed import rng
from mixfed.algorithms.feddle.atlas import flat
from mixfed.algorithms.feddle.guidance import Merged
from mixfed.core import algorithm as core
from mixfed.core.algorithm import CENTRE, Server
from mixfed.core.train import LocalTrainer
from mixfed.ranges import PartOfOne, within_ranges


@within_ranges()
@dataclass(frozen=True)
class CentralAnchor:
    """d: the change that the ``trainer`` makes at the centre, from where the fallback would go.

    ``share`` is how much of d the search begins with: 1 is all of it, as Fed+FT takes it, 0 is nothing, as Feddle does.

    A direction that was fitted to examples looks better on these than on new ones, and a search on them would trust it
    too much. So a part of the server's examples (the share ``held_out``, drawn anew in every round) is kept from the
    fit, and the search goes by this part alone. With 0, or where there is only one example, both have all. Examples
    that were fitted to in earlier rounds may judge now, so the search still trusts d a little too much; a part that is
    never fitted to would be a cleaner judge, and cost more by what the fit then lacks.
    """

    trainer: LocalTrainer
    share: float = 1.0
    held_out: PartOfOne = 0.25

    def added(
        self, models: Merged, start: Tensor, server: Server, *, normalise: bool = True
    ) -> tuple[Merged, Tensor, Server]:
        """The models with d as one more direction, where a search begins in them, and the server as it judges them."""
        fitting, judging = self._apart(server)
        before, names = models.at(start), models.model.trainable
        after = core.as_server_copy(fitting.train(self.trainer, before).params, before)
        update = flat(after, names) - flat(before, names)
        factor = models.atlas.factors(update.norm()[None], normalise=normalise)
        first = torch.where(factor > 0, self.share / factor, 0.0)
        with_update = replace(models, more=update, factors=torch.cat([models.factors, factor]))
        return with_update, torch.cat([start, first]), judging

    def _apart(self, server: Server) -> tuple[Server, Server]:
        """The server with the examples to fit to, and with those to judge by."""
        examples = len(server.central.get(CENTRE, ()))
        if not self.held_out or examples < 2:
            return server, server
        order = rng.generator(server.seed, "feddle/held out", server.round).permutation(examples)
        count = min(max(round(self.held_out * examples), 1), examples - 1)

        def only(rows: np.ndarray) -> Server:
            return replace(server, central={**server.central, CENTRE: server.central[CENTRE].select(np.sort(rows))})

        return only(order[count:]), only(order[:count])
