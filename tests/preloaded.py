"""What every process of the tests would load anyway, loaded once (see :mod:`tests.warm`)."""

import matplotlib.backends.backend_agg
import matplotlib.font_manager
import sklearn.datasets
import torch
import torch._dynamo
from typer.testing import CliRunner

import mixfed.cli.common
import mixfed.cli.compare
import mixfed.cli.listing
import mixfed.cli.ownership
import mixfed.cli.probe
import mixfed.cli.run
import mixfed.cli.split
import mixfed.cli.study
import mixfed.cli.theory
import mixfed.cli.tune

loaded = (matplotlib, sklearn, torch, mixfed)

torch.set_num_threads(1)
CliRunner().invoke(mixfed.cli.app, ["list"])  # loads what parsing takes
