"""A few cases of every kind, always the same ones; ``make torture`` runs many."""

from __future__ import annotations

from tests.adversarial.__main__ import main
from tests.adversarial.runner import KINDS
from tests.warm import Process


def test_nothing_breaks_and_nothing_is_silently_wrong() -> None:
    process = Process(main, ["--cases", "60", "--seed", "0", "--workers", "1"])
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert all(f"\n{kind} " in out for kind in KINDS)
