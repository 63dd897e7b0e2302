from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec import kernels
from specdec.kernels import cpu
from specdec.models.native.linear import PlainLinear, compute_dtype, linear

STORED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
needs_kernels = pytest.mark.skipif(kernels.build().library is None, reason=f"no kernels: {kernels.build().reason}")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_library", lambda: None)


def check_product(stored: torch.dtype, biased: bool, shape: tuple[int, ...]) -> None:
    """Weights are what they are stored as, and nothing else is rounded to that."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(5, 7, generator=generator).to(stored), torch.randn(5, generator=generator).to(stored)
    computing = compute_dtype(stored, torch.device("cpu"))
    x = torch.randn(shape, generator=generator).to(computing)
    product = linear(weight, bias if biased else None)
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    tolerance = 1e-12 if stored == torch.float64 else 1e-5
    assert product(x).dtype == computing
    torch.testing.assert_close(product(x).double(), expected, atol=tolerance, rtol=0)
    onto = torch.randn(expected.shape, generator=generator).to(computing)
    torch.testing.assert_close(product(x, onto).double(), expected + onto, atol=2 * tolerance, rtol=0)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(7,), (1, 1, 7), (2, 9, 7), (1, 100, 7)])
def test_the_product_is_that_of_the_stored_weights(stored: torch.dtype, biased: bool, shape: tuple[int, ...]) -> None:
    check_product(stored, biased, shape)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("stored", STORED)
def test_without_kernels_it_is_the_same(stored: torch.dtype) -> None:
    check_product(stored, biased=True, shape=(2, 9, 7))
    assert type(linear(torch.ones(2, 2, dtype=stored))) is PlainLinear


@pytest.mark.parametrize("stored", STORED)
def test_a_cpu_computes_in_float32_at_least_and_other_devices_in_what_is_stored(stored: torch.dtype) -> None:
    wide = torch.float64 if stored == torch.float64 else torch.float32
    assert compute_dtype(stored, torch.device("cpu")) == wide
    assert compute_dtype(stored, torch.device("meta")) == stored


@needs_kernels
@pytest.mark.parametrize("stored", STORED)
def test_float32_and_bfloat16_go_through_the_kernels_on_a_cpu(stored: torch.dtype) -> None:
    packed = type(linear(torch.ones(2, 2, dtype=stored))) is kernels.Product
    assert packed == (stored in (torch.float32, torch.bfloat16))
    assert type(linear(torch.ones(2, 2, dtype=stored, device="meta"))) is PlainLinear


@pytest.mark.usefixtures("without_kernels")
def test_num_bytes_counts_weight_and_bias_once() -> None:
    assert linear(torch.ones(5, 7)).num_bytes == 5 * 7 * 4
    assert linear(torch.ones(5, 7), torch.ones(5)).num_bytes == 5 * 8 * 4
    assert linear(torch.ones(5, 7, dtype=torch.bfloat16)).num_bytes == 5 * 7 * 2
    assert linear(torch.ones(5, 7, dtype=torch.float64)).num_bytes == 5 * 7 * 8


@needs_kernels
def test_num_bytes_counts_what_the_kernels_fill_up_with() -> None:
    assert linear(torch.ones(64, 7)).num_bytes == 64 * 7 * 4
    assert linear(torch.ones(64, 7, dtype=torch.bfloat16)).num_bytes == 64 * 7 * 2
    assert linear(torch.ones(65, 7), torch.ones(65)).num_bytes > 65 * 8 * 4
