"""What a decoding step spends its time on, written in C for a CPU: float32, for inference only (decode.c).

`serves` says whether a tensor may come here; whoever asks has torch's operators for the rest.
"""

from specdec.kernels.cpu import (
    ForwardPass,
    Layer,
    Product,
    SelfAttention,
    argmax,
    entropy_nats,
    feed_forward,
    rms_norm,
    serves,
    serves_heads,
)
from specdec.kernels.library import Build, build

__all__ = [
    "Build",
    "ForwardPass",
    "Layer",
    "Product",
    "SelfAttention",
    "argmax",
    "build",
    "entropy_nats",
    "feed_forward",
    "rms_norm",
    "serves",
    "serves_heads",
]
