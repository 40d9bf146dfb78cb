"""What every process of the tests would load anyway, loaded once (see :mod:`tests.warm`)."""

import matplotlib.backends.backend_agg
import sklearn.datasets
import torch
import torch._dynamo

import mixfed.cli.common
import mixfed.cli.compare
import mixfed.cli.holdings
import mixfed.cli.listing
import mixfed.cli.probe
import mixfed.cli.run
import mixfed.cli.split
import mixfed.cli.study
import mixfed.cli.theory
import mixfed.cli.tune

loaded = (matplotlib, sklearn, torch, mixfed)

torch.set_num_threads(1)
