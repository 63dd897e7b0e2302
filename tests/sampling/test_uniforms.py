import subprocess
import sys

import numpy as np
import pytest
import torch

from specdec.sampling.distributions import sample
from specdec.sampling.uniforms import Purpose, Uniforms, _exponentials, request_key
from specdec.testing.exact import chi_square_p_value

FALSE_ALARM = 1e-6  # of each test below, were the generator truly random; it is fixed, so they pass always or never

KEY_A, KEY_1A = 140742745180244919, 10939470743932660649
ACCEPT_DRAWS = [[0.36483796916610245, 0.9814487910495248], [0.816841234214717, 0.4305393418813439]]
CHOSEN = [45539, 3030]
TARGET_DRAWS = [[0.6749295623818332], [0.42398112485190087]]


def test_known_values_never_change() -> None:
    # Results are stored under their seeds: a changed stream must not go unnoticed.
    assert request_key(0, "a") == KEY_A
    assert request_key(1, "a") == KEY_1A
    uniforms = Uniforms([KEY_A, KEY_1A], [0, 7])
    assert uniforms.draw(Purpose.ACCEPT, 0, 2).tolist() == ACCEPT_DRAWS
    assert uniforms.draw(Purpose.TARGET, 0, 1).tolist() == TARGET_DRAWS


def test_stream_is_published_splitmix64() -> None:
    # Vigna's reference implementation started at 0 yields these first three words.
    uniforms = Uniforms([0], [0])
    uniforms._streams = np.array([0], dtype=np.uint64) - np.array(
        [int(Purpose.DRAFT) << 32], dtype=np.uint64
    ) * np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert uniforms.draw(Purpose.DRAFT, 1, 3)[0].tolist() == [(word >> 11) / 2**53 for word in words]


def test_key_is_the_same_in_another_process() -> None:
    code = "from specdec.sampling.uniforms import request_key; print(request_key(3, 'räksmörgås'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == request_key(3, "räksmörgås")


def test_keys_do_not_collide_across_seed_and_id() -> None:
    keys = {
        request_key(seed, name) for seed in range(12) for name in ["1", "11", "1/1", "", "/", *map(str, range(20, 60))]
    }
    assert len(keys) == 12 * 45


def test_rows_do_not_know_each_other() -> None:
    keys, steps = [request_key(0, str(i)) for i in range(5)], [3, 1, 4, 1, 5]
    together = Uniforms(keys, steps).draw(Purpose.ACCEPT, 0, 4)
    for row in range(5):
        assert torch.equal(Uniforms([keys[row]], [steps[row]]).draw(Purpose.ACCEPT, 0, 4)[0], together[row])
    assert torch.equal(Uniforms(keys[::-1], steps[::-1]).draw(Purpose.ACCEPT, 0, 4), together.flip(0))
    assert torch.equal(Uniforms(keys, steps).select([4, 2]).draw(Purpose.ACCEPT, 0, 4), together[[4, 2]])


def test_rows_do_not_know_each_other_when_they_race() -> None:
    probs = torch.rand(5, 1000, generator=torch.Generator().manual_seed(0))
    keys, positions = [request_key(0, str(i)) for i in range(5)], [3, 1, 400, 1, 5]
    together = Uniforms(keys, [1] * 5, positions=positions).choose(probs, 2)
    for row in range(5):
        alone = Uniforms([keys[row]], [7], positions=[positions[row]])  # the step is of no account
        assert alone.choose(probs[row : row + 1], 2) == together[row]
        later = Uniforms([keys[row]], [7], positions=[positions[row] + 2])
        assert later.choose(probs[row : row + 1], 0) == together[row]
    assert torch.equal(
        Uniforms(keys, [1] * 5, positions=positions).select([4, 2]).choose(probs[[4, 2]], 2), together[[4, 2]]
    )


def test_a_known_race_never_changes() -> None:
    uniforms = Uniforms([KEY_A, KEY_1A], [0, 7], positions=[10, 11])
    flat = torch.full((2, 49_152), 1 / 49_152)
    assert uniforms.choose(flat, 0).tolist() == CHOSEN
    assert uniforms.on(torch.device("meta")).positions == (10, 11)


def test_a_race_is_won_in_proportion() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.115, 0.01])
    batch = 40_000
    uniforms = Uniforms([request_key(0, str(i)) for i in range(batch)], [0] * batch, positions=[9] * batch)
    chosen = uniforms.choose(2 * probs.expand(batch, -1), 0)  # need not sum to 1
    assert chi_square_p_value(np.bincount(chosen, minlength=6), probs.double().numpy()) > FALSE_ALARM


def test_a_race_among_many_is_fair_by_place() -> None:
    batch, count = 3000, 20_000
    uniforms = Uniforms([request_key(1, str(i)) for i in range(batch)], [0] * batch, positions=range(batch))
    chosen = torch.cat([uniforms.select([row]).choose(torch.ones(1, count), 0) for row in range(batch)])
    places = np.histogram(chosen.numpy(), bins=50, range=(0, count))[0]
    assert chi_square_p_value(places, np.full(50, 0.02)) > FALSE_ALARM
    assert chi_square_p_value(np.bincount(chosen.numpy() % 16, minlength=16), np.full(16, 1 / 16)) > FALSE_ALARM


def test_times_are_exponential() -> None:
    seeds = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, (100, 2), dtype=np.int32))
    times = _exponentials(seeds, 10_000).double().numpy()
    assert times.min() > 0
    assert times.max() <= 32
    counts = np.histogram(1 - np.exp(-times.ravel()), bins=100, range=(0, 1))[0]
    assert chi_square_p_value(counts, np.full(100, 0.01)) > FALSE_ALARM
    for axis in (0, 1):
        first, second = (1 - np.exp(-np.delete(times, place, axis)) for place in (-1, 0))
        pairs = np.histogram2d(first.ravel(), second.ravel(), bins=12, range=[[0, 1], [0, 1]])[0]
        assert chi_square_p_value(pairs.ravel(), np.full(144, 1 / 144)) > FALSE_ALARM


def test_coupled_uniforms_are_what_drafters_draw_with() -> None:
    probs = torch.rand(40, 30, generator=torch.Generator().manual_seed(0))
    keys, positions = range(40), range(40)
    own, shared = (Uniforms(keys, [1] * 40, positions=positions, coupled=coupled) for coupled in (False, True))
    assert torch.equal(shared.draft(probs, 3), shared.choose(probs, 3))
    assert torch.equal(own.draft(probs, 3), sample(probs, own.draw(Purpose.DRAFT, 3, 1)[:, 0]))
    assert torch.equal(shared.select([4]).draft(probs[[4]], 3), shared.choose(probs, 3)[[4]])
    assert not torch.equal(own.draft(probs, 3), shared.draft(probs, 3))


def test_rows_without_a_position_do_not_race() -> None:
    with pytest.raises(ValueError, match="positions"):
        Uniforms([1], [1]).choose(torch.ones(1, 3), 0)
    with pytest.raises(ValueError, match="2 positions"):
        Uniforms([1], [1], positions=[1, 2])


def test_node_numbers_not_widths_decide() -> None:
    uniforms = Uniforms([1], [2])
    whole = uniforms.draw(Purpose.DRAFT, 0, 9)
    assert torch.equal(whole[:, 3:5], uniforms.draw(Purpose.DRAFT, 3, 2))
    assert torch.equal(whole, uniforms.draw(Purpose.DRAFT, 0, 9))
    assert uniforms.draw(Purpose.DRAFT, 0, 0).shape == (1, 0)
    assert whole.dtype == torch.float64


def test_every_argument_matters() -> None:
    draws = [
        float(Uniforms([request_key(seed, name)], [step]).draw(purpose, node, 1))
        for seed in range(3)
        for name in ("a", "b")
        for step in range(3)
        for purpose in Purpose
        for node in range(3)
    ]
    assert len(set(draws)) == len(draws) == 3 * 2 * 3 * len(Purpose) * 3


def _sample() -> np.ndarray:
    """[purpose, request, step, node]."""
    keys = [request_key(0, f"request-{i}") for i in range(40) for _ in range(50)]
    uniforms = Uniforms(keys, list(range(50)) * 40)
    return np.stack([uniforms.draw(purpose, 0, 16).numpy().reshape(40, 50, 16) for purpose in Purpose])


def test_uniform() -> None:
    draws = _sample()
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert chi_square_p_value(counts, np.full(100, 0.01)) > FALSE_ALARM


def test_low_bits_are_uniform_too() -> None:
    counts = np.histogram((_sample() * 2**20) % 1, bins=100, range=(0, 1))[0]
    assert chi_square_p_value(counts, np.full(100, 0.01)) > FALSE_ALARM


def test_neighbours_are_independent_along_every_axis() -> None:
    draws = _sample()
    for axis in range(4):
        first, second = np.delete(draws, -1, axis), np.delete(draws, 0, axis)
        counts = np.histogram2d(first.ravel(), second.ravel(), bins=12, range=[[0, 1], [0, 1]])[0]
        assert chi_square_p_value(counts.ravel(), np.full(144, 1 / 144)) > FALSE_ALARM


def test_independence_test_can_fail() -> None:
    draws = _sample()
    counts = np.histogram2d(draws.ravel(), (draws.ravel() + 0.05) % 1, bins=12, range=[[0, 1], [0, 1]])[0]
    assert chi_square_p_value(counts.ravel(), np.full(144, 1 / 144)) < FALSE_ALARM
