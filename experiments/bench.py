"""The native engine against transformers' own generate: python -m experiments.bench [--quick]

Greedy, batch 1, the same prompts and limits, interleaved prompt by prompt in one process, so that whatever else the
machine does falls on both. Writes raw times and a summary of ratios under results/bench/. Needs no Hydra.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specdec import results
from specdec.backends.native import NativeBackend
from specdec.controllers.fixed import FixedController
from specdec.drafters.base import Drafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.errors import UsageError
from specdec.models.checkpoint import find
from specdec.models.loading import LoadedModel, load_model
from specdec.statistics import bootstrap, rate_ratio
from specdec.timing import PeakMemory, Stopwatch
from specdec.types import Request, SamplingParams, Trace
from specdec.verifiers.rejection import RejectionVerifier
from specdec.workloads import load_workload

GAMMA, NGRAM = 10, 3
POSITION = 160
"""Tokens in the cache when a forward is timed."""

Decoder = Callable[[Request], tuple[Sequence[int], float, Trace | None]]
"""Request → emitted tokens, seconds, and the native engine's trace."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    options = _parse(arguments)
    if options.memory_of is not None:
        print(peak_over_ideal(options.model, options.memory_of))
        return 0
    try:
        results.prepare_folder(options.output)
        with results.timed_lock("cpu", shared=options.share_device):
            parts = [measure(options, dtype) for dtype in options.dtypes]
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    raw, summary = (pd.concat(tables, ignore_index=True) for tables in zip(*parts, strict=True))
    provenance = results.collect_provenance(
        "python -m experiments.bench " + " ".join(arguments or sys.argv[1:]), [0], "", torch.get_num_threads()
    )
    summary = summary.assign(
        model=options.model, hardware=str(provenance.hardware), date=provenance.date, git_sha=provenance.revision
    )
    results.write_text(options.output / "raw.csv", raw.to_csv(index=False))
    results.write_text(options.output / "summary.csv", summary.to_csv(index=False))
    print(summary[["dtype", "what", "value", "low", "high", "n"]].round(4).to_string(index=False))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few prompts: under two minutes")
    parser.add_argument("--model", default="smollm2-135m", help="an embedded model or a local directory")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--workload", default="code_edit", help="prompts for the generation benchmarks")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("results/bench"))
    parser.add_argument("--share-device", action="store_true", help="allow another timed run at the same time")
    parser.add_argument("--memory-of", metavar="DTYPE", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, dtype: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Raw times and summary rows of one dtype."""
    target = load_model(options.model, dtype=dtype, device="cpu")
    memory = _memory_in_child(options.model, dtype)
    requests = _requests(target, options.workload, 4 if options.quick else 16, options.max_new_tokens)
    decoders = native_decoders(target) | transformers_decoders(options.model, target)
    generations = time_generation(decoders, requests, dtype)
    forwards = time_forwards(target, 10 if options.quick else 40)
    summary = [*_speed_rows(generations), *_forward_rows(forwards), memory]
    raw = pd.concat([generations, forwards], ignore_index=True).assign(dtype=dtype)
    return raw, pd.DataFrame(summary).assign(dtype=dtype)


def _requests(target: LoadedModel, workload: str, count: int, max_new_tokens: int) -> list[Request]:
    """The workload's prompts without stop strings, which the two sides would check at different cost."""
    prompts = load_workload(workload, limit=count, max_new_tokens=max_new_tokens).prompts
    backend = _backend(target, NoDrafter(), 0)
    batches = backend.batches([replace(prompt, stop=()) for prompt in prompts], SamplingParams())
    return [request for batch in batches for request in batch]


def _backend(target: LoadedModel, drafter: Drafter, gamma: int) -> NativeBackend:
    return NativeBackend(target, drafter, RejectionVerifier(), FixedController(gamma))


def native_decoders(target: LoadedModel) -> dict[str, Decoder]:
    """Plain decoding and prompt lookup on this engine."""

    def decoder(backend: NativeBackend) -> Decoder:
        def decode(request: Request) -> tuple[Sequence[int], float, Trace]:
            start = time.perf_counter()
            (trace,) = backend.engine.generate([request])
            return trace.token_ids, time.perf_counter() - start, trace

        return decode

    return {
        "specdec plain": decoder(_backend(target, NoDrafter(), 0)),
        "specdec lookup": decoder(_backend(target, PromptLookupDrafter(max_ngram=NGRAM), GAMMA)),
    }


def transformers_decoders(model: str, target: LoadedModel) -> dict[str, Decoder]:
    """The same through `generate`, at equal gamma and n-gram size."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(find(model, None).directory, dtype=target.model.dtype).eval()

    def decoder(**how: Any) -> Decoder:
        @torch.inference_mode()
        def decode(request: Request) -> tuple[Sequence[int], float, None]:
            ids = torch.tensor([request.prompt_ids])
            start = time.perf_counter()
            output = hf.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(request.eos_ids),
                pad_token_id=min(request.eos_ids),
                **how,
            )
            seconds = time.perf_counter() - start
            return output[0, ids.shape[1] :].tolist(), seconds, None

        return decode

    return {
        "transformers plain": decoder(),
        "transformers lookup": decoder(prompt_lookup_num_tokens=GAMMA, max_matching_ngram_size=NGRAM),
    }


def time_generation(decoders: Mapping[str, Decoder], requests: Sequence[Request], dtype: str) -> pd.DataFrame:
    """Every decoder on every request in rotating order, after one untimed request each."""
    for decode in decoders.values():
        decode(requests[0])
    rows = []
    names = list(decoders)
    for index, request in enumerate(tqdm(requests, desc=f"{dtype} generation", unit="request")):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            tokens, seconds, trace = decoders[name](request)
            rows.append(
                {
                    "kind": "generation",
                    "name": name,
                    "request_id": request.id,
                    "num_tokens": len(tokens),
                    "seconds": seconds,
                    "token_ids": " ".join(map(str, tokens)),
                    "outside_share": None if trace is None else outside_forwards(trace),
                }
            )
    return pd.DataFrame(rows)


def outside_forwards(trace: Trace) -> float:
    """Share of decode step time spent outside the target's forward: drafting, rule, roll back, records."""
    steps = [step for step in trace.steps if step.step > 0]
    return 1 - sum(step.forward_seconds for step in steps) / sum(step.seconds for step in steps)


@torch.inference_mode()
def time_forwards(target: LoadedModel, repeats: int) -> pd.DataFrame:
    """Seconds of one forward over 1 to 11 tokens at `POSITION`, interleaved."""
    model, counts, rows = target.model, (1, 2, 4, 6, 8, 9, 11), []
    start = min(POSITION, model.max_positions - max(counts))
    cache = model.new_cache(1, start + max(counts))
    prompt = torch.arange(start)[None] % model.vocab_size
    model.forward(prompt, torch.arange(start)[None], cache.view([0]))
    for repeat in range(repeats + 3):
        for count in counts:
            cache.rollback([0], [start])
            tokens, positions = prompt[:, :count], torch.arange(start, start + count)[None]
            clock = Stopwatch(model.device)
            model.forward(tokens, positions, cache.view([0]))
            if repeat >= 3:
                rows.append({"kind": "forward", "name": f"{count} tokens", "seconds": clock.lap()})
    return pd.DataFrame(rows)


def _speed_rows(generations: pd.DataFrame) -> list[dict[str, Any]]:
    pairs = [
        ("specdec plain", "transformers plain"),
        ("specdec lookup", "transformers lookup"),
        ("specdec lookup", "specdec plain"),
        ("transformers lookup", "transformers plain"),
    ]
    tokens = generations.pivot(index="request_id", columns="name", values="num_tokens")
    seconds = generations.pivot(index="request_id", columns="name", values="seconds")
    ids = generations.pivot(index="request_id", columns="name", values="token_ids")
    rows = []
    for ours, theirs in pairs:
        table = np.stack([tokens[ours], seconds[ours], tokens[theirs], seconds[theirs]], axis=1).astype(float)
        found = bootstrap(table, rate_ratio)
        what = f"tokens/s: {ours} ÷ {theirs}"
        rows.append({"what": what, "value": found.value, "low": found.low, "high": found.high, "n": len(table)})
    for name in tokens:
        rate = float(tokens[name].sum() / seconds[name].sum())
        rows.append({"what": f"tokens/s: {name}", "value": rate, "n": len(tokens)})
        same = float((ids[name] == ids["specdec plain"]).mean())
        rows.append({"what": f"share of requests with specdec plain's tokens: {name}", "value": same, "n": len(ids)})
    for name, group in generations.dropna(subset=["outside_share"]).groupby("name"):
        rows.append({"what": f"share of step time outside forwards: {name!s}", **_spread(group["outside_share"])})
    return rows


def _forward_rows(forwards: pd.DataFrame) -> list[dict[str, Any]]:
    groups = forwards.groupby("name", sort=False)["seconds"]
    one = groups.get_group("1 tokens").to_numpy()
    rows = [{"what": "milliseconds: forward of 1 token", **_spread(1000 * one)}]
    for name, seconds in groups:
        if name != "1 tokens":
            rows.append({"what": f"forward of {name} ÷ forward of 1", **_spread(seconds.to_numpy() / one)})
    return rows


def _spread(values: Any) -> dict[str, Any]:
    """Median and quartiles."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75])
    return {"value": float(middle), "low": float(low), "high": float(high), "n": len(values)}


def _memory_in_child(model: str, dtype: str) -> dict[str, Any]:
    """Peak memory in a process of its own, where nothing else was ever loaded."""
    command = [sys.executable, "-m", "experiments.bench", "--model", model, "--memory-of", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"what": "peak memory ÷ (weights as packed + cache + logits)", "value": float(done.stdout), "n": 1}


def peak_over_ideal(model: str, dtype: str) -> float:
    """Peak resident memory of loading and decoding, less what the libraries take, over what must be held."""
    from transformers import AutoConfig, AutoTokenizer

    directory = find(model, None).directory
    _libraries = AutoConfig.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    peak = PeakMemory(torch.device("cpu"))
    peak.reset()
    baseline = peak.read()  # what is not this model's: the interpreter, torch, transformers, the tokenizer
    peak.reset()
    target = load_model(model, dtype=dtype, device="cpu")
    length = min(POSITION, target.model.max_positions // 2)
    prompt = tuple(index % target.model.vocab_size for index in range(length))
    request = Request("memory", prompt, max_new_tokens=64)
    _backend(target, PromptLookupDrafter(), GAMMA).engine.generate([request])
    used = peak.read() - baseline
    cache = target.model.new_cache(1, 256).num_bytes
    logits = (GAMMA + 1) * target.model.vocab_size * 4
    return used / (target.model.num_bytes + cache + logits)


if __name__ == "__main__":
    sys.exit(main())
