"""Closed forms: what speculation can gain and what a machine allows. Plain Python."""

from specdec.costmodel.costs import GUESS, StepCosts
from specdec.costmodel.roofline import attention_score_bytes, decode_intensity, kv_cache_bytes, ridge_point
from specdec.costmodel.theory import draft_acceptance_rate, expected_tokens, optimal_gamma, speedup

__all__ = [
    "GUESS",
    "StepCosts",
    "attention_score_bytes",
    "decode_intensity",
    "draft_acceptance_rate",
    "expected_tokens",
    "kv_cache_bytes",
    "optimal_gamma",
    "ridge_point",
    "speedup",
]
