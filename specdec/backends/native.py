"""The toolkit's own engine as a backend, and the short way to a pair of models in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specdec.backends.base import Backend
from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.costmodel import StepCosts
from specdec.decoding.engine import Engine, NewCache, preferred_cache
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.errors import UsageError
from specdec.measurement.calibration import step_costs
from specdec.measurement.interleaving import following
from specdec.models.loading import LoadedModel, load_model
from specdec.types import Chunk, Prompt, Request, SamplingParams, Trace
from specdec.verifiers.base import Verifier
from specdec.verifiers.rejection import RejectionVerifier

DEFAULT_MAX_NEW_TOKENS = 128


class NativeBackend(Backend):
    """One target with one drafter, verifier and controller; prompts run in batches that start together."""

    def __init__(
        self,
        target: LoadedModel,
        drafter: Drafter,
        verifier: Verifier,
        controller: Controller,
        *,
        new_cache: NewCache = preferred_cache,
        batch_size: int = 1,
        measure: Callable[[Engine], StepCosts] | None = None,
    ) -> None:
        """measure: step costs for a controller that weighs time; None: timed here and now."""
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} is not possible; it must be at least 1")
        self.target = target
        self.batch_size = batch_size
        self.engine = Engine(
            target.model, drafter, verifier, controller, tokenizer=target.tokenizer, new_cache=new_cache
        )
        controller.bind(lambda: (measure or step_costs)(self.engine))

    def run(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, on_chunk: Callable[[Chunk], None] | None = None
    ) -> list[Trace]:
        """Decode every prompt with the same sampling options; a conversation's turns follow its batch."""
        traces: list[Trace] = []
        for batch in self.batches(prompts, sampling):
            while batch:
                answers = self.engine.generate(batch, on_chunk)
                traces += answers
                batch = following(batch, answers, self.next_turn)
        return traces

    def batches(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[list[Request]]:
        """The prompts as requests, `batch_size` at a time."""
        requests = [to_request(prompt, sampling, self.target) for prompt in prompts]
        return [requests[start : start + self.batch_size] for start in range(0, len(requests), self.batch_size)]

    def next_turn(self, request: Request, answer: Trace) -> Request | None:
        """What the request's conversation goes on with after this answer, read anew from its first token; or None."""
        prompt = request.prompt and request.prompt.answered(answer.text)
        return None if prompt is None else to_request(prompt, request.sampling, self.target)

    def generate(
        self,
        prompt: str | Prompt,
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> Trace:
        """Decode one prompt. A plain string goes through the model's chat template where it has one."""
        asked = prompt if isinstance(prompt, Prompt) else self._as_prompt(prompt)
        if max_new_tokens is not None:
            asked = replace(asked, max_new_tokens=max_new_tokens)
        return self.run([asked], sampling or SamplingParams(), on_chunk)[0]

    def _as_prompt(self, text: str) -> Prompt:
        if self.target.tokenizer.has_chat_template:
            return Prompt("prompt", messages=({"role": "user", "content": text},))
        return Prompt("prompt", text=text)


def to_request(prompt: Prompt, sampling: SamplingParams, target: LoadedModel) -> Request:
    """A prompt in the target's tokens, ending at the target's own EOS ids."""
    return Request(
        id=prompt.id,
        prompt_ids=target.tokenizer.encode_prompt(prompt),
        sampling=sampling,
        max_new_tokens=DEFAULT_MAX_NEW_TOKENS if prompt.max_new_tokens is None else prompt.max_new_tokens,
        eos_ids=target.eos_ids,
        stop=prompt.stop,
        prompt=prompt,
    )


def load_pair(
    target: str = "smollm2-135m",
    draft: str | Drafter | None = None,
    *,
    num_draft_tokens: int = 5,
    dtype: str = "float32",
    device: str = "auto",
) -> NativeBackend:
    """A target and its drafter, ready to generate, losslessly.

    target: an embedded model, a local directory or a hub id. draft: the same, for a draft model, best with the target's
    tokenizer; or any `Drafter`; None: prompt lookup. num_draft_tokens: gamma; 0 is plain decoding.
    """
    if isinstance(draft, str):
        draft = DraftModelDrafter.load(draft, dtype=dtype, device=device)
    drafter = PromptLookupDrafter() if draft is None else draft
    loaded = load_model(target, dtype=dtype, device=device)
    return NativeBackend(loaded, drafter, RejectionVerifier(), FixedController(num_draft_tokens))
