"""One row per arm of a run: counts first, ratios of totals after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specdec.measurement.metrics.schema import SUMMARY_COLUMNS, conform
from specdec.measurement.results import ArmMetadata, RunMetadata
from specdec.measurement.statistics import (
    Interval,
    bootstrap,
    order_statistic,
    quantile_interval,
    rate_ratio,
    ratio,
    total_ratio,
)
from specdec.measurement.traces import DRAFTED_KINDS, Frames

NGRAM = 4
PARTS = ("draft", "forward", "verify", "rollback", "other")
Row = dict[str, Any]


def summarise(
    steps: pd.DataFrame, tokens: pd.DataFrame, requests: pd.DataFrame, metadata: RunMetadata, seed: int = 0
) -> pd.DataFrame:
    """One row per arm, plain first, columns as in `SUMMARY_COLUMNS`; an arm whose every request failed has one too.

    steps, tokens, requests: as in `specdec.measurement.traces`. seed: of the bootstrap over prompts.
    """
    frames = Frames(steps, tokens, requests)
    plain = requests[requests["arm"] == metadata.plain_arm]
    plain_steps = _decode_steps(frames.arm(metadata.plain_arm).steps)
    rows = [
        _identity(metadata, name, arm)
        | _counts(frames.arm(name))
        | _text_measures(frames.arm(name))
        | _acceptance(frames.arm(name), arm, seed)
        | _speed(frames.arm(name).requests, plain, seed)
        | _latency(frames.arm(name))
        | _shares(_decode_steps(frames.arm(name).steps))
        | _drafting(_decode_steps(frames.arm(name).steps), plain_steps)
        for name, arm in metadata.arms.items()
    ]
    columns = [column.name for column in SUMMARY_COLUMNS]
    return conform(pd.DataFrame(rows, columns=columns), SUMMARY_COLUMNS)


def repeated_tokens(token_ids: Sequence[int], ngram: int = NGRAM) -> int:
    """How many tokens complete an n-gram that the sequence already holds before them."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(ngram, len(token_ids) + 1):
        gram = tuple(token_ids[end - ngram : end])
        repeated += gram in seen
        seen.add(gram)
    return repeated


def _identity(metadata: RunMetadata, name: str, arm: ArmMetadata) -> Row:
    provenance = metadata.provenance
    return {
        **{key: getattr(metadata, key) for key in ("workload", "tier", "temperature", "model", "dtype", "run_id")},
        **{key: getattr(arm, key) for key in ("drafter", "verifier", "controller", "num_draft_tokens")},
        "arm": name,
        "synthetic": arm.synthetic,
        "lossless": arm.lossless,
        "num_failures": len(metadata.failures.get(name, {})),
        "hardware": str(provenance.hardware),
        "date": provenance.date,
        "git_sha": provenance.revision,
    }


def _counts(frames: Frames) -> Row:
    steps = _decode_steps(frames.steps)
    counts = {name: _total(steps[name]) for name in ("num_drafted", "num_examined", "num_accepted")}
    examined, accepted = counts["num_examined"], counts["num_accepted"]
    memory = frames.requests["peak_memory_bytes"]
    return {
        "num_requests": len(frames.requests),
        "num_tokens": int(frames.requests["num_tokens"].sum()),
        "num_steps": len(steps),
        **counts,
        "num_rejections": None if examined is None or accepted is None else examined - accepted,
        "peak_memory_bytes": int(memory.max()) if memory.notna().any() else None,
    }


def _text_measures(frames: Frames) -> Row:
    emitted = frames.tokens[frames.tokens["emitted"]]
    repeated = sum(repeated_tokens(ids) for ids in frames.requests["token_ids"])
    return {
        "model_entropy_bits": emitted["model_entropy_bits"].mean(),
        "sampling_entropy_bits": emitted["sampling_entropy_bits"].mean(),
        "repetition_share": ratio(repeated, int(frames.requests["num_tokens"].sum())),
    }


def _acceptance(frames: Frames, arm: ArmMetadata, seed: int) -> Row:
    steps = _decode_steps(frames.steps)
    names = ["num_accepted", "num_examined", "num_drafted", "num_emitted"]
    per_request = steps[["request_id", *names]].assign(steps=1).groupby("request_id").sum(min_count=1)
    table = per_request.to_numpy(dtype=float, na_value=np.nan)
    if not arm.tokenwise or steps["num_examined"].isna().any():
        table[:, :2] = np.nan  # alpha has no meaning there, or was not observed
    alpha = bootstrap(table[:, [0, 1]], total_ratio, seed=seed)
    efficiency = bootstrap(table[:, [3, 4]], total_ratio, seed=seed)
    examined = frames.tokens[frames.tokens["kind"].isin(DRAFTED_KINDS)]
    return {
        **_with_limits("acceptance_rate", alpha),
        "draft_acceptance_rate": ratio(_total(steps["num_accepted"]), _total(steps["num_drafted"])),
        "expected_acceptance": examined["expected_acceptance"].mean(),
        **_with_limits("block_efficiency", efficiency),
    }


def _speed(requests: pd.DataFrame, plain: pd.DataFrame, seed: int) -> Row:
    names = ["num_tokens", "wall_seconds"]
    rate = bootstrap(requests[names].to_numpy(dtype=float), total_ratio, seed=seed)
    both = requests.merge(plain, on="request_id", suffixes=("", "_plain"))
    paired = both[[*names, *(f"{name}_plain" for name in names)]].to_numpy(dtype=float)
    return {
        **_with_limits("tokens_per_second", rate),
        **_with_limits("speedup", bootstrap(paired, rate_ratio, seed=seed)),
    }


def _latency(frames: Frames) -> Row:
    requests, steps = frames.requests, _decode_steps(frames.steps)
    after_first = requests["num_tokens"].astype(float) - 1
    tpot = (requests["e2e_seconds"] - requests["ttft_seconds"]) / after_first.where(after_first > 0)
    chunks = frames.steps[frames.steps["num_emitted"] > 0]
    gaps = chunks.groupby("request_id", sort=False)["end_seconds"].diff()
    return {
        "ttft_p50_seconds": order_statistic(requests["ttft_seconds"].dropna(), 0.5),
        **_quantiles("tpot", tpot, requests["request_id"]),
        **_quantiles("itl", gaps, chunks["request_id"]),
        **_quantiles("step_latency", _step_seconds(steps), steps["request_id"]),
    }


def _quantiles(name: str, seconds: pd.Series, clusters: pd.Series) -> Row:
    observed = seconds.notna()
    values, requests = seconds[observed].to_numpy(dtype=float), clusters[observed].to_numpy()
    p99 = quantile_interval(values, 0.99, requests)
    return {
        f"{name}_p50_seconds": order_statistic(values, 0.5),
        f"{name}_p90_seconds": order_statistic(values, 0.9),
        f"{name}_p99_seconds": p99.value,
        f"{name}_p99_low_seconds": p99.low,
        f"{name}_p99_high_seconds": p99.high,
    }


def _shares(steps: pd.DataFrame) -> Row:
    totals = {part: float(_shared(steps, part).sum()) for part in PARTS}
    total = sum(totals.values()) if len(steps) else 0.0
    return {"decode_seconds": total, **{f"{part}_share": ratio(totals[part], total) for part in PARTS}}


def _drafting(steps: pd.DataFrame, plain: pd.DataFrame) -> Row:
    """Steps that proposed something apart from those that asked in vain; nothing where proposals were not observed."""
    if _total(steps["num_drafted"]) is None:
        return dict.fromkeys(["num_drafting_steps", "asking_seconds", "drafting_seconds", "drafting_cost"])
    proposed = steps["num_drafted"] > 0
    asking, drafting = (float(_shared(steps[chosen], "draft").sum()) for chosen in (~proposed, proposed))
    per_token = ratio(float(steps[proposed]["draft_seconds"].sum(skipna=False)), int(steps["num_drafted"].sum()))
    per_plain_step = ratio(float(_step_seconds(plain).sum(skipna=False)), len(plain))
    return {
        "num_drafting_steps": int(proposed.sum()),
        "asking_seconds": asking,
        "drafting_seconds": drafting,
        "drafting_cost": ratio(per_token, per_plain_step),
    }


def _shared(steps: pd.DataFrame, part: str) -> NDArray[np.float64]:
    """Seconds of a part of each row's step: every row of a batch carries the whole step's, and counts for its share."""
    batch = steps["batch_size"].to_numpy(dtype=float, na_value=np.nan)
    seconds: NDArray[np.float64] = steps[f"{part}_seconds"].to_numpy(dtype=float, na_value=np.nan) / batch
    return seconds


def _decode_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """Without step 0, the prefill."""
    return steps[steps["step"] > 0]


def _step_seconds(steps: pd.DataFrame) -> pd.Series:
    return steps[[f"{part}_seconds" for part in PARTS]].sum(axis=1, skipna=False)


def _total(counts: pd.Series) -> int | None:
    """The sum, or None where a part of it was not observed."""
    return None if counts.isna().any() else int(counts.sum())


def _with_limits(name: str, interval: Interval) -> Row:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
