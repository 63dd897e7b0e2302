"""A draft model trained for one target: a few layers of its own between the target's embedding and head."""

from __future__ import annotations

from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.errors import UsageError
from specdec.models.base import LanguageModel, Tables
from specdec.models.loading.draft_checkpoint import DraftCheckpoint
from specdec.models.native.transformer import Transformer
from specdec.models.vocabulary.draft_vocabulary import DraftVocabulary
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.models.vocabulary.vocab import ReducedIds


class DistilledDrafter(AutoregressiveDrafter):
    """Reads every token of the target's, proposes those of its draft vocabulary alone.

    Training on the target's own output is DistillSpec's idea (2310.08461), the reduced head FR-Spec's (2502.14856).

    checkpoint: the name of a draft that ships with specdec, or a folder `python -m experiments.distill` has written.
    check_revision: refuse a target with other weights than the one it was trained for.
    """

    model: Transformer

    def __init__(self, checkpoint: str, *, check_revision: bool = True) -> None:
        self._checkpoint = DraftCheckpoint.find(checkpoint, "draft_model")
        self.name = self._checkpoint.name
        self._check_revision = check_revision

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        """Build the layers on the target's tables. Raises `UsageError` where they belong to another target."""
        checkpoint = self._checkpoint
        checkpoint.refuse_other_target(target, self._check_revision)
        weights, tables = checkpoint.weights(), target.tables()
        if "draft_vocab" not in weights:
            raise UsageError(f"the trained draft {self.name} has no draft_vocab; copy or train it again")
        vocabulary = DraftVocabulary.checked(weights.pop("draft_vocab"), target.vocab_size, self.name).on(target.device)
        self._token_map = ReducedIds(vocabulary, target.vocab_size)
        self.model = Transformer.from_state_dict(
            checkpoint.config,
            weights,
            device=target.device,
            dtype=target.dtype,
            shared=Tables(tables.embedding, tables.head[vocabulary.ids]),
            name=self.name,
        )

    @property
    def num_bytes(self) -> int:
        """Its cache, its layers, and its copy of the head's rows; the embedding is the target's."""
        model = self.model
        layers = sum(layer.num_bytes for layer in model.layers)
        return self._cache.num_bytes + layers + model.norm.num_bytes + model.head.num_bytes
