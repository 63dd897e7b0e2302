"""What a decoding step spends its time on, written in C for a CPU, for inference only (decode.c): all of a layer
in float32, what lies between its products in bfloat16.

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
    rms_norm_bfloat16,
    serves,
    serves_bfloat16,
    serves_heads,
    swiglu_bfloat16,
    turn_bfloat16,
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
    "rms_norm_bfloat16",
    "serves",
    "serves_bfloat16",
    "serves_heads",
    "swiglu_bfloat16",
    "turn_bfloat16",
]
