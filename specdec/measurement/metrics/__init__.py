"""Traces → tables of numbers: the only place where ratios are made, always after totals."""

from specdec.measurement.metrics.lengths import best_fixed, fixed_lengths, predicted_speedups, tpot_ratio
from specdec.measurement.metrics.positions import per_position
from specdec.measurement.metrics.schema import POSITION_COLUMNS, SUMMARY_COLUMNS, Column, conform, markdown_table
from specdec.measurement.metrics.summary import repeated_tokens, summarise

__all__ = [
    "POSITION_COLUMNS",
    "SUMMARY_COLUMNS",
    "Column",
    "best_fixed",
    "conform",
    "fixed_lengths",
    "markdown_table",
    "per_position",
    "predicted_speedups",
    "repeated_tokens",
    "summarise",
    "tpot_ratio",
]
