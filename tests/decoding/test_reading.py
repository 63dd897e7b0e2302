"""What the host reads of a step arrives as it was, in one copy."""

from __future__ import annotations

import torch

from specdec.decoding.reading import read
from specdec.testing.device import DeviceWatch


def test_on_the_host_nothing_is_copied() -> None:
    tensors = {"a": torch.arange(3), "b": torch.rand(2, 2)}
    found = read(tensors)
    assert all(found[name] is tensors[name] for name in tensors)


def test_what_lies_elsewhere_comes_in_one_copy_with_its_shape_and_type() -> None:
    shapes = {"a": ((3,), torch.long), "b": ((2, 0), torch.long), "c": ((), torch.bool), "d": ((2, 3), torch.float32)}
    away = {name: torch.zeros(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    with DeviceWatch() as watch:
        found = read({**away, "here": torch.ones(1)})
    assert watch.reads.total() == 1
    assert found["here"].item() == 1
    for name, (shape, dtype) in shapes.items():
        assert found[name].is_cpu
        assert (tuple(found[name].shape), found[name].dtype) == (shape, dtype)
