"""Where a model computes."""

from __future__ import annotations

import torch

from mixfed.errors import InputError


def usable_device(name: str | torch.device) -> torch.device:
    """The device, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:  # PyTorch raises another class for almost every device that is not there
        why = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise InputError(
            f"The device '{str(name)[:60]}' cannot be used here: {why[:200]}; 'cpu' is always there."
        ) from error
    return device
