"""Any transformers causal language model behind this project's `LanguageModel`.

The native transformer is faster and batches ragged rows; this adapter is for everything it does not know. What it
cannot do for a given model is in `limitations`, one sentence each, from the moment it is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec.cache.base import CacheView
from specdec.cache.dynamic import DynamicCache, DynamicView
from specdec.cache.replaying import ReplayingCache, is_recurrent, states
from specdec.errors import UsageError
from specdec.models.base import LanguageModel, Output, Tables

_UNLIMITED = 1 << 20  # positions of a model that states no limit (ALiBi, recurrent)
_MOST_READ_AGAIN = 16  # tokens beside a draft; more are read by themselves, so that a step's length stays bounded


class HFModel(LanguageModel):
    """Runs `model`, an `AutoModelForCausalLM`, one sequence at a time.

    Sliding-window layers keep every entry, because those a window has dropped could not be rolled back to; the mask
    still hides them, so logits are the model's own. Recurrent and linear-attention layers are put back as they were
    before a draft and read again what was accepted. Other state leaves `can_rollback` of its caches False.
    """

    max_batch = 1

    def __init__(self, model: Any, name: str) -> None:
        config = model.config.get_text_config(decoder=True)
        parameters = inspect.signature(model.forward).parameters
        self.name = name
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.max_positions = getattr(config, "max_position_embeddings", None) or _UNLIMITED
        self.dtype = self.compute_dtype = model.dtype  # transformers' own arithmetic, on every device
        self.device = model.device
        self._model = model.eval()
        self._cache_argument = _cache_argument(parameters, type(model).__name__)
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        past, self._has_windows = _full_length_cache(config)
        self._make_cache: type[DynamicCache] = ReplayingCache if is_recurrent(past) else DynamicCache
        self._unable = self._make_cache.layers_without_rollback(past)
        self._is_recurrent, self._reads_several = is_recurrent(past), True
        self._look_into_state()
        self.supports_trees = self._honours_tree_masks()
        self.limitations = tuple(self._limitations())

    @property
    def num_bytes(self) -> int:
        """See `LanguageModel.num_bytes`."""
        size: int = self._model.get_memory_footprint()
        return size

    def tables(self) -> Tables:
        """See `LanguageModel.tables`."""
        embedding = getattr(self._model.get_input_embeddings(), "weight", None)
        head = getattr(self._model.get_output_embeddings(), "weight", None)
        shape = (self.vocab_size, self.hidden_size)
        if embedding is None or head is None or embedding.shape != shape or head.shape != shape:
            raise UsageError(f"{self.name} does not show its embedding and head, so a draft cannot share them")
        return Tables(embedding.detach().to(self.device), head.detach().to(self.device))

    def new_cache(self, num_slots: int, capacity: int) -> DynamicCache:
        """A dynamic cache of one sequence. Raises `UsageError` for more than one slot."""
        if num_slots != 1:
            raise UsageError(
                f"{self.name} runs through transformers, one sequence at a time, not {num_slots}; use batch size 1"
            )
        config = self._model.config.get_text_config(decoder=True)
        return self._make_cache(lambda: _full_length_cache(config)[0], capacity, self._unable)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: CacheView,
        mask: Tensor | None = None,
        *,
        logits_at: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        """See `LanguageModel.forward`; B = 1. A mask needs `supports_trees`."""
        if not isinstance(cache, DynamicView):
            raise UsageError(f"{self.name} runs through transformers and needs its own dynamic cache; use new_cache()")
        if cache.owner.num_unread > (_MOST_READ_AGAIN if self._reads_several else 0):
            self._catch_up(cache)
        fed = cache.owner.read(tokens)
        num_again, wanted = fed.shape[1] - tokens.shape[1], None if logits_at is None else logits_at[0]
        if num_again:
            positions = torch.cat([self._positions(cache.starts[0] - num_again, num_again), positions], dim=1)
            wanted = num_again + (torch.arange(tokens.shape[1], device=self.device) if wanted is None else wanted)
        bias = {} if mask is None else {"attention_mask": self._tree_mask(mask, cache.starts[0])}
        output = self._read(cache, fed, positions, wanted, hidden_layers, **bias)
        cache.advance(tokens.shape[1])
        return output if output.hidden is None else Output(output.logits, output.hidden[:, num_again:])

    def _catch_up(self, view: DynamicView) -> None:
        """Read what a rollback left to be read again, by itself."""
        num_unread = view.owner.num_unread
        unread = view.owner.read(torch.empty(1, 0, dtype=torch.long, device=self.device))
        self._read(view, unread, self._positions(view.starts[0] - num_unread, num_unread), None, ())
        view.owner.settle()

    def _positions(self, start: int, count: int) -> Tensor:
        return torch.arange(start, start + count, device=self.device)[None]

    def _read(
        self,
        view: DynamicView,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor | None,
        hidden_layers: Sequence[int],
        **inputs: Tensor,
    ) -> Output:
        """Feed [1, S] to the model, at once or, where it has to be, one by one. wanted: [N], which logits to return."""
        size = tokens.shape[1] if self._reads_several or not view.starts[0] else 1
        if wanted is not None and self._takes_logits_to_keep and size == tokens.shape[1]:
            inputs["logits_to_keep"], wanted = wanted, None
        pieces = zip(torch.split(tokens, size, dim=1), torch.split(positions, size, dim=1), strict=True)
        parts = [self._call(view.past, *piece, hidden_layers, inputs) for piece in pieces]
        logits = _joined([part.logits for part in parts])
        hidden = _joined([part.hidden for part in parts if part.hidden is not None]) if hidden_layers else None
        return Output(logits if wanted is None else logits[:, wanted], hidden)

    def _call(
        self, past: Any, tokens: Tensor, positions: Tensor, hidden_layers: Sequence[int], inputs: dict[str, Tensor]
    ) -> Output:
        places = {"position_ids": positions} if self._takes_positions else {}
        with _Recorder(self._layers() if hidden_layers else ()) as recorder:
            output = self._model(input_ids=tokens, use_cache=True, **{self._cache_argument: past}, **places, **inputs)
        hidden = recorder.stack(hidden_layers, self.device) if hidden_layers else None
        return Output(output.logits.to(self.device), hidden)

    def _tree_mask(self, mask: Tensor, num_cached: int) -> Tensor:
        """[1, S, S] bool → [1, 1, S, num_cached + S], added to the scores; what is cached is visible."""
        hidden = torch.finfo(self.dtype).min
        bias = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill(~mask, hidden)
        return nn.functional.pad(bias, (num_cached, 0))[:, None]

    def _layers(self) -> nn.ModuleList:
        """The decoder's layers: the list of modules that is as long as the model is deep."""
        for module in self._model.get_decoder().modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers:
                return module
        raise UsageError(f"{self.name} does not show its layers, so it cannot give hidden features; use another target")

    def _limitations(self) -> list[str]:
        said = [f"{self.name} runs one sequence at a time (max_batch=1)"]
        if self._unable:
            said.append(f"{self.name} cannot roll back rejected tokens because of {', '.join(self._unable)}")
        if not self._reads_several:
            said.append(
                f"{self.name} reads a draft one token at a time, because its state starts afresh in transformers when "
                "several tokens follow: drafts save it no time"
            )
        if not self.supports_trees:
            said.append(f"{self.name} cannot verify trees, only chains")
        return said

    def _look_into_state(self) -> None:
        """What one token leaves in the cache: whether all state is there, and whether several tokens go on from it."""
        view = self.new_cache(1, 1).view([0])
        try:
            self._probe([1], [0], view)
        except Exception as error:  # whatever a stranger's model raises: better said now than at the first prompt
            raise UsageError(
                f"{self.name} cannot be decoded with transformers' dynamic cache ({error}); choose another model"
            ) from error
        held, stateful = states(view.past), getattr(self._model, "_is_stateful", False)
        if (self._is_recurrent or stateful) and not held and not self._unable:
            self._unable = (f"{type(self._model).__name__}'s recurrent state",)
        self._reads_several = self._goes_on_from(held)

    def _goes_on_from(self, held: Iterable[str]) -> bool:
        """Whether a forward of several tokens starts from the cached state, as one of a single token does.

        In transformers, Mamba's and Jamba's start it afresh. Tried, one kind of state after the other: where it is
        read, logits change once it is emptied.
        """
        whole = self._continued()
        return not any(torch.equal(whole, self._continued(emptied=kind)) for kind in held)

    def _continued(self, emptied: str | None = None) -> Tensor:
        """Logits [2, V] of two tokens after a few others, with one kind of state set to zero in between."""
        cache = self.new_cache(1, 8)
        self._probe(range(1, 7), range(6), cache.view([0]))
        for tensor in states(cache.past).get(emptied or "", ()):
            tensor.zero_()
        return self._probe([7, 8], [6, 7], cache.view([0]))

    def _honours_tree_masks(self) -> bool:
        """Whether two siblings under one root can be told apart by a mask: tried, on three tokens.

        The second sibling must get the logits it gets as the root's only child, not those it gets when it also sees
        the first; the comparison is relative, so that it holds in every dtype.
        """
        if not self._takes_positions or self._has_windows or self._is_recurrent or self._unable:
            return False
        siblings = torch.tensor([[[True, False, False], [True, True, False], [True, False, True]]], device=self.device)
        alone = self._probe([1, 3], [0, 1])[-1]
        causal = self._probe([1, 2, 3], [0, 1, 1])[-1]
        try:
            masked = self._probe([1, 2, 3], [0, 1, 1], mask=siblings)[-1]
        except Exception:  # a model that takes no such mask may say so in any way
            return False
        return bool((masked - alone).norm() < 0.1 * (causal - alone).norm())

    def _probe(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        view: DynamicView | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [S, V] of a few tokens, by default the first of a sequence."""
        view = self.new_cache(1, len(tokens)).view([0]) if view is None else view
        ids, places = (torch.tensor([row], device=self.device) for row in (tokens, positions))
        return self.forward(ids % self.vocab_size, places, view, mask).logits[0].float()


class _Recorder:
    """Catches the residual stream as it enters the first of some layers and as it leaves each.

    transformers' own `output_hidden_states` would give the last layer's output after the final norm.
    """

    def __init__(self, layers: Sequence[nn.Module] | nn.ModuleList) -> None:
        self._layers = tuple(layers)
        self._hooks: list[Any] = []
        self._states: dict[int, Tensor] = {}  # [1, S, d] each

    def __enter__(self) -> _Recorder:
        if self._layers:
            self._hooks.append(self._layers[0].register_forward_pre_hook(self._enter, with_kwargs=True))
        for number, layer in enumerate(self._layers, start=1):
            self._hooks.append(layer.register_forward_hook(self._leave(number)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def stack(self, wanted: Sequence[int], device: torch.device) -> Tensor:
        """[1, S, len(wanted), d]."""
        return torch.stack([self._states[number].to(device) for number in wanted], dim=2)

    def _enter(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._states[0] = arguments[0] if arguments else keywords["hidden_states"]

    def _leave(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def record(_: nn.Module, __: Any, output: Any) -> None:
            self._states[number] = output[0] if isinstance(output, tuple) else output

        return record


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """[1, S_i, ...] → [1, sum of S_i, ...]; one part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _cache_argument(parameters: Any, kind: str) -> str:
    """What this model's forward calls its cache: it was renamed within transformers 5."""
    for name in ("cache", "past_key_values", "cache_params"):
        if name in parameters:
            return name
    raise UsageError(f"{kind} takes no key-value cache, so it cannot be decoded step by step; choose another model")


def _full_length_cache(config: Any) -> tuple[Any, bool]:
    """An empty transformers cache without windows, and whether the model asked for any."""
    from transformers.cache_utils import DynamicCache as Past
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    past = Past(config=config)
    windows = [index for index, layer in enumerate(past.layers) if type(layer) is DynamicSlidingWindowLayer]
    for index in windows:
        past.layers[index] = DynamicLayer()
    return past, bool(windows)
