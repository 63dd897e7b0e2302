"""Acceptance by position in the draft."""

from __future__ import annotations

import pandas as pd

from specdec.measurement.metrics.schema import POSITION_COLUMNS, conform
from specdec.measurement.results import RunMetadata
from specdec.measurement.statistics import proportion_interval
from specdec.measurement.traces import DRAFTED_KINDS, STEP


def per_position(tokens: pd.DataFrame, metadata: RunMetadata) -> pd.DataFrame:
    """One row per arm and draft position: accepted_k ÷ reached_k, columns as in `POSITION_COLUMNS`.

    A step reaches position k when its verifier examined a token there (in a tree: at that depth). Limits are
    Wilson's at the effective sample size, steps clustered by request.
    """
    drafted = tokens[tokens["kind"].isin(DRAFTED_KINDS)]
    reached = (
        drafted.assign(accepted=(drafted["kind"] == "accepted").astype(int))
        .groupby([*STEP, "draft_position"], sort=False)["accepted"]
        .max()
        .reset_index()
    )
    rows = [_row(group, metadata) for _, group in reached.groupby(["arm", "draft_position"], sort=True)]
    columns = [column.name for column in POSITION_COLUMNS]
    return conform(pd.DataFrame(rows, columns=columns), POSITION_COLUMNS)


def _row(group: pd.DataFrame, metadata: RunMetadata) -> dict[str, object]:
    """group: the steps of one arm that reached one position."""
    arm = str(group["arm"].iloc[0])
    per_request = group.groupby("request_id")["accepted"].agg(["sum", "count"])
    interval, size = proportion_interval(per_request["sum"], per_request["count"])
    return {
        "workload": metadata.workload,
        "tier": metadata.tier,
        "temperature": metadata.temperature,
        "arm": arm,
        "synthetic": metadata.arms[arm].synthetic,
        "draft_position": int(group["draft_position"].iloc[0]),
        "num_reached": int(per_request["count"].sum()),
        "num_accepted": int(per_request["sum"].sum()),
        "acceptance": interval.value,
        "acceptance_low": interval.low,
        "acceptance_high": interval.high,
        "effective_reached": size,
        "run_id": metadata.run_id,
    }
