"""What every verification rule is: a pure function from a draft and probabilities to a verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto

import torch
from torch import Tensor

from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, Verdict


def worth_asking(which: Tensor) -> Tensor:
    """Rows to go on with, given which need it: [B] bool → [R] int64.

    Exactly those on the host, where looking is free. Elsewhere all, since to look is to wait for the device: what is
    done with the rows must leave the others as they are.
    """
    return which.nonzero()[:, 0] if which.is_cpu else torch.arange(len(which), device=which.device)


class SiblingDraws(Enum):
    """How the children of one node must have been drawn for a rule to be lossless."""

    ANY = auto()  # each from what it reports, which may depend on its elder siblings
    INDEPENDENT = auto()  # with replacement: all from one distribution
    DISTINCT = auto()  # without replacement: no token twice


class Verifier(ABC):
    """A rule. No model, no tokenizer, no cache, no mutation of its arguments.

    lossless: emitted tokens follow the target's distribution exactly.
    greedy_only: the rule is only right at temperature 0 (one-hot target distributions).
    accepts_trees: drafts with `parents` may be given.
    siblings: what it takes for granted about drafts with `parents` that have probabilities.
    tokenwise: drafts are chains judged one token after another, so that accepted ÷ examined estimates alpha.
    coupled: tokens are chosen by the noise of their position (`Uniforms.choose`), and drafters may use the same.
    synthetic: acceptance is set, not earned; named so wherever it appears.
    greedy_when_certain: where target and draft distributions are one-hot, the rule decides as `GreedyTreeVerifier`. The
        engine then compares tokens and does not ask it. Not inherited: a rule made out of another may decide otherwise.

    Drafts without probabilities are one-hot to every rule.
    """

    lossless: bool = True
    greedy_only: bool = False
    accepts_trees: bool = False
    siblings: SiblingDraws = SiblingDraws.ANY
    tokenwise: bool = True
    coupled: bool = False
    synthetic: bool = False
    greedy_when_certain: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.greedy_when_certain = cls.__dict__.get("greedy_when_certain", False)

    @abstractmethod
    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Decide how much of the draft stays.

        target_probs: [B, K + 1, V]; index 0 is the distribution after the last emitted token (the root),
        index i + 1 the one after draft node i. Entries beyond a row's own length are ignored. Nothing may be read from
        a device: off the host, no loop and no shape depends on what a tensor holds (`worth_asking`).
        """
