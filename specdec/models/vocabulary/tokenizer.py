"""Text to token ids and back, the same way for every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.errors import UsageError
from specdec.types import Prompt


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer and the name of the model it belongs to.

    `hf` is the wrapped `PreTrainedTokenizerBase`, for whatever is not here.
    """

    hf: Any
    name: str

    @property
    def has_chat_template(self) -> bool:
        """Whether it can encode messages."""
        return bool(self.hf.chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text, with the special tokens (a BOS, say) that the tokenizer itself adds."""
        return tuple(self.hf(text, verbose=False)["input_ids"])

    def encode_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of a prompt: raw text as it is, messages through the chat template up to the assistant's turn.

        The template writes the special tokens itself, so none is added twice.
        """
        if prompt.messages is None:
            return self.encode(prompt.text or "")
        if not self.has_chat_template:
            raise UsageError(
                f"prompt {prompt.id!r} has messages, but {self.name} has no chat template; "
                "give it as text, or choose an instruction-tuned model"
            )
        messages = [dict(message) for message in prompt.messages]
        return tuple(self.hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out, and spaces stay as the model wrote them."""
        text: str = self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def get_vocab(self) -> dict[str, int]:
        """Every token, special and added ones included, with its id."""
        vocabulary: dict[str, int] = self.hf.get_vocab()
        return vocabulary

    @property
    def vocab_size(self) -> int:
        """One more than the highest real id: what a model's padded vocabulary has above this is never a token."""
        return max(self.get_vocab().values()) + 1
