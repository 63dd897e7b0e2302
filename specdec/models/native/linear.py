"""Matrix products with fixed weights: what weights are stored in, what is computed in, and packing where it pays.

On a CPU a dtype says what weights are stored in: half the bytes are half the time of a step that reads every weight
once. Everything else, activations, cache, sums and logits, is float32 there, so that the arithmetic is one. On a GPU
everything is in the dtype.

Decoding's speed is that of memory, and on a CPU `F.linear` falls well short of it for a handful of rows. float32 and
bfloat16 go through `specdec.kernels`; where those can't be built, and for float16, torch widens the weight first.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import kernels


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """What a model whose weights are `stored` so computes in: on a CPU float32 at least, elsewhere the same."""
    return torch.promote_types(stored, torch.float32) if device.type == "cpu" else stored


class Linear(Protocol):
    """x [..., in] → x @ weight.T + bias [..., out], and onto that what is given, as a residual stream is."""

    num_bytes: int

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x [..., in], onto [..., out] or None → [..., out], all in the compute dtype."""


class PlainLinear:
    """The product as torch computes it, for any device and dtype; the weight stays stored as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        bias = None if self._bias is None else self._bias.to(x.dtype)
        product = F.linear(x, self._weight.to(x.dtype), bias)
        return product if onto is None else onto + product


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product for where the weight [out, in] lies and what it is stored in."""
    return kernels.Product(weight, bias) if kernels.packs(weight) else PlainLinear(weight, bias)
