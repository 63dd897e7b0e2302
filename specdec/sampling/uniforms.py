"""Counter-based uniforms: randomness as a pure function of who asks and for what.

A draw depends on (seed, request id, the request's step number, purpose, node) and on nothing else: not on batch
width, row order, device, or how many draws came before. A request therefore decodes to the same tokens alone,
batched, reordered or preempted, and a position that is drafted again in a later step gets fresh randomness.

One thing alone is keyed by position instead of step: the noise of coupled decoding, `Uniforms.choose`, which is to be
the same however often and by whom a position is looked at (Daliri, Musco, Suresh 2408.07978).

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

from specdec.sampling.distributions import argmax, sample

Words = npt.NDArray[np.uint64]


class Purpose(IntEnum):
    """What a uniform decides. Numbers are part of every stored result: add new ones, never renumber."""

    DRAFT = 1  # which token a drafter draws at a node
    ACCEPT = 2  # whether a draft node is kept
    TARGET = 3  # the token drawn from the target: recovered, bonus or plain
    ORACLE = 4  # synthetic drafters: which tokens to spoil
    COUPLED = 5  # the noise of a position, whoever asks


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
_ODD, _FIRST, _SECOND = (word - (1 << 32) * (word >> 31) for word in (0x9E3779B1, 0x7FEB352D, 0x846CA68B))  # as int32
_LONGEST = 32.0  # seconds; beyond it 2^-31 is rounding


def _split_mix(words: Words) -> Words:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit reaches every output bit."""
    words = (words ^ (words >> _SHIFT_30)) * _MULTIPLY_1
    words = (words ^ (words >> _SHIFT_27)) * _MULTIPLY_2
    mixed: Words = words ^ (words >> _SHIFT_31)
    return mixed


class Uniforms:
    """The uniforms of B requests, each at its own step.

    keys: `request_key` of each row. steps: each request's own step number. positions: how many tokens each request
    has, prompt and output; only coupled decoding asks. coupled: whether drafters draw with the noise of the position
    too, because the verifier does. Immutable; drawing twice gives the same numbers twice.
    """

    def __init__(
        self,
        keys: Sequence[int],
        steps: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        positions: Sequence[int] = (),
        coupled: bool = False,
    ) -> None:
        if len(keys) != len(steps) or len(positions) not in (0, len(keys)):
            raise ValueError(
                f"{len(keys)} keys, {len(steps)} steps and {len(positions)} positions; every row needs one of each"
            )
        self.keys = tuple(keys)
        self.steps = tuple(steps)
        self.positions = tuple(positions)
        self.coupled = coupled
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

    def draft(self, probs: Tensor, node: int) -> Tensor:
        """The token that a drafter draws at a node of its chain, 0 the first: [B, V] → [B] int64."""
        if self.coupled:
            return self.choose(probs, node)
        return sample(probs, self.draw(Purpose.DRAFT, node, 1)[:, 0])

    def choose(self, probs: Tensor, node: int) -> Tensor:
        """The token that wins the race of position `positions + node`: [B, V], need not sum to 1 → [B] int64.

        Every token runs for an exponential time of rate its probability; Gumbel-max is the same in logarithms. Whoever
        asks about a position meets the same noise, so two distributions that are close mostly choose the same token.
        Never a token of probability 0.
        """
        if len(self.positions) != self.batch_size:
            raise ValueError("coupled tokens are chosen by position; make the uniforms with positions=...")
        nodes = np.array(self.positions, dtype=np.uint64) + np.array([Purpose.COUPLED * _NODES_PER_PURPOSE + node])
        streams = _split_mix(_split_mix(np.array(self.keys, dtype=np.uint64)))  # every request's step 0
        words = _split_mix(streams + nodes.astype(np.uint64) * _GAMMA)
        seconds = _exponentials(torch.from_numpy(words.view(np.int32)).view(-1, 2).to(probs.device), probs.shape[-1])
        return argmax(torch.div(probs, seconds, out=seconds))

    def on(self, device: torch.device) -> Uniforms:
        """The same uniforms, drawn onto another device."""
        return self if device == self.device else self._with(range(self.batch_size), device)

    def select(self, rows: Sequence[int]) -> Uniforms:
        """The uniforms of some rows, in the order given."""
        return self._with(rows, self.device)

    def _with(self, rows: Sequence[int], device: torch.device) -> Uniforms:
        keys, steps = [self.keys[row] for row in rows], [self.steps[row] for row in rows]
        positions = [self.positions[row] for row in rows] if self.positions else ()
        return Uniforms(keys, steps, device, positions=positions, coupled=self.coupled)


def _exponentials(seeds: Tensor, count: int) -> Tensor:
    """Standard exponentials, never 0 nor infinite: two words per row [B, 2] int32 → [B, count] float32.

    A 32-bit finaliser (Mueller and Wellons, "lowbias32") of a counter, which enters between its two multiplications
    again: V numbers per position are too many for 64-bit words.
    """
    counters = torch.arange(count, dtype=torch.int32, device=seeds.device).mul_(_ODD)
    words = counters + seeds[:, :1]  # int32 arithmetic wraps around
    words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)  # the mask makes a logical shift of it
    words.bitwise_xor_((words >> 15).bitwise_and_(0x1FFFF)).add_(seeds[:, 1:]).mul_(_SECOND)
    words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0x7FFFFFFF)
    # log1p keeps the short times apart, which win races among many unlikely tokens.
    negative = words.float().add_(0.5).mul_(-(2.0**-31)).log1p_()
    return negative.clamp_(min=-_LONGEST).neg_()
