"""How much memory tensors take."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary


class Peak(TorchDispatchMode):
    """The most bytes that tensors made by PyTorch's operations took at any one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Any = WeakIdKeyDictionary()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.live[x.untyped_storage()] = x.untyped_storage().nbytes()
        self.bytes = max(self.bytes, sum(self.live.values()))
        return out
