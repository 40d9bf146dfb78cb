"""Transforms of what travels: compression of any message or upload, for any algorithm."""

from mixfed.transforms.codecs import Codec, quantize, top_k
from mixfed.transforms.compress import compress

__all__ = ["Codec", "compress", "quantize", "top_k"]
