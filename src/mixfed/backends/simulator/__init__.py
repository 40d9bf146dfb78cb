"""The simulator: clients in one process, cohorts as units of work."""

from mixfed.backends.simulator.engine import Simulator

__all__ = ["Simulator"]
