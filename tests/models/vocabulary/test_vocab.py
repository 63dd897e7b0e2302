from __future__ import annotations

import pytest
import torch

from specdec.errors import UsageError
from specdec.models.vocabulary.draft_vocabulary import DraftVocabulary
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.models.vocabulary.vocab import ReducedIds, SameIds, shared_ids
from specdec.types import Prompt
from tests.conftest import REAL_VOCAB_SIZE, SPECIAL_TOKENS, make_tokenizer


class Vocabulary:
    """A tokenizer that is nothing but its vocabulary."""

    def __init__(self, *tokens: str) -> None:
        self._ids = {token: index for index, token in enumerate(tokens)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def test_same_tokenizer_shares_every_real_id() -> None:
    assert shared_ids(make_tokenizer(), Tokenizer(make_tokenizer(), "target")) == REAL_VOCAB_SIZE


def test_one_vocabulary_may_go_on_where_the_other_ends() -> None:
    longer = make_tokenizer((*SPECIAL_TOKENS, "<think>"))
    assert shared_ids(make_tokenizer(), longer) == REAL_VOCAB_SIZE
    assert shared_ids(longer, make_tokenizer()) == REAL_VOCAB_SIZE


@pytest.mark.parametrize(
    "draft",
    [
        Vocabulary("a", "b", "d"),  # another token on the same id
        Vocabulary("b", "a", "c"),  # two tokens swapped
        Vocabulary("a", "b", "x", "c"),  # one moved up
    ],
)
def test_different_tokenizers_share_no_ids(draft: Vocabulary) -> None:
    assert shared_ids(draft, Vocabulary("a", "b", "c")) is None


@pytest.mark.parametrize(("draft_size", "target_size"), [(10, 10), (10, 12), (12, 10), (8, 12), (12, 8), (7, 9)])
def test_padding_gets_no_mass(draft_size: int, target_size: int) -> None:
    num_real = 8
    logits = torch.randn(2, 3, draft_size)
    logits[..., num_real:] = 50.0  # what a bug would let through
    ids, shared = SameIds(num_real, target_size), min(num_real, draft_size)
    expanded = ids.expand(logits)
    assert expanded.shape == (2, 3, target_size)
    assert torch.equal(expanded[..., :shared], logits[..., :shared])
    assert expanded.softmax(-1)[..., shared:].sum() == 0
    assert torch.equal(ids.choose(logits), logits[..., :shared].argmax(-1))


def test_equal_vocabularies_are_not_copied() -> None:
    logits = torch.randn(2, 8)
    assert SameIds(8, 8).expand(logits) is logits


def test_a_reduced_vocabulary_means_the_targets_ids() -> None:
    ids, logits = torch.tensor([5, 0, 3]), torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 4.0]])
    reduced = ReducedIds(DraftVocabulary(ids), 7)
    assert reduced.choose(logits).tolist() == [0, 3]
    expanded = reduced.expand(logits)
    assert torch.equal(expanded[:, ids], logits)
    assert expanded.isinf().sum() == 2 * 4
    assert torch.equal(reduced.choose(logits), expanded.argmax(-1))


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
