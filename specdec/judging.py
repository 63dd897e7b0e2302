"""What a verifier is shown: the draft and the target's distributions, over as few tokens as they can be about.

At temperature 0 a distribution is one token. Writing it out over the vocabulary would cost more memory traffic than
everything else a step does outside its forward, so only the K + 1 choices leave the device, and tokens are renamed: of
one row's choices and drafts only equality matters to any rule, and at most 2K + 1 names are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.sampling import Seen, argmax, expected_acceptance, parent_probs, probabilities, token_probs
from specdec.types import PADDING, Draft, SamplingParams, Verdict


class Measured(NamedTuple):
    """One token as it was judged. What does not apply to a token drawn from the target is None."""

    token_id: int
    target_prob: float
    draft_prob: float | None = None
    expected_acceptance: float | None = None


@dataclass(frozen=True)
class Judged:
    """Arguments of a verifier: the draft, and target_probs [B, K + 1, M] over the M tokens that matter.

    likely: [B, K + 1], the target's most likely tokens, where judging had to find them.
    """

    draft: Draft
    target_probs: Tensor
    likely: Tensor | None

    def translated(self, verdict: Verdict) -> Verdict:
        """The verdict with its next token as a token id."""
        return verdict

    def measured(self, verdict: Verdict, width: int) -> tuple[list[list[Measured]], list[Measured]]:
        """The first `width` draft nodes of each row, and the token each row was granted from the target."""
        draft, probs = _first_nodes(self.draft, width), self.target_probs
        target = token_probs(parent_probs(draft, probs), draft.tokens)
        drafted = torch.ones_like(target) if draft.probs is None else token_probs(draft.probs, draft.tokens)
        expected = target if draft.probs is None else expected_acceptance(draft, probs)
        nodes = torch.stack([draft.tokens.double(), target.double(), drafted.double(), expected.double()], dim=-1)
        path = F.pad(verdict.path, (1, 0), value=-1)  # [B, D + 1], from the root
        last = path.gather(1, verdict.num_accepted[:, None])[:, 0]
        rows = torch.arange(len(probs), device=probs.device)
        granted = torch.stack([verdict.next_token.double(), probs[rows, last + 1, verdict.next_token].double()], dim=-1)
        return (
            [[Measured(int(token), *rest) for token, *rest in row] for row in nodes.tolist()],
            [Measured(int(token), prob) for token, prob in granted.tolist()],
        )


@dataclass(frozen=True)
class Certain(Judged):
    """One-hot distributions and deterministic drafts, on the host, tokens renamed.

    token_ids[b][n]: what row b calls n. choices[b][i]: the target's choice at position i, by name.
    """

    token_ids: Sequence[Sequence[int]]
    choices: Sequence[Sequence[int]]

    def translated(self, verdict: Verdict) -> Verdict:
        """See `Judged.translated`."""
        names = zip(self.token_ids, verdict.next_token.tolist(), strict=True)
        next_token = torch.tensor([ids[name] for ids, name in names])
        return Verdict(verdict.path, verdict.num_accepted, verdict.num_examined, next_token)

    def measured(self, verdict: Verdict, width: int) -> tuple[list[list[Measured]], list[Measured]]:
        """See `Judged.measured`."""
        parents = None if self.draft.parents is None else self.draft.parents.tolist()
        tokens, paths, counts = self.draft.tokens.tolist(), verdict.path.tolist(), verdict.num_accepted.tolist()
        nodes, granted = [], []
        for row, name in enumerate(verdict.next_token.tolist()):
            ids, choices = self.token_ids[row], self.choices[row]
            above = range(-1, width - 1) if parents is None else parents[row][:width]
            hits = [float(choices[max(up, -1) + 1] == token) for up, token in zip(above, tokens[row], strict=False)]
            nodes.append([Measured(ids[tokens[row][i]], hit, 1.0, hit) for i, hit in enumerate(hits)])
            last = paths[row][counts[row] - 1] if counts[row] else -1
            granted.append(Measured(ids[name], float(choices[last + 1] == name)))
        return nodes, granted


def judge(draft: Draft, logits: Tensor, sampling: Sequence[SamplingParams], seen: Seen) -> Judged:
    """From the target's logits [B, K + 1, V] to what the draft is verified with."""
    if draft.probs is None and all(params.greedy and not params.penalised for params in sampling):
        return _certain(draft, argmax(logits.float()))
    return Judged(draft, probabilities(logits, sampling, seen), None)


def _certain(draft: Draft, likely: Tensor) -> Certain:
    """likely: [B, K + 1], the target's choices."""
    choices, drafted = likely.tolist(), draft.tokens.tolist()
    tables = [list(dict.fromkeys([*chosen, *tokens])) for chosen, tokens in zip(choices, drafted, strict=True)]
    names = [{token: name for name, token in enumerate(table)} | {PADDING: PADDING} for table in tables]
    chosen = [[own[token] for token in row] for own, row in zip(names, choices, strict=True)]
    tokens = [[own[token] for token in row] for own, row in zip(names, drafted, strict=True)]
    one_hot = _one_hot_rows(2 * draft.width + 1)
    parents = None if draft.parents is None else draft.parents.cpu()
    renamed = draft if draft.width == 0 else Draft(torch.tensor(tokens), draft.lengths, None, parents)
    return Certain(
        renamed,
        torch.tensor([[one_hot[name] for name in row] for row in chosen]),
        likely,
        tables,
        chosen,
    )


@lru_cache
def _one_hot_rows(size: int) -> list[list[float]]:
    """Row n is one-hot at n."""
    return [[float(column == row) for column in range(size)] for row in range(size)]


def _first_nodes(draft: Draft, width: int) -> Draft:
    """The draft's first `width` nodes; parents come before children, so that is a draft too."""
    probs = None if draft.probs is None else draft.probs[:, :width]
    parents = None if draft.parents is None else draft.parents[:, :width]
    return Draft(draft.tokens[:, :width], draft.lengths, probs, parents)
