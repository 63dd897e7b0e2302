"""Where a sequence ends: one token at a time or eight, it is the same place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.stopping import Ending, TextStream
from specdec.types import FinishReason, Request

WORDS = ["the ", "cat ", "sat", " on", " a", " mat", ".", "\n", "STOP", "ST", "OP", "S"]


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def ending(
    stop: tuple[str, ...] = (), *, limit: int = 50, window: int = 100, eos: frozenset[int] = frozenset()
) -> Ending:
    return Ending(Request("r", (0,), max_new_tokens=limit, stop=stop, eos_ids=eos), window, decode, stream=True)


def test_eos_in_the_middle_of_a_block_ends_there_and_is_kept() -> None:
    end = ending(eos=frozenset({6}))
    end.extend([0, 1, 6, 3, 4])
    assert end.tokens == [0, 1, 6]
    assert end.reason is FinishReason.EOS


def test_the_limit_is_never_exceeded() -> None:
    end = ending(limit=2)
    end.extend([0, 1, 2])
    assert (end.tokens, end.reason, end.remaining) == ([0, 1], FinishReason.LENGTH, 0)


def test_the_window_ends_a_sequence_before_its_limit_does() -> None:
    end = ending(limit=50, window=4)
    end.extend([0, 1, 2, 3])
    assert (end.tokens, end.reason) == ([0, 1, 2], FinishReason.WINDOW)


@pytest.mark.parametrize("blocks", [[[0, 1, 9, 10, 3]], [[0, 1, 9], [10, 3]], [[0], [1], [9], [10], [3]]])
def test_a_stop_string_that_straddles_tokens_and_blocks_is_cut_from_text_and_tokens(blocks: list[list[int]]) -> None:
    end = ending(stop=("STOP",))
    for block in blocks:
        end.extend(block)
    assert end.reason is FinishReason.STOP
    assert end.tokens == [0, 1]
    assert end.text == "the cat "


def test_a_stop_string_inside_a_token_keeps_the_token_its_text_needs() -> None:
    end = ending(stop=("at ",))
    end.extend([0, 1, 2])
    assert (end.tokens, end.text) == ([0, 1], "the c")


def test_a_stop_string_at_once_leaves_nothing() -> None:
    end = ending(stop=("S",))
    end.extend([8, 1])
    assert (end.tokens, end.text, end.reason) == ([], "", FinishReason.STOP)


@given(
    st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=20),
    st.lists(st.integers(1, 6), min_size=20, max_size=20),
    st.sampled_from([(), ("STOP",), ("S", "mat."), ("\n", " a m")]),
    st.sampled_from([frozenset(), frozenset({6}), frozenset({0, 5})]),
    st.integers(1, 12),
)
def test_blocks_never_matter(
    tokens: list[int], sizes: list[int], stop: tuple[str, ...], eos: frozenset[int], limit: int
) -> None:
    one_by_one, in_blocks = (ending(stop, limit=limit, eos=eos) for _ in range(2))
    shown: list[str] = []
    for token in tokens:
        one_by_one.extend([token])
    while tokens:
        size = sizes.pop()
        in_blocks.extend(tokens[:size])
        shown.append(in_blocks.new_text())
        tokens = tokens[size:]
    assert in_blocks.tokens == one_by_one.tokens
    assert in_blocks.text == one_by_one.text
    assert in_blocks.reason == one_by_one.reason
    # A client never sees text that is taken back later.
    assert in_blocks.text.startswith("".join(shown))
    if in_blocks.reason is not None:
        assert "".join(shown) == in_blocks.text


@given(st.text(max_size=20), st.integers(0, 3))
def test_streamed_text_is_the_decoded_text(text: str, dangling: int) -> None:
    ids = [*text.encode("utf-8", errors="ignore"), *"é€".encode()[:dangling]]
    stream = TextStream(decode_bytes)
    for index in ids:
        stream.push(index)
    assert "\N{REPLACEMENT CHARACTER}" not in stream.text
    stream.flush()
    assert stream.text == decode_bytes(ids)
    assert len(stream.text_lengths) == len(ids)
