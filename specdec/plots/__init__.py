"""Tables → Axes. Reads no files and computes no statistics: limits are columns of the tables already.

Colour is the arm, marker is the tier; a hollow marker and a dashed bar mark an arm whose acceptance is set rather
than earned, and its name says "(synthetic)".
"""

from specdec.plots.figures import figures
from specdec.plots.panels import (
    acceptance_by_position,
    acceptance_vs_entropy,
    p99_by_workload,
    repetition,
    speedup_vs_entropy,
    step_time,
)
from specdec.plots.style import TIERS, arm_styles, caption, with_plain_entropy

__all__ = [
    "TIERS",
    "acceptance_by_position",
    "acceptance_vs_entropy",
    "arm_styles",
    "caption",
    "figures",
    "p99_by_workload",
    "repetition",
    "speedup_vs_entropy",
    "step_time",
    "with_plain_entropy",
]
