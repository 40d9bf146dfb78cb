"""The systems, by name: a module of this folder and the options its ``run`` gets.

A system is one module with one function::

    def run(workload: Workload, clock: Clock, cores: int, **options) -> None

It builds what it needs from ``workload`` (model, data, cohort(round), batch, steps, rate), then plays the rounds
0, 1, 2, ... and at the end of each calls ``clock.lap(params)``, where ``params()`` gives the parameters after that
round by the names of ``workload.model().named_parameters()``. It returns as soon as that answers False. It runs in a
process of its own that is bound to ``cores`` cores, may start threads and processes, and must leave none behind. It
imports its package when the module is imported or in ``run``, so that a missing one becomes a row that says so. Where
it has no code for a workload it raises NotImplementedError.
"""

from mixfed import cli

SYSTEMS: dict[str, tuple[str, dict[str, int]]] = {
    "torch-loop": ("torch_loop", {}),
    "torch-threads": ("torch_threads", {}),
    "torch-vmap": ("torch_vmap", {}),
    "torch-factored": ("torch_factored", {}),
    "torch-rows": ("torch_rows", {}),
    "torch-processes": ("torch_processes", {}),
    "pfl": ("pfl_system", {"processes": 1}),
    "pfl-processes": ("pfl_system", {"processes": 2}),
    "flower": ("flower_system", {}),
    "fedjax": ("fedjax_system", {}),
    "mixfed": ("mixfed_system", {}),
    "mixfed-ranks": ("mixfed_ranks", {}),
}

BASELINES = ("torch-loop", "torch-threads", "torch-vmap", "torch-factored", "torch-rows")
"""Hand-written code in one process: the best of these is what the ratios refer to."""

PYTHON = {"fedjax": ".venv-bench-jax/bin/python"}
"""The interpreter of a system that has an environment of its own, seen from the project's folder."""

QUICK = ("torch-threads", "torch-vmap", "torch-factored", "torch-rows", "mixfed")
"""The systems of a developer's loop: mixfed, and the hand-written code that is the best somewhere."""

ENVIRONMENT = {"mixfed": cli.ENVIRONMENT, "mixfed-ranks": cli.ENVIRONMENT, "fedjax": {"JAX_PLATFORMS": "cpu"}}
"""What a system sets before PyTorch (or JAX) is loaded: the command ``mixfed`` sets this itself."""
