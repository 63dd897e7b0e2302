"""What a decoding step spends its time on, written in C for a CPU, for inference only (decode.c).

Activations, cache, sums and logits are float32; weights are stored in float32 or bfloat16. `serves` says whether a
tensor may come here, `packs` whether a weight may; whoever asks has torch's operators for the rest.
"""

from specdec.kernels.cpu import (
    ForwardPass,
    Layer,
    Product,
    SelfAttention,
    argmax,
    entropy_nats,
    feed_forward,
    packs,
    rms_norm,
    serves,
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
    "packs",
    "rms_norm",
    "serves",
]
