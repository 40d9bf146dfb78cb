"""Factored clients: a chunk is trained without forming its clients' own copies of wide linear layers.

A client that takes K steps on batches of B changes a linear layer by a matrix of rank K·B at most. With the inputs A
and output gradients D of its examples so far, F.linear is one product with the shared W for the whole chunk and two
small ones for each client, forward and backward:

    z = x·Wᵀ − η·(x·Aᵀ)·D        dx = δ·W − η·(δ·Dᵀ)·A

A step's (x, δ) join A and D, and the weight's gradient is never formed. Weight decay, momentum, a constant correction
and a proximal term make other coefficients than −η, the same for all clients at a step (:mod:`.weight`).

The loss is computed under vmap as ever, with a tensor in the place of each such weight whose use in F.linear is
intercepted (:mod:`.watch`). A weight that is used in another way, or so often that factors do not pay, is trained as
vmap does it; so are biases, norms, convolutions and all that clients do not start from together.
"""

from mixfed.backends.simulator.factored.factors import Factors
from mixfed.backends.simulator.factored.kernel import InFactors
from mixfed.backends.simulator.factored.matrix import apart
from mixfed.backends.simulator.factored.weight import pays

__all__ = ["Factors", "InFactors", "apart", "pays"]
