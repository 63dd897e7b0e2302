"""Where the memory wall stands: arithmetic intensity, ridge point, and the bytes that decoding moves."""

from __future__ import annotations


def ridge_point(flops_per_second: float, bytes_per_second: float) -> float:
    """FLOP per byte above which a machine is limited by arithmetic rather than by memory.

    Use the dense peak; a vendor's peak with sparsity is about twice that.
    """
    return flops_per_second / bytes_per_second


def decode_intensity(num_parameters: float, bytes_per_weight: float, batch: int = 1, kv_bytes: float = 0) -> float:
    """FLOP per byte of one decode step: 2 N B ÷ (N b + KV bytes read). kv_bytes: of the whole batch."""
    return 2 * num_parameters * batch / (num_parameters * bytes_per_weight + kv_bytes)


def kv_cache_bytes(
    num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_value: int, batch: int, length: int
) -> int:
    """Keys and values of `batch` sequences of `length` tokens."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_value * batch * length


def attention_score_bytes(batch: int, num_heads: int, length: int, bytes_per_value: int) -> int:
    """Scores of one layer when they are materialised, [batch, num_heads, length, length]."""
    return batch * num_heads * length**2 * bytes_per_value
