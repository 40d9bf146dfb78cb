"""What the paper says that a client of the movie recommender costs, to stand beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from mixfed.errors import InputError


@dataclass(frozen=True)
class ClosedForm:
    """Table 12 of Augenstein et al. (2022): cost of one client in one round, by method, next to what was measured.

    N items of width d in one shared table, n of which a client's K batches of B examples touch. Values are counted in
    numbers; ``bytes_per_value`` turns them into bytes. The paper's Table 3 (494, 20, 30 KB; 125.16 and 0.025 MFLOP) is
    this with N 3,952, d 16, n = K·B = 160, KiB of four-byte values, and the FLOPs of a single step.
    """

    items: int
    width: int
    rows: float
    steps: int
    batch: int
    bytes_per_value: int = 4

    def bytes(self, method: str) -> float:
        """2Nd for the baseline, 2nd for Parallel Training, 3nd for gradient transfer."""
        values = {
            "baseline": 2 * self.items,
            "parallel": 2 * self.rows,
            "gradient_1way": 3 * self.rows,
            "gradient_2way": 3 * self.rows,
        }
        if method not in values:
            raise InputError(f"Table 12 has no method '{method}'; it has {', '.join(values)}.")
        return values[method] * self.width * self.bytes_per_value

    def regulariser(self, method: str) -> float:
        """K·N²·d/2 on every client for the baseline, nothing on clients with mixed learning."""
        return self.steps * self.items**2 * self.width / 2 if method == "baseline" else 0.0

    def server_regulariser(self, method: str) -> float:
        """N²·d/2 at the server in a round of mixed learning, nothing for the baseline."""
        return 0.0 if method == "baseline" else self.items**2 * self.width / 2

    def step_flops(self, method: str) -> float:
        """One step as section C.3 counts it: Bd + 3Bd² + 3B²d + 2B, and N²d/2 + 3Nd where the client regularises.

        C.3 writes Nd for the regulariser's gradient; the figure of Table 3 takes 3Nd.
        """
        b, d, n = self.batch, self.width, self.items
        own = b * d + 3 * b * d**2 + 3 * b**2 * d + 2 * b
        return own + (n**2 * d / 2 + 3 * n * d if method == "baseline" else 0)
