from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.models import linear as module
from specdec.models.linear import Linear, MklLinear, OneDnnLinear, PlainLinear, can_pack, linear

CPU = torch.device("cpu")
packs_float32 = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="torch was built without oneDNN")
has_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch was built without MKL")
PACKED = [pytest.param(OneDnnLinear, marks=packs_float32), pytest.param(MklLinear, marks=has_mkl)]


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_without_fast_kernels_fall_back(dtype: torch.dtype) -> None:
    assert not can_pack(CPU, dtype)
    assert type(linear(torch.ones(2, 2, dtype=dtype))) is PlainLinear


def test_other_devices_fall_back() -> None:
    assert not can_pack(torch.device("meta"), torch.float32)
    assert type(linear(torch.ones(2, 2, device="meta"))) is PlainLinear


def test_without_onednn_or_its_bfloat16_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert type(linear(torch.ones(2, 2))) is PlainLinear
    assert type(linear(torch.ones(2, 2, dtype=torch.bfloat16))) is PlainLinear


@packs_float32
@has_mkl
@pytest.mark.parametrize(("intel", "expected"), [(True, MklLinear), (False, OneDnnLinear)])
def test_float32_is_packed_for_the_processor(
    intel: bool, expected: type[Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_intel", lambda: intel)
    assert type(linear(torch.ones(2, 2))) is expected
    assert type(linear(torch.ones(2, 2, dtype=torch.bfloat16))) in (OneDnnLinear, PlainLinear)


@packs_float32
def test_without_mkl_every_processor_uses_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_intel", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert type(linear(torch.ones(2, 2))) is OneDnnLinear


@pytest.mark.parametrize("packed", PACKED)
def test_a_packed_product_lets_the_plain_weight_go(packed: type[MklLinear]) -> None:
    weight = torch.randn(5, 7)
    product = packed(weight)
    before = product(torch.ones(1, 7))
    weight.zero_()  # a packed copy does not see it
    torch.testing.assert_close(product(torch.ones(1, 7)), before)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (300, 64), (1030, 129)])
def test_a_layout_chosen_for_some_rows_serves_any_number(
    packed: type[MklLinear], biased: bool, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    product = packed(weight, bias if biased else None)
    for num_rows in [*range(1, 34), 64, 100, 257]:
        x = torch.randn(2, num_rows, 2 * shape[1], generator=generator)[..., ::2]  # not contiguous
        expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
        torch.testing.assert_close(product(x).double(), expected, atol=1e-4, rtol=1e-5)


def test_num_bytes_counts_weight_and_bias_once() -> None:
    assert linear(torch.ones(5, 7)).num_bytes == 5 * 7 * 4
    assert linear(torch.ones(5, 7), torch.ones(5)).num_bytes == 5 * 8 * 4
    assert linear(torch.ones(5, 7, dtype=torch.float64)).num_bytes == 5 * 7 * 8
