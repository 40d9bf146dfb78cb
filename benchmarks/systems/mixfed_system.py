"""mixfed: to be written against its public interface; see the package's docstring for what ``run`` must do."""

from clock import Clock
from workloads import Workload


def run(workload: Workload, clock: Clock, cores: int) -> None:
    raise NotImplementedError("mixfed_system is not written yet")
