"""What a tokenizer's ids spell, in bytes, whatever way it writes its tokens down.

Byte-level vocabularies write every byte as a printable letter ("Ġthe"), SentencePiece's a space as "▁" and some bytes
as "<0x0A>", others plain text. Which of these a tokenizer does, its own decoder is asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from specdec.models.vocabulary.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Lexicon:
    """Ordinary tokens by what they spell, special ones by name and role.

    spellings: id → bytes of every ordinary token; of two that spell the same, the later one is `by_spelling`. names: of
    special tokens, by id. roles: "eos" and "bos" → id. filler: stands for what can't be spelled. encode: text → ids,
    with nothing added.
    """

    def __init__(
        self,
        spellings: Mapping[int, bytes],
        names: Mapping[int, str],
        roles: Mapping[str, int],
        filler: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.names, self.roles, self.filler = names, roles, filler
        self.by_spelling = {spelling: index for index, spelling in spellings.items() if spelling}
        self._spellings, self._encode = spellings, encode
        self._longest = max(map(len, self.by_spelling), default=0)

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Lexicon:
        """vocab_size: the model's; an id that it has no logit for is no token."""
        hf = tokenizer.hf
        added = hf.added_tokens_decoder
        special = {index for index, token in added.items() if token.special} | set(hf.all_special_ids)
        spell = _speller(hf)
        # The longest notation first, so that of "<0x41>" and "A" the plain one is found by its spelling.
        tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: -len(item[0]))
        known = {index: token for token, index in tokens if index < vocab_size}
        roles = {"eos": hf.eos_token_id, "bos": hf.bos_token_id}
        return cls(
            {i: token.encode() if i in added else spell(token) for i, token in known.items() if i not in special},
            {i: token for i, token in known.items() if i in special},
            {role: index for role, index in roles.items() if index in known},
            hf.unk_token_id or 0,
            lambda text: list(hf(text, add_special_tokens=False, verbose=False)["input_ids"]),
        )

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self._spellings) + len(self.names)

    def text_of(self, index: int) -> bytes:
        """What a token spells, a special one its name; nothing for an id that is no token."""
        return self.names[index].encode() if index in self.names else self._spellings.get(index, b"")

    def split(self, text: bytes) -> list[int]:
        """The text in this tokenizer's ids, at least one.

        As the tokenizer itself has it, unless that spells something else (half a character, a space put in front):
        then the longest token that fits, again and again.
        """
        try:
            ids = self._encode(text.decode())
        except UnicodeDecodeError:
            ids = []
        if b"".join(self._spellings.get(index, b"") for index in ids) != text:
            ids = self._longest_matches(text)
        return ids or [self.filler]

    def _longest_matches(self, text: bytes) -> list[int]:
        """Greedily from the left; a byte that begins no token is left out."""
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self.by_spelling), None)
            if end is not None:
                ids.append(self.by_spelling[text[start:end]])
            start = start + 1 if end is None else end
        return ids


def _speller(hf: Any) -> Callable[[str], bytes]:
    """Token as it is written → the bytes it stands for."""
    if hf.convert_tokens_to_string(["a", "Ġa"]) == "a a":
        letters = _byte_letters()
        return lambda token: b"".join(letters.get(letter, letter.encode()) for letter in token)
    if hf.convert_tokens_to_string(["a", "▁a"]) == "a a":
        return _spell_sentencepiece
    return str.encode


def _spell_sentencepiece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _byte_letters() -> dict[str, bytes]:
    """GPT-2's letters for bytes: Latin-1's printable ones are themselves, the others 256, 257, ... in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): bytes([byte]) for byte in plain}
    return letters | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}
