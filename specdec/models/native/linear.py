"""Matrix products with fixed weights, packed where that pays.

Decoding reads every weight once per token, so its speed is that of memory. On CPU, `F.linear` falls well short of it
for a handful of rows. float32 goes through `specdec.kernels`; where those can't be built, and for bfloat16, through
oneDNN's product as torch's own inductor emits it for frozen weights, which comes near it for one row.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import kernels

# Rows oneDNN's layout is chosen for; it then serves any number. Hints from 4 to 16 tie for 1 to 9 rows, a hint of 1 is
# a third slower.
_ONEDNN_ROWS = 8


class Linear(Protocol):
    """x [..., in] → x @ weight.T + bias [..., out], and onto that what is given, as a residual stream is."""

    num_bytes: int

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x [..., in], onto [..., out] or None → [..., out]."""


class PlainLinear:
    """The product as torch computes it, for any device and dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.num_bytes = _num_bytes(weight, bias)

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        product = F.linear(x, self._weight, self._bias)
        return product if onto is None else onto + product


class OneDnnLinear:
    """The product through oneDNN, with the weight reordered once. Keeps no reference to the plain weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ONEDNN_ROWS)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self.num_bytes = _num_bytes(weight, bias)

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        product: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return product if onto is None else onto + product


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product for where the weight [out, in] lies and what it is made of."""
    if kernels.serves(weight):
        return kernels.Product(weight, bias)
    return OneDnnLinear(weight, bias) if has_onednn(weight.device, weight.dtype) else PlainLinear(weight, bias)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights are held in another layout than the plain one."""
    return kernels.serves(torch.empty(0, dtype=dtype, device=device)) or has_onednn(device, dtype)


def has_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast kernels here: float32 always, bfloat16 where the processor has the instructions."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _num_bytes(weight: Tensor, bias: Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)
