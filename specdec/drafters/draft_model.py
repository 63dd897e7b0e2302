"""A small language model drafts token by token: the classic pair of Leviathan 2211.17192 and Chen 2302.01318."""

from __future__ import annotations

from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.errors import UsageError
from specdec.models.base import LanguageModel
from specdec.models.loading import LoadedModel, load_model
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.models.vocabulary.translation import Translation
from specdec.models.vocabulary.vocab import SameIds, TokenMap, shared_ids


class DraftModelDrafter(AutoregressiveDrafter):
    """Any causal language model. Best with the target's tokenizer; any other works through the tokens both have.

    What another tokenizer costs in acceptance, and when it is refused, is in `specdec.models.vocabulary.translation`.
    """

    def __init__(self, draft: LoadedModel) -> None:
        self.name = draft.name
        self.model = draft.model
        self._draft = draft

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str = "float32",
        device: str = "auto",
        device_map: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> DraftModelDrafter:
        """From an embedded model's name, a local directory or a hub id; see `specdec.models.loading.load_model`."""
        return cls(
            load_model(
                model,
                dtype=dtype,
                device=device,
                device_map=device_map,
                revision=revision,
                trust_remote_code=trust_remote_code,
            )
        )

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        """Find out what the draft's ids mean in the target's.

        Raises `UsageError` where two tokenizers have too little in common, or none is given and sizes differ.
        """
        self._token_map = self._map_to(target, tokenizer)

    def _map_to(self, target: LanguageModel, tokenizer: Tokenizer | None) -> TokenMap:
        if tokenizer is not None:
            num_real = shared_ids(self._draft.tokenizer, tokenizer)
            if num_real is None:
                return Translation.between(self.model, self._draft.tokenizer, target, tokenizer)
            return SameIds(num_real, target.vocab_size)
        if self.model.vocab_size != target.vocab_size:
            raise UsageError(
                f"draft {self.name} has {self.model.vocab_size} token ids and target {target.name} "
                f"{target.vocab_size}; pass the tokenizer so that they can be aligned"
            )
        return SameIds(self.model.vocab_size, target.vocab_size)
