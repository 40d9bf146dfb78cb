"""What ``torchrun`` tells each process that it starts, in environment variables. PyTorch is not needed to read them."""

from __future__ import annotations

import os


def started_by_torchrun() -> bool:
    """Whether this process is one that ``torchrun`` started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def ranks_here() -> int:
    """How many processes there are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def restarts() -> int:
    """How often ``torchrun --max-restarts`` has started the processes anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def attempt() -> str:
    """What tells this start of the ranks from earlier ones, in a store that outlives them: that of ``torchrun`` itself.

    Otherwise a rank may find the address of one that has died.
    """
    outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"mixfed-{restarts()}" if outlives else "mixfed"
