"""Transforms of what travels, for any algorithm: compression of messages and uploads, a bound on updates."""

from mixfed.transforms.bound import bounded
from mixfed.transforms.codecs import Codec, quantize, top_k
from mixfed.transforms.compress import compress

__all__ = ["Codec", "bounded", "compress", "quantize", "top_k"]
