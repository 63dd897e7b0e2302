"""Harvested shards as padded batches, in an order that depends on the seed and the step alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.distill.harvest import Continuation, load_shard, shard_sizes
from specdec.distill.networks import Examples
from specdec.errors import UsageError


class Harvest:
    """The shards of a folder, or the first `limit` of them.

    wanted: which of the stored features a draft reads, as indices into them.
    """

    def __init__(
        self, folder: Path, wanted: Sequence[int], batch_size: int, seed: int = 0, limit: int | None = None
    ) -> None:
        self.shards = sorted(folder.glob("[0-9]*.safetensors"))[:limit]
        if not self.shards:
            raise UsageError(f"{folder} holds no harvested continuations; run the harvest first")
        self._wanted, self._batch_size, self._seed = list(wanted), batch_size, seed
        self._counts = [-(-shard_sizes(shard)[0] // batch_size) for shard in self.shards]

    @property
    def batches_per_epoch(self) -> int:
        """Batches until every continuation has been seen once."""
        return sum(self._counts)

    def batches(self, start: int) -> Iterator[Examples]:
        """Endless, from batch number `start` on: what an interrupted training has not seen yet."""
        epoch, skipped = divmod(start, self.batches_per_epoch)
        while True:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            for index in torch.randperm(len(self.shards), generator=generator).tolist():
                order = torch.randperm(self._counts[index] * self._batch_size, generator=generator).tolist()
                if skipped >= self._counts[index]:
                    skipped -= self._counts[index]
                    continue
                yield from self._of_shard(index, order, skipped)
                skipped = 0
            epoch += 1

    def _of_shard(self, index: int, order: Sequence[int], skipped: int) -> Iterator[Examples]:
        found = load_shard(self.shards[index])
        chosen = [found[number] for number in order if number < len(found)]
        starts = range(0, len(chosen), self._batch_size)
        for start in starts[skipped:]:
            yield collate(chosen[start : start + self._batch_size], self._wanted)

    def frequent_tokens(self, count: int, vocab_size: int) -> Tensor:
        """The draft vocabulary: the `count` ids most frequent in the continuations, [count] int64, most frequent first.

        Where fewer occur, prompts count too, then the lowest ids: byte-pair vocabularies are ranked by frequency.
        """
        said: Counter[int] = Counter()
        read: Counter[int] = Counter()
        for shard in self.shards:
            for one in load_shard(shard):
                said.update(one.tokens[one.num_prompt :].tolist())
                read.update(one.tokens[: one.num_prompt].tolist())
        ranked = sorted(range(vocab_size), key=lambda token: (-said[token], -read[token], token))
        return torch.tensor(ranked[:count])


def collate(found: Sequence[Continuation], wanted: Sequence[int]) -> Examples:
    """Pad on the right. A root is followed by a token and the features of that token."""
    lengths = [len(one.tokens) for one in found]
    width = max(lengths)
    tokens = torch.zeros(len(found), width, dtype=torch.long)
    features = torch.zeros(len(found), width, len(wanted), found[0].features.shape[-1])
    last = torch.zeros(len(found), width, found[0].features.shape[-1])
    scored = torch.zeros(len(found), width, dtype=torch.bool)
    for row, (one, length) in enumerate(zip(found, lengths, strict=True)):
        tokens[row, :length] = one.tokens
        features[row, : length - 1] = one.features[:, list(wanted)]
        last[row, : length - 1] = one.features[:, -1]
        scored[row, one.num_prompt - 1 : length - 2] = True
    return Examples(tokens, features, last, scored, torch.tensor(lengths))
