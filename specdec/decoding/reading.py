"""The one read of a step: whatever the host must know of it, in one copy.

Every read of a device's memory waits until the device has come that far, and nothing is queued meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the host, of the same shapes and dtypes. Those that are there already are not copied.

    The others travel as one tensor of float64, which holds every token id, count and float32 exactly.
    """
    away = {name: tensor for name, tensor in tensors.items() if not tensor.is_cpu}
    if not away:
        return dict(tensors)
    packed = torch.cat([tensor.flatten().double() for tensor in away.values()]).cpu()
    parts = torch.split(packed, [prod(tensor.shape) for tensor in away.values()])
    found = {
        name: part.to(tensor.dtype).view(tensor.shape) for (name, tensor), part in zip(away.items(), parts, strict=True)
    }
    return {**tensors, **found}
