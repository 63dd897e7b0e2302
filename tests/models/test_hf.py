"""The adapter against transformers itself, on tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from specdec.cache.dynamic import DynamicCache
from specdec.cache.replaying import ReplayingCache
from specdec.errors import UsageError
from specdec.models.hf import HFModel
from tests.conftest import PADDED_VOCAB_SIZE, make_model

ROLLING_BACK = ["llama", "mistral_window", "gemma2", "gpt2"]
RECURRENT = ["qwen3_next", "lfm2", "jamba", "mamba", "falcon_h1"]
TOKENS = torch.arange(1, 21)[None] * 7 % PADDED_VOCAB_SIZE  # [1, 20], longer than every window in these models
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def adapter() -> Callable[[str], HFModel]:
    models: dict[str, HFModel] = {}

    def get(kind: str) -> HFModel:
        if kind not in models:
            models[kind] = HFModel(make_model(kind), kind)
        return models[kind]

    return get


def run(model: HFModel, cache: DynamicCache, tokens: Tensor, **options: Any) -> Tensor:
    """Append [1, S] tokens after what the cache holds; logits [1, N, V]."""
    start = cache.lengths[0]
    positions = torch.arange(start, start + tokens.shape[1])[None]
    return model.forward(tokens, positions, cache.view([0]), **options).logits


@pytest.mark.parametrize("kind", [*ROLLING_BACK, *RECURRENT])
def test_pieces_give_the_logits_of_the_whole(adapter: Callable[[str], HFModel], kind: str) -> None:
    model = adapter(kind)
    with torch.no_grad():
        expected = make_model(kind)(TOKENS).logits
    cache = model.new_cache(1, 32)
    pieces = torch.cat([run(model, cache, part) for part in TOKENS.split([9, 1, 4, 6], dim=1)], dim=1)
    assert cache.lengths == (20,)
    torch.testing.assert_close(pieces, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ROLLING_BACK)
@settings(max_examples=10)
@given(steps=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=4))
def test_any_appends_and_rollbacks_leave_no_trace(
    adapter: Callable[[str], HFModel], kind: str, steps: list[tuple[int, int]]
) -> None:
    model, generator = adapter(kind), torch.Generator().manual_seed(0)
    cache, kept = model.new_cache(1, 64), torch.empty(1, 0, dtype=torch.long)
    for num_appended, num_removed in steps:
        new = torch.randint(PADDED_VOCAB_SIZE, (1, num_appended), generator=generator)
        run(model, cache, new)
        kept = torch.cat([kept, new], dim=1)
        kept = kept[:, : max(kept.shape[1] - num_removed, 0)]
        cache.rollback([0], [kept.shape[1]])
    last = torch.tensor([[5]])
    fresh = run(model, model.new_cache(1, 64), torch.cat([kept, last], dim=1))[:, -1]
    torch.testing.assert_close(run(model, cache, last)[:, -1], fresh, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", RECURRENT)
@settings(max_examples=10)
@given(steps=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=8))
def test_state_is_put_back_and_goes_on_with_what_was_kept(
    adapter: Callable[[str], HFModel], kind: str, steps: list[tuple[int, int]]
) -> None:
    """Logits and features of every forward, whatever the ones before it left to be read again."""
    model, generator = adapter(kind), torch.Generator().manual_seed(0)
    cache, kept = model.new_cache(1, 128), torch.empty(1, 0, dtype=torch.long)
    for num_appended, num_removed in steps:
        new = torch.randint(PADDED_VOCAB_SIZE, (1, num_appended), generator=generator)
        places = torch.arange(kept.shape[1], kept.shape[1] + num_appended)[None]
        found = model.forward(new, places, cache.view([0]), hidden_layers=(1, 3))
        text = torch.cat([kept, new], dim=1)
        whole = model.forward(
            text, torch.arange(text.shape[1])[None], model.new_cache(1, 128).view([0]), hidden_layers=(1, 3)
        )
        assert found.hidden is not None
        assert whole.hidden is not None
        torch.testing.assert_close(found.logits, whole.logits[:, -num_appended:], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(found.hidden, whole.hidden[:, -num_appended:], atol=TOLERANCE, rtol=TOLERANCE)
        kept = text[:, : text.shape[1] - min(num_removed, num_appended)]
        cache.rollback([0], [kept.shape[1]])
        assert cache.lengths == (kept.shape[1],)


@pytest.mark.parametrize(("kind", "most"), [("qwen3_next", 21), ("jamba", 6)])  # Jamba reads its draft one by one
def test_what_is_read_again_is_bounded(
    adapter: Callable[[str], HFModel], monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    model, kept, fed = adapter(kind), TOKENS[:, :4], []
    read = ReplayingCache.read

    def watched(cache: ReplayingCache, tokens: Tensor) -> Tensor:
        fed.append(read(cache, tokens))
        return fed[-1]

    monkeypatch.setattr(ReplayingCache, "read", watched)
    cache = model.new_cache(1, 128)
    run(model, cache, kept)
    cache.rollback([0], [4])
    for _ in range(10):  # three of six are accepted
        run(model, cache, TOKENS[:, :6])
        cache.rollback([0], [cache.lengths[0] - 3])
        kept = torch.cat([kept, TOKENS[:, :3]], dim=1)
    assert max(tokens.shape[1] for tokens in fed) == most
    fresh = run(model, model.new_cache(1, 128), torch.cat([kept, TOKENS[:, :1]], dim=1))
    torch.testing.assert_close(run(model, cache, TOKENS[:, :1])[:, -1], fresh[:, -1], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_trees_are_verified_under_their_mask_and_gathered(adapter: Callable[[str], HFModel], kind: str) -> None:
    model, prompt = adapter(kind), TOKENS[:, :8]
    assert model.supports_trees
    root, left, right, leaf = 3, 40, 50, 60  # right and left are siblings, leaf hangs under right
    mask = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], dtype=torch.bool)
    cache = model.new_cache(1, 32)
    run(model, cache, prompt)
    tree = torch.tensor([[root, left, right, leaf]])
    logits = model.forward(tree, torch.tensor([[8, 9, 9, 10]]), cache.view([0]), mask).logits
    chain = torch.cat([prompt, torch.tensor([[root, right, leaf]])], dim=1)
    expected = run(model, model.new_cache(1, 32), chain)
    torch.testing.assert_close(logits[:, [0, 2, 3]], expected[:, 8:], atol=TOLERANCE, rtol=0)

    cache.keep([0], [8], [[0, 2, 3]])
    assert cache.lengths == (11,)
    after = run(model, cache, torch.tensor([[7]]))
    whole = run(model, model.new_cache(1, 32), torch.cat([chain, torch.tensor([[7]])], dim=1))
    torch.testing.assert_close(after[:, -1], whole[:, -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # with and without transformers' own logits_to_keep
def test_logits_only_where_asked(adapter: Callable[[str], HFModel], kind: str) -> None:
    model = adapter(kind)
    everywhere = run(model, model.new_cache(1, 32), TOKENS)
    some = run(model, model.new_cache(1, 32), TOKENS, logits_at=torch.tensor([[2, 19]]))
    torch.testing.assert_close(some, everywhere[:, [2, 19]], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_hidden_features_are_the_residual_stream(adapter: Callable[[str], HFModel], kind: str) -> None:
    model, reference = adapter(kind), make_model(kind)
    positions = torch.arange(20)[None]
    output = model.forward(TOKENS, positions, model.new_cache(1, 32).view([0]), hidden_layers=(3, 0, 2))
    with torch.no_grad():
        theirs = reference(TOKENS, output_hidden_states=True).hidden_states
    assert output.hidden is not None
    assert output.hidden.shape == (1, 20, 3, 32)
    torch.testing.assert_close(output.hidden[:, :, 1], theirs[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(output.hidden[:, :, 2], theirs[2], atol=TOLERANCE, rtol=0)
    # transformers shows the last layer after the final norm; here it is before, as for every other layer
    final_norm = dict(reference.get_decoder().named_children())["ln_f" if kind == "gpt2" else "norm"]
    torch.testing.assert_close(final_norm(output.hidden[:, :, 0]), theirs[3], atol=TOLERANCE, rtol=0)


def test_recurrent_state_goes_back_to_what_was_kept_last_and_no_further(adapter: Callable[[str], HFModel]) -> None:
    model = adapter("qwen3_next")
    cache = model.new_cache(1, 32)
    assert cache.can_rollback
    assert not model.supports_trees
    run(model, cache, TOKENS[:, :4])
    cache.rollback([0], [4])
    run(model, cache, TOKENS[:, :2])
    with pytest.raises(UsageError, match=r"cannot roll back 3 entries: .* the last rollback left it, 2 entries ago"):
        cache.rollback([0], [3])
    cache.free(0)
    assert (cache.lengths, cache.num_unread) == ((0,), 0)
    assert cache.num_bytes == model.new_cache(1, 32).num_bytes


def test_what_makes_drafts_slow_is_said_at_construction(adapter: Callable[[str], HFModel]) -> None:
    slow = {kind: [said for said in adapter(kind).limitations if "one token at a time" in said] for kind in RECURRENT}
    assert [kind for kind, said in slow.items() if said] == ["jamba", "mamba"]


def test_a_quantised_cache_is_named() -> None:
    class QuantizedLayer(DynamicLayer):
        """Stands in for transformers' own, which needs a quantisation backend."""

    class Past:
        layers = (DynamicLayer(), QuantizedLayer())

    cache = DynamicCache(Past, 8)
    assert cache.unable == ("QuantizedLayer",)
    assert not cache.can_rollback


def test_windows_are_kept_whole_and_trees_refused(adapter: Callable[[str], HFModel]) -> None:
    model = adapter("mistral_window")
    assert model.new_cache(1, 128).can_rollback
    assert not model.supports_trees
    assert any("cannot verify trees" in sentence for sentence in model.limitations)


def test_a_model_that_wants_its_own_cache_is_refused_when_built() -> None:
    reference = make_model("llama")

    def forward(input_ids: Tensor, past_key_values: object = None, use_cache: bool = True) -> None:
        raise ValueError("bring my own cache")

    reference.forward = forward
    with pytest.raises(UsageError, match=r"stubborn cannot be decoded .*bring my own cache"):
        HFModel(reference, "stubborn")


def test_a_model_without_a_cache_is_refused_when_built() -> None:
    reference = make_model("llama")
    reference.forward = lambda input_ids: None
    with pytest.raises(UsageError, match="LlamaForCausalLM takes no key-value cache"):
        HFModel(reference, "forgetful")


def test_one_sequence_at_a_time(adapter: Callable[[str], HFModel]) -> None:
    model = adapter("llama")
    assert model.max_batch == 1
    with pytest.raises(UsageError, match="one sequence at a time, not 2"):
        model.new_cache(2, 8)
    cache = model.new_cache(1, 8)
    with pytest.raises(UsageError, match="slot 0"):
        cache.view([1])
    with pytest.raises(UsageError, match="cannot roll back to 3 entries"):
        cache.rollback([0], [3])


def test_a_freed_cache_is_as_new(adapter: Callable[[str], HFModel]) -> None:
    model = adapter("llama")
    cache = model.new_cache(1, 32)
    first = run(model, cache, TOKENS)
    assert cache.num_bytes == 2 * 3 * 2 * 8 * 20 * 4  # keys and values, layers, kv heads, head_dim, entries, float32
    cache.free(0)
    assert cache.lengths == (0,)
    assert cache.num_bytes == 0
    assert torch.equal(run(model, cache, TOKENS), first)


def test_view_appends_like_any_cache(adapter: Callable[[str], HFModel]) -> None:
    view = adapter("llama").new_cache(1, 8).view([0])
    keys, values = torch.randn(2, 1, 2, 3, 8)
    view.append(0, keys, values)
    view.advance(3)
    more_keys, more_values = torch.randn(2, 1, 2, 1, 8)
    all_keys, all_values = view.append(0, more_keys, more_values)
    assert torch.equal(all_keys, torch.cat([keys, more_keys], dim=2))
    assert torch.equal(all_values, torch.cat([values, more_values], dim=2))


def test_what_the_adapter_reports(adapter: Callable[[str], HFModel]) -> None:
    model = adapter("gpt2")
    assert (model.vocab_size, model.num_layers, model.hidden_size) == (PADDED_VOCAB_SIZE, 3, 32)
    assert model.max_positions == 128
    assert model.dtype is torch.float32
    assert model.device == torch.device("cpu")
