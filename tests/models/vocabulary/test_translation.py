"""Two tokenizers: what each spells, which tokens both have, and how one reads what the other wrote."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specdec.errors import UsageError
from specdec.models.base import LanguageModel
from specdec.models.vocabulary.lexicon import Lexicon
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.models.vocabulary.translation import MIN_SHARE, Translation
from tests.conftest import make_tokenizer

TEXT = "the cat's  éa\n你 7"


def wrapped(backend: Backend, name: str, specials: dict[str, str], also: tuple[str, ...] = ()) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True) for token in (*specials.values(), *also)])
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **specials), name)


def byte_level() -> Tokenizer:
    """GPT-2's kind, with a few merges; its turns end with <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("c", "a"), ("ca", "t"), ("Ġ", "cat"), ("Ã", "©"), ("Ġ", "Ġ")]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *map("".join, merges)])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend, "bytes", {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, ("<|tool|>",))


def sentencepiece(lead: bool = True) -> Tokenizer:
    """Llama's kind: unigram pieces after "▁", bytes for everything else, <s> in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁the", "▁cat", "▁", "a", "c", "t", "e", "h", "'", "s", "é", "你", "th", "▁ca", "7"]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = wrapped(backend, "pieces", specials, ("<|tool|>",))
    if lead:
        from tokenizers.processors import TemplateProcessing

        backend = tokenizer.hf.backend_tokenizer
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def words(*vocabulary: str) -> Tokenizer:
    backend = Backend(models.WordLevel({"[UNK]": 0, **{word: i for i, word in enumerate(vocabulary, 1)}}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrapped(backend, "words", {"unk_token": "[UNK]"})


def lexicon(tokenizer: Tokenizer) -> Lexicon:
    return Lexicon.of(tokenizer, tokenizer.vocab_size)


def translation(draft: Tokenizer, target: Tokenizer) -> Translation:
    return Translation(lexicon(draft), lexicon(target), target.vocab_size, "cpu")


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.get_vocab()[token] for token in tokens]


def spelt(own: Lexicon, read: np.ndarray) -> bytes:
    return b"".join(own.text_of(index) for index in read.tolist())


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece(lead=False), words("the", "cat")])
def test_every_token_spells_what_it_stands_for(tokenizer: Tokenizer) -> None:
    own = lexicon(tokenizer)
    text = "the cat" if tokenizer.name == "words" else TEXT
    spelled = spelt(own, np.array(tokenizer.encode(text)))
    expected = {"bytes": text, "pieces": " " + text, "words": "thecat"}[tokenizer.name]
    assert spelled.decode() == expected
    assert own.size == len(tokenizer.get_vocab())


def test_a_letter_is_found_before_its_byte() -> None:
    tokenizer = sentencepiece()
    assert lexicon(tokenizer).by_spelling[b"a"] == ids(tokenizer, "a")[0]
    assert lexicon(tokenizer).by_spelling[b"b"] == ids(tokenizer, "<0x62>")[0]


def test_ids_beyond_the_models_vocabulary_are_no_tokens() -> None:
    tokenizer = byte_level()
    cut = Lexicon.of(tokenizer, 256)
    assert cut.size == 256
    assert not cut.roles
    assert not cut.names


def test_equal_bytes_and_equal_roles_are_one_token() -> None:
    draft, target = sentencepiece(), byte_level()
    found = translation(draft, target)
    pairs = [("▁the", "Ġthe"), ("▁cat", "Ġcat"), ("é", "Ã©"), ("<0x0A>", "Ċ"), ("▁", "Ġ"), ("th", "th"), ("a", "a")]
    pairs += [("<|tool|>", "<|tool|>"), ("<s>", "<|im_start|>"), ("</s>", "<|im_end|>")]
    for own, other in pairs:
        assert found.read_drawn(torch.tensor(ids(target, other))).tolist() == ids(draft, own), (own, other)
    # 256 single bytes, " the", " cat", "é", "th", and three special tokens
    assert len(found) == 263


def test_special_tokens_of_other_roles_are_kept_apart() -> None:
    draft, target = make_tokenizer(("<s>", "<pad>", "</s>")), make_tokenizer(("</s>", "<mask>", "<end>"))
    found = translation(Tokenizer(draft, "draft"), Tokenizer(target, "target"))
    assert found.read_drawn(torch.tensor([256])).tolist() == [258], "by name, though their roles differ"
    assert len(found) == 256 + 1, "the draft's </s> is taken, <s> and <end> have different roles"


def test_what_only_one_has_is_never_proposed() -> None:
    draft, target = sentencepiece(), byte_level()
    found = translation(draft, target)
    logits = torch.randn(3, draft.vocab_size)
    logits[:, ids(draft, "你", "▁ca", "<0x61>", "<unk>")] = 50.0  # the draft's own, and a double
    expanded = found.expand(logits)
    lacking = ids(target, "ĠĠ", "the", "cat", "ca")
    assert expanded.shape == (3, target.vocab_size)
    assert (expanded[:, lacking] == -math.inf).all()
    assert expanded.isfinite().sum() == 3 * len(found)
    assert torch.equal(expanded[:, ids(target, "Ã©")], logits[:, ids(draft, "é")])
    assert torch.equal(found.choose(logits), expanded.argmax(-1))
    assert expanded.max() < 50


@pytest.mark.parametrize(
    ("draft", "target"),
    [(sentencepiece(lead=False), byte_level()), (byte_level(), sentencepiece(lead=False))],
    ids=lambda tokenizer: tokenizer.name,
)
def test_a_context_says_the_same_to_both(draft: Tokenizer, target: Tokenizer) -> None:
    found, tokens = translation(draft, target), np.array(target.encode(TEXT))
    text = spelt(lexicon(target), tokens)
    for _ in range(2):  # pieces are looked up the first time, remembered the second
        assert spelt(lexicon(draft), found.read(tokens)) == text
    begun = found.read(tokens[:-3])
    assert found.read(tokens)[: len(begun)].tolist() == begun.tolist()


def test_half_a_character_is_read_byte_by_byte() -> None:
    draft, target = sentencepiece(), byte_level()
    first, second = ids(target, "ä", "½")  # of 你
    read = translation(draft, target).read(np.array([first, second]))
    assert read.tolist() == ids(draft, "<0xE4>", "<0xBD>")


def test_a_special_token_without_a_counterpart_is_read_by_its_name() -> None:
    draft, target = byte_level(), Tokenizer(make_tokenizer(), "target")
    found = translation(draft, target)
    assert found.read(np.array(ids(target, "<|im_start|>"))).tolist() == ids(draft, "<|im_start|>")
    read = found.read(np.array(ids(target, "<|bos|>", "a")))
    assert spelt(lexicon(draft), read) == b"<|bos|>a", "the draft's own beginning is taken"
    assert len(read) == len("<|bos|>a")


def test_what_cannot_be_spelled_is_read_as_unknown() -> None:
    draft, target = words("the", "cat"), byte_level()
    read = translation(draft, target).read(np.array(ids(target, "the", "Ġthe", "x")))
    assert read.tolist() == ids(draft, "the", "the", "[UNK]")


def model_of(tokenizer: Tokenizer) -> LanguageModel:
    class Sized:
        name, vocab_size, device = tokenizer.name, tokenizer.vocab_size, torch.device("cpu")

    return Sized()  # type: ignore[return-value]


def between(draft: Tokenizer, target: Tokenizer) -> Translation:
    return Translation.between(model_of(draft), draft, model_of(target), target)


def test_a_draft_that_begins_texts_its_own_way_reads_its_beginning_once() -> None:
    draft, target = sentencepiece(), byte_level()
    found, start = between(draft, target), ids(draft, "<s>")
    (the,) = ids(draft, "▁the")
    assert found.read(np.array(ids(target, "Ġthe"))).tolist() == [*start, the]
    assert found.read(np.array(ids(target, "<|im_start|>", "Ġthe"))).tolist() == [*start, the]
    assert found.read(np.array(ids(target, "<|tool|>"))).tolist() == [*start, *ids(draft, "<|tool|>")]
    assert between(sentencepiece(lead=False), target).read(np.array(ids(target, "Ġthe"))).tolist() == [the]


def test_a_hopeless_overlap_is_refused_with_its_size(caplog: pytest.LogCaptureFixture) -> None:
    target = byte_level()
    assert 3 / target.vocab_size < MIN_SHARE
    with pytest.raises(UsageError) as refused:
        between(words("the", "cat", "th"), target)
    message = str(refused.value)
    assert "the draft words and the target bytes" in message
    assert "3 tokens are in both vocabularies, 1.1% of the target's 267 and 75.0% of the draft's 4" in message
    assert "prompt lookup" in message
    assert not caplog.records
    between(sentencepiece(), target)
    assert "pieces has another tokenizer than bytes: 263 tokens are in both vocabularies" in caplog.text
