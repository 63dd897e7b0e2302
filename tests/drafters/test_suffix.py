"""Suffix decoding: counts against counting, scores by hand, bad corpora, and nothing lost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import DraftContext
from specdec.drafters.none import NoDrafter
from specdec.drafters.suffix import Continuation, SuffixDrafter, SuffixTreeDrafter, expand
from specdec.drafters.suffix_index import CorpusIndex, Match, earlier_matches
from specdec.errors import UsageError
from specdec.models.loading import LoadedModel
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, SamplingParams, Trace
from specdec.verifiers.base import Verifier
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from tests.fakes import SpoilingController, make_request

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def propose(drafter: SuffixDrafter, rows: list[list[int]], limits: list[int]) -> Draft:
    context = DraftContext(
        slots=tuple(range(len(rows))),
        request_ids=tuple(str(row) for row in range(len(rows))),
        tokens=tuple(np.array(row) for row in rows),
        num_prompt=(1,) * len(rows),
        sampling=(SamplingParams(),) * len(rows),
        vocab_size=100,
        device=torch.device("cpu"),
    )
    nothing = torch.zeros(len(rows), dtype=torch.bool)
    return drafter.propose(context, limits, lambda *_: nothing, Uniforms([0] * len(rows), [0] * len(rows)))


def rows_of(draft: Draft) -> list[list[int]]:
    assert draft.probs is None, "deterministic drafts are one-hot"
    return [row[:length] for row, length in zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)]


# --- Matches, against counting ----------------------------------------------------------------------------------------


def ends_of(pattern: list[int], text: list[int]) -> list[int]:
    """Where the text goes on after each occurrence of the pattern."""
    return [end for end in range(len(pattern), len(text) + 1) if text[end - len(pattern) : end] == pattern]


def distinct(found: dict[int, list[int]]) -> dict[int, list[int]]:
    """Of lengths with the same occurrences the longest."""
    return {length: ends for length, ends in found.items() if ends and ends != found.get(length + 1)}


@given(TOKENS, st.integers(1, 9))
def test_earlier_matches_are_all_there_are(tokens: list[int], longest: int) -> None:
    matches = list(earlier_matches(np.array(tokens), longest))
    lengths = range(1, min(longest, len(tokens)) + 1)
    expected = {length: [end for end in ends_of(tokens[-length:], tokens) if end < len(tokens)] for length in lengths}
    assert {match.length: match.following.tolist()[::-1] for match in matches} == distinct(expected)
    assert [match.length for match in matches] == sorted((match.length for match in matches), reverse=True)


@given(st.lists(TOKENS, min_size=1, max_size=4), TOKENS, st.integers(1, 9))
def test_a_corpus_finds_every_occurrence_within_its_texts(
    texts: list[list[int]], tokens: list[int], longest: int
) -> None:
    index = CorpusIndex([np.array(text) for text in texts], longest)
    starts = list(itertools.accumulate((len(text) + 1 for text in texts), initial=0))[:-1]
    expected = {
        length: [
            start + end for start, text in zip(starts, texts, strict=True) for end in ends_of(tokens[-length:], text)
        ]
        for length in range(1, min(longest, len(tokens)) + 1)
    }
    matches = index.matches(np.array(tokens))
    assert {match.length: sorted(match.following.tolist()) for match in matches} == distinct(expected)
    assert [match.length for match in matches] == sorted((match.length for match in matches), reverse=True)
    assert index.num_tokens == sum(map(len, texts)) + len(texts)


def test_what_occurs_too_often_is_sampled_evenly() -> None:
    (match,) = CorpusIndex([np.array([7, 8] * 3000)], 1).matches(np.array([7]))
    assert 512 < len(match.following) <= 1024
    assert set(match.text[match.following].tolist()) == {8}
    latest = list(earlier_matches(np.zeros(20_000, dtype=np.int64), 4))[-1]
    assert latest.following[0] == 19_999
    assert len(latest.following) == 1024


# --- Continuations, against the definition ----------------------------------------------------------------------------


def share(tokens: list[int], length: int, path: list[int]) -> float:
    """D of the last token of a path: of the match's occurrences, those that the path follows. A cycle may enter it."""
    grown, ends = [*tokens, *path], [end for end in ends_of(tokens[-length:], tokens) if end < len(tokens)]
    return sum(grown[end : end + len(path)] == path for end in ends) / len(ends)


def paths(found: Continuation) -> list[list[int]]:
    out: list[list[int]] = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        assert -1 <= parent < len(out), "parents come first"
        out.append([*(out[parent] if parent >= 0 else []), token])
    return out


@given(TOKENS, st.integers(1, 4), st.sampled_from([0.0, 0.1234, 0.59]))
def test_a_tree_has_every_continuation_that_is_frequent_enough(tokens: list[int], depth: int, least: float) -> None:
    for match in earlier_matches(np.array(tokens), 5):
        found = expand(match, 1000, depth, least, None)
        shares = [share(tokens, match.length, path) for path in paths(found)]
        possible = [list(path) for n in range(1, depth + 1) for path in itertools.product(range(3), repeat=n)]
        frequent = [path for path in possible if share(tokens, match.length, path) > max(least, 1e-9)]
        assert sorted(paths(found)) == sorted(frequent)
        assert shares == sorted(shares, reverse=True), "best first"
        assert found.score == pytest.approx(sum(shares))
        few = expand(match, 3, depth, least, None)
        assert paths(few) == paths(found)[:3]


@given(TOKENS, st.integers(0, 8))
def test_a_chain_takes_the_most_frequent_token_the_latest_of_several(tokens: list[int], limit: int) -> None:
    (chain,) = rows_of(propose(SuffixDrafter(100.0, min_probability=0.0, max_match=1), [tokens], [limit]))
    ends = [end for end in ends_of(tokens[-1:], tokens) if end < len(tokens)]
    expected: list[int] = []
    while ends and len(expected) < limit:
        following = [[*tokens, *expected][end + len(expected)] for end in ends]
        best = max(reversed(following), key=following.count)
        ends = [end for end, token in zip(ends, following, strict=True) if token == best]
        expected.append(best)
    assert chain == expected


def test_scores_by_hand() -> None:
    # "1 2" was followed by 3 4, 3 5 and 6 7.
    text = np.array([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 7, 1, 2])
    (two,) = earlier_matches(text, 2)
    assert (two.length, two.following.tolist()) == (2, [10, 6, 2])
    tree = expand(two, 9, 2, 0.1, None)
    assert list(zip(tree.tokens, tree.parents, strict=True)) == [(3, -1), (6, -1), (5, 0), (4, 0), (7, 1)]
    assert tree.score == pytest.approx(2 / 3 + 4 * 1 / 3)
    chain = expand(two, 9, 2, 0.1, 1)
    assert (chain.tokens, chain.parents) == ([3, 5], [-1, 0])
    assert chain.score == pytest.approx(2 / 3 + 1 / 3)
    assert expand(two, 9, 2, 0.5, None).tokens == [3]
    assert expand(two, 9, 1, 0.1, None).tokens == [3, 6]


def test_the_budget_grows_with_the_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert rows_of(propose(SuffixDrafter(1.0), [text], [9])) == [[3, 4]]
    assert rows_of(propose(SuffixDrafter(1.0, 1.0), [text], [9])) == [[3, 4, 5]]
    assert rows_of(propose(SuffixDrafter(1.0, max_match=1), [text], [9])) == [[3]]
    assert rows_of(propose(SuffixDrafter(0.4), [text], [9])) == [[]]
    assert rows_of(propose(SuffixDrafter(9.0), [text], [2])) == [[3, 4]]


def test_a_longer_budget_of_a_shorter_match_is_not_worth_more_than_certainty() -> None:
    # After "2" alone 9 is the most frequent; after "1 2" it was 3, once.
    text = [2, 9, 2, 9, 2, 9, 1, 2, 3, 1, 2]
    assert rows_of(propose(SuffixDrafter(1.0), [text], [1])) == [[3]]
    assert rows_of(propose(SuffixDrafter(1.0, max_match=1), [text], [1])) == [[9]]


def test_weak_continuations_are_left_to_others() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert rows_of(propose(SuffixDrafter(min_match=3), [text], [9])) == [[]]
    assert rows_of(propose(SuffixDrafter(1.0, min_score=2.5), [text], [9])) == [[]]
    assert rows_of(propose(SuffixDrafter(1.0, min_score=2.0), [text], [9])) == [[3, 4]]
    assert rows_of(propose(SuffixDrafter(1.0, min_score=2.5), [text], [1])) == [[3]], "all that was asked for"


def test_a_cycle_is_carried_on_beyond_the_end_of_the_text() -> None:
    assert rows_of(propose(SuffixDrafter(), [[5, 1, 2, 3, 1, 2, 3]], [6])) == [[1, 2, 3, 1, 2, 3]]


def test_rows_of_a_ragged_batch_do_not_touch_each_other() -> None:
    rows, limits = [[1, 2, 3], [4, 4], [7], [1, 2, 3, 1, 2]], [3, 2, 3, 0]
    for drafter in (SuffixDrafter(), SuffixTreeDrafter()):
        together = rows_of(propose(drafter, rows, limits))
        assert together == [rows_of(propose(drafter, [row], [n]))[0] for row, n in zip(rows, limits, strict=True)]
        assert together == [[], [4, 4], [], []]


def test_a_tree_is_a_batch_of_trees() -> None:
    rows = [[1, 2, 3, 1, 2, 4, 1, 2], [8, 9], [5, 6, 5]]
    draft = propose(SuffixTreeDrafter(num_nodes=3), rows, [2, 4, 1])
    assert draft.parents is not None
    assert draft.tokens.tolist() == [[4, 3, 1], [-1, -1, -1], [6, -1, -1]]
    assert draft.parents.tolist() == [[-1, -1, 0], [-1, -1, -1], [-1, -1, -1]]
    assert draft.lengths.tolist() == [3, 0, 1]
    assert draft.lengths.max() <= SuffixTreeDrafter(num_nodes=3).max_nodes(9)


def test_nothing_is_kept_between_requests() -> None:
    drafter, text = SuffixDrafter(), [1, 2, 3, 4, 1, 2]
    first = rows_of(propose(drafter, [text], [4]))
    before = dict(vars(drafter))
    assert rows_of(propose(drafter, [[9, 3, 4, 9]], [4])) == [[3, 4]]
    assert rows_of(propose(drafter, [[1, 2]], [4])) == [[]], "the first request's text is gone"
    assert rows_of(propose(drafter, [text], [4])) == first
    assert vars(drafter) == before


# --- The corpus -------------------------------------------------------------------------------------------------------


def bound(target: LoadedModel, path: Path, content: str, **options: float) -> SuffixDrafter:
    path.write_text(content, encoding="utf-8")
    drafter = SuffixDrafter(corpus=str(path), **options)  # type: ignore[arg-type]
    drafter.bind(target.model, target.tokenizer)
    return drafter


@pytest.mark.parametrize("form", ["{}", '{{"text": {}}}', '{{"id": 3, "token_ids": {}}}'])
def test_a_corpus_is_read_line_by_line(target: LoadedModel, tmp_path: Path, form: str) -> None:
    ids = list(target.tokenizer.encode("once upon a quiz"))
    entry = json.dumps(ids) if "ids" in form else json.dumps("once upon a quiz")
    drafter = bound(target, tmp_path / "corpus.jsonl", f"{form.format(entry)}\n\n[7, 8]\n")
    assert rows_of(propose(drafter, [ids[:6]], [4])) == [ids[6:10]]
    assert rows_of(propose(drafter, [ids[-2:]], [4])) == [[]], "the end of a text is no way into the next"
    assert rows_of(propose(drafter, [[7]], [4])) == [[8]]
    assert drafter.num_bytes > 0


def test_a_text_file_is_one_text(target: LoadedModel, tmp_path: Path) -> None:
    drafter = bound(target, tmp_path / "corpus.txt", "one\ntwo")
    ids = list(target.tokenizer.encode("one\ntwo"))
    assert rows_of(propose(drafter, [ids[:3]], [9])) == [ids[3:]]


def test_the_request_comes_before_an_equally_good_corpus(target: LoadedModel, tmp_path: Path) -> None:
    drafter = bound(target, tmp_path / "corpus.jsonl", "[1, 2, 9, 9]\n[1, 2, 5, 3, 3]")
    assert rows_of(propose(drafter, [[1, 2, 4, 4, 1, 2]], [2])) == [[4, 4]]
    assert rows_of(propose(drafter, [[2, 4, 4, 1, 2, 5]], [2])) == [[3, 3]], "a longer match in the corpus"


BAD = {
    "line.jsonl": ('"fine"\n{"text"', "line 2 is not JSON"),
    "field.jsonl": ('{"prompt": "x"}', "line 1 is neither a text nor a list of token ids"),
    "float.jsonl": ("[1, 2.5]", "line 1 is neither a text nor a list of token ids"),
    "range.jsonl": ("[1, 264]", "line 1 has token ids outside the target's vocabulary of 264"),
    "empty.txt": ("", "holds no text"),
    "blank.jsonl": ('\n[]\n""\n', "holds no text"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_corpus_that_is_none_is_refused_in_a_sentence(target: LoadedModel, tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    with pytest.raises(UsageError, match=message) as caught:
        bound(target, tmp_path / name, content)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_corpus_that_cannot_be_read_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for path, reason in (
        (tmp_path / "none.txt", "No such file"),
        (tmp_path, "directory"),
        (tmp_path / "binary.txt", "UTF-8"),
    ):
        with pytest.raises(UsageError, match=reason):
            SuffixDrafter(corpus=str(path)).bind(target.model, target.tokenizer)
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(UsageError, match="needs a tokenizer"):
        SuffixDrafter(corpus=str(tmp_path / "text.txt")).bind(target.model, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "min_match=0"),
        ({"min_match": 9, "max_match": 8}, "min_match=9, max_match=8"),
        ({"factor": -1.0}, "factor=-1.0"),
        ({"min_probability": 1.5}, "min_probability=1.5"),
        ({"num_nodes": 0}, "num_nodes=0"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SuffixTreeDrafter(**options)  # type: ignore[arg-type]


# --- Nothing is lost --------------------------------------------------------------------------------------------------

REQUESTS = [make_request("a", 9), make_request("b", 30), make_request("c", 3, max_new_tokens=60)]
DRAFTERS = [
    (SuffixDrafter(), GreedyVerifier()),
    (SuffixDrafter(4.0, 2.0, 0.0), RejectionVerifier()),
    (SuffixTreeDrafter(), GreedyTreeVerifier()),
    (SuffixTreeDrafter(5, min_probability=0.0), GreedyTreeVerifier()),
]


@pytest.fixture(scope="module")
def plain(target: LoadedModel) -> list[Trace]:
    return Engine(target.model, NoDrafter(), RejectionVerifier(), FixedController(0)).generate(REQUESTS)


@pytest.mark.parametrize("controller", [FixedController(6), SpoilingController()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize(("drafter", "verifier"), DRAFTERS)
def test_greedy_output_equals_plain_decoding(
    target: LoadedModel, plain: list[Trace], drafter: SuffixDrafter, verifier: Verifier, controller: FixedController
) -> None:
    traces = Engine(target.model, drafter, verifier, controller).generate(REQUESTS)
    assert [trace.token_ids for trace in traces] == [trace.token_ids for trace in plain]
    assert sum(step.num_accepted for trace in traces for step in trace.steps) > 0


def test_a_corpus_of_the_answers_is_accepted_whole(target: LoadedModel, plain: list[Trace], tmp_path: Path) -> None:
    lines = [json.dumps([*r.prompt_ids, *trace.token_ids]) for r, trace in zip(REQUESTS, plain, strict=True)]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    drafter = SuffixDrafter(corpus=str(tmp_path / "answers.jsonl"))
    traces = Engine(target.model, drafter, GreedyVerifier(), FixedController(4)).generate(REQUESTS)
    assert [trace.token_ids for trace in traces] == [trace.token_ids for trace in plain]
    for trace in traces:
        assert len(trace.steps) <= 2 + -(-len(trace.token_ids) // 5)


def test_matches_are_compared_with_tokens_only() -> None:
    match = Match(1, np.array([5, -1, 6]), np.array([1]))
    assert expand(match, 4, 4, 0.0, None) == Continuation()
