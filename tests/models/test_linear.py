from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.models.linear import PackedLinear, PlainLinear, can_pack, linear

CPU = torch.device("cpu")
packs_float32 = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="torch was built without oneDNN")


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
def test_float32_on_cpu_is_packed_and_the_plain_weight_let_go() -> None:
    weight = torch.randn(5, 7)
    product = linear(weight)
    assert type(product) is PackedLinear
    before = product(torch.ones(1, 7))
    weight.zero_()  # a packed copy does not see it
    torch.testing.assert_close(product(torch.ones(1, 7)), before)


def test_num_bytes_counts_weight_and_bias_once() -> None:
    assert linear(torch.ones(5, 7)).num_bytes == 5 * 7 * 4
    assert linear(torch.ones(5, 7), torch.ones(5)).num_bytes == 5 * 8 * 4
    assert linear(torch.ones(5, 7, dtype=torch.float64)).num_bytes == 5 * 7 * 8
