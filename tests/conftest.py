"""Tests share two cores: one intra-op thread each, and a cache folder of their own (but for the list of fonts)."""

import os
import tempfile
from pathlib import Path

import torch

torch.set_num_threads(1)
os.environ.setdefault("MPLCONFIGDIR", str(Path(tempfile.gettempdir()) / "mixfed-tests-matplotlib"))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mixfed-tests-")
