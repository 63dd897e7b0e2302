"""decode.c in terms of tensors. Sizes: B sequences, S new tokens, H query and K key heads of width D."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from specdec.kernels.library import build

# The structures of decode.c, field by field.


class _Product(ctypes.Structure):
    _fields_ = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_long),
        ("outputs", c_long),
        ("narrow", c_long),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        ("qkv", _Product),
        ("output", _Product),
        ("norms", c_void_p),
        ("eps", c_float),
        ("heads", c_long),
        ("kv_heads", c_long),
        ("width", c_long),
    ]


class _ForwardPass(ctypes.Structure):
    _fields_ = [
        ("batch", c_long),
        ("tokens", c_long),
        ("slots", POINTER(c_long)),
        ("starts", POINTER(c_long)),
        ("slot_stride", c_long),
        ("head_stride", c_long),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("tree", c_void_p),
        ("nodes", c_long),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", c_void_p),
        ("feed_forward_norm", c_void_p),
        ("attention_eps", c_float),
        ("feed_forward_eps", c_float),
        ("attention", POINTER(_Attention)),
        ("gate_up", POINTER(_Product)),
        ("down", POINTER(_Product)),
    ]


@cache
def _library() -> Any:
    """The library with its functions declared, or None."""
    library = build().library
    if library is None:
        return None
    product, attention, forward = POINTER(_Product), POINTER(_Attention), POINTER(_ForwardPass)
    declared: dict[str, tuple[list[Any], Any]] = {
        "panel": ([], c_int),
        "product": ([product, *3 * [c_void_p], c_long], None),
        "rms_norm": ([*3 * [c_void_p], c_long, c_long, c_float], None),
        "argmax": ([c_void_p, c_void_p, c_long, c_long], None),
        "entropy": ([c_void_p, c_void_p, c_long, c_long], None),
        "feed_forward": ([product, product, *3 * [c_void_p], c_long], c_int),
        "self_attention": ([attention, forward, *5 * [c_void_p]], c_int),
        "layer": ([POINTER(_Layer), forward, *4 * [c_void_p]], c_int),
    }
    for name, (arguments, result) in declared.items():
        function = getattr(library, f"specdec_{name}")
        function.argtypes, function.restype = arguments, result
    return library


@cache
def _panel() -> int:
    return cast(int, _library().specdec_panel())


def serves(x: Tensor) -> bool:
    """Whether the kernels take this tensor: float32, on a CPU, with nothing to differentiate."""
    return x.dtype is torch.float32 and x.is_cpu and not x.requires_grad and _library() is not None


def packs(weight: Tensor) -> bool:
    """Whether `Product` takes this weight: stored in float32 or bfloat16, on a CPU, with nothing to differentiate."""
    stored = weight.dtype in (torch.float32, torch.bfloat16) and weight.is_cpu
    return stored and not weight.requires_grad and _library() is not None


class Product:
    """x [..., k] → x @ weight.T + bias [..., n], for a weight [n, k] of which only a packed copy is kept.

    Packed, [⌈n / panel⌉, k, panel], outputs that are computed together lie side by side; those beyond n are zeros. In
    bfloat16 every output of a panel's first half lies next to its fellow of the second. x, bias and sums are float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self.packed = _packed(weight)
        self.bias = None if bias is None else bias.float().contiguous()
        self.num_bytes = self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)
        narrow = weight.dtype is torch.bfloat16
        sizes = (self.inputs, self.outputs, narrow)
        self.structure = _Product(self.packed.data_ptr(), _address(self.bias), *sizes)

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """The product, plus `onto` [..., n] or nothing."""
        x, rows = x.contiguous(), x.shape[:-1]
        onto = None if onto is None else onto.contiguous()
        out = x.new_empty(*rows, self.outputs)
        _library().specdec_product(self.structure, x.data_ptr(), _address(onto), out.data_ptr(), math.prod(rows))
        return out


def _packed(weight: Tensor) -> Tensor:
    """Filled in place: a copy of a whole table would be most of the peak in memory while a model loads."""
    outputs, inputs = weight.shape
    panel = _panel()
    halves = (2, panel // 2) if weight.dtype is torch.float32 else (panel // 2, 2)
    order = (0, 3, 1, 2) if weight.dtype is torch.float32 else (0, 3, 2, 1)
    packed = weight.new_zeros(-(-outputs // panel), inputs, *halves)
    whole = outputs // panel
    packed[:whole] = weight[: whole * panel].view(whole, 2, panel // 2, inputs).permute(order)
    if outputs % panel:
        last = weight.new_zeros(1, panel, inputs)
        last[0, : outputs % panel] = weight[whole * panel :]
        packed[whole:] = last.view(1, 2, panel // 2, inputs).permute(order)
    return packed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / RMS(x) · weight, over the last dimension."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    _library().specdec_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
    return out


def argmax(x: Tensor) -> Tensor:
    """Index of each row's first maximum, or first NaN: [..., n > 0] → [...] int64."""
    x = x.contiguous()
    found, width = torch.empty(x.shape[:-1], dtype=torch.int64), x.shape[-1]
    _library().specdec_argmax(x.data_ptr(), found.data_ptr(), found.numel(), width)
    return found


def entropy_nats(logits: Tensor) -> Tensor:
    """Entropy of each row's softmax: [..., n] → [...] float64. NaN where a logit is NaN or +inf, or all are -inf."""
    logits = logits.contiguous()
    nats, width = torch.empty(logits.shape[:-1], dtype=torch.float64), logits.shape[-1]
    _library().specdec_entropy(logits.data_ptr(), nats.data_ptr(), nats.numel(), width)
    return nats


def feed_forward(gate_up: Product, down: Product, x: Tensor, onto: Tensor) -> Tensor:
    """down(silu(gate(x)) · up(x)) + onto, x [..., k] → [..., n]."""
    x, onto = x.contiguous(), onto.contiguous()
    out = torch.empty_like(onto)
    pointers, num_rows = (x.data_ptr(), onto.data_ptr(), out.data_ptr()), math.prod(x.shape[:-1])
    _check(_library().specdec_feed_forward(gate_up.structure, down.structure, *pointers, num_rows))
    return out


class ForwardPass:
    """Where the new entries of a forward pass go, and what its tokens see; shared by all layers.

    keys, values: per layer, [slots, K, capacity, D] as `ContiguousCache` has them; row b of the pass is slot `slots[b]`
    and already holds `starts[b]` entries. cos, signed_sin: [B, S, 1, D], as `specdec.models.native.rope.Turn` has them.
    tree: [B, S, N] bool, which of a row's last N entries, the S new ones among them, each token sees beside all before;
    None: causal.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        slots: Sequence[int],
        starts: Sequence[int],
        cos: Tensor,
        signed_sin: Tensor,
        tree: Tensor | None,
    ) -> None:
        tree = None if tree is None else tree.contiguous()
        self.keys, self.values = keys, values
        self._held = cos, signed_sin, tree  # what the structure points to
        batch, tokens = cos.shape[:2]
        row = c_long * batch
        self.structure = _ForwardPass(
            *(batch, tokens, row(*slots), row(*starts), *keys[0].stride()[:2]),
            *(cos.data_ptr(), signed_sin.data_ptr(), _address(tree), 0 if tree is None else tree.shape[2]),
        )


class SelfAttention:
    """output(attention(qkv(x))) + onto; norms: [H + K, D] for queries and keys, with their epsilon, or None."""

    def __init__(
        self, qkv: Product, output: Product, norms: Tensor | None, eps: float, num_heads: int, num_kv_heads: int
    ) -> None:
        self._held = qkv, output, norms
        width = output.inputs // num_heads
        self.structure = _Attention(
            qkv.structure, output.structure, _address(norms), eps, num_heads, num_kv_heads, width
        )

    def __call__(self, x: Tensor, forward: ForwardPass, layer: int, onto: Tensor) -> Tensor:
        """x [B, S, k] → [B, S, n]; writes to the keys and values of `layer`."""
        x, onto = x.contiguous(), onto.contiguous()
        out = torch.empty_like(onto)
        pointers = (forward.keys[layer].data_ptr(), forward.values[layer].data_ptr(), x.data_ptr(), onto.data_ptr())
        _check(_library().specdec_self_attention(self.structure, forward.structure, *pointers, out.data_ptr()))
        return out


class Layer:
    """stream → stream + attention(norm(stream)) → that + down(silu(gate(x)) · up(x)), x the norm of it, in one call.

    norms: weight [d] and epsilon of the one before attention, and of the one before the feed-forward.
    """

    def __init__(
        self,
        attention_norm: tuple[Tensor, float],
        attention: SelfAttention,
        feed_forward_norm: tuple[Tensor, float],
        gate_up: Product,
        down: Product,
    ) -> None:
        (first, first_eps), (second, second_eps) = attention_norm, feed_forward_norm
        self._held = first, second, attention, gate_up, down
        parts = [ctypes.pointer(part.structure) for part in (attention, gate_up, down)]
        self._structure = _Layer(first.data_ptr(), second.data_ptr(), first_eps, second_eps, *parts)

    def __call__(self, stream: Tensor, forward: ForwardPass, layer: int) -> Tensor:
        """[B, S, d] → [B, S, d]; writes to the keys and values of `layer`."""
        stream = stream.contiguous()
        out = torch.empty_like(stream)
        pointers = (forward.keys[layer].data_ptr(), forward.values[layer].data_ptr(), stream.data_ptr(), out.data_ptr())
        _check(_library().specdec_layer(self._structure, forward.structure, *pointers))
        return out


def _check(complete: int) -> None:
    if not complete:
        raise MemoryError("there is no memory left for one layer's intermediate results")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
