"""Peak memory of loading and decoding, measured in a process of its own, where nothing else was ever loaded."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import torch

from experiments.bench.forwards import POSITION
from experiments.bench.plan import LOOKUP_TOKENS, Plan
from experiments.bench.subject import Subject
from experiments.bench.systems import OURS, engine
from experiments.bench.tables import Row, spread
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.errors import UsageError
from specdec.machine.timing import PeakMemory
from specdec.models.loading.checkpoint import find
from specdec.models.loading.model import load_model, resolve_device, resolve_dtype
from specdec.types import Request

_NEW_TOKENS = 64


def measure(subject: Subject, plan: Plan) -> pd.DataFrame:
    """Columns: system, ratio."""
    arguments = [subject.setting.model, subject.dtype, subject.setting.device]
    command = [sys.executable, "-m", "experiments.bench.memory", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"measuring memory in a process of its own failed: {done.stderr[-500:]}")
    return pd.DataFrame([{"system": OURS, "ratio": float(done.stdout)}])


def summarise(raw: pd.DataFrame) -> list[Row]:
    """Peak ÷ what must be held."""
    return [spread("peak_memory_ratio", raw["ratio"], system=OURS)]


def peak_over_ideal(model: str, dtype: str, device: str) -> float:
    """Peak memory of loading and decoding, less what the libraries take, ÷ weights as packed + cache + logits."""
    from transformers import AutoConfig, AutoTokenizer

    directory = find(model).directory
    _libraries = AutoConfig.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    place = resolve_device(device, resolve_dtype(dtype))
    peak = PeakMemory(place)
    peak.reset()
    baseline = peak.read()  # what is not this model's: the interpreter, torch, transformers, the tokenizer
    peak.reset()
    target = load_model(model, dtype=dtype, device=str(place))
    length = min(POSITION, target.model.max_positions // 2)
    prompt = tuple(index % target.model.vocab_size for index in range(length))
    request = Request("memory", prompt, max_new_tokens=_NEW_TOKENS)
    decoding = engine(target, PromptLookupDrafter(), LOOKUP_TOKENS)
    decoding.generate([request])
    used = peak.read() - baseline
    logits = (LOOKUP_TOKENS + 1) * target.model.vocab_size * 4
    cache = target.model.new_cache(1, 256).num_bytes
    return used / (target.model.num_bytes + cache + logits)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    print(peak_over_ideal(*sys.argv[1:4]))
