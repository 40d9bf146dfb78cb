"""Tests share two cores: one intra-op thread each, and a cache folder of their own."""

import os
import tempfile

import torch

torch.set_num_threads(1)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mixfed-tests-")
