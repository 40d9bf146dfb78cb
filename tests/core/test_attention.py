"""Attention under vmap: the same answers and gradients as client by client, in one call of the fused operator."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from mixfed.models.attention import SelfAttention, attend_under_vmap

attend_under_vmap()
CLIENTS, SHAPE = 5, (2, 4, 8, 16)
MASKS = {
    "none": (None, None, False),
    "causal": (None, None, True),
    "everyone's": (torch.ones(8, 8).tril().bool(), None, False),
    "everyone's, by example": (torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), None, False),
    "a client's own": (torch.rand(CLIENTS, 8, 8) > 0.3, 0, False),
    "a client's own, by example and head": (torch.randn(CLIENTS, 2, 4, 8, 8), 0, False),
}


def loss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).square().sum()


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "shared keys"])
def test_gradients_are_those_of_single_clients(kind: str, shared: bool) -> None:
    mask, dim, causal = MASKS[kind]
    torch.manual_seed(1)
    q, k, v = torch.randn(3, CLIENTS, *SHAPE)
    k, v = (k[0], v[0]) if shared else (k, v)
    keys = None if shared else 0

    def gradients(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        return grad(loss, argnums=(0, 1, 2))(q, k, v, mask, causal)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns where it runs clients one by one
        together = vmap(gradients, in_dims=(0, keys, keys, dim))(q, k, v, mask)
    for c in range(CLIENTS):
        own = [q[c], k if shared else k[c], v if shared else v[c]]
        wanted = gradients(*own, mask if dim is None else mask[c])
        torch.testing.assert_close([x[c] for x in together], list(wanted))


def test_a_transformer_layer_needs_no_change() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    params = {n: torch.stack([p.detach() * (1 + c / 10) for c in range(3)]) for n, p in layer.named_parameters()}
    x = torch.randn(3, 2, 6, 8)

    def total(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, params, (x,)).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        together = vmap(grad(total))(params, x)
    for c in range(3):
        wanted = grad(total)({n: p[c] for n, p in params.items()}, x[c])
        torch.testing.assert_close({n: g[c] for n, g in together.items()}, wanted, rtol=1e-4, atol=1e-5)


LATER = torch.ones(6, 6, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
CALLS = {
    "plain": {"need_weights": False},
    "causal": {"need_weights": False, "attn_mask": LATER, "is_causal": True},
    "masked": {"need_weights": False, "attn_mask": LATER},
    "masked by numbers": {"need_weights": False, "attn_mask": torch.randn(6, 6)},
    "masked by head": {"need_weights": False, "attn_mask": LATER.expand(4, 6, 6)},
    "padded": {"need_weights": False, "key_padding_mask": PADDING},
    "with weights": {"attn_mask": LATER},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}],
    ids=["sequence first", "batch first", "without bias", "biased keys", "a zero key"],
)
def test_self_attention_is_pytorchs_own(call: str, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, **options)
    ours = SelfAttention(8, 2, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 8) if options.get("batch_first") else torch.randn(6, 2, 8)
    found = []
    for layer in (theirs, ours):
        given = x.clone().requires_grad_()
        answer, weights = layer(given, given, given, **CALLS[call])
        gradients = torch.autograd.grad(answer.square().sum(), [given, *layer.parameters()])
        found.append((answer, weights, gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("other", ["keys", "values", "both", "a single example", "another width"])
def test_other_attention_is_pytorchs_own(other: str) -> None:
    torch.manual_seed(0)
    options = {"kdim": 4, "vdim": 3} if other == "another width" else {}
    theirs, ours = nn.MultiheadAttention(8, 2, **options), SelfAttention(8, 2, **options)
    ours.load_state_dict(theirs.state_dict())
    x, y = torch.randn(2, 6, 2, 8)
    given = {
        "keys": (x, y, x),
        "values": (x, x, y),
        "both": (x, y, y),
        "a single example": (x[:, 0],) * 3,
        "another width": (x, y[..., :4], y[..., :3]),
    }[other]
    torch.testing.assert_close(ours(*given, need_weights=False), theirs(*given, need_weights=False))
