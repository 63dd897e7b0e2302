"""Matrix products with fixed weights, prepacked where that pays.

Decoding reads every weight once per token, so its speed is that of memory. On CPU, `F.linear` falls well short of it
for a handful of rows; oneDNN reaches it once the weights lie in its blocked layout. These are the operators that
torch's own inductor emits for frozen weights.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_HINT = 8  # rows the layout is chosen for: hints from 4 to 16 tie for 1 to 9 rows, a hint of 1 is a third slower


class Linear(Protocol):
    """x [..., in] → x @ weight.T + bias [..., out]."""

    num_bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""


class PlainLinear:
    """The product as torch computes it, for any device and dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.num_bytes = _num_bytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """The product through oneDNN, with the weight reordered once. Keeps no reference to the plain weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self.num_bytes = _num_bytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        product: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return product


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product for where the weight [out, in] lies and what it is made of."""
    if can_pack(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast kernels here: float32 always, bfloat16 where the processor has the instructions."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _num_bytes(weight: Tensor, bias: Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)
