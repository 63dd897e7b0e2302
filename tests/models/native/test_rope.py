from __future__ import annotations

import math

import torch

from specdec.models.native.rope import LinearScaling, Llama3Scaling, Rope, Sinusoidal, unscaled

CPU = torch.device("cpu")


def dot(query: torch.Tensor, key: torch.Tensor, at: int, start: int, rope: Rope) -> float:
    """Score of a query at one position and a key at another."""
    rotation = rope.build(32, 8, CPU).rotation(torch.tensor([[at, start]]), torch.float64)
    turned = rotation(torch.stack([query, key])[None, :, None])  # [1, 2, 1, 8]
    return float(turned[0, 0, 0] @ turned[0, 1, 0])


def test_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    near, far = dot(query, key, 5, 2, Rope()), dot(query, key, 905, 902, Rope())
    assert math.isclose(near, far, rel_tol=1e-9)
    assert not math.isclose(near, dot(query, key, 6, 2, Rope()), rel_tol=1e-3)


def test_position_zero_turns_nothing_and_lengths_stay() -> None:
    x = torch.randn(1, 2, 3, 8)
    turned = Rope().build(32, 8, CPU).rotation(torch.tensor([[0, 7]]), torch.float32)(x)
    torch.testing.assert_close(turned[:, 0], x[:, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(turned[:, 1], x[:, 1])


def test_linear_scaling_makes_a_position_a_fraction_of_itself() -> None:
    x = torch.randn(1, 1, 1, 8)
    squeezed = Rope(scaling=LinearScaling(4.0)).build(32, 8, CPU).rotation(torch.tensor([[12]]), torch.float32)(x)
    plain = Rope(scaling=unscaled).build(32, 8, CPU).rotation(torch.tensor([[3]]), torch.float32)(x)
    torch.testing.assert_close(squeezed, plain)


def test_llama3_keeps_fast_waves_stretches_slow_ones_and_meets_between() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    turns = torch.tensor([100.0, 4.0, 2.5, 1.0, 0.1])  # within the original context
    frequencies = turns * 2 * math.pi / 8192
    halfway = (1 + 1 / 8) / 2  # 2.5 turns lie halfway between 1 and 4
    torch.testing.assert_close(scaling(frequencies) / frequencies, torch.tensor([1.0, 1.0, halfway, 1 / 8, 1 / 8]))


def test_sinusoids_are_those_of_the_paper() -> None:
    encoding = Sinusoidal().build(6, 3, CPU)
    embedded = encoding.embed(torch.ones(1, 2, 6), torch.tensor([[0, 9]]))
    for row, position in enumerate((0, 9)):
        for pair in range(3):
            angle = position / 10000 ** (2 * pair / 6)
            assert math.isclose(embedded[0, row, 2 * pair], math.sqrt(6) + math.sin(angle), rel_tol=1e-6)
            assert math.isclose(embedded[0, row, 2 * pair + 1], math.sqrt(6) + math.cos(angle), rel_tol=1e-6)
    x = torch.randn(1, 2, 4, 3)
    assert encoding.rotation(torch.tensor([[0, 9]]), torch.float32)(x) is x


def test_large_positions_stay_exact_in_bfloat16() -> None:
    x = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(0))
    place, encoding = torch.tensor([[4097]]), Rope().build(32, 8, CPU)  # bfloat16 cannot hold 4097
    exact, rounded = encoding.rotation(place, torch.float32)(x), encoding.rotation(place, torch.bfloat16)(x.bfloat16())
    torch.testing.assert_close(rounded.float(), exact, atol=0.03, rtol=0)
