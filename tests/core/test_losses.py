"""Criteria need nothing of what executes a cohort."""

from __future__ import annotations

import subprocess
import sys


def test_losses_load_no_networks_and_no_vmap_internals() -> None:
    code = "import sys, mixfed.core.losses; print(*[m for m in sys.modules if m.startswith('mixfed.')])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "mixfed.core.losses" in told
    assert not [m for m in told if m.startswith(("mixfed.models", "mixfed.core.model", "mixfed.transforms"))]
