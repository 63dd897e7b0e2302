"""No drafter: every step is plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft


class NoDrafter(Drafter):
    """Proposes nothing. The plain arm's drafter."""

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """An empty draft."""
        return Draft.empty(context.batch_size, context.device)
