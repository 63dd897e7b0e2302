from __future__ import annotations

import pytest
import torch

from specdec.errors import UsageError
from specdec.models.tokenizer import Tokenizer
from specdec.models.vocab import align, fit_logits
from specdec.types import Prompt
from tests.conftest import REAL_VOCAB_SIZE, SPECIAL_TOKENS, make_tokenizer


class Vocabulary:
    """A tokenizer that is nothing but its vocabulary."""

    def __init__(self, *tokens: str) -> None:
        self._ids = {token: index for index, token in enumerate(tokens)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def test_same_tokenizer_shares_every_real_id() -> None:
    assert align(make_tokenizer(), Tokenizer(make_tokenizer(), "target"), "draft", "target") == REAL_VOCAB_SIZE


def test_one_vocabulary_may_go_on_where_the_other_ends() -> None:
    longer = make_tokenizer((*SPECIAL_TOKENS, "<think>"))
    assert align(make_tokenizer(), longer, "draft", "target") == REAL_VOCAB_SIZE
    assert align(longer, make_tokenizer(), "draft", "target") == REAL_VOCAB_SIZE


@pytest.mark.parametrize(
    ("draft", "agreeing"),
    [
        (Vocabulary("a", "b", "d"), "2 of 3"),  # another token on the same id
        (Vocabulary("b", "a", "c"), "1 of 3"),  # two tokens swapped
        (Vocabulary("a", "b", "x", "c"), "2 of 4"),  # one moved up
    ],
)
def test_different_tokenizers_are_refused_by_name(draft: Vocabulary, agreeing: str) -> None:
    with pytest.raises(UsageError, match=f"draft small and the target big .*{agreeing} ids agree"):
        align(draft, Vocabulary("a", "b", "c"), "small", "big")


@pytest.mark.parametrize(("draft_size", "target_size"), [(10, 10), (10, 12), (12, 10), (8, 12), (12, 8), (7, 9)])
def test_padding_gets_no_mass(draft_size: int, target_size: int) -> None:
    num_real = 8
    logits = torch.randn(2, 3, draft_size)
    logits[..., num_real:] = 50.0  # what a bug would let through
    fitted = fit_logits(logits, num_real, target_size)
    shared = min(num_real, draft_size)
    assert fitted.shape == (2, 3, target_size)
    assert torch.equal(fitted[..., :shared], logits[..., :shared])
    assert fitted.softmax(-1)[..., shared:].sum() == 0


def test_equal_vocabularies_are_not_copied() -> None:
    logits = torch.randn(2, 8)
    assert fit_logits(logits, 8, 8) is logits


def test_text_round_trips_through_the_tokenizer() -> None:
    tokenizer = Tokenizer(make_tokenizer(), "tiny")
    text = "  can't , stop .\n\té 你好 123"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode("end"), 258]) == "end"
    assert tokenizer.vocab_size == REAL_VOCAB_SIZE


def test_messages_go_through_the_chat_template_and_text_does_not() -> None:
    tokenizer = Tokenizer(make_tokenizer(), "tiny")
    chat = tokenizer.encode_prompt(Prompt("chat", messages=({"role": "user", "content": "hi"},)))
    assert tokenizer.hf.decode(chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_prompt(Prompt("raw", text="hi")) == tokenizer.encode("hi")


def test_the_beginning_of_text_is_not_doubled() -> None:
    hf = make_tokenizer()
    hf.chat_template = "{{ bos_token }}" + hf.chat_template
    hf.add_bos_token = True
    hf.backend_tokenizer.post_processor = _bos_adder()
    tokenizer = Tokenizer(hf, "tiny")
    chat = tokenizer.encode_prompt(Prompt("chat", messages=({"role": "user", "content": "hi"},)))
    assert chat.count(256) == 1
    assert tokenizer.encode_prompt(Prompt("raw", text="hi")).count(256) == 1


def _bos_adder() -> object:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])


def test_messages_without_a_chat_template_are_refused() -> None:
    hf = make_tokenizer()
    hf.chat_template = None
    with pytest.raises(UsageError, match="tiny has no chat template"):
        Tokenizer(hf, "tiny").encode_prompt(Prompt("chat", messages=({"role": "user", "content": "hi"},)))
