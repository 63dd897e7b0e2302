import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from specdec.errors import UsageError
from specdec.sampling.distributions import (
    argmax,
    entropy_bits,
    expected_acceptance,
    in_bits,
    logits_entropy_nats,
    one_hot,
    parent_probs,
    probabilities,
    sample,
    token_probs,
)
from specdec.testing.exact import chi_square_p_value
from specdec.types import PADDING, Draft, SamplingParams

V = 300
IDS = torch.zeros(1, 1, dtype=torch.long)  # transformers' warpers want ids and ignore them


def _logits(batch: int = 3, positions: int = 4, scale: float = 2.5, seed: int = 0) -> Tensor:
    return torch.randn(batch, positions, V, generator=torch.Generator().manual_seed(seed)) * scale


def _reference(logits: Tensor, params: SamplingParams) -> Tensor:
    """transformers' own warpers, in the order generate() builds them."""
    scores = logits.float().reshape(-1, logits.shape[-1])
    scores = hf.TemperatureLogitsWarper(params.temperature)(IDS, scores)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(IDS, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(IDS, scores)
    if params.min_p:
        scores = hf.MinPLogitsWarper(params.min_p)(IDS, scores)
    return scores.softmax(-1).view(logits.shape)


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 0.8, "top_k": 17},
    {"temperature": 0.8, "top_k": 10 * V},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.5, "top_k": 5, "top_p": 0.95},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 2.5, 8.0])
def test_agrees_with_transformers(options: dict[str, float], scale: float) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    logits = _logits(scale=scale)
    found, wanted = probabilities(logits, [params] * 3), _reference(logits, params)
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_changes_the_distribution(options: dict[str, float]) -> None:
    if options == {"temperature": 1.0}:
        options = {"temperature": 0.0}
    params = [SamplingParams(**options)] * 3  # type: ignore[arg-type]
    assert not torch.allclose(probabilities(_logits(), params), _logits().softmax(-1), atol=1e-4)


def test_large_nuclei_need_no_luck() -> None:
    # Flat and peaked positions together: most need more candidates than the first look has.
    logits = (
        torch.randn(1, 6, 5000, generator=torch.Generator().manual_seed(1))
        * torch.tensor([0, 0.3, 1, 2, 4, 9])[:, None]
    )
    logits[0, 0] = torch.linspace(0, 1, 5000)
    params = SamplingParams(temperature=1.0, top_p=0.97)
    assert torch.equal(probabilities(logits, [params]) > 0, _reference(logits, params) > 0)


@pytest.mark.parametrize(("top_p", "size"), [(0.5, 50), (0.505, 51), (0.01, 1), (0.99, 99)])
def test_nucleus_of_equals_keeps_the_lowest_ids(top_p: float, size: int) -> None:
    logits = torch.zeros(1, 2, 100, dtype=torch.float64)
    probs = probabilities(logits, [SamplingParams(temperature=1.0, top_p=top_p - 1e-4)])
    for position in range(2):
        assert probs[0, position].nonzero()[:, 0].tolist() == list(range(size))


def test_tie_at_the_edge_of_the_nucleus() -> None:
    logits = torch.tensor([0.1, 0.4, 0.1, 0.3, 0.1]).log().expand(1, 1, -1)
    probs = probabilities(logits, [SamplingParams(temperature=1.0, top_p=0.75)])
    torch.testing.assert_close(probs[0, 0], torch.tensor([0.125, 0.5, 0, 0.375, 0]))


def test_greedy_is_exactly_one_hot_at_the_first_maximum() -> None:
    logits = torch.tensor([[[1.0, 3, 3, 0]]])
    assert probabilities(logits, [SamplingParams()]).tolist() == [[[0, 1, 0, 0]]]
    assert probabilities(logits.bfloat16(), [SamplingParams(top_k=2, top_p=0.5)]).tolist() == [[[0, 1, 0, 0]]]


def test_mixed_batch_is_each_row_alone() -> None:
    params = [
        SamplingParams(temperature=1.0, top_p=0.7, seed=1),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=0.7, seed=2),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=0.9, repetition_penalty=1.5),
    ]
    logits = _logits(batch=5)
    seen = lambda row, position: (np.arange(row * 10), np.arange(position))  # noqa: E731
    together = probabilities(logits, params, seen)
    for row in range(5):
        alone = probabilities(logits[row : row + 1], [params[row]], lambda _, position, row=row: seen(row, position))
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=1.0),
    ],
)
def test_logits_are_left_alone_and_the_result_is_float32(dtype: torch.dtype, params: SamplingParams) -> None:
    logits = _logits().to(dtype)
    copy = logits.clone()
    probs = probabilities(logits, [params] * 3, lambda row, position: (np.arange(5), np.arange(3)))
    logits_entropy_nats(logits)
    assert torch.equal(logits, copy)
    assert probs.dtype == torch.float32
    assert torch.equal(
        probs, probabilities(copy.float(), [params] * 3, lambda row, position: (np.arange(5), np.arange(3)))
    )
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 4))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forbidden_tokens_stay_forbidden(options: dict[str, float]) -> None:
    logits = _logits()
    logits[..., ::2] = -math.inf
    probs = probabilities(logits, [SamplingParams(**options)] * 3)  # type: ignore[arg-type]
    assert (probs[..., ::2] == 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 4))


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-300])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    probs = probabilities(_logits() * 100, [SamplingParams(temperature=temperature)] * 3)
    torch.testing.assert_close(probs, probabilities(_logits() * 100, [SamplingParams()] * 3))


def test_repetition_penalty_agrees_with_transformers() -> None:
    logits = _logits(batch=1, positions=1)
    prompt, output = np.array([3, 4, 4, 9]), np.array([4, 20])
    params = SamplingParams(temperature=0.7, repetition_penalty=1.4)
    ids = torch.from_numpy(np.concatenate([prompt, output]))[None]
    wanted = _reference(
        hf.RepetitionPenaltyLogitsProcessor(1.4)(ids, logits[0].clone())[None], SamplingParams(temperature=0.7)
    )
    torch.testing.assert_close(probabilities(logits, [params], lambda row, position: (prompt, output)), wanted)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = torch.zeros(1, 1, 4)
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    probs = probabilities(logits, [params], lambda row, position: (np.array([0, 0]), np.array([1, 2, 2, 2])))
    torch.testing.assert_close(probs[0, 0], torch.tensor([0, -0.75, -1.25, 0]).softmax(0))


def test_penalties_come_before_greedy_choice_and_see_the_drafts_before_them() -> None:
    logits = torch.tensor([3.0, 2.5, 2.0]).expand(1, 3, -1)
    drafts = np.array([0, 1])
    probs = probabilities(
        logits, [SamplingParams(presence_penalty=1.0)], lambda row, position: (np.array([2]), drafts[:position])
    )
    assert probs.argmax(-1).tolist() == [[0, 1, 0]]


def test_penalties_without_history_are_refused() -> None:
    with pytest.raises(UsageError, match=r"row 1 .* seen"):
        probabilities(_logits(), [SamplingParams(), SamplingParams(presence_penalty=1.0), SamplingParams()])


def test_history_is_not_asked_of_rows_that_need_none() -> None:
    asked = []

    def seen(row: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append((row, position))
        return np.array([1]), np.array([], dtype=np.int64)

    probabilities(_logits(2, 2), [SamplingParams(), SamplingParams(frequency_penalty=1.0)], seen)
    assert asked == [(1, 0), (1, 1)]


def test_sample_follows_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    n = 80
    tokens = sample(probs.expand(n, -1), (torch.arange(n).double() + 0.5) / n)  # stratified: exact shares
    assert torch.equal(torch.bincount(tokens, minlength=5) / n, probs)


@pytest.mark.parametrize("uniform", [0.0, 2**-53, 0.5, 1 - 2**-53, 1.0])
def test_sample_never_returns_the_impossible(uniform: float) -> None:
    rows = torch.tensor([[0, 0, 0.3, 0, 0.7, 0], [0, 1, 0, 0, 0, 0], [1e-45, 0, 0, 0, 1e-45, 0], [0, 0, 0, 0, 0, 1]])
    tokens = sample(rows, torch.full((4,), uniform, dtype=torch.float64))
    assert (rows.gather(1, tokens[:, None]) > 0).all()


def test_sample_reaches_a_tail_that_float32_sums_would_lose() -> None:
    probs = torch.cat([torch.ones(1), torch.full((200,), 1e-9)])[None]
    assert int(sample(probs, torch.tensor([1 - 1e-7], dtype=torch.float64))) == pytest.approx(100, abs=1)


def test_sample_by_chi_square() -> None:
    logits = _logits(1, 1)
    probs = probabilities(logits, [SamplingParams(temperature=1.0, top_p=0.8)])[0]
    uniforms = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(sample(probs.expand(20_000, -1), uniforms), minlength=V).numpy()
    exact = probs[0].double().numpy()
    assert chi_square_p_value(counts, exact / exact.sum()) > 1e-6  # the false-failure probability


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_of_logits(dtype: torch.dtype) -> None:
    logits = (_logits() + 1000).to(dtype)
    wanted = torch.distributions.Categorical(logits=logits.double()).entropy() / math.log(2)
    found = torch.tensor(in_bits(logits_entropy_nats(logits)), dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_entropy_in_bits() -> None:
    logits = torch.full((1, 1, 64), -math.inf)
    logits[..., :8] = 3.0
    assert in_bits(logits_entropy_nats(logits))[0] == pytest.approx([3], abs=1e-6)
    assert float(entropy_bits(logits.softmax(-1))) == pytest.approx(3, abs=1e-6)
    certain = one_hot(torch.tensor(5), 64)
    assert float(entropy_bits(certain)) == 0
    assert in_bits(logits_entropy_nats(certain.log()[None, None])) == [[0]]


def test_entropy_of_a_truncated_distribution() -> None:
    probs = probabilities(_logits(), [SamplingParams(temperature=0.7, top_p=0.9)] * 3)
    torch.testing.assert_close(entropy_bits(probs), torch.special.entr(probs).sum(-1) / math.log(2))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_entropy_finds_broken_logits(broken: float) -> None:
    logits = _logits(1, 3)
    logits[0, 1] = broken if broken < 0 else logits[0, 1]
    logits[0, 1, 7] = broken
    assert [math.isnan(bits) for bits in in_bits(logits_entropy_nats(logits))[0]] == [False, True, False]


def test_token_probs_of_padding_are_zero() -> None:
    probs = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    assert token_probs(probs, torch.tensor([[1, PADDING]])).tolist() == [[0.75, 0]]


def test_expected_acceptance_of_a_chain() -> None:
    target = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [1, 0, 0]]])
    drafted = torch.tensor([[[0.2, 0.2, 0.6], [0.1, 0.1, 0.8]]])
    draft = Draft(torch.tensor([[2, 1]]), torch.tensor([2]), drafted)
    torch.testing.assert_close(expected_acceptance(draft, target), torch.tensor([[0.6, 1.0]]))
    certain = Draft(draft.tokens, draft.lengths)
    torch.testing.assert_close(expected_acceptance(certain, target), torch.tensor([[0.2, 0.1]]))


def test_expected_acceptance_of_a_tree_and_of_padding() -> None:
    target = torch.rand(2, 4, 5).softmax(-1)
    tokens = torch.tensor([[1, 2, 3], [4, PADDING, PADDING]])
    parents = torch.tensor([[-1, -1, 0], [-1, PADDING, PADDING]])
    draft = Draft(tokens, torch.tensor([3, 1]), parents=parents)
    judges = parent_probs(draft, target)
    assert torch.equal(judges[0], target[0, [0, 0, 1]])
    found = expected_acceptance(draft, target)
    assert found[0].tolist() == [target[0, 0, 1], target[0, 0, 2], target[0, 1, 3]]
    assert found[1].tolist() == [target[1, 0, 4], 0, 0]
    drafted = torch.rand(2, 3, 5).softmax(-1)
    drafted[1, 1:] = math.nan
    found = expected_acceptance(Draft(tokens, draft.lengths, drafted, parents), target)
    torch.testing.assert_close(found[0], torch.minimum(judges[0], drafted[0]).sum(-1))
    assert found[1, 1:].tolist() == [0, 0]


@pytest.mark.parametrize("vocab_size", [7, 32, 300, 512, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_maximum(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 0] = 1.0  # all equal: the first
    logits[0, 1, vocab_size // 2 :] = 9.0  # a tie across blocks
    logits[1, 0] = -math.inf
    logits[1, 0, vocab_size - 1] = -50.0
    found = argmax(logits)
    assert found.tolist() == logits.double().numpy().argmax(-1).tolist()
    assert found[0].tolist()[:2] == [0, vocab_size // 2]
