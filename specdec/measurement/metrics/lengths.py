"""Draft lengths compared: what each fixed one brought, which was best in hindsight, and which theory would choose."""

from __future__ import annotations

import pandas as pd

from specdec.costmodel import expected_tokens

LENGTH = "num_draft_tokens"
FIXED = "fixed"
"""What `controller` says of an arm whose length never changes."""


def fixed_lengths(summary: pd.DataFrame) -> pd.DataFrame:
    """Arms that draft the same number of tokens at every step, and at least one."""
    return summary[(summary["controller"] == FIXED) & (summary[LENGTH] > 0) & (summary["num_steps"] > 0)]


def best_fixed(summary: pd.DataFrame) -> pd.DataFrame:
    """The best fixed length per run and drafter, in hindsight: run_id, drafter, num_draft_tokens, speedup.

    Plain decoding takes part as length 0, so no speedup is below 1.
    """
    rows = fixed_lengths(summary).dropna(subset=["speedup"])[["run_id", "drafter", LENGTH, "speedup"]]
    plain = rows.drop_duplicates(["run_id", "drafter"]).assign(**{LENGTH: 0, "speedup": 1.0})
    candidates = pd.concat([plain, rows], ignore_index=True)
    best = candidates.groupby(["run_id", "drafter"], sort=False)["speedup"].idxmax()
    return candidates.loc[best].reset_index(drop=True)


def tpot_ratio(summary: pd.DataFrame) -> pd.Series:
    """p99 of request TPOT ÷ that of the run's plain arm, its first row."""
    tpot = summary["tpot_p99_seconds"]
    ratio: pd.Series = tpot / tpot.groupby(summary["run_id"]).transform("first")
    return ratio


def predicted_speedups(summary: pd.DataFrame) -> pd.DataFrame:
    """Theory for every fixed length that ran: run_id, drafter, num_draft_tokens, predicted_speedup.

    Leviathan et al. 2211.17192 with measured alpha, c and v(γ), and a drafter that has a draft in a share f of steps:
    (1 + f (E(alpha, γ) − 1)) ÷ (1 + f (v(γ) − 1 + γ c)). alpha and f are the run's, pooled over its lengths; v(γ) and c
    the machine's, pooled over runs. Acceptance is independent of position there, which is what the comparison tests.
    """
    rows = _measured(summary)
    workloads = rows.groupby(["run_id", "drafter"])[["num_accepted", "num_examined", "num_drafted", "slots"]].sum()
    alpha = (workloads["num_accepted"] / workloads["num_examined"]).fillna(0.0)
    share = (workloads["num_drafted"] / workloads["slots"]).clip(upper=1.0)
    verifying = rows.groupby(["drafter", LENGTH])[["slower", "share"]].sum()
    v = (verifying["slower"] / verifying["share"]).clip(lower=0.0)
    drafting = rows.groupby("drafter")[["drafting", "share_of_tokens"]].sum()
    c = (drafting["drafting"] / drafting["share_of_tokens"]).clip(lower=0.0)
    predicted = []
    for _, row in rows.iterrows():
        run, drafter, gamma = row["run_id"], row["drafter"], int(row[LENGTH])
        f = share[run, drafter]
        tokens = 1 + f * (expected_tokens(float(alpha[run, drafter]), gamma) - 1)
        predicted.append(tokens / (1 + f * (v[drafter, gamma] + gamma * c[drafter])))
    return rows[["run_id", "drafter", LENGTH]].assign(predicted_speedup=predicted).reset_index(drop=True)


def _measured(summary: pd.DataFrame) -> pd.DataFrame:
    """Fixed lengths with their costs in plain steps of the same run, each over all steps of the arm.

    slots: tokens that might have been drafted. share: of them that were. slower: a step's excess over a plain one,
    drafting apart; drafting: its excess there.
    """
    rows = summary.assign(step=summary["decode_seconds"] / summary["num_steps"].astype(float))
    plain = rows.groupby("run_id")[["step", "draft_share"]].transform("first")
    drafting = (rows["draft_share"] * rows["step"] - plain["draft_share"] * plain["step"]) / plain["step"]
    rows = rows.assign(drafting=drafting, slower=rows["step"] / plain["step"] - 1 - drafting)
    rows = fixed_lengths(rows).dropna(subset=["num_examined", "num_drafted", "step"])
    counts = ["num_accepted", "num_examined", "num_drafted", "num_steps", LENGTH]
    rows = rows.astype(dict.fromkeys(counts, float))
    slots = rows["num_steps"] * rows[LENGTH]
    share = (rows["num_drafted"] / slots).clip(upper=1.0)
    rows = rows[share > 0]
    return rows.assign(slots=slots, share=share, share_of_tokens=share * rows[LENGTH])
