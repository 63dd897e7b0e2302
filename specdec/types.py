"""The nouns of the toolkit: what flows from prompts to figures.

Shapes use B (sequences in a batch), K (draft nodes per sequence, padded to the longest draft),
D (accepted nodes, padded), V (vocabulary). Counts are stored, ratios are made in `specdec.measurement.metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import UsageError

PADDING = -1
"""Fills `Draft.tokens`, `Draft.parents` and `Verdict.path` past a row's own length; never a token id."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples. Applied in this order: penalties, temperature, top-k, top-p, min-p.

    temperature: 0 is exact greedy decoding. top_k: 0 keeps all. top_p in (0, 1]. min_p in [0, 1): relative to
    the most likely token. repetition_penalty > 0 divides positive and multiplies negative logits of every token
    seen (prompt and output, as in transformers); presence_penalty and frequency_penalty are subtracted once, and
    once per occurrence, for tokens of the output alone. seed: of this request's uniforms.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0 and math.isfinite(self.temperature), "a finite number >= 0"),
            "top_k": (self.top_k >= 0, "0 (keep all) or a positive count"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "a finite number above 0"),
            "presence_penalty": (math.isfinite(self.presence_penalty), "a finite number"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "a finite number"),
        }
        for name, (valid, wanted) in checks.items():
            if not valid:
                raise UsageError(f"{name}={getattr(self, name)} is not possible; it must be {wanted}")

    @property
    def greedy(self) -> bool:
        """Whether the distribution is one-hot."""
        return self.temperature == 0

    @property
    def untouched(self) -> bool:
        """Whether the distribution is the model's own softmax."""
        truncated = self.top_k != 0 or self.top_p != 1 or self.min_p != 0
        return self.temperature == 1 and not truncated and not self.penalised

    @property
    def penalised(self) -> bool:
        """Whether the distribution depends on the tokens seen so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Turn:
    """What a user says after the model's answer, and the id of the request that it becomes."""

    id: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """What a user asks, before any tokenizer has seen it.

    Exactly one of `text` (raw continuation) and `messages` (chat template) is set. then: further turns of the
    conversation, each asked once the one before has been answered, by whoever decodes it.
    """

    id: str
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    workload: str = "adhoc"
    tier: str = "unknown"
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    then: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise UsageError(f"prompt {self.id!r} needs exactly one of text and messages")
        if self.then and self.messages is None:
            raise UsageError(f"prompt {self.id!r} is raw text, which no turn can follow; give it as messages")

    def answered(self, text: str) -> Prompt | None:
        """The conversation's next turn after this answer; None at its end."""
        if not self.then or self.messages is None:
            return None
        turn, *others = self.then
        said = ({"role": "assistant", "content": text}, {"role": "user", "content": turn.text})
        return replace(self, id=turn.id, messages=(*self.messages, *said), then=tuple(others))


@dataclass(frozen=True)
class Request:
    """One sequence to decode: prompt token ids and everything that shapes its continuation.

    prompt: what it was made from, for a conversation to go on; None: there was nothing else.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128
    eos_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    prompt: Prompt | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise UsageError(f"request {self.id!r} has an empty prompt; give it at least one token")
        if self.max_new_tokens < 1:
            raise UsageError(
                f"request {self.id!r} asks for max_new_tokens={self.max_new_tokens}; it must be at least 1"
            )
        if "" in self.stop:
            raise UsageError(f"request {self.id!r} has an empty stop string, which is everywhere; leave it out")


@dataclass(frozen=True)
class DeferredError:
    """An error to be raised once somebody has looked whether there is one. found: bool of any shape, True where so."""

    found: Tensor
    error: Exception


def refuse(found: Tensor, error: Exception) -> tuple[DeferredError, ...]:
    """Raise the error where `found` holds anywhere, if looking costs nothing.

    Off the host looking would wait for the device: then the error is handed on in `Draft.deferred` or
    `Verdict.deferred`, and the engine looks when it reads the step.
    """
    if not found.is_cpu:
        return (DeferredError(found, error),)
    if found.any():
        raise error
    return ()


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for B sequences: a chain each, or a tree each.

    tokens:  [B, K] int64, `PADDING` from each row's length on.
    lengths: [B] int64 on the host, nodes in each row (0 = nothing to say). K = max(lengths).
    probs:   [B, K, V] the distribution each token was drawn from, after every sampling option,
             or None: deterministic drafts, that is one-hot distributions.
    parents: [B, K] int64, index of each node's parent, -1 for a child of the root; a parent comes
             before its children. None: a chain, parents -1, 0, 1, ...
    sampled: which rows were drawn and not chosen, [B] on the host; None: all where there are `probs`, else none.
    deferred: what may be wrong with it; see `refuse`.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    parents: Tensor | None = None
    sampled: tuple[bool, ...] | None = None
    deferred: tuple[DeferredError, ...] = ()

    @property
    def width(self) -> int:
        """K, the longest draft in the batch."""
        return self.tokens.shape[1]

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> Draft:
        """A draft of no tokens for every row: the step becomes plain decoding."""
        return cls(torch.empty(batch, 0, dtype=torch.long, device=device), torch.zeros(batch, dtype=torch.long))

    @classmethod
    def from_chains(cls, chains: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Draft:
        """Deterministic chains of ragged length, as lookup drafters make them."""
        width = max((len(chain) for chain in chains), default=0)
        padded = [[*chain, *[PADDING] * (width - len(chain))] for chain in chains]
        tokens = torch.tensor(padded, dtype=torch.long, device=device)
        return cls(tokens, torch.tensor([len(chain) for chain in chains], dtype=torch.long))

    def node_depths(self) -> Tensor:
        """[B, K] int64: 1 for a child of the root. Padding nodes get 1."""
        if self.parents is None:
            return torch.arange(1, self.width + 1, device=self.tokens.device).expand(len(self.lengths), -1)
        depths = torch.ones_like(self.tokens)
        for node in range(self.width):
            parent = self.parents[:, node]
            above = depths.gather(1, parent.clamp(min=0)[:, None])[:, 0]
            depths[:, node] = torch.where(parent >= 0, above + 1, 1)
        return depths


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided, per row.

    path:         [B, D] int64, accepted node indices from the root down, `PADDING` after; D >= 0.
    num_accepted: [B] int64.
    num_examined: [B] int64, nodes the rule looked at: for a chain, everything up to and including
                  the first rejection.
    next_token:   [B] int64, the recovered token after a rejection, or the bonus token.
    deferred:     what may be wrong with the draft; see `refuse`.
    """

    path: Tensor
    num_accepted: Tensor
    num_examined: Tensor
    next_token: Tensor
    deferred: tuple[DeferredError, ...] = ()


def ancestor_mask(parents: Tensor) -> Tensor:
    """Who sees whom among the root and the draft nodes: parents [B, K] → [B, K + 1, K + 1] bool.

    Entry (i, j) is True where j is i itself or one of its ancestors; index 0 is the root.
    """
    batch, width = parents.shape
    above = F.pad(parents + 1, (1, 0))  # [B, K + 1], the root above itself
    mask = torch.eye(width + 1, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    # Pointer jumping: each round doubles how far up a node has looked, so depth costs only its logarithm.
    for _ in range((width + 1).bit_length()):
        mask = mask | mask.gather(1, above[..., None].expand(-1, -1, width + 1))
        above = above.gather(1, above)
    return mask


class TokenKind(StrEnum):
    """Where a row of the token trace comes from."""

    PREFILL = "prefill"  # the first token, drawn from the prompt's forward; no decode step
    ACCEPTED = "accepted"  # drafted and kept
    REJECTED = "rejected"  # drafted and thrown away; not emitted
    RECOVERED = "recovered"  # drawn after a rejection
    BONUS = "bonus"  # drawn after every draft was accepted, or when nothing was drafted


class FinishReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"
    STOP = "stop"  # a stop string
    LENGTH = "length"  # max_new_tokens
    WINDOW = "window"  # the model's context window


@dataclass(frozen=True)
class StepRecord:
    """One draft → verify → roll back round of one request. Step 0 is the prefill.

    Counts are what is left after a stop: `num_emitted` = `num_accepted` + 1, or `num_accepted` where `cut`: a stop
    fell before the step's recovered or bonus token, so the step counts no rejection either. Seconds are wall-clock of
    the whole batch's step; `end_seconds` counts from the moment the request was submitted.
    """

    request_id: str
    step: int
    batch_size: int
    context_length: int
    num_drafted: int
    num_examined: int
    num_accepted: int
    num_emitted: int
    cut: bool
    draft_seconds: float
    forward_seconds: float
    verify_seconds: float
    rollback_seconds: float
    other_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """Wall-clock of the step."""
        return (
            self.draft_seconds + self.forward_seconds + self.verify_seconds + self.rollback_seconds + self.other_seconds
        )


@dataclass(frozen=True)
class TokenRecord:
    """One examined draft token, or one token drawn from the target.

    `draft_position` counts from 1 within the step's draft (the depth, in a tree); a recovered or bonus token
    has the position after the last accepted one, a prefill token 0. Probabilities are of `token_id`.
    A value that was not observed is None, never zero.
    """

    request_id: str
    step: int
    draft_position: int
    token_id: int
    kind: TokenKind
    emitted: bool
    target_prob: float | None
    draft_prob: float | None
    model_entropy_bits: float | None
    sampling_entropy_bits: float | None
    expected_acceptance: float | None


@dataclass(frozen=True)
class Trace:
    """Everything that happened to one request. `token_ids` is exactly what was emitted."""

    request_id: str
    prompt_length: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    steps: tuple[StepRecord, ...]
    tokens: tuple[TokenRecord, ...]
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Chunk:
    """What a streaming client sees: the tokens one step emitted, and the text they complete."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
