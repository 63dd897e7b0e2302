"""What a verification rule costs by itself, on made-up steps over the target's vocabulary."""

from __future__ import annotations

import pandas as pd

from experiments.bench.plan import Plan
from experiments.bench.rule_times import time_rules
from experiments.bench.subject import Subject
from experiments.bench.systems import OURS
from experiments.bench.tables import Row, groups, spread


def measure(subject: Subject, plan: Plan) -> pd.DataFrame:
    """Every rule once a round, batch 1. Columns: see `time_rules`; a round is one made-up step."""
    table = time_rules(subject.target.model.vocab_size, 1, subject.setting.draft_tokens, plan.rules)
    return table.rename(columns={"repeat": "round"}).assign(system=OURS)


def summarise(raw: pd.DataFrame) -> list[Row]:
    """Seconds of each rule."""
    return [
        spread("rule_seconds", rows["seconds"], system=OURS, arm=str(rule).replace("_", " "))
        for (rule,), rows in groups(raw, "rule")
    ]
