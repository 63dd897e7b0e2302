"""The kernels against the same written out in float64; and that a row's bits do not depend on its company."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import kernels
from specdec.cache.contiguous import ContiguousCache
from specdec.decoding.engine import ancestor_mask
from specdec.kernels import cpu, library
from specdec.machine.processor import features
from specdec.models.native.attention import eager
from specdec.models.native.config import TransformerConfig
from specdec.models.native.transformer import Transformer
from tests.models.native.test_transformer import random_weights

pytestmark = pytest.mark.skipif(kernels.build().library is None, reason=f"no kernels: {kernels.build().reason}")
NEEDS = {"native": set[str](), "x86-64": set[str](), "x86-64-v3": {"avx2", "fma"}}

WIDE = TransformerConfig(
    vocab_size=50,
    hidden_size=48,
    intermediate_size=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_positions=256,
    tied_head=True,
)
STORED = [torch.float32, torch.bfloat16]
LONGER = TransformerConfig(**{**vars(WIDE), "max_positions": 1024})


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forget_library() -> None:
    for made_once in (library.build, cpu._library, cpu._panel):
        made_once.cache_clear()


@pytest.fixture(scope="module", autouse=True, params=NEEDS)
def architecture(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test with this processor's vectors, and with those of others that it can run as well."""
    name: str = request.param
    if name != "native" and (platform.machine() != "x86_64" or not NEEDS[name] <= set(features().split())):
        pytest.skip(f"this processor does not run {name}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(library.ARCHITECTURE, name)
        forget_library()
        yield name
    forget_library()


def test_the_library_is_the_one_built_for_the_architecture(architecture: str) -> None:
    assert cpu._panel() == {"x86-64": 8, "x86-64-v3": 16}.get(architecture, cpu._panel())
    assert f"-march={architecture}" in library._options()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# Products, norms, SwiGLU


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (64, 32), (300, 64), (1030, 129)])
def test_a_product_of_any_number_of_rows(stored: torch.dtype, biased: bool, shape: tuple[int, int]) -> None:
    weight, bias = draw(*shape).to(stored), draw(shape[0], seed=1).to(stored) if biased else None
    product = kernels.Product(weight, bias)
    for num_rows in [*range(1, 40), 64, 100, 257, 481, 1000]:
        x, onto = draw(2, num_rows, 2 * shape[1], seed=2)[..., ::2], draw(2, num_rows, shape[0], seed=3)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(product(x).double(), expected, atol=2e-4, rtol=1e-5)
        torch.testing.assert_close(product(x, onto).double(), expected + onto, atol=2e-4, rtol=1e-5)


def test_widening_bfloat16_rounds_nothing() -> None:
    weight, x = draw(300, 64).bfloat16(), draw(9, 64, seed=1)
    assert torch.equal(kernels.Product(weight, None)(x), kernels.Product(weight.float(), None)(x))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("stored", STORED)
def test_a_row_has_the_same_bits_in_any_company(stored: torch.dtype) -> None:
    product, x = kernels.Product(draw(300, 129).to(stored), draw(300, seed=1)), draw(600, 129, seed=2)
    together = product(x)
    for first, last in [(0, 1), (3, 4), (0, 2), (5, 12), (0, 13), (7, 32), (80, 599)]:
        assert torch.equal(product(x[first:last]), together[first:last])
    torch.set_num_threads(1)
    assert torch.equal(product(x), together)


def test_no_rows_give_no_rows() -> None:
    assert kernels.Product(draw(5, 7), None)(torch.empty(0, 7)).shape == (0, 5)


def test_a_product_keeps_no_reference_to_the_plain_weight() -> None:
    weight, bias = draw(5, 7), draw(5)
    product = kernels.Product(weight, bias)
    before = product(torch.ones(1, 7))
    weight.zero_()
    assert torch.equal(product(torch.ones(1, 7)), before)


@pytest.mark.parametrize("width", [1, 7, 32, 100, 576])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(width: int, scale: float) -> None:
    x, weight = draw(2, 3, 2 * width)[..., ::2] * scale, draw(width, seed=1)
    expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("inner", [1, 16, 40, 100])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_feed_forward(inner: int, scale: float) -> None:
    gate_up, down, x, onto = draw(2 * inner, 9) * scale, draw(5, inner, seed=1), draw(2, 3, 9, seed=2), draw(2, 3, 5)
    gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
    expected = onto + (F.silu(gate) * up) @ down.double().T
    ours = kernels.feed_forward(kernels.Product(gate_up, None), kernels.Product(down, None), x, onto)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5 * scale * scale, rtol=1e-5)


# Attention, inside a model


def make_model(config: TransformerConfig = WIDE, **options: object) -> Transformer:
    return Transformer.from_state_dict(config, random_weights(config), **options)  # type: ignore[arg-type]


def forward(
    model: Transformer, cache: ContiguousCache, slots: list[int], tokens: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Logits [B, S, V] of tokens that follow what the slots hold; in a tree, at the depth its mask gives them."""
    starts = torch.tensor([cache.lengths[slot] for slot in slots])[:, None]
    depths = torch.arange(tokens.shape[1]) if mask is None else mask.sum(-1) - 1
    return model.forward(tokens, starts + depths, cache.view(slots), mask).logits


def tokens_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(WIDE.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("width", [6, 32, 40])
@pytest.mark.parametrize("slots", [[0], [0, 1, 2], [2, 0], [3, 1, 2]])
def test_the_model_computes_what_the_reference_does(kv_heads: int, width: int, slots: list[int]) -> None:
    """Against scores written out in float64: prompts of several lengths, then chains, a tree and single tokens."""
    config = TransformerConfig(**{**vars(WIDE), "num_kv_heads": kv_heads, "head_dim": width})
    ours, reference = make_model(config), make_model(config, dtype=torch.float64, attention=eager)
    caches = [model.new_cache(4, 200) for model in (ours, reference)]
    for slot in slots:
        prompt = tokens_of(1, 4 + 37 * slot, seed=slot)
        for model, cache in zip((ours, reference), caches, strict=True):
            forward(model, cache, [slot], prompt)
    tree = ancestor_mask(torch.tensor([[-1, -1, 0, 0, 1, 2]] * len(slots)))
    for tokens, mask in [(tokens_of(len(slots), s), None) for s in (1, 7, 1, 40)] + [(tokens_of(len(slots), 7), tree)]:
        logits, expected = (
            forward(model, cache, slots, tokens, mask) for model, cache in zip((ours, reference), caches, strict=True)
        )
        torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)
        for slot in slots:
            length = caches[0].lengths[slot]
            for mine, other in zip(caches[0].keys + caches[0].values, caches[1].keys + caches[1].values, strict=True):
                written, true = mine[slot, :, :length].double(), other[slot, :, :length]
                torch.testing.assert_close(written, true, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=STORED)
def longer(request: pytest.FixtureRequest, architecture: str) -> Transformer:
    return make_model(LONGER, dtype=request.param)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("length", [1, 31, 33, 150, 250, 256, 600])
def test_a_token_has_the_same_logits_alone_and_among_those_verified_with_it(longer: Transformer, length: int) -> None:
    """Also where a draft reaches into the next span of attention."""
    prompt, draft = tokens_of(1, length), tokens_of(1, 9, seed=2)
    cache = longer.new_cache(3, 700)
    for slot in range(2):
        forward(longer, cache, [slot], prompt)
    forward(longer, cache, [2], tokens_of(1, 70, seed=5))
    together = forward(longer, cache, [0], draft)
    one_by_one = [forward(longer, cache, [1], token[None]) for token in draft.T]
    assert torch.equal(together, torch.cat(one_by_one, dim=1))

    cache.rollback([0], [length])
    in_company = forward(longer, cache, [2, 0], torch.cat((tokens_of(1, 9, seed=6), draft)))
    assert torch.equal(in_company[1:], together)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("length", [1, 37, 250, 255, 256, 509])
def test_a_token_has_the_same_logits_alone_and_in_a_tree(longer: Transformer, length: int) -> None:
    """Every path of a tree against the same tokens one by one; in the tree a path's entries don't lie together."""
    parents = torch.tensor([[-1, 0, -1, 2, 1, 3, 4, 5, 7]])
    mask, nodes = ancestor_mask(parents), tokens_of(1, 10, seed=2)
    cache = longer.new_cache(2, 600)
    for slot in range(2):
        forward(longer, cache, [slot], tokens_of(1, length))
    in_tree = forward(longer, cache, [0], nodes, mask)[0]
    for leaf in (6, 9):
        path = mask[0, leaf].nonzero().flatten()
        cache.rollback([1], [length])
        alone = torch.cat([forward(longer, cache, [1], nodes[:, node, None]) for node in path], dim=1)[0]
        assert torch.equal(in_tree[path], alone)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("first", [1, 40, 300])
def test_a_prompt_gives_the_same_logits_whole_and_in_pieces(longer: Transformer, first: int) -> None:
    prompt, cache = tokens_of(1, 601), longer.new_cache(2, 601)
    whole = forward(longer, cache, [0], prompt)
    pieces = [
        forward(longer, cache, [1], piece) for piece in (prompt[:, :first], prompt[:, first:600], prompt[:, 600:])
    ]
    assert torch.equal(whole, torch.cat(pieces, dim=1))


def test_what_a_slot_held_before_is_not_seen() -> None:
    model, cache = make_model(), make_model().new_cache(1, 64)
    forward(model, cache, [0], tokens_of(1, 5))
    fresh = forward(model, cache, [0], tokens_of(1, 3, seed=2))
    forward(model, cache, [0], tokens_of(1, 20, seed=3))
    cache.rollback([0], [5])
    assert torch.equal(forward(model, cache, [0], tokens_of(1, 3, seed=2)), fresh)


def test_a_full_cache_is_refused_before_anything_is_written() -> None:
    model, cache = make_model(), make_model().new_cache(1, 8)
    forward(model, cache, [0], tokens_of(1, 6))
    before = cache.keys[0].clone()
    with pytest.raises(ValueError, match=r"holds 8 entries per sequence and 9 are needed"):
        forward(model, cache, [0], tokens_of(1, 3))
    assert torch.equal(cache.keys[0], before)


def test_scores_far_apart_neither_overflow_nor_spread() -> None:
    weights = random_weights(WIDE)
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            weights[name] *= 200
    double = {name: weight.double() for name, weight in weights.items()}
    ours = Transformer.from_state_dict(WIDE, weights)
    reference = Transformer.from_state_dict(WIDE, double, dtype=torch.float64, attention=eager)
    caches = ours.new_cache(1, 32), reference.new_cache(1, 32)
    logits, expected = (
        forward(ours, caches[0], [0], tokens_of(1, 12)),
        forward(reference, caches[1], [0], tokens_of(1, 12)),
    )
    assert logits.isfinite().all()
    torch.testing.assert_close(logits.double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("head_dim", [6, 32])
def test_what_computes_in_float32_goes_through_the_kernels(
    num_tokens: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(kernels.Layer, "__call__", lambda self, x, *rest: calls.append(x.shape[1]) or x)
    config = TransformerConfig(**{**vars(WIDE), "head_dim": head_dim})
    for model in (make_model(config, attention=eager), make_model(config, dtype=torch.float64)):
        forward(model, model.new_cache(1, 64), [0], tokens_of(1, num_tokens))
    assert calls == []
    for stored in STORED:
        model = make_model(config, dtype=stored)
        forward(model, model.new_cache(1, 64), [0], tokens_of(1, num_tokens))
    assert calls == [num_tokens] * 2 * WIDE.num_layers


def test_bfloat16_halves_the_bytes_of_the_weights() -> None:
    wide, narrow = make_model(), make_model(dtype=torch.bfloat16)
    assert (narrow.dtype, narrow.compute_dtype) == (torch.bfloat16, torch.float32)
    norms = wide.norm.num_bytes * (1 + 2 * wide.num_layers)
    assert narrow.num_bytes - norms == (wide.num_bytes - norms) / 2


def test_nothing_that_is_to_be_differentiated_is_served() -> None:
    assert kernels.serves(torch.ones(2))
    assert not kernels.serves(torch.ones(2, requires_grad=True))
    assert not kernels.serves(torch.ones(2, dtype=torch.bfloat16))
    assert not kernels.serves(torch.ones(2, device="meta"))
    assert kernels.packs(torch.ones(2, dtype=torch.bfloat16))
    assert not kernels.packs(torch.ones(2, requires_grad=True))
    assert not kernels.packs(torch.ones(2, dtype=torch.float16))
    assert not kernels.packs(torch.ones(2, device="meta"))


# What is read off the logits


@pytest.mark.parametrize("width", [1, 7, 16, 300, 1024, 1025, 49152])
@pytest.mark.usefixtures("two_threads")
def test_argmax_is_the_first_largest_or_the_first_that_is_no_number(width: int) -> None:
    x = torch.randint(-9, 9, (5, width), generator=torch.Generator().manual_seed(0)).float()  # full of ties
    x[1] = -math.inf
    x[2, width // 2 :] = math.inf
    x[3, width // 3], x[3, width - 1] = math.nan, math.nan
    assert kernels.argmax(x).tolist() == x.numpy().argmax(-1).tolist()
    assert kernels.argmax(x[0]).tolist() == int(x[0].numpy().argmax())


@pytest.mark.parametrize("width", [1, 7, 16, 300, 1025, 49152])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 1e3])
@pytest.mark.usefixtures("two_threads")
def test_entropy_of_logits(width: int, scale: float) -> None:
    logits = draw(2, 3, width) * scale + 1000
    logits[0, 1, width // 2 :] = -math.inf
    logits[0, 1, 0] = 0.0
    logs = logits.double().log_softmax(-1)
    expected = -(logs.exp() * logs.clamp(min=-1e4)).sum(-1)
    torch.testing.assert_close(kernels.entropy_nats(logits), expected, atol=2e-6, rtol=1e-6)


def test_entropy_of_what_is_no_distribution_is_no_number() -> None:
    logits = draw(4, 40)
    logits[1, 33], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    assert kernels.entropy_nats(logits).isnan().tolist() == [False, True, True, True]
