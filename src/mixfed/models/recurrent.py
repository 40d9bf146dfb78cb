"""Recurrent layers for a whole cohort: PyTorch's own cannot run under vmap, and pay for every client's every step anew.

:func:`for_cohorts` turns ``nn.GRU``, ``nn.LSTM`` and ``nn.RNN`` inside any module into layers with the same parameters
and the same answers, whose work :mod:`mixfed.models.scan` does for all clients of a chunk together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixfed.models import vmap
from mixfed.models.attention import SelfAttention
from mixfed.models.cells import CELLS
from mixfed.models.layers import has_onednn
from mixfed.models.products import Linear
from mixfed.models.scan import scan


class _ForCohorts(nn.RNNBase):
    """The forward pass of all three: layer after layer, the two directions of a layer side by side."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """``forward`` of the layer that PyTorch has; packed sequences and projected states are left to that."""
        if not isinstance(input, Tensor) or input.ndim not in (2, 3) or self.proj_size:
            return super().forward(input, hx)  # PyTorch's own
        carried = CELLS[self.mode].carried
        x = input.unsqueeze(1) if input.ndim == 2 else input.transpose(0, 1) if self.batch_first else input
        directions = 1 + self.bidirectional
        if hx is None:
            carry = [x.new_zeros(self.num_layers * directions, x.shape[1], self.hidden_size)] * carried
        else:
            carry = [h.unsqueeze(1) if input.ndim == 2 else h for h in (hx if carried > 1 else (hx,))]
        self.check_forward_args(x.transpose(0, 1) if self.batch_first else x, _as_given(carry), None)
        last = []
        for layer in range(self.num_layers):
            if layer and self.dropout:  # examples first, as keyed draws count them
                x = F.dropout(x.transpose(0, 1), self.dropout, self.training).transpose(0, 1)
            both = torch.stack([x, x.flip(0)]) if self.bidirectional else x[None]
            first = [h[layer * directions :][:directions] for h in carry]
            states, ends = scan(self.mode, both, self._weights_of(layer), first)
            x = torch.cat([states[0], states[1].flip(0)], -1) if self.bidirectional else states.squeeze(0)
            last.append(ends)
        ends = [torch.cat(one) for one in zip(*last, strict=True)]
        if input.ndim == 2:
            return x.squeeze(1), _as_given([h.squeeze(1) for h in ends])
        return x.transpose(0, 1) if self.batch_first else x, _as_given(ends)

    def _weights_of(self, layer: int) -> list[Tensor]:
        """The weights of a layer [directions, …]; where there are no biases, zeros."""
        names = [f"_l{layer}", f"_l{layer}_reverse"][: 1 + self.bidirectional]
        found = [_together([self._parameters[part + name] for name in names]) for part in ("weight_ih", "weight_hh")]
        if not self.bias:
            return [*found, *[found[0].new_zeros(found[0].shape[:2])] * 2]
        return found + [_together([self._parameters[part + name] for name in names]) for part in ("bias_ih", "bias_hh")]


class GRU(_ForCohorts, nn.GRU):
    """``nn.GRU`` for cohorts."""


class LSTM(_ForCohorts, nn.LSTM):
    """``nn.LSTM`` for cohorts; a single client has PyTorch's own, where that is oneDNN's."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """See :class:`_ForCohorts`."""
        draws = self.dropout > 0 and self.training
        if isinstance(input, Tensor) and has_onednn("LSTM", input) and not draws and not vmap.is_active():
            return nn.LSTM.forward(self, input, hx)
        return super().forward(input, hx)


class RNN(_ForCohorts, nn.RNN):
    """``nn.RNN`` for cohorts."""


def for_cohorts(module: nn.Module) -> nn.Module:
    """The module with its recurrent layers in the form above, its linear ones in that of
    :mod:`mixfed.models.products` and attention in that of :mod:`mixfed.models.attention`; parameters and their names
    stay."""
    ours = {nn.GRU: GRU, nn.LSTM: LSTM, nn.RNN: RNN, nn.Linear: Linear, nn.MultiheadAttention: SelfAttention}
    for part in module.modules():
        if type(part) in ours:
            part.__class__ = ours[type(part)]
    return module


def _together(tensors: list[Any]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]


def _as_given(carry: list[Tensor]) -> Any:
    """The state alone, or of an LSTM the pair."""
    return tuple(carry) if len(carry) > 1 else carry[0]
