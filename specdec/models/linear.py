"""Matrix products with fixed weights, prepacked where that pays.

Decoding reads every weight once per token, so its speed is that of memory. On CPU, `F.linear` falls well short of it
for a handful of rows; a library comes near it once the weights lie in its own layout. These are the operators that
torch's own inductor emits for frozen weights: oneDNN's, and for float32 on Intel's processors MKL's, which spends less
on each product. On others MKL takes its slow paths.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.processor import is_intel

# Rows the layout is chosen for; it then serves any number. oneDNN: hints from 4 to 16 tie for 1 to 9 rows, a hint of 1
# is a third slower. MKL: 8 and 16 tie up to 6 rows, 16 leads at 9, a hint of 1 takes twice as long for 2.
_ONEDNN_ROWS, _MKL_ROWS = 8, 16


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


class OneDnnLinear:
    """The product through oneDNN, with the weight reordered once. Keeps no reference to the plain weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ONEDNN_ROWS)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self.num_bytes = _num_bytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        product: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return product


class MklLinear:
    """The product through MKL, with the weight reordered once. Keeps no reference to the plain weight.

    The buffer is several times larger than what MKL writes to it. The rest is never touched and takes no memory where
    the buffer has pages of its own, and small ones: see `specdec.allocator.own_pages`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _MKL_ROWS)
        self._shape = weight.new_empty(1).expand(weight.shape)  # all the operator asks the plain weight for
        self._width = weight.shape[1]
        self._bias = bias
        self._product = torch.ops.mkl._mkl_linear.default
        self.num_bytes = _num_bytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        num_rows = x.numel() // self._width
        product: Tensor = self._product(x, self._weight, self._shape, self._bias, num_rows)
        return product


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product for where the weight [out, in] lies and what it is made of."""
    if not can_pack(weight.device, weight.dtype):
        return PlainLinear(weight, bias)
    return MklLinear(weight, bias) if prefers_mkl(weight.device, weight.dtype) else OneDnnLinear(weight, bias)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast kernels here: float32 always, bfloat16 where the processor has the instructions."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def prefers_mkl(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether MKL's packed product is the faster one."""
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and dtype == torch.float32 and is_intel() and has_mkl


def _num_bytes(weight: Tensor, bias: Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)
