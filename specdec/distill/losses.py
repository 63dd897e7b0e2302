"""How far a draft's distribution is from the target's: logits [N, Vd] each → [N]."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from specdec.errors import UsageError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(draft logits, target logits) → one value per position, in nats where it has a unit."""


def forward_kl(draft: Tensor, target: Tensor) -> Tensor:
    """Σ P log(P / Q): punishes mass the draft lacks; the usual distillation loss."""
    log_target = target.log_softmax(-1)
    return (log_target.exp() * (log_target - draft.log_softmax(-1))).sum(-1)


def total_variation(draft: Tensor, target: Tensor) -> Tensor:
    """½ Σ |P − Q| = 1 − alpha at this position: what rejection sampling loses (DistillSpec 2310.08461)."""
    return (target.softmax(-1) - draft.softmax(-1)).abs().sum(-1) / 2


def cross_entropy(draft: Tensor, target: Tensor) -> Tensor:
    """−log Q of the target's most likely token: what greedy acceptance asks for."""
    return -draft.log_softmax(-1).gather(-1, target.argmax(-1, keepdim=True))[..., 0]


LOSSES: Mapping[str, Loss] = {
    "forward_kl": forward_kl,
    "total_variation": total_variation,
    "cross_entropy": cross_entropy,
}


def find_loss(name: str) -> Loss:
    """The loss of a name; `UsageError` listing them for any other."""
    if name not in LOSSES:
        raise UsageError(f"loss={name!r} is unknown; choose from {', '.join(LOSSES)}")
    return LOSSES[name]
