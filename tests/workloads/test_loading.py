"""The loader: what it makes of a good file, and what it says about a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.errors import UsageError
from specdec.workloads import load_workload, workload_names

HEADER = {"workload": "mine", "tier": "low", "license": "MIT", "format": "raw", "max_new_tokens": 8}
PROMPTS = [{"id": f"m-{number}", "text": f"Count to {number}:"} for number in range(1, 7)]


def write(folder: Path, *lines: object) -> str:
    path = folder / "mine.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return str(path)


def refusal(name: str, **options: int) -> str:
    with pytest.raises(UsageError) as caught:
        load_workload(name, **options)
    return str(caught.value)


def test_a_raw_file_becomes_texts(tmp_path: Path) -> None:
    header = HEADER | {"stop": ["\n\n"], "description": "counting", "source": "me"}
    own = {"id": "own", "text": "Go on", "stop": [], "max_new_tokens": 3}
    workload = load_workload(write(tmp_path, header, PROMPTS[0], own))
    assert (workload.name, workload.tier, workload.license) == ("mine", "low", "MIT")
    assert workload.description == "counting"
    first, second = workload.prompts
    assert (first.id, first.text, first.messages) == ("m-1", "Count to 1:", None)
    assert (first.workload, first.tier, first.max_new_tokens, first.stop) == ("mine", "low", 8, ("\n\n",))
    assert (second.max_new_tokens, second.stop) == (3, ())


def test_a_chat_file_becomes_messages(tmp_path: Path) -> None:
    chat = HEADER | {"format": "chat"}
    plain, ruled = load_workload(write(tmp_path, chat, PROMPTS[0], PROMPTS[1] | {"system": "Be brief."})).prompts
    assert plain.text is None
    assert plain.messages == ({"role": "user", "content": "Count to 1:"},)
    assert ruled.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count to 2:"},
    )


def test_blank_lines_windows_endings_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    plain = load_workload(write(tmp_path, HEADER, *PROMPTS))
    path = tmp_path / "windows.jsonl"
    lines = [json.dumps(HEADER), "", *(json.dumps(prompt) for prompt in PROMPTS), ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert load_workload(str(path)) == plain


def test_a_line_separator_inside_a_text_is_not_a_line_end(tmp_path: Path) -> None:
    line = json.dumps({"id": "a", "text": "one\u2028two"}, ensure_ascii=False)
    assert load_workload(write(tmp_path, HEADER, line)).prompts[0].text == "one\u2028two"


def test_limit_takes_from_the_front(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, *PROMPTS)
    assert load_workload(path, limit=2).prompts == load_workload(path).prompts[:2]
    assert load_workload(path, limit=6) == load_workload(path)


def test_shuffling_is_a_function_of_the_seed_and_comes_before_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, *PROMPTS)
    orders = {tuple(prompt.id for prompt in load_workload(path, shuffle_seed=seed).prompts) for seed in range(8)}
    assert len(orders) > 1
    assert all(sorted(order) == [prompt["id"] for prompt in PROMPTS] for order in orders)
    shuffled = load_workload(path, shuffle_seed=3)
    assert load_workload(path, shuffle_seed=3, limit=4).prompts == shuffled.prompts[:4]


def test_max_new_tokens_replaces_every_prompts_own(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, PROMPTS[0], PROMPTS[1] | {"max_new_tokens": 3})
    assert [prompt.max_new_tokens for prompt in load_workload(path).prompts] == [8, 3]
    assert [prompt.max_new_tokens for prompt in load_workload(path, max_new_tokens=5).prompts] == [5, 5]


def test_the_fingerprint_follows_what_will_be_run(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, *PROMPTS)
    whole = load_workload(path)
    assert whole.fingerprint == load_workload(path, limit=6).fingerprint
    variants = [
        whole,
        load_workload(path, limit=5),
        load_workload(path, max_new_tokens=9),
        load_workload(path, shuffle_seed=1),
        load_workload(write(tmp_path, HEADER | {"stop": ["x"]}, *PROMPTS)),
        load_workload(write(tmp_path, HEADER | {"format": "chat"}, *PROMPTS)),
    ]
    assert len({variant.fingerprint for variant in variants}) == len(variants)
    assert all(len(variant.fingerprint) == 64 for variant in variants)


def test_an_unknown_name_lists_the_known_ones() -> None:
    message = refusal("jsonn")
    assert "'jsonn'" in message
    assert all(name in message for name in workload_names())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.jsonl")
    assert missing in refusal(missing)
    (tmp_path / "folder.jsonl").mkdir()
    assert "can't be read" in refusal(str(tmp_path / "folder.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"workload": "caf\xe9"}\n')
    assert "UTF-8" in refusal(str(tmp_path / "latin.jsonl"))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ["is empty"]),
        (["", "  "], ["is empty"]),
        ([HEADER], ["no prompts"]),
        ([HEADER, PROMPTS[0], "{oops"], ["line 3", "not JSON"]),
        ([HEADER, "", "[1, 2]"], ["line 3", "not a JSON object"]),
        ([PROMPTS[0], PROMPTS[1]], ["line 1", "header", "'workload'"]),
        ([{key: HEADER[key] for key in HEADER if key != "license"}, PROMPTS[0]], ["line 1", "'license'"]),
        ([HEADER | {"tier": "medium"}, PROMPTS[0]], ["'medium'", "low, mixed, high"]),
        ([HEADER | {"tier": ["low"]}, PROMPTS[0]], ["['low']", "low, mixed, high"]),
        ([HEADER | {"format": "html"}, PROMPTS[0]], ["'html'", "chat, raw"]),
        ([HEADER | {"format": {}}, PROMPTS[0]], ["{}", "chat, raw"]),
        ([HEADER | {"max_new_tokens": 0}, PROMPTS[0]], ["max_new_tokens=0", "at least 1"]),
        ([HEADER | {"max_new_tokens": True}, PROMPTS[0]], ["max_new_tokens=True"]),
        ([HEADER | {"stop": "END"}, PROMPTS[0]], ["stop='END'", "list"]),
        ([HEADER | {"stop": [""]}, PROMPTS[0]], ["stop=['']"]),
        ([HEADER | {"temperature": 1}, PROMPTS[0]], ["unknown field 'temperature'"]),
        ([HEADER, {"id": "a"}], ["line 2", "'text'"]),
        ([HEADER, {"text": "a"}], ["line 2", "'id'"]),
        ([HEADER, {"id": "a", "text": " \n"}], ["line 2", "not blank"]),
        ([HEADER, {"id": 7, "text": "a"}], ["line 2", "id=7"]),
        ([HEADER, {"id": "a", "text": "a", "max_new_tokens": 1.5}], ["line 2", "1.5"]),
        ([HEADER, {"id": "a", "text": "a", "system": "b"}], ["line 2", "'system'"]),
        ([HEADER, {"id": "a", "text": "a"}, {"id": "a", "text": "b"}], ["'a'", "2 times"]),
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, lines: list[object], words: list[str]) -> None:
    path = write(tmp_path, *lines)
    message = refusal(path)
    assert path in message
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("limit", [0, -1, 7])
def test_a_limit_that_is_not_possible_says_how_many_there_are(tmp_path: Path, limit: int) -> None:
    message = refusal(write(tmp_path, HEADER, *PROMPTS), limit=limit)
    assert f"limit={limit}" in message
    assert "6" in message


def test_answers_of_no_tokens_are_refused(tmp_path: Path) -> None:
    assert "max_new_tokens=0" in refusal(write(tmp_path, HEADER, *PROMPTS), max_new_tokens=0)
