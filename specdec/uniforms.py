"""Counter-based uniforms: randomness as a pure function of who asks and for what.

A draw depends on (seed, request id, the request's step number, purpose, node) and on nothing else: not on batch
width, row order, device, or how many draws came before. A request therefore decodes to the same tokens alone,
batched, reordered or preempted, and a position that is drafted again in a later step gets fresh randomness.

The generator is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): each
(request, step) owns a stream, and (purpose, node) is the index within it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]


class Purpose(IntEnum):
    """What a uniform decides. Numbers are part of every stored result: add new ones, never renumber."""

    DRAFT = 1  # which token a drafter draws at a node
    ACCEPT = 2  # whether a draft node is kept
    TARGET = 3  # the token drawn from the target: recovered, bonus or plain
    ORACLE = 4  # synthetic drafters: which tokens to spoil


def request_key(seed: int, request_id: str) -> int:
    """64-bit key of one request, the same in every process and on every machine."""
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


# Arrays of one element, not scalars: numpy warns when a uint64 *scalar* wraps around, which is the point here.
_GAMMA = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
_MULTIPLY_1 = np.array([0xBF58476D1CE4E5B9], dtype=np.uint64)
_MULTIPLY_2 = np.array([0x94D049BB133111EB], dtype=np.uint64)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_11 = (np.array([shift], dtype=np.uint64) for shift in (30, 27, 31, 11))
_NODES_PER_PURPOSE = 1 << 32


def _split_mix(words: Words) -> Words:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit reaches every output bit."""
    words = (words ^ (words >> _SHIFT_30)) * _MULTIPLY_1
    words = (words ^ (words >> _SHIFT_27)) * _MULTIPLY_2
    mixed: Words = words ^ (words >> _SHIFT_31)
    return mixed


class Uniforms:
    """The uniforms of B requests, each at its own step.

    keys: `request_key` of each row. steps: each request's own step number. Immutable; drawing twice gives
    the same numbers twice.
    """

    def __init__(self, keys: Sequence[int], steps: Sequence[int], device: torch.device | str = "cpu") -> None:
        if len(keys) != len(steps):
            raise ValueError(f"{len(keys)} keys and {len(steps)} steps; every row needs one of each")
        self.keys = tuple(keys)
        self.steps = tuple(steps)
        self.device = torch.device(device)

    @cached_property
    def _streams(self) -> Words:
        """[B], made at the first draw: a greedy step may need none."""
        requests = np.array(self.keys, dtype=np.uint64)
        return _split_mix(_split_mix(requests) + np.array(self.steps, dtype=np.uint64) * _GAMMA)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.keys)

    def draw(self, purpose: Purpose, first_node: int, num_nodes: int) -> Tensor:
        """Uniforms of nodes first_node ... first_node + num_nodes - 1: [B, num_nodes] float64 in [0, 1)."""
        start = purpose * _NODES_PER_PURPOSE + first_node
        counters = np.arange(start, start + num_nodes, dtype=np.uint64)
        words = _split_mix(self._streams[:, None] + counters * _GAMMA)  # [B, num_nodes]
        return torch.from_numpy((words >> _SHIFT_11) * 2.0**-53).to(self.device)

    def on(self, device: torch.device) -> Uniforms:
        """The same uniforms, drawn onto another device."""
        return self if device == self.device else Uniforms(self.keys, self.steps, device)

    def select(self, rows: Sequence[int]) -> Uniforms:
        """The uniforms of some rows, in the order given."""
        return Uniforms([self.keys[row] for row in rows], [self.steps[row] for row in rows], self.device)
