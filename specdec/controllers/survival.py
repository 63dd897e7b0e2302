"""SpecDec++: stop drafting when some token so far has probably been rejected already (2405.19715).

The chance that a token is accepted comes from a logistic in two features that recorded traces hold: the draft's own
probability of the token, and its position in the draft. (The paper's head reads the draft model's hidden state; the
draft's entropy would be a third feature, but traces record the target's.) Fit it on sampled runs: at temperature 0
recorded draft probabilities are all 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec.controllers.base import Controller, Observation, refuse_lengths
from specdec.errors import UsageError

_EDGE = 1e-4  # probabilities are kept this far from 0 and 1, where their logits would be infinite
_RIDGE = 1e-3  # keeps the fit finite where a feature separates accepted from rejected tokens


@dataclass(frozen=True)
class SurvivalModel:
    """P(accepted) = σ(bias + confidence · logit(draft probability) + depth · (position − 1)).

    Unfitted, it believes the draft: a token's chance is its draft probability. num_tokens: what it was fitted on.
    """

    bias: float = 0.0
    confidence: float = 1.0
    depth: float = 0.0
    num_tokens: int = 0

    def acceptance(self, draft_probs: Tensor, depth: int) -> Tensor:
        """[B] probabilities of the tokens drawn at `depth` (from 1) → [B] chances that they are accepted."""
        logits = draft_probs.clamp(_EDGE, 1 - _EDGE).logit()
        return (self.bias + self.confidence * logits + self.depth * (depth - 1)).sigmoid()

    def save(self, path: Path) -> None:
        """Write the coefficients as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> SurvivalModel:
        """Read what `save` wrote. Raises `UsageError` where the file is missing or holds something else."""
        wanted = [field.name for field in fields(cls)]
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            bias, confidence, depth = coefficients = [float(values[name]) for name in wanted[:3]]
            model = cls(bias, confidence, depth, int(values["num_tokens"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} holds no survival coefficients ({', '.join(wanted)}); "
                "fit them with python -m experiments.fit_survival results/NAME"
            ) from error
        if not all(map(math.isfinite, coefficients)):
            raise UsageError(f"{path} holds a coefficient that is not finite; fit it again")
        return model


def fit_survival(
    draft_probs: npt.ArrayLike, positions: npt.ArrayLike, accepted: npt.ArrayLike, iterations: int = 30
) -> SurvivalModel:
    """Maximum likelihood by Newton's method, with a small ridge. Arrays [N], one entry per examined draft token.

    Raises `UsageError` where there is nothing to learn: no tokens, one outcome only, or draft probabilities that are
    all the same (deterministic drafters, and every drafter at temperature 0).
    """
    probs = np.clip(np.asarray(draft_probs, dtype=float), _EDGE, 1 - _EDGE)
    outcome = np.asarray(accepted, dtype=float)
    if len(probs) == 0 or np.ptp(outcome) == 0 or np.ptp(probs) == 0:
        raise UsageError(
            f"{len(probs)} draft tokens with one outcome or one draft probability teach nothing; "
            "fit on runs of a draft model at temperature above 0"
        )
    features = np.column_stack([np.ones_like(probs), np.log(probs / (1 - probs)), np.asarray(positions) - 1.0])
    weights = np.array([0.0, 1.0, 0.0])
    for _ in range(iterations):
        chance = 1 / (1 + np.exp(-features @ weights))
        gradient = features.T @ (outcome - chance) - _RIDGE * weights
        curvature = (features * (chance * (1 - chance))[:, None]).T @ features + _RIDGE * np.eye(3)
        step = np.linalg.solve(curvature, gradient)
        weights = weights + step
        if np.abs(step).max() < 1e-9:
            break
    bias, confidence, depth = weights.tolist()
    return SurvivalModel(bias, confidence, depth, len(probs))


@dataclass
class _Survival:
    """Chance that every token of the draft being made is accepted: [], where the draft is made; None before one is."""

    chance: Tensor | None = None


class SurvivalController(Controller):
    """Stops where 1 − Π P(accepted) > `threshold` (h in the paper, 0.7): a rejection has become that likely.

    coefficients: a file that `experiments.fit_survival` wrote; None: a token's chance is its draft probability.
    Deterministic drafters are only limited to `max_draft_tokens`.
    """

    def __init__(
        self, coefficients: str | Path | None = None, threshold: float = 0.7, max_draft_tokens: int = 16
    ) -> None:
        if not 0 <= threshold <= 1:
            raise UsageError(f"threshold={threshold} is not a probability; use a value in [0, 1]")
        refuse_lengths(max_draft_tokens)
        self.model = SurvivalModel() if coefficients is None else SurvivalModel.load(Path(coefficients))
        self.threshold = threshold
        self.max_draft_tokens = max_draft_tokens

    def init(self) -> Any:
        """No draft yet."""
        return _Survival()

    def decide(self, states: Sequence[_Survival], observation: Observation) -> list[int]:
        """A new draft, as long as it survives."""
        for state in states:
            state.chance = None
        return [self.max_draft_tokens] * len(states)

    def stop(self, states: Sequence[_Survival], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """Where the draft has probably died."""
        chances = self.model.acceptance(draft_probs.gather(-1, tokens[:, None])[:, 0], depth).double()
        alive = torch.stack([chances.new_ones(()) if state.chance is None else state.chance for state in states])
        chances *= alive
        for state, chance in zip(states, chances, strict=True):
            state.chance = chance
        return 1 - chances > self.threshold
