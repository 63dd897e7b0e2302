"""Positions: rotary (Su et al. 2021, arXiv 2104.09864) with its scalings, and the sinusoids of 2017.

A description (`Rope`, `Sinusoidal`) is part of a model's configuration; `build` makes what the model calls. An encoding
may add to the embeddings, rotate queries and keys, or both; angles are computed in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Scaling = Callable[[Tensor], Tensor]
"""Radians per position [D / 2] → the same, stretched for a longer context."""
Rotation = Callable[[Tensor], Tensor]
"""Queries and keys [B, S, heads, D] → the same, turned by their positions."""


class Encoding(Protocol):
    """What the model calls, once per forward."""

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [B, S, d] at positions [B, S] → what enters the first layer."""

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """How to turn queries and keys at positions [B, S]; shared by all layers."""


class Positions(Protocol):
    """A description of an encoding."""

    def build(self, hidden_size: int, head_dim: int, device: torch.device) -> Encoding:
        """The encoding for a model of this width."""


def unscaled(frequencies: Tensor) -> Tensor:
    """As trained."""
    return frequencies


@dataclass(frozen=True)
class LinearScaling:
    """Positions squeezed by a factor (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float

    def __call__(self, frequencies: Tensor) -> Tensor:
        """See `Scaling`."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: slow waves are stretched by `factor`, fast ones kept, and those between interpolated.

    A wave is fast that turns at least `high_freq_factor` times within `original_max_positions`, and slow that
    turns at most `low_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __call__(self, frequencies: Tensor) -> Tensor:
        """See `Scaling`."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequencies / self.factor, frequencies, kept.clamp(0, 1))


@dataclass(frozen=True)
class Rope:
    """Rotary positions: pair i of D / 2 turns by theta^(−2i/D) radians per position."""

    theta: float = 10000.0
    scaling: Scaling = unscaled

    def build(self, hidden_size: int, head_dim: int, device: torch.device) -> Encoding:
        """See `Positions`."""
        return _Rotary(self.scaling(_frequencies(self.theta, head_dim)).to(device))


@dataclass(frozen=True)
class Sinusoidal:
    """Sines and cosines added to the scaled embeddings (Vaswani et al. 2017, sections 3.4 and 3.5)."""

    base: float = 10000.0

    def build(self, hidden_size: int, head_dim: int, device: torch.device) -> Encoding:
        """See `Positions`."""
        return _Sinusoids(_frequencies(self.base, hidden_size).to(device))


class _Rotary:
    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies  # [D / 2]

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        angles = _angles(positions, self._frequencies, dtype)[:, :, None]  # [B, S, 1, D / 2]
        cos, sin = angles.cos(), angles.sin()
        return Turn(torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype))


@dataclass(frozen=True, slots=True)
class Turn:
    """A rotation by cos and signed_sin [B, S, 1, D]: the sine of every pair's first half is negative.

    Pair i is (x[i], x[i + D / 2]), as Hugging Face checkpoints have it.
    """

    cos: Tensor
    signed_sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """See `Rotation`."""
        partners = x.roll(x.shape[-1] // 2, dims=-1)
        return torch.addcmul(x * self.cos, partners, self.signed_sin)


class _Sinusoids:
    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies  # [d / 2]

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        angles = _angles(positions, self._frequencies, hidden.dtype)
        waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # sin, cos, sin, cos, ...
        return hidden * math.sqrt(hidden.shape[-1]) + waves.to(hidden.dtype)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return _unturned


def _unturned(x: Tensor) -> Tensor:
    return x


def _frequencies(base: float, width: int) -> Tensor:
    """[width / 2] float32: base^(−2i / width)."""
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def _angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S, len(frequencies)] radians, float64 where the model is."""
    precision = torch.promote_types(dtype, torch.float32)
    return positions[..., None].to(precision) * frequencies.to(precision)
