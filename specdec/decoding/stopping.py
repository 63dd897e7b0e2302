"""Where a sequence ends: the one place that knows about EOS, stop strings, limits and the context window.

The rule looks at one token after another, so it cannot tell whether they came one per step or eight: plain and
speculative decoding end alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.types import FinishReason, Request

Decode = Callable[[Sequence[int]], str]
"""Token ids → text."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's sign for half a UTF-8 character


class TextStream:
    """Text of a growing token sequence, with the length of the text after each token.

    Decodes a short tail per token, never the whole output: a token's text may depend on its predecessors
    (spaces, split UTF-8), so the tail starts at the last boundary where the text was complete.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._tail_start = 0  # decode from here ...
        self._complete = 0  # ... and show what comes after here
        self.text = ""
        self.text_lengths: list[int] = []

    def push(self, token: int) -> None:
        """Append one token."""
        self._tokens.append(token)
        shown = self._decode(self._tokens[self._tail_start : self._complete])
        tail = self._decode(self._tokens[self._tail_start :])
        if len(tail) > len(shown) and not tail.endswith(_INCOMPLETE):
            self.text += tail[len(shown) :]
            self._tail_start, self._complete = self._complete, len(self._tokens)
        self.text_lengths.append(len(self.text))

    def flush(self) -> None:
        """Show a dangling half character, as decoding the whole output would."""
        shown = self._decode(self._tokens[self._tail_start : self._complete])
        self.text += self._decode(self._tokens[self._tail_start :])[len(shown) :]
        self._tail_start = self._complete = len(self._tokens)
        if self.text_lengths:
            self.text_lengths[-1] = len(self.text)


class Ending:
    """Follows one request's output and says when and where it ends.

    After `reason` is set, `tokens` is what was emitted and `text` what a reader sees. A stop string is cut from both:
    `tokens` keeps the fewest tokens whose text covers everything before it.
    """

    def __init__(self, request: Request, window: int, decode: Decode | None, *, stream: bool = False) -> None:
        self._request = request
        self._decode = decode
        self._max_new_tokens = min(request.max_new_tokens, window - len(request.prompt_ids))
        self._limit_reason = (
            FinishReason.LENGTH if self._max_new_tokens == request.max_new_tokens else FinishReason.WINDOW
        )
        self._stream = TextStream(decode) if decode is not None and (stream or request.stop) else None
        self._held_back = max((len(stop) for stop in request.stop), default=1) - 1
        self._shown = 0
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self._cut_text: str | None = None

    @property
    def remaining(self) -> int:
        """Tokens the request may still emit."""
        return self._max_new_tokens - len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take what a step granted; everything after the cut is dropped."""
        for token in tokens:
            if self.reason is None:
                self._push(token)

    def _push(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._request.eos_ids:
            self.reason = FinishReason.EOS
        else:
            self._push_text(token)
            if self.reason is None and self.remaining == 0:
                self.reason = self._limit_reason
        if self.reason is not None and self._stream is not None and self._cut_text is None:
            searched = max(0, len(self._stream.text) - self._held_back)
            self._stream.flush()
            self._cut_at_stop(self._stream, searched)

    def _push_text(self, token: int) -> None:
        if self._stream is None:
            return
        searched = max(0, len(self._stream.text) - self._held_back)
        self._stream.push(token)
        self._cut_at_stop(self._stream, searched)

    def _cut_at_stop(self, stream: TextStream, searched: int) -> None:
        """End before the first stop string that is not wholly in the first `searched` characters."""
        found = [at for stop in self._request.stop if (at := stream.text.find(stop, searched)) >= 0]
        if not found:
            return
        self.reason, cut = FinishReason.STOP, min(found)
        self._cut_text = stream.text[:cut]
        kept = 0 if cut == 0 else next(i for i, end in enumerate(stream.text_lengths) if end >= cut) + 1
        del self.tokens[kept:]

    @property
    def text(self) -> str:
        """The output's text; empty without a tokenizer."""
        if self._cut_text is not None:
            return self._cut_text
        if self._stream is not None:
            return self._stream.text
        spoken = self.tokens[:-1] if self.reason is FinishReason.EOS else self.tokens
        return self._decode(spoken) if self._decode is not None else ""

    def new_text(self) -> str:
        """Text that became safe to show since the last call: the beginning of a stop string is held back."""
        text = self.text
        safe = len(text) if self.reason is not None else max(len(text) - self._held_back, self._shown)
        delta, self._shown = text[self._shown : safe], safe
        return delta
