"""What a verifier is shown: the draft and the target's distributions, over as few tokens as they can be about.

At temperature 0 a distribution is one token. Writing it out over the vocabulary would cost more memory traffic than
everything else a step does outside its forward, so tokens are renamed first: of one row's K + 1 choices and K drafts
only equality matters to any rule, and at most 2K + 1 names are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.sampling import Seen, one_hot, probabilities
from specdec.types import Draft, SamplingParams, Verdict


@dataclass(frozen=True)
class Judged:
    """Arguments of a verifier. token_ids: [B, M], what the names 0 ... M - 1 of a row stand for; None: themselves."""

    draft: Draft
    target_probs: Tensor
    token_ids: Tensor | None = None

    def ids(self, names: Tensor) -> Tensor:
        """[B, N] names → token ids."""
        return names if self.token_ids is None else self.token_ids.gather(1, names)

    def translated(self, verdict: Verdict) -> Verdict:
        """The verdict with its next token as a token id."""
        if self.token_ids is None:
            return verdict
        return replace(verdict, next_token=self.ids(verdict.next_token[:, None])[:, 0])


def judge(draft: Draft, logits: Tensor, sampling: Sequence[SamplingParams], seen: Seen) -> Judged:
    """From the target's logits [B, K + 1, V] to what the draft is verified with."""
    certain = draft.probs is None and all(params.greedy and not params.penalised for params in sampling)
    if not certain:
        return Judged(draft, probabilities(logits, sampling, seen))
    tokens = torch.cat([logits.argmax(-1), draft.tokens], dim=1)  # [B, 2K + 1], choices first
    # A token's name is the place where it first occurs. Padding gets a name too, which nobody looks at.
    names = (tokens[:, :, None] == tokens[:, None, :]).byte().argmax(-1)
    choices, drafted = names[:, : draft.width + 1], names[:, draft.width + 1 :]
    renamed = replace(draft, tokens=torch.where(draft.tokens < 0, draft.tokens, drafted))
    return Judged(renamed, one_hot(choices, tokens.shape[1]), tokens)
