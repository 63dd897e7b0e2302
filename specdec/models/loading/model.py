"""From a model's name to something that decodes: `load_model`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from specdec.errors import UsageError
from specdec.machine.allocator import huge_pages, keep_freed_memory
from specdec.models.base import LanguageModel
from specdec.models.loading.checkpoint import Checkpoint, find
from specdec.models.loading.sharing import shareable
from specdec.models.vocabulary.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
_IMPLEMENTATIONS = ("auto", "native", "hf")


@dataclass(frozen=True)
class LoadedModel:
    """A model with what belongs to it.

    eos_ids: from the model's generation config; empty if it names none. fingerprint: the hub's commit, or a hash.
    real_vocab_size: ids from here on, up to the model's vocab_size, are padding. implementation: "native" or "hf";
    note: why it is not native, or None. in_float64: builds the same weights, rounded as they are, in float64: what a
    disagreement between two orders of summation is judged by.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    name: str
    eos_ids: frozenset[int]
    fingerprint: str
    real_vocab_size: int
    implementation: str
    in_float64: Callable[[], LanguageModel]
    note: str | None = None


@shareable
def load_model(
    model: str = "smollm2-135m",
    *,
    dtype: str = "float32",
    device: str = "auto",
    device_map: str | Mapping[str, int | str] | None = None,
    revision: str | None = None,
    implementation: str = "auto",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load an embedded model, a local checkpoint directory or a hub id, weights from safetensors only.

    dtype: float32, bfloat16, float16 or float64. device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
    device_map: accelerate's, for a model spread over devices; then transformers runs it. revision: of a hub id.
    implementation: auto (native where the architecture is known, else transformers), native or hf.
    Raises `UsageError`, with the way out, for everything that cannot be.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise UsageError(f"implementation={implementation!r} is unknown; choose from {', '.join(_IMPLEMENTATIONS)}")
    if device_map is not None and device != "auto":
        raise UsageError(f"device={device!r} and device_map={device_map!r} contradict each other; give only one")
    torch_dtype = resolve_dtype(dtype)
    torch_device = resolve_device(device, torch_dtype)
    checkpoint = find(model, revision)
    config = _config(checkpoint, trust_remote_code)
    note = _why_not_native(config, implementation, device_map)
    if note is not None and implementation == "native":
        raise UsageError(f"{model} cannot run natively: {note}; use implementation=auto")
    tokenizer = _tokenizer(checkpoint, trust_remote_code)
    placement = device_map if device_map is not None else {"": str(torch_device)}

    def build(computing: torch.dtype) -> LanguageModel:
        if note is None:
            built: LanguageModel = _native(checkpoint, config, torch_device, torch_dtype, computing)
        else:
            built = _through_transformers(checkpoint, placement, torch_dtype, computing, trust_remote_code)
        built.fingerprint = checkpoint.fingerprint
        return built

    if torch_device.type == "cpu":
        keep_freed_memory()
        with huge_pages(2 * checkpoint.num_bytes):  # on disk, weights may take half of what they take here
            loaded = build(torch_dtype)
    else:
        loaded = build(torch_dtype)
    if note is not None and implementation == "auto":
        _log.warning("%s runs through transformers: %s", model, note)
    return LoadedModel(
        model=loaded,
        tokenizer=tokenizer,
        name=model,
        eos_ids=_eos_ids(checkpoint, tokenizer),
        fingerprint=checkpoint.fingerprint,
        real_vocab_size=min(tokenizer.vocab_size, loaded.vocab_size),
        implementation="native" if note is None else "hf",
        in_float64=lambda: build(torch.float64),
        note=note,
    )


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype of a name; `UsageError` for any other."""
    if name not in _DTYPES:
        raise UsageError(f"dtype={name!r} is unknown; choose from {', '.join(_DTYPES)}")
    return _DTYPES[name]


def resolve_device(name: str, dtype: torch.dtype) -> torch.device:
    """The device of a name ("auto": a GPU if there is one), tried out. `UsageError` where it or the dtype lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"device={name!r} is not on this machine; use device=cpu, or auto for what there is"
        ) from error
    emulated = device.type == "cuda" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device)[0] < 8
    if emulated or not _computes(device, dtype):
        wanted = str(dtype).removeprefix("torch.")
        raise UsageError(f"device={name!r} has no {wanted}; use dtype=float32, or float16 on an older GPU")
    return device


def _computes(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        one = torch.ones(1, 1, device=device, dtype=dtype)
        return (one @ one).item() == 1
    except (RuntimeError, TypeError):
        return False


def _config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        kind = checkpoint.json("config.json").get("model_type", "none")
        raise UsageError(
            f"transformers does not know the model_type {kind!r} of {checkpoint.name}; update transformers, or set "
            "trust_remote_code=true if you trust the code that comes with it"
        ) from error


def _why_not_native(config: Any, implementation: str, device_map: object) -> str | None:
    if implementation == "hf":
        return "implementation=hf was asked for"
    if device_map is not None:
        return "a device_map needs accelerate"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    from specdec.models.native.transformer import TransformerConfig

    return TransformerConfig.supports(config)


def _tokenizer(checkpoint: Checkpoint, trust_remote_code: bool) -> Tokenizer:
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((checkpoint.directory / name).is_file() for name in names):
        raise UsageError(
            f"{checkpoint.name} has no tokenizer; save one there with tokenizer.save_pretrained(directory)"
        )
    try:
        hf = AutoTokenizer.from_pretrained(checkpoint.directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise UsageError(
            f"the tokenizer of {checkpoint.name} cannot be loaded ({error}); save it there again"
        ) from error
    return Tokenizer(hf, checkpoint.name)


def _native(
    checkpoint: Checkpoint, config: Any, device: torch.device, dtype: torch.dtype, computing: torch.dtype
) -> LanguageModel:
    """Weights rounded to `dtype`, held and computed with in `computing`."""
    from specdec.models.native.transformer import Transformer, TransformerConfig

    weights: MutableMapping[str, torch.Tensor] = checkpoint.weights()
    if computing != dtype:
        weights = {name: weights[name].to(dtype) for name in list(weights)}
    ours = TransformerConfig.from_hf(config)
    return Transformer.from_state_dict(ours, weights, device=device, dtype=computing, name=checkpoint.name)


def _through_transformers(
    checkpoint: Checkpoint,
    device_map: str | Mapping[str, int | str],
    dtype: torch.dtype,
    computing: torch.dtype,
    trust_remote_code: bool,
) -> LanguageModel:
    """Weights rounded to `dtype`, held and computed with in `computing`."""
    from transformers import AutoModelForCausalLM

    from specdec.models.hf import HFModel

    _ = checkpoint.weight_files  # refuses pickles and damaged files before anything is read
    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.directory,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    return HFModel(model if computing == dtype else model.to(computing), checkpoint.name)


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """From the generation config; where it is silent the model's config, then the tokenizer."""
    config = checkpoint.json("config.json")
    said = (
        checkpoint.json("generation_config.json").get("eos_token_id"),
        config.get("eos_token_id"),
        config.get("text_config", {}).get("eos_token_id"),
        tokenizer.hf.eos_token_id,
    )
    first: int | list[int] = next((value for value in said if value is not None), [])
    return frozenset(first if isinstance(first, list) else [first])


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar for weights that load in a second."""
    from transformers.utils import logging as chatter

    shown = chatter.is_progress_bar_enabled()
    chatter.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            chatter.enable_progress_bar()
