from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec import kernels
from specdec.kernels import cpu
from specdec.models.native.linear import OneDnnLinear, PlainLinear, has_onednn, linear, packs

CPU = torch.device("cpu")
packs_float32 = pytest.mark.skipif(not has_onednn(CPU, torch.float32), reason="torch was built without oneDNN")
needs_kernels = pytest.mark.skipif(kernels.build().library is None, reason=f"no kernels: {kernels.build().reason}")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_library", lambda: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(7,), (1, 1, 7), (2, 9, 7), (1, 100, 7)])
def test_the_product_is_that_of_torch(dtype: torch.dtype, biased: bool, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(5, 7, generator=generator), torch.randn(5, generator=generator)
    x, ours = torch.randn(shape, generator=generator), bias.to(dtype) if biased else None
    product = linear(weight.to(dtype), ours)(x.to(dtype))
    assert product.dtype == dtype
    expected = F.linear(x.to(dtype).double(), weight.to(dtype).double(), None if ours is None else ours.double())
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 0.06)
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=0)
    onto = torch.randn(product.shape, generator=generator).to(dtype)
    added = linear(weight.to(dtype), ours)(x.to(dtype), onto)
    torch.testing.assert_close(added.double(), expected + onto, atol=2 * tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_without_fast_products_fall_back(dtype: torch.dtype) -> None:
    assert not packs(CPU, dtype)
    assert type(linear(torch.ones(2, 2, dtype=dtype))) is PlainLinear


def test_other_devices_fall_back() -> None:
    assert not packs(torch.device("meta"), torch.float32)
    assert type(linear(torch.ones(2, 2, device="meta"))) is PlainLinear


@needs_kernels
def test_float32_goes_through_the_kernels() -> None:
    assert type(linear(torch.ones(2, 2))) is kernels.Product
    assert type(linear(torch.ones(2, 2, dtype=torch.bfloat16))) in (OneDnnLinear, PlainLinear)


@packs_float32
@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_float32_goes_through_onednn() -> None:
    assert packs(CPU, torch.float32)
    assert type(linear(torch.ones(2, 2))) is OneDnnLinear


@pytest.mark.usefixtures("without_kernels")
def test_without_onednn_or_its_bfloat16_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not packs(CPU, torch.float32)
    assert type(linear(torch.ones(2, 2))) is PlainLinear
    assert type(linear(torch.ones(2, 2, dtype=torch.bfloat16))) is PlainLinear


@packs_float32
def test_onednn_lets_the_plain_weight_go() -> None:
    weight = torch.randn(5, 7)
    product = OneDnnLinear(weight)
    before = product(torch.ones(1, 7))
    weight.zero_()  # a packed copy does not see it
    torch.testing.assert_close(product(torch.ones(1, 7)), before)


@packs_float32
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (300, 64), (1030, 129)])
def test_onednns_layout_chosen_for_some_rows_serves_any_number(biased: bool, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    product = OneDnnLinear(weight, bias if biased else None)
    for num_rows in [*range(1, 34), 64, 100, 257]:
        x = torch.randn(2, num_rows, 2 * shape[1], generator=generator)[..., ::2]  # not contiguous
        expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
        torch.testing.assert_close(product(x).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.usefixtures("without_kernels")
def test_num_bytes_counts_weight_and_bias_once() -> None:
    assert linear(torch.ones(5, 7)).num_bytes == 5 * 7 * 4
    assert linear(torch.ones(5, 7), torch.ones(5)).num_bytes == 5 * 8 * 4
    assert linear(torch.ones(5, 7, dtype=torch.float64)).num_bytes == 5 * 7 * 8


@needs_kernels
def test_num_bytes_counts_what_the_kernels_fill_up_with() -> None:
    assert linear(torch.ones(64, 7)).num_bytes == 64 * 7 * 4
    assert linear(torch.ones(65, 7), torch.ones(65)).num_bytes > 65 * 8 * 4
