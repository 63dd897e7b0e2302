"""What speculation can gain: closed forms of Leviathan et al. 2211.17192, under independent acceptance.

alpha: probability that a draft token is accepted. gamma: tokens drafted per step. c: seconds to draft one token ÷
seconds of a decode step. v: seconds to verify gamma tokens ÷ seconds of a decode step.
"""

from __future__ import annotations

from specdec.errors import UsageError


def expected_tokens(alpha: float, gamma: int) -> float:
    """Emitted tokens per step, (1 − alpha^(gamma + 1)) ÷ (1 − alpha), equation 1."""
    if not 0 <= alpha <= 1:
        raise UsageError(f"alpha={alpha} is not a probability; it must lie in [0, 1]")
    if gamma < 0:
        raise UsageError(f"gamma={gamma} is not possible; it must be at least 0")
    return float(sum(alpha**k for k in range(gamma + 1)))


def speedup(alpha: float, gamma: int, c: float, v: float = 1.0) -> float:
    """Expected tokens ÷ (gamma · c + v), theorem 3.8; v = 1: verifying costs one decode step."""
    return expected_tokens(alpha, gamma) / (gamma * c + v)


def optimal_gamma(alpha: float, c: float, max_gamma: int = 128) -> int:
    """The draft length of the greatest speedup with v = 1; 0 when drafting never gains (alpha <= c)."""
    return max(range(max_gamma + 1), key=lambda gamma: speedup(alpha, gamma, c))


def draft_acceptance_rate(alpha: float, gamma: int) -> float:
    """Accepted ÷ drafted when every step drafts gamma tokens: what servers report, below alpha."""
    return (expected_tokens(alpha, gamma) - 1) / gamma
