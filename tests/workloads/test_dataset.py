"""Datasets by configuration alone: each one's shape on a small local file, each option, each refusal."""

from __future__ import annotations

import csv
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from experiments.building import build
from specdec.errors import UsageError
from specdec.machine import hub
from specdec.types import Prompt, Turn
from specdec.workloads import Workload, load_dataset

CONF = Path(__file__).parent.parent.parent / "conf"
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
TEXT = {"text": "text"}
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
    {"question_id": 161, "category": "translation", "turns": ["Translate: Hallo"]},
    {"question_id": 241, "category": "summarization", "turns": ["Summarise: long"]},
    {"question_id": 242, "category": "summarization", "turns": ["Summarise: short"]},
]
SPEED = [
    {"question_id": f"{number:032x}", "category": category, "sub_category": "x", "turns": [f"Do {number}"]}
    for number, category in enumerate(["low_entropy", "mixed", "high_entropy", "low_entropy"])
]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("loading a dataset touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(hub, "in_reach", refuse)


def jsonl(folder: Path, rows: Sequence[object], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8")
    return str(path)


def parquet(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "rows.parquet") -> str:
    path = folder / name
    pd.DataFrame(list(rows)).to_parquet(path)
    return str(path)


def texts(workload: Workload) -> list[str]:
    return [prompt.text or (prompt.messages or ())[-1]["content"] for prompt in workload.prompts]


def ids(workload: Workload) -> list[str]:
    return [prompt.id for prompt in workload.prompts]


def refusal(path: str, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load_dataset(path, **{"columns": TEXT, **options})
    message = str(caught.value)
    assert "\n" not in message
    return message


# The shipped configurations, each on a file of its dataset's shape.


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Callable[..., Workload]]:
    """What `workload=name` makes of `rows` in a local file."""

    def load(name: str, rows: Sequence[Mapping[str, Any]], *overrides: str) -> Workload:
        path = (parquet if name not in ("spec_bench", "local") else jsonl)(tmp_path, rows)
        cfg = compose("config", [f"workload={name}", f"workload.path={path}", *overrides]).workload
        workload = build(cfg)
        assert isinstance(workload, Workload)
        return workload

    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield load


def test_humaneval_is_continued_as_it_stands(configured: Callable[..., Workload]) -> None:
    code = 'def one():\n    """Return {1}."""\n'
    row = {
        "task_id": "HumanEval/0",
        "prompt": code,
        "canonical_solution": "    return 1\n",
        "test": "...",
        "entry_point": "one",
    }
    (prompt,) = configured("humaneval", [row]).prompts
    assert prompt == Prompt(
        id="HumanEval/0",
        text=code,
        workload="humaneval",
        tier="mixed",
        max_new_tokens=256,
        stop=("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint("),
    )


def test_mbpp_shows_the_tests(configured: Callable[..., Workload]) -> None:
    tests = ["assert add(1, 2) == 3", "assert add({}, 1) is None"]
    row = {"source_file": "x", "task_id": 2, "prompt": "Add.", "code": "", "test_imports": [], "test_list": tests}
    workload = configured("mbpp", [row])
    assert ids(workload) == ["2"]
    assert texts(workload) == [
        "Add.\nYour code should pass these tests:\n\nassert add(1, 2) == 3\nassert add({}, 1) is None"
    ]


def test_gsm8k_has_no_ids_of_its_own(configured: Callable[..., Workload]) -> None:
    workload = configured("gsm8k", [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "4"}])
    assert ids(workload) == ["gsm8k-1", "gsm8k-2"]
    assert texts(workload)[1].startswith("2 + 2?\nThink step by step")
    assert (workload.name, workload.tier, workload.license) == ("gsm8k", "mixed", "MIT")


def test_mt_bench_first_turn_and_all(configured: Callable[..., Workload]) -> None:
    rows = [{"prompt_id": 81, "category": "writing", "prompt": ["Compose.", "Rewrite it."], "reference": []}]
    assert texts(configured("mt_bench", rows)) == ["Compose."]
    (every,) = configured("mt_bench", rows, "workload.turns=all").prompts
    assert (every.id, every.messages) == ("81/1", ({"role": "user", "content": "Compose."},))
    assert every.then == (Turn("81/2", "Rewrite it."),)


def test_spec_bench_by_category(configured: Callable[..., Workload]) -> None:
    workload = configured("spec_bench", QUESTIONS, "workload.category=summarization")
    assert workload.name == "spec_bench_summarization"
    assert ids(workload) == ["241", "242"]
    several = configured("spec_bench", QUESTIONS, "workload.category=[writing,translation]")
    assert (several.name, ids(several)) == ("spec_bench_writing+translation", ["81", "161"])
    assert len(configured("spec_bench", QUESTIONS).prompts) == 4


def test_speed_bench_keeps_its_tiers(configured: Callable[..., Workload]) -> None:
    workload = configured("speed_bench", SPEED)
    assert [prompt.tier for prompt in workload.prompts] == ["low", "mixed", "high", "low"]
    assert workload.tier == "unknown"
    for category, tier in {"low_entropy": "low", "mixed": "mixed", "high_entropy": "high"}.items():
        one = configured("speed_bench", SPEED, f"workload.category={category}")
        assert (one.name, one.tier, {prompt.tier for prompt in one.prompts}) == (
            f"speed_bench_{category}",
            tier,
            {tier},
        )


def test_speed_benchs_withheld_texts_are_refused_or_left_out(configured: Callable[..., Workload]) -> None:
    rows = [SPEED[0], SPEED[1] | {"turns": [PLACEHOLDER]}]
    with pytest.raises(UsageError, match=r"holds a placeholder.*skip_placeholders=true"):
        configured("speed_bench", rows)
    assert texts(configured("speed_bench", rows, "workload.skip_placeholders=true")) == ["Do 0"]


def test_speed_bench_as_its_authors_script_writes_it(configured: Callable[..., Workload]) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    rows = [{"question_id": "a", "category": "mixed", "messages": messages}]
    workload = configured("speed_bench", rows, "workload.columns.text=messages")
    assert workload.prompts[0].messages == tuple(messages)


def test_cnn_dailymail(configured: Callable[..., Workload]) -> None:
    workload = configured("cnn_dailymail", [{"article": "(CNN) News.", "highlights": "News.", "id": "00f"}])
    assert ids(workload) == ["00f"]
    assert texts(workload) == ["Summarise this news article in three sentences:\n\n(CNN) News."]


def test_wmt_reaches_into_the_pair(configured: Callable[..., Workload]) -> None:
    rows = [{"translation": {"de": "Hallo", "en": "Hello"}}]
    assert texts(configured("wmt", rows))[0].endswith(":\n\nHallo")
    assert texts(configured("wmt", rows, "workload.columns.text=translation.en"))[0].endswith(":\n\nHello")


def test_local(configured: Callable[..., Workload]) -> None:
    workload = configured("local", [{"text": "One."}, {"text": "Two."}], "workload.limit=1", "workload.name=mine")
    assert (workload.name, ids(workload), texts(workload)) == ("mine", ["mine-1"], ["One."])


# Where rows come from.


def test_every_format_gives_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"text": "null", "key": "007"}, {"text": "2020-01-01", "key": "1.0"}, {"text": 'é, "x"\nNA', "key": "c"}]
    with (tmp_path / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["text", "key"])
        writer.writeheader()
        writer.writerows(rows)
    paths = [jsonl(tmp_path, rows), str(tmp_path / "rows.csv"), parquet(tmp_path, rows)]
    loaded = [load_dataset(path, columns=TEXT | {"id": "key"}) for path in paths]
    assert texts(loaded[0]) == ["null", "2020-01-01", 'é, "x"\nNA']
    assert loaded[0] == loaded[1] == loaded[2]
    assert loaded[0].fingerprint == loaded[1].fingerprint


def test_a_csv_row_of_another_width_is_named_or_blank(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,text\n1,a\n2,b,c\n")
    assert "line 3" in refusal(str(path))
    path.write_text("id,text\n1,a\n2\n")
    message = refusal(str(path))
    assert "row 2" in message
    assert "blank" in message


def test_a_json_array_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"text": "One."}, {"text": "Two."}]))
    assert texts(load_dataset(str(tmp_path / "rows.json"), columns=TEXT)) == ["One.", "Two."]


def test_a_folder_has_splits(tmp_path: Path) -> None:
    jsonl(tmp_path, [{"text": "Learn."}], "train.jsonl")
    jsonl(tmp_path, [{"text": "Check."}], "test.jsonl")
    assert texts(load_dataset(str(tmp_path), columns=TEXT, split="train")) == ["Learn."]
    assert texts(load_dataset(str(tmp_path), columns=TEXT)) == ["Check."]
    message = refusal(str(tmp_path), split="dev")
    assert all(word in message for word in ("'dev'", "train", "test"))


def test_a_local_file_leaves_no_copy_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    load_dataset(parquet(tmp_path, [{"text": "One."}]), columns=TEXT)
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_the_hub_is_asked_for_what_was_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[dict[str, Any]] = []

    def load(**how: Any) -> Any:
        asked.append(how | {"offline": datasets.config.HF_HUB_OFFLINE})
        return datasets.DatasetDict({"test": datasets.Dataset.from_list([{"text": "One."}, {"text": "Two."}])})

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "in_reach", lambda: True)
    workload = load_dataset("owner/name", columns=TEXT, config="small", streaming=True)
    assert asked == [{"path": "owner/name", "name": "small", "streaming": True, "offline": False}]
    assert (workload.name, texts(workload)) == ("name", ["One.", "Two."])
    assert "it has test" in refusal("owner/name", split="validation")
    # Out of reach, what was loaded before comes out of the cache, without half a minute of trying.
    monkeypatch.setattr(hub, "in_reach", lambda: False)
    assert len(load_dataset("owner/name", columns=TEXT).prompts) == 2
    assert asked[-1]["offline"]
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_hub_that_cannot_be_reached_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "in_reach", lambda: False)
    message = refusal("openai/not-in-any-cache")
    assert all(word in message for word in ("openai/not-in-any-cache", "does not answer", "workload.path"))


# What the options do.


def test_a_shuffle_follows_its_seed_and_comes_before_the_limit(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"text": f"Say {number}"} for number in range(20)])
    whole = load_dataset(path, columns=TEXT)
    shuffled = load_dataset(path, columns=TEXT, shuffle_seed=1)
    assert ids(whole)[0] == "rows-1"
    assert ids(shuffled) != ids(whole)
    assert sorted(ids(shuffled)) == sorted(ids(whole))
    assert ids(load_dataset(path, columns=TEXT, shuffle_seed=1, limit=3)) == ids(shuffled)[:3]
    assert ids(load_dataset(path, columns=TEXT, limit=3)) == ids(whole)[:3]


def test_a_limit_reads_no_further_than_it_must(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"text": "One."}, "{broken"])
    assert texts(load_dataset(path, columns=TEXT, limit=1)) == ["One."]
    assert "line 2" in refusal(path, limit=1, shuffle_seed=0)


def test_max_new_tokens_and_stop_reach_every_prompt(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"text": "One."}, {"text": "Two."}])
    workload = load_dataset(path, columns=TEXT, max_new_tokens=7, stop=["END"], tier="high", format="raw")
    assert {(prompt.max_new_tokens, prompt.stop, prompt.tier) for prompt in workload.prompts} == {(7, ("END",), "high")}
    assert workload.prompts[0].text == "One."


def test_a_template_goes_around_every_user_turn_and_no_other(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "{a}"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path = jsonl(tmp_path, [{"talk": talk, "hint": ["x", "y"]}])
    columns = {"text": "talk", "hint": "hint", "id": None}
    first, last = load_dataset(path, columns=columns, template="<{text}> {hint} {{}}", turns="all").prompts
    assert first.messages == (talk[0], {"role": "user", "content": "<{a}> x\ny {}"})
    assert last.messages == (*first.messages, talk[2], {"role": "user", "content": "<c> x\ny {}"})
    assert load_dataset(path, columns=columns, template="<{text}> {hint} {{}}").prompts[0].messages == first.messages


def test_turns_follow_the_datas_answers_where_it_has_them_and_else_the_models(tmp_path: Path) -> None:
    roles = {"u": "user", "a": "assistant"}
    talk = [{"role": roles[name[0]], "content": name} for name in ("u1", "u2", "a2", "u3", "u4", "u5")]
    path = jsonl(tmp_path, [{"text": talk}])
    first, later = load_dataset(path, columns={"text": "text"}, template="<{text}>", turns="all", name="q").prompts
    assert [message["content"] for message in first.messages or ()] == ["<u1>"]
    assert (first.id, first.then) == ("q-1/1", (Turn("q-1/2", "<u2>"),))
    assert [message["content"] for message in later.messages or ()] == ["<u1>\n\n<u2>", "a2", "<u3>"]
    assert (later.id, later.then) == ("q-1/3", (Turn("q-1/4", "<u4>"), Turn("q-1/5", "<u5>")))


def test_what_is_hashed_of_prompts_without_turns_is_what_it_was(tmp_path: Path) -> None:
    workload = load_dataset(jsonl(tmp_path, [{"text": "One."}]), columns={"text": "text"}, turns="all", name="q")
    assert workload.fingerprint == "09084532f35e78a60eeeead236ca53ad1f86c3c5dfe1df59207cc4e6f196c482"
    several = load_dataset(jsonl(tmp_path, [{"text": ["One.", "Two."]}]), columns={"text": "text"}, turns="all")
    others = load_dataset(jsonl(tmp_path, [{"text": ["One.", "Too."]}]), columns={"text": "text"}, turns="all")
    assert several.fingerprint != others.fingerprint


def test_row_numbers_stay_when_rows_are_left_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path, QUESTIONS)
    columns = {"text": "turns", "category": "category"}
    assert ids(load_dataset(path, columns=columns, category="translation", name="q")) == ["q_translation-2"]


# What is refused.


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{oops", ["line 2", "not JSON"]),
        ("[1, 2]", ["line 2", "not a JSON object"]),
        ({"words": "a"}, ["line 2", "'text'", "columns are words"]),
        ({"text": " "}, ["line 2", "blank"]),
        ({"text": None}, ["line 2", "blank"]),
        ({"text": []}, ["line 2", "no user turn"]),
        ({"text": [{"role": "tool", "content": "a"}]}, ["line 2", "'tool'", "system, user, assistant"]),
        ({"text": [{"role": "user", "content": 3}]}, ["line 2", "blank"]),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: object, words: list[str]) -> None:
    path = jsonl(tmp_path, [{"text": "One."}, line])
    message = refusal(path)
    assert path in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": {"text": "promt"}}, ["'promt'", "question_id, category, turns"]),
        ({"columns": {"text": "turns", "id": "key"}}, ["'key'", "columns.id"]),
        ({"columns": {"id": "question_id"}}, ["columns.text"]),
        ({"category": "poetry"}, ["'poetry'", "writing, translation, summarization"]),
        ({"category": ["writing", "poetry"], "limit": 1}, ["'poetry'"]),
        ({"category": "writing", "columns": {"text": "turns"}}, ["columns.category"]),
        ({"tiers": {"writing": "medium"}}, ["tiers.writing='medium'", "low, mixed, high"]),
        ({"tier": "medium"}, ["tier='medium'", "low, mixed, high"]),
        ({"format": "html"}, ["format='html'", "chat, raw"]),
        ({"turns": "second"}, ["turns='second'", "first, all"]),
        ({"template": "{text} {hint}"}, ["'hint'", "text"]),
        ({"template": "Go"}, ["'Go'", "{text}"]),
        ({"template": "{text} {"}, ["stray brace"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0", "at least 1"]),
        ({"stop": [""]}, ["stop=['']"]),
        ({"limit": 5}, ["limit=5", "1 to 4"]),
        ({"limit": 0}, ["limit=0", "1 to 4"]),
        ({"limit": -1}, ["limit=-1", "1 to 4"]),
        ({"placeholder": "Compose", "limit": 1}, ["'81'", "placeholder", "skip_placeholders"]),
        ({"columns": {"text": "turns", "id": "category"}}, ["'summarization'", "2 times"]),
    ],
)
def test_an_impossible_option_is_refused_by_name(tmp_path: Path, options: dict[str, Any], words: list[str]) -> None:
    columns = {"text": "turns", "id": "question_id", "category": "category"}
    message = refusal(jsonl(tmp_path, QUESTIONS), **{"columns": columns, **options})
    assert all(word in message for word in words), message


def test_a_conversation_is_not_raw_text(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert "format=chat" in refusal(jsonl(tmp_path, [{"text": talk}]), format="raw")


def test_every_turn_is_looked_at(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"id": "a", "text": ["One.", "TBD"]}, {"id": "a/2", "text": "Two."}])
    assert "holds a placeholder" in refusal(path, turns="all", placeholder="TBD")
    assert "uses the id 'a/2' 2 times" in refusal(path, turns="all", columns={"text": "text", "id": "id"})


def test_nothing_left_is_refused(tmp_path: Path) -> None:
    assert "gives no prompts" in refusal(jsonl(tmp_path, []))
    path = jsonl(tmp_path, [{"text": "TBD"}])
    assert "gives no prompts" in refusal(path, placeholder="TBD", skip_placeholders=True)


def test_paths_that_are_nothing(tmp_path: Path) -> None:
    assert "can't be read (No such file" in refusal(str(tmp_path / "none.csv"))
    assert "owner/name" in refusal("gsm8k")
    assert "owner/name" in refusal(str(tmp_path / "nowhere"))
    (tmp_path / "rows.txt").write_text("hello")
    assert ".jsonl, .csv, .parquet, .json" in refusal(str(tmp_path / "rows.txt"))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv", "rows.json", "rows.jsonl"])
def test_files_that_are_not_what_they_say(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'"caf\xe9\n{,\xff\x00')
    message = refusal(str(tmp_path / name))
    assert str(tmp_path / name) in message


def test_a_column_missing_from_parquet_lists_nested_ones(tmp_path: Path) -> None:
    message = refusal(parquet(tmp_path, [{"translation": {"de": "a", "en": "b"}, "n": 1}]))
    assert "row 1" in message
    assert "translation.de, translation.en, n" in message
