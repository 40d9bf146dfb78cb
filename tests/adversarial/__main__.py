"""``python -m tests.adversarial``: runs cases, prints counts and how to repeat failures; exits 1 if there are any."""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import import_module

from tests import warm
from tests.adversarial.runner import BAD, KINDS, Outcome, cases, run, table


def main(words: list[str] | None = None) -> None:
    """Reads the options, runs the cases and reports."""
    parser = argparse.ArgumentParser("python -m tests.adversarial", description=__doc__)
    parser.add_argument("--cases", type=int, help="how many cases, at most (no limit by default)")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long, at most")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="another seed gives other cases")
    parser.add_argument("--only", choices=KINDS, help="cases of this kind only")
    parser.add_argument("--case", help="this one case again, with all that it says")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="how many cases at once")
    given = parser.parse_args(words)
    import_module("tests.preloaded")
    warm.computes_nothing()
    names = iter([given.case]) if given.case else cases(given.seed, given.only)
    print(f"seed {given.seed}", flush=True)
    outcomes: list[Outcome] = []
    for outcome in run(names, most=given.cases, seconds=60 * given.minutes, workers=given.workers):
        outcomes.append(outcome)
        if given.case or outcome.ending in BAD:
            print(
                f"\n{outcome.case}: {outcome.ending} after {outcome.seconds:.1f} s\n{outcome.told.rstrip()}", flush=True
            )
        elif len(outcomes) % 100 == 0:
            print(f"{len(outcomes)} cases", flush=True)
    print(f"\n{table(outcomes)}\n")
    failed = [outcome for outcome in outcomes if outcome.ending in BAD]
    for outcome in failed:
        print(f"{outcome.ending:<10} repeat with: python -m tests.adversarial --case {outcome.case}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
