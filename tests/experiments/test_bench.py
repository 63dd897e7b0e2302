"""The benchmark: what it computes from raw times, and that it runs on any checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from experiments.bench import __main__ as bench
from experiments.bench import batches, contexts, drafters, drafts, forwards, generation, rounds, tables
from experiments.bench.plan import Plan
from experiments.bench.rounds import Limit
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.measurement import results
from specdec.models.loading import load_model
from specdec.models.loading.checkpoint import find
from specdec.plots.bench import bench_figure
from specdec.types import Request, StepRecord, Trace
from tests.commands import PROMPTS

QUICK_PARTS = ["generation", "forwards", "long_forwards", "contexts", "batches", "drafters", "rules"]
LITTLE = Plan(
    max_new_tokens=8,
    generation=Limit(3),
    forwards=Limit(3),
    dtypes=Limit(3),
    long_context=64,
    long_forwards=Limit(2),
    contexts=(64, 4096),
    prefills=Limit(1),
    steps=Limit(2),
    batch_sizes=(1, 4),
    batch_tokens=4,
    batches=Limit(2),
    drafters=Limit(2),
    rules=2,
)


def step(number: int, forward: float, other: float) -> StepRecord:
    counts = {"num_drafted": 0, "num_examined": 0, "num_accepted": 0, "num_emitted": 1, "cut": False}
    return StepRecord("a", number, 1, 5, **counts, draft_seconds=0.0, forward_seconds=forward, verify_seconds=0.0,
                      rollback_seconds=0.0, other_seconds=other, end_seconds=0.0)  # fmt: skip


def generations(seconds: dict[tuple[str, str], list[float]], tokens: int = 10) -> pd.DataFrame:
    spent = {f"{part}_seconds": 0.0 for part in generation.PARTS}
    rows = [
        {"system": system, "arm": arm, "request_id": index, "num_tokens": tokens, "seconds": second, "token_ids": "1 2",
         **spent, "forward_seconds": 3.0 + index, "other_seconds": 1.0}
        for (system, arm), times in seconds.items()
        for index, second in enumerate(times)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def named(rows: Sequence[tables.Row], measure: str) -> dict[tuple[str, str], tables.Row]:
    return {(row["system"], row["arm"]): row for row in rows if row["measure"] == measure}


@pytest.fixture(scope="module")
def arguments(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text(PROMPTS)
    chosen = ["--quick", "--model", str(tiny_checkpoint("llama")), "--workload", str(prompts), "--dtypes", "float32"]
    return [*chosen, "--share-device", "--draft-tokens", "2"]


@pytest.fixture(scope="module")
def written(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run with everything but the memory, which takes a process of its own."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "QUICK", LITTLE)
        assert bench.main([*arguments, "--output", str(folder)]) == 0
    return folder / "quick"


def test_ratios_are_of_totals() -> None:
    table = generations(
        {
            ("specdec", "plain"): [1.0, 3.0],
            ("specdec", "lookup"): [0.5, 0.5],
            ("transformers", "plain"): [4.0, 4.0],
            ("transformers", "lookup"): [1.0, 3.0],
        }
    )
    rows = generation.summarise(table)
    speedups = named(rows, "speedup")
    found = speedups["specdec ÷ transformers", "plain"]
    assert found["value"] == pytest.approx(2.0)  # not the mean of 4 and 4/3
    assert found["low"] <= 2.0 <= found["high"]
    assert speedups["transformers", "lookup ÷ plain"]["value"] == pytest.approx(2.0)
    assert named(rows, "tokens_per_second")["specdec", "lookup"]["value"] == pytest.approx(20.0)
    assert named(rows, "outside_share")["specdec", "plain"]["value"] == pytest.approx(2 / 9)
    assert ("transformers", "plain") not in named(rows, "forward_share"), "not observed there"


def test_agreement_is_counted_by_request() -> None:
    table = generations({("specdec", "plain"): [1.0, 1.0], ("transformers", "plain"): [1.0, 1.0]})
    table.loc[(table["system"] == "transformers") & (table["request_id"] == 1), "token_ids"] = "1 3"
    found = named(generation.summarise(table), "same_tokens_share")
    assert found["specdec", "plain"]["value"] == 1.0
    assert found["transformers", "plain"]["value"] == 0.5


def test_step_time_leaves_the_prefill_out() -> None:
    trace = Trace("a", 5, (1, 2), "", None, (step(0, 1.0, 9.0), step(1, 3.0, 1.0)), ())  # type: ignore[arg-type]
    spent = generation.step_seconds([trace])
    assert (spent["forward_seconds"], spent["other_seconds"]) == (3.0, 1.0)
    assert generation.step_seconds([]) == {}


def test_a_forward_is_compared_within_its_round() -> None:
    records = [("1", 1.0, 2.0), ("2", 2.0, 5.0), ("3", 4.0, 8.0)]  # the machine slows down from round to round
    table = pd.DataFrame(
        [{"round": r, "tokens": n, "seconds": s} for r, one, two in records for n, s in ((1, one), (2, two))]
    )
    rows = {(row["measure"], row["x"]): row for row in forwards.summarise(table)}
    assert rows["relative_cost", 2]["value"] == 2.0
    assert rows["relative_cost", 2]["high"] == pytest.approx(2.25)
    assert rows["forward_seconds", 1]["value"] == 2.0
    assert ("relative_cost", 1) not in rows


def test_a_dtype_is_compared_with_float32_within_its_round() -> None:
    seconds = {"float32": [2.0, 4.0, 8.0], "bfloat16": [1.0, 2.4, 4.0]}
    table = pd.DataFrame(
        [{"dtype": name, "round": r, "seconds": s} for name, all_ in seconds.items() for r, s in enumerate(all_)]
    )
    (row,) = forwards.summarise_dtypes(table)
    assert (row["dtype"], row["measure"], row["value"]) == ("bfloat16", "dtype_cost", 0.5)


def test_a_step_is_compared_with_reading_its_bytes_and_a_prefill_with_the_other_side() -> None:
    cells = [("specdec", 64, 2.0), ("transformers", 64, 4.0), ("specdec", 1, 3.0), ("memory", 1, 2.0)]
    table = pd.DataFrame(
        [
            {"system": system, "context": 64, "tokens": tokens, "round": number, "seconds": seconds * (number + 1)}
            for number in range(3)
            for system, tokens, seconds in cells
        ]
    )
    rows = {row["measure"]: row for row in contexts.summarise(table)}
    assert rows["prefill_ratio"]["value"] == 0.5
    assert rows["step_over_reading"]["value"] == 1.5
    assert rows["read_seconds"]["system"] == "memory"


def test_batches_are_compared_with_one_sequence() -> None:
    table = pd.DataFrame(
        [
            {"system": "specdec", "arm": "plain", "batch": size, "round": number, "num_tokens": 10 * size, "seconds": s}
            for number in range(2)
            for size, s in ((1, 1.0 + number), (4, 2.0 + 2 * number))
        ]
    )
    rows = {(row["measure"], row["x"]): row["value"] for row in batches.summarise(table)}
    assert rows["batch_speedup", 4] == 2.0
    assert rows["batch_tokens_per_second", 1] == 7.5


def test_several_dtypes_are_measured_side_by_side(arguments: list[str], tmp_path: Path) -> None:
    both = [*arguments, "bfloat16", "--only", "dtypes", "--output", str(tmp_path)]
    both.insert(both.index("float32") + 1, both.pop(both.index("bfloat16")))
    assert bench.main(both) == 0
    summary = bench.read(tmp_path / "quick" / "summary.csv")
    assert list(zip(summary["measure"], summary["dtype"], strict=True)) == [("dtype_cost", "bfloat16")]


def test_cost_of_drafting_is_per_token_and_per_plain_step() -> None:
    none = {"verify_seconds": 0.5, "rollback_seconds": 0.25, "other_seconds": 0.25, "model_seconds": 0.0}
    plain = {**none, "arm": "plain", "forward_seconds": 4.0, "num_steps": 4, "num_drafted": 0, "draft_seconds": 0.1}
    drafting = {**none, "arm": "x", "forward_seconds": 8.0, "num_steps": 2, "num_drafted": 6, "draft_seconds": 3.0}
    silent = {**drafting, "arm": "y", "num_drafted": 0}
    rows = drafters.summarise(pd.DataFrame([plain, {**drafting, "model_seconds": 2.4}, silent]).assign(round=0))
    assert named(rows, "cost_ratio")["specdec", "x"]["value"] == pytest.approx(0.5)
    assert math.isnan(named(rows, "cost_ratio")["specdec", "y"]["value"])
    assert named(rows, "bookkeeping_share")["specdec", "x"]["value"] == pytest.approx(0.6 / 12)
    assert named(rows, "bookkeeping_share")["specdec", "y"]["value"] == pytest.approx(3 / 12)


def test_forwards_of_a_draft_model_are_noted_and_then_no_longer(tiny_checkpoint: Callable[..., Path]) -> None:
    drafter = DraftModelDrafter(load_model(str(tiny_checkpoint("llama")), device="cpu"))
    with drafters.metered(drafter) as calls:
        cache = drafter.model.new_cache(1, 4)
        drafter.model.forward(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), cache.view([0]))
    assert len(calls) == 1
    assert calls[0].seconds > 0
    assert "forward" not in vars(drafter.model)


def test_a_drafter_without_a_network_has_nothing_to_note() -> None:
    with drafters.metered(PromptLookupDrafter()) as calls:
        pass
    assert calls == []


def test_rounds_end_by_count_or_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(rounds.rounds(rounds.Limit(3), "x")) == [0, 1, 2]
    clock = iter(float(second) for second in range(0, 100, 4))  # every round takes four seconds
    monkeypatch.setattr("experiments.bench.rounds.time.perf_counter", lambda: next(clock))
    assert list(rounds.rounds(rounds.Limit(9, seconds=13), "x")) == [0, 1, 2]  # a fourth would end at 16
    assert rounds.rotated("abc", 4) == ["b", "c", "a"]


def test_rows_of_a_batch_do_the_same_work() -> None:
    requests = [Request("a", (1, 2, 3, 4), eos_ids=frozenset({9})), Request("b", (5, 6, 7))]
    found = batches.equal_length(requests, 3, at_most=128)
    assert [request.prompt_ids for request in found] == [(2, 3, 4), (5, 6, 7), (2, 3, 4)]
    assert len({request.id for request in found}) == 3
    assert not any(request.eos_ids for request in found)
    assert {len(request.prompt_ids) for request in batches.equal_length(requests, 2, at_most=2)} == {2}


def test_a_cut_draft_is_the_targets_beginning(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = find(str(tiny_checkpoint("llama")))
    drafts.truncate(checkpoint, tmp_path / "draft")
    draft, target = load_model(str(tmp_path / "draft"), device="cpu"), load_model(checkpoint.name, device="cpu")
    assert draft.model.num_layers == 1
    tokens, places = torch.tensor([[3, 1, 4]]), torch.arange(3)[None]
    logits = draft.model.forward(tokens, places, draft.model.new_cache(1, 3).view([0])).logits
    features = target.model.forward(tokens, places, target.model.new_cache(1, 3).view([0]), hidden_layers=[1]).hidden
    early = target.model.head(target.model.norm(features[:, :, 0]))  # type: ignore[attr-defined, index]
    torch.testing.assert_close(logits, early)


def test_every_part_runs_on_any_checkpoint(written: Path) -> None:
    raw, summary = (bench.read(written / f"{name}.csv") for name in ("raw", "summary"))
    assert list(dict.fromkeys(raw["part"])) == QUICK_PARTS
    assert (raw["seconds"] > 0).all()
    assert {"model", "draft", "hardware", "date", "git_sha"} <= set(raw) & set(summary)
    same = summary[summary["measure"] == "same_tokens_share"]
    assert len(same) == 6
    assert (same["value"] == 1.0).all(), "float32 and greedy: the same tokens on both sides, however drafted"
    assert set(summary.loc[summary["measure"] == "forward_seconds", "x"]) == set(forwards.COUNTS)
    assert set(summary.loc[summary["measure"] == "step_seconds", "x"]) == {64, 128 - contexts.VERIFY}, "window: 128"
    assert set(summary.loc[summary["measure"] == "batch_tokens_per_second", "x"]) == {1, 4}
    drafted = set(summary.loc[summary["measure"] == "cost_ratio", "arm"])
    assert {"prompt lookup", "suffix", "early exit", "draft model"} <= drafted
    assert "EAGLE" not in drafted
    assert (written / "provenance.json").is_file()
    assert {path.suffix for path in written.glob("bench.*")} == {".png", ".svg"}
    shown = (written / "table.md").read_text()
    assert "| tokens/s, ratio | float32 |" in shown
    assert "| specdec, context 64 |" in shown


def test_a_part_measured_again_replaces_its_own_rows_only(
    written: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "QUICK", LITTLE)
    before = bench.read(written / "summary.csv")
    assert bench.main([*arguments, "--only", "forwards", "--output", str(written.parent)]) == 0
    after = bench.read(written / "summary.csv")
    assert len(after) == len(before)
    kept, again = (after[(after["part"] != "forwards") == other] for other in (True, False))
    pd.testing.assert_frame_equal(kept, before[before["part"] != "forwards"])
    assert (again["value"] != before.loc[again.index, "value"]).any()
    assert list(dict.fromkeys(after["part"])) == QUICK_PARTS


def test_an_interruption_keeps_what_was_finished(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> pd.DataFrame:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "QUICK", LITTLE)
    broken = {"rules": bench.PARTS["rules"], "forwards": bench.Part(interrupted, forwards.summarise)}
    monkeypatch.setattr(bench, "PARTS", broken)
    with pytest.raises(KeyboardInterrupt):
        bench.main([*arguments, "--output", str(tmp_path)])
    assert set(bench.read(tmp_path / "quick" / "raw.csv")["part"]) == {"rules"}


def test_rows_of_another_model_do_not_stay(written: Path) -> None:
    old = bench.read(written / "summary.csv")
    new = old[old["part"] == "forwards"].assign(model="another")
    assert set(bench.joined(new, written / "summary.csv")["model"]) == {"another"}


@pytest.mark.slow
def test_table_and_figure_come_from_the_summary_alone(written: Path) -> None:
    table = (written / "table.md").read_text()
    (written / "table.md").unlink()
    assert bench.main(["--quick", "--figures-only", "--output", str(written.parent)]) == 0
    assert (written / "table.md").read_text() == table


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(arguments: list[str], tmp_path: Path) -> None:
    assert bench.main([*arguments, "--only", "memory", "--output", str(tmp_path)]) == 0
    summary = bench.read(tmp_path / "quick" / "summary.csv")
    assert list(summary["measure"]) == ["peak_memory_ratio"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--model", "nothing/here/at/all"], "there is no checkpoint directory"),
        (["--dtypes", "float7"], "dtype='float7' is unknown"),
        (["--only", "dtypes"], "name both in --dtypes"),
        (["--draft-tokens", "0"], "it must be at least 1"),
        (["--device", "cuda:99"], "is not on this machine"),
        (["--draft", "nothing/here/at/all"], "there is no checkpoint directory nothing/here/at/all"),
        (["--figures-only"], "can't be read"),
        (["--output", "/proc/no"], "can't be written to /proc/no"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    wrong: list[str], said: str, arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench.main(["--output", str(tmp_path / "bench"), *arguments, *wrong]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("error: ") == 1


def test_the_figure_says_what_it_shows(written: Path) -> None:
    summary = bench.read(written / "summary.csv")
    figure = bench_figure(summary.assign(hardware="Imaginary CPU", git_sha="abc1234"))
    FigureCanvasAgg(figure).draw()
    said = " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())
    for fact in ("Imaginary CPU", "abc1234", "first 1/5 of layers", "n = ", "bars: 95 %", "transformers", "float32"):
        assert fact in said
    titles = [ax.get_title(loc="left").split(",")[0] for ax in figure.axes if ax.axison]
    assert titles == [
        "Whole requests", "Where a step's time goes", "Forward by tokens", "Forward after a long context",
        "Decode step", "Decode step over reading its bytes", "Verify step", "Prefill", "Batches", "Cost of drafting",
        "Verification rules",
    ]  # fmt: skip


def test_a_bar_and_its_limits_belong_together(written: Path) -> None:
    summary = bench.read(written / "summary.csv")
    rows = summary[summary["measure"].str.endswith("_share")]
    both = pd.concat([rows, rows.assign(dtype="bfloat16", value=rows["value"].iloc[::-1].to_numpy())])
    figure = bench_figure(both.assign(low=both["value"], high=both["value"]))
    ax = figure.axes[0]
    (whiskers,) = ax.collections
    assert [start[0] for start, _ in whiskers.get_segments()] == pytest.approx(
        [bar.get_width() for bar in ax.containers[0]]
    )


def test_a_second_timed_run_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alone = [argument for argument in arguments if argument != "--share-device"]
    with results.timed_lock("cpu"):
        assert bench.main([*alone, "--output", str(tmp_path)]) == 2
    assert "another timed run is using" in capsys.readouterr().err
