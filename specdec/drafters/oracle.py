"""Replays the target's own greedy continuation with a set share of wrong tokens: acceptance is set, not earned.

Isolates what a drafter of a given quality and no cost would bring. Synthetic, and named so wherever it appears.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.errors import UsageError
from specdec.sampling.uniforms import Purpose, Uniforms, request_key
from specdec.types import Draft


class OracleDrafter(Drafter):
    """Drafts right with probability `acceptance_rate` at every position, independently; greedy decoding only.

    It must be shown the target's continuation of a request first (`reveal`), for instance by the plain arm. Which
    positions are spoiled depends on (seed, request, position) alone.
    """

    greedy_only = True
    synthetic = True

    def __init__(self, acceptance_rate: float = 0.9, seed: int = 0) -> None:
        if not 0 <= acceptance_rate <= 1:
            raise UsageError(f"acceptance_rate={acceptance_rate} is not a probability; use a value in [0, 1]")
        self.acceptance_rate = acceptance_rate
        self.seed = seed
        self._continuations: dict[str, np.ndarray] = {}

    def reveal(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Keep the request's greedy continuation, spoiled where the coin says so."""
        self._continuations[request_id] = np.asarray(token_ids, dtype=np.int64)

    def begin(self, context: DraftContext, hidden: object) -> None:
        """Refuse requests nobody has revealed."""
        for request_id in context.request_ids:
            if request_id not in self._continuations:
                raise UsageError(
                    f"the oracle drafter does not know request {request_id!r}; decode it plainly first and "
                    f"call reveal(request_id, token_ids)"
                )

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """Chains out of the known continuations; they are deterministic, so one-hot."""
        chains = [self._replay(context, row, limit) for row, limit in enumerate(max_tokens)]
        return Draft.from_chains(chains, context.device)

    def _replay(self, context: DraftContext, row: int, limit: int) -> list[int]:
        request_id = context.request_ids[row]
        start = len(context.tokens[row]) - context.num_prompt[row]
        truth = self._continuations[request_id][start : start + limit]
        coins = Uniforms([request_key(self.seed, request_id)], [0]).draw(Purpose.ORACLE, start, len(truth))
        spoiled = coins[0].numpy() >= self.acceptance_rate
        # Any other token is wrong for a greedy target: its argmax is the true one.
        wrong = (truth + 1) % context.vocab_size
        chain: list[int] = np.where(spoiled, wrong, truth).tolist()
        return chain
