"""The shape of a native transformer, and which Hugging Face configurations have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import UsageError
from specdec.models.native.rope import LinearScaling, Llama3Scaling, Positions, Rope, Scaling, unscaled


@dataclass(frozen=True)
class TransformerConfig:
    """Everything but the weights. Sizes are counts; `positions` says how tokens learn where they stand.

    qkv_bias, output_bias, mlp_bias: which projections add a bias. qk_norm: RMSNorm over each head's queries and keys.
    tied_head: the output projection is the embedding table.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-6
    positions: Positions = field(default_factory=Rope)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "every key head must serve the same number of query heads"
            )

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads

    @staticmethod
    def supports(hf: Any) -> str | None:
        """Why a transformers configuration can not be run natively; None where it can."""
        kind = getattr(hf, "model_type", None)
        if kind not in _KINDS:
            return f"its architecture {kind!r} is not one of {', '.join(_KINDS)}"
        if hf.hidden_act != "silu":
            return f"its activation {hf.hidden_act!r} is not silu"
        return _rope_reason(_rope_settings(hf)) or _window_reason(hf)

    @classmethod
    def from_hf(cls, hf: Any) -> TransformerConfig:
        """From a transformers configuration of Llama, Mistral, Qwen2 or Qwen3; `UsageError` for any other."""
        reason = cls.supports(hf)
        if reason is not None:
            raise UsageError(f"the native transformer cannot run this model: {reason}; load it with implementation=hf")
        settings = _rope_settings(hf)
        return cls(
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            max_positions=hf.max_position_embeddings,
            norm_eps=hf.rms_norm_eps,
            positions=Rope(_theta(hf, settings), _SCALINGS[_rope_type(settings)](settings, hf)),
            tied_head=hf.tie_word_embeddings,
            **_KINDS[hf.model_type](hf),
        )


def _llama(hf: Any) -> dict[str, bool]:
    return {"qkv_bias": hf.attention_bias, "output_bias": hf.attention_bias, "mlp_bias": hf.mlp_bias}


def _mistral(hf: Any) -> dict[str, bool]:
    return {}


def _qwen2(hf: Any) -> dict[str, bool]:
    return {"qkv_bias": True}


def _qwen3(hf: Any) -> dict[str, bool]:
    return {"qkv_bias": hf.attention_bias, "output_bias": hf.attention_bias, "qk_norm": True}


_KINDS: Mapping[str, Callable[[Any], dict[str, bool]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def _linear(settings: Mapping[str, Any], hf: Any) -> Scaling:
    return LinearScaling(settings["factor"])


def _llama3(settings: Mapping[str, Any], hf: Any) -> Scaling:
    original = settings.get("original_max_position_embeddings", hf.max_position_embeddings)
    return Llama3Scaling(settings["factor"], settings["low_freq_factor"], settings["high_freq_factor"], original)


_SCALINGS: Mapping[str, Callable[[Mapping[str, Any], Any], Scaling]] = {
    "default": lambda settings, hf: unscaled,
    "linear": _linear,
    "llama3": _llama3,
}


def _rope_settings(hf: Any) -> Mapping[str, Any]:
    """transformers 5 keeps them in `rope_parameters`, older configurations in `rope_scaling` and `rope_theta`."""
    return getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}


def _rope_type(settings: Mapping[str, Any]) -> str:
    return str(settings.get("rope_type", settings.get("type", "default")))


def _theta(hf: Any, settings: Mapping[str, Any]) -> float:
    return float(settings.get("rope_theta") or getattr(hf, "rope_theta", None) or 10000.0)


def _rope_reason(settings: Mapping[str, Any]) -> str | None:
    if _rope_type(settings) not in _SCALINGS:
        return f"its rotary positions are of type {_rope_type(settings)!r}, not one of {', '.join(_SCALINGS)}"
    if (settings.get("partial_rotary_factor") or 1.0) != 1.0:
        return f"it rotates only part of each head (partial_rotary_factor={settings['partial_rotary_factor']})"
    if any(hasattr(value, "keys") for value in settings.values()):
        return "its rotary positions differ between layers"
    return None


def _window_reason(hf: Any) -> str | None:
    """A sliding window is in force where some layer has it and it is shorter than the context."""
    window = getattr(hf, "sliding_window", None)
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"]
    if window is None or window >= hf.max_position_embeddings or "sliding_attention" not in kinds:
        return None
    return f"it attends within a sliding window of {window} tokens"
