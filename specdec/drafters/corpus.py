"""Texts a drafter may copy from: a file, read once, in the target's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import UsageError
from specdec.models.vocabulary.tokenizer import Tokenizer


def read_corpus(path: str, tokenizer: Tokenizer | None, vocab_size: int) -> list[np.ndarray]:
    """The file's texts as token ids, each [n] int64; empty ones are left out.

    A name ending in .jsonl: one text per line, a string or a list of token ids, bare or as `text` or `token_ids` of an
    object. Any other file is one text, in UTF-8. Raises `UsageError` for a file that cannot be read or is neither.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"the corpus {path} cannot be read ({reason}); give a .jsonl or text file") from error
    entries = _json_lines(content, path) if path.endswith(".jsonl") else iter([(path, content)])
    texts = [_token_ids(entry, where, tokenizer, vocab_size) for where, entry in entries]
    if not any(map(len, texts)):
        raise UsageError(f"the corpus {path} holds no text; leave it out, or give one with at least a token")
    return [text for text in texts if len(text)]


def _json_lines(content: str, path: str) -> Iterator[tuple[str, Any]]:
    """Where each entry stands, and what it is."""
    for number, line in enumerate(content.split("\n"), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where} is not JSON ({error}); write one text or list of token ids per line") from error
        if isinstance(entry, dict):
            entry = entry.get("text", entry.get("token_ids"))
        yield where, entry


def _token_ids(entry: Any, where: str, tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    if isinstance(entry, str):
        if tokenizer is None:
            raise UsageError(f"{where} is text, which needs a tokenizer; pass tokenizer=... or give token ids")
        return np.array(tokenizer.encode(entry), dtype=np.int64)
    if not isinstance(entry, list) or not all(type(token) is int for token in entry):
        raise UsageError(f"{where} is neither a text nor a list of token ids; give one, bare or as text or token_ids")
    if not all(0 <= token < vocab_size for token in entry):
        raise UsageError(f"{where} has token ids outside the target's vocabulary of {vocab_size}; encode it anew")
    return np.array(entry, dtype=np.int64)
