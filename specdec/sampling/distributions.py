"""From logits to the distribution that is sampled, and from the distribution to a token.

One function, `probabilities`, makes every distribution: for plain decoding, for drafts and for verification.
What is reported as a probability is therefore always what was drawn from.

Options apply in the order and with the meaning of transformers' logits processors: penalties, temperature,
top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec import kernels
from specdec.errors import UsageError
from specdec.types import Draft, SamplingParams

Tokens = np.ndarray | Tensor
Seen = Callable[[int, int], tuple[Tokens, Tokens]]
"""(row, position) → prompt token ids, and output token ids before that position, drafts included; `PADDING` is none."""

_NUCLEUS_START = 64  # candidates looked at first; most nuclei are smaller
_NUCLEUS_GROWTH = 8
_NO_MASS = -200.0  # in nats: exp is 0 in float32 from -104 on, and 0 * -inf would be NaN
_NATS_PER_BIT = math.log(2)
_TINY_TEMPERATURE = 1e-6  # below it, dividing a logit may overflow float32


def probabilities(logits: Tensor, params: Sequence[SamplingParams], seen: Seen | None = None) -> Tensor:
    """The distribution each position is sampled from.

    logits: [B, S, V] of any float type, left untouched; -inf means no mass. params: one per row.
    seen: what penalties count; asked only for rows with a penalty.
    Returns [B, S, V] float32; at temperature 0 an exact one-hot at the first maximum.
    Raises `UsageError` for a penalised row without `seen`.
    """
    groups: dict[SamplingParams, list[int]] = {}
    for row, wanted in enumerate(params):
        groups.setdefault(replace(wanted, seed=0) if wanted.seed else wanted, []).append(row)
    if len(groups) == 1:
        (only,) = groups
        return _distribution(logits, only, range(len(params)), seen)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for wanted, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        out[index] = _distribution(logits[index], wanted, rows, seen)
    return out


def _distribution(logits: Tensor, params: SamplingParams, rows: Sequence[int], seen: Seen | None) -> Tensor:
    """Rows that agree in every option: [N, S, V] → [N, S, V] float32. rows: their numbers in the batch."""
    if params.penalised:
        logits = _penalised(logits, params, rows, seen)
    if params.greedy:
        return one_hot(argmax(logits), logits.shape[-1])
    scores = _tempered(logits.float(), params.temperature)
    if 0 < params.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(params.top_k, dim=-1).values[..., -1:]  # ties with it are kept, as in transformers
        scores = scores.masked_fill(scores < smallest_kept, -math.inf)
    probs = scores.softmax(-1)
    if params.top_p < 1 or params.min_p > 0:
        probs = _truncated(probs, params)
    return probs


def argmax(logits: Tensor) -> Tensor:
    """Index of each row's first maximum, or first NaN: [..., V] → [...] int64."""
    if not kernels.serves(logits):
        return logits.argmax(-1)
    return kernels.argmax(logits)


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    """All mass on one token: [...] int64 → [..., V] float32."""
    out = torch.zeros(*tokens.shape, vocab_size, device=tokens.device)
    return out.scatter_(-1, tokens[..., None], 1.0)


def _tempered(scores: Tensor, temperature: float) -> Tensor:
    if temperature == 1:
        return scores
    if temperature < _TINY_TEMPERATURE:
        scores = scores.double() - scores.amax(-1, keepdim=True)
    return (scores / temperature).float()


def _penalised(logits: Tensor, params: SamplingParams, rows: Sequence[int], seen: Seen | None) -> Tensor:
    """Penalties of every position, each counting what lies before it: [N, S, V] → a new [N, S, V] float32."""
    if seen is None:
        raise UsageError(
            f"row {rows[0]} asks for penalties, which depend on the tokens before each position; pass seen=..."
        )
    scores = logits.float().clone()
    for index, row in enumerate(rows):
        for position in range(scores.shape[1]):
            prompt, output = seen(row, position)
            _penalise(scores[index, position], params, prompt, output)
    return scores


def _penalise(scores: Tensor, params: SamplingParams, prompt: Tokens, output: Tokens) -> None:
    """One position, in place, [V]. Repetition first, as in transformers; then the two that are subtracted."""
    said = torch.as_tensor(output, device=scores.device)
    if params.repetition_penalty != 1:
        tokens = torch.cat((torch.as_tensor(prompt, device=scores.device), said))
        at, counts = _counted(tokens, scores)
        found = scores[at]
        turned = torch.where(found < 0, found * params.repetition_penalty, found / params.repetition_penalty)
        scores[at] = torch.where(counts > 0, turned, found)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        at, counts = _counted(said, scores)
        penalty = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts.double()
        scores[at] = scores[at] - penalty.to(scores)


def _counted(tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Where a position's scores [V] may change, and how often each of these tokens occurs: [n] → [n], [n].

    Equal tokens give equal entries. Padding stands for token 0 with that one's own count. No shape depends on the ids.
    """
    totals = scores.new_zeros(len(scores) + 1)  # 0 is for padding
    totals.index_add_(0, tokens + 1, torch.ones_like(tokens, dtype=totals.dtype))
    at = tokens.clamp(min=0)
    return at, totals[at + 1]


def _truncated(probs: Tensor, params: SamplingParams) -> Tensor:
    """Top-p, then min-p, then normalised once: min-p compares ratios, which normalising does not change."""
    kept = torch.ones((), dtype=torch.bool, device=probs.device)
    if params.top_p < 1:
        kept = _nucleus(probs.flatten(0, -2), params.top_p).view(probs.shape)
    if params.min_p > 0:
        kept = kept & (probs >= params.min_p * probs.amax(-1, keepdim=True))
    probs = torch.where(kept, probs, 0.0)
    return probs.div_(probs.sum(-1, keepdim=True))


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens whose mass reaches top_p: [N, V] → [N, V] bool.

    Holtzman et al. 1904.09751. Among tokens tied at the edge the lowest ids stay. On a CPU without sorting the
    vocabulary: the largest few probabilities show where the set ends; only positions whose mass they do not reach are
    looked at again, with more candidates. Elsewhere asking which those are would wait for the device.
    """
    if not probs.is_cpu:
        edge = _edge(probs, top_p, probs.shape[-1])
        return _above(probs, edge)
    edge, pending, size = _edge(probs, top_p, _NUCLEUS_START), torch.arange(len(probs)), _NUCLEUS_START
    while len(pending := pending[~edge.reached[pending]]):
        size *= _NUCLEUS_GROWTH
        for whole, part in zip(edge, _edge(probs[pending], top_p, size), strict=True):
            whole[pending] = part
    return _above(probs, edge) if edge.tied.any() else probs >= edge.smallest


class _Edge(NamedTuple):
    """Where nuclei end. smallest: [N, 1], the least probability kept. quota: [N, 1], how many tokens of that
    probability stay. tied: [N], whether more have it. reached: [N], whether enough candidates were looked at."""

    smallest: Tensor
    quota: Tensor
    tied: Tensor
    reached: Tensor


def _edge(probs: Tensor, top_p: float, size: int) -> _Edge:
    """From the `size` largest probabilities of each position."""
    size = min(size, probs.shape[-1])
    found = probs.topk(size, dim=-1).values  # [N, size]
    mass_before = found.double().cumsum(-1) - found
    count = (mass_before < top_p).sum(-1, keepdim=True)  # [N, 1]
    smallest = found.gather(-1, count - 1)
    quota = (found == smallest).cumsum(-1).gather(-1, count - 1)
    inside = (count < size)[:, 0]
    tied = (found.gather(-1, count.clamp(max=size - 1)) == smallest)[:, 0] & inside
    return _Edge(smallest, quota, tied, inside | (size == probs.shape[-1]))


def _above(probs: Tensor, edge: _Edge) -> Tensor:
    """What is kept where tokens may be tied at the edge."""
    at_edge = probs == edge.smallest
    return (probs > edge.smallest) | (at_edge & (at_edge.cumsum(-1) <= edge.quota))


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling: one token per row.

    probs: [B, V], need not sum to 1. uniforms: [B] float64 in [0, 1]. Returns [B] int64, never a token of
    probability 0. The cumulative sum is float64: in float32 the tail of a large vocabulary drifts.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, uniforms[:, None].to(total) * total, right=True)
    last_possible = torch.searchsorted(cumulative, total)  # past it there is no mass left, whatever rounding does
    return torch.minimum(token, last_possible).clamp(max=probs.shape[-1] - 1)[:, 0]


def logits_entropy_nats(logits: Tensor) -> Tensor:
    """Entropy of the softmax, temperature 1, before any truncation: [B, S, V] → [B, S].

    -inf logits have no mass. NaN, +inf, or nothing but -inf give NaN, so that this also finds broken logits.
    """
    scores = logits.float()
    return kernels.entropy_nats(scores) if kernels.serves(scores) else _nats(scores)


def in_bits(nats: Tensor) -> list[list[float]]:
    """Entropies [B, S] on the host, rounded up to 0 where rounding left less."""
    return [[max(0.0, value / _NATS_PER_BIT) if value == value else value for value in row] for row in nats.tolist()]


def _nats(logits: Tensor) -> Tensor:
    """Entropy as −Σ P log P: [..., V] → [...]."""
    logs = logits.log_softmax(-1)
    nats: Tensor = torch.linalg.vecdot(logs.exp(), logs.clamp(min=_NO_MASS))
    return nats.neg_()


def entropy_bits(probs: Tensor) -> Tensor:
    """Entropy in bits of a distribution: [..., V] → [...]."""
    logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()  # finite, so that 0 * log 0 is 0
    nats: Tensor = torch.linalg.vecdot(probs, logs)
    return (nats / -math.log(2)).clamp_(min=0)


def token_probs(probs: Tensor, tokens: Tensor) -> Tensor:
    """Probability of one token per position: [B, N, V] and [B, N] → [B, N]. Padding has probability 0."""
    found = probs.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(tokens < 0, 0.0)


def parent_probs(draft: Draft, target_probs: Tensor) -> Tensor:
    """The target distribution each draft node is judged by: [B, K + 1, V] → [B, K, V].

    A view for chains, a gather for trees.
    """
    if draft.parents is None:
        return target_probs[:, : draft.width]
    rows = torch.arange(len(target_probs), device=target_probs.device)[:, None]
    return target_probs[rows, draft.parents.clamp(min=-1) + 1]


def expected_acceptance(draft: Draft, target_probs: Tensor) -> Tensor:
    """Σ min(target, draft) over the vocabulary at each node: [B, K]. Leviathan 2211.17192, definition 3.3.

    target_probs: [B, K + 1, V] as a verifier sees it. Padding nodes get 0.
    """
    target = parent_probs(draft, target_probs)
    if draft.probs is None:
        return token_probs(target, draft.tokens)
    return torch.minimum(target, draft.probs).sum(-1).masked_fill(draft.tokens < 0, 0.0)
