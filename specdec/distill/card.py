"""The model card that lies beside a trained draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.distill.session import Acceptance, Session

_USE = {"eagle": "eagle", "draft_model": "distilled"}


def card(session: Session, training: Mapping[str, Any], measured: Sequence[Acceptance]) -> str:
    """Markdown: what it is, how it was made, what it achieves, what it is bad at."""
    plan, kind = session.plan, session.recipe.kind
    parameters = sum(parameter.numel() for parameter in session.trainer.network.parameters())
    lines = [
        f"# A draft of kind `{kind}` for {session.target.name}",
        "",
        f"{parameters / 1e6:.1f} M trained parameters, stored in float16; embeddings and head are the target's own.",
        f"Use it with `drafter={_USE[kind]} drafter.checkpoint=<this folder>`. Licence: the target's, Apache-2.0 for "
        "SmolLM2.",
        "",
        "## How it was made",
        "",
        f"- Data: {training['continuations']:,} continuations by the target itself of prompts from "
        f"`specdec.distill.prompts`, none of them an evaluation prompt; {training['tokens_harvested']:,} tokens.",
        f"- {plan.steps:,} steps of {plan.batch_size} continuations, loss {plan.loss}, hard share {plan.hard_share:g}, "
        f"{plan.unrolled_steps} unrolled steps, seed {plan.seed}.",
        f"- Command: `{training['command']}`, specdec at {training['git_sha']}.",
        "",
        "## What it achieves",
        "",
        "Alpha is accepted ÷ examined; tau is emitted tokens per target forward.",
        "",
        "| workload | temperature | alpha | tau | examined |",
        "|---|---|---|---|---|",
        *(
            f"| {one.workload} | {one.temperature:g} | {one.alpha:.3f} | {one.block_efficiency:.2f} | "
            f"{one.num_examined} |"
            for one in measured
        ),
        "",
        "## What it is bad at",
        "",
        _weakness(measured),
        "",
    ]
    return "\n".join(lines)


def _weakness(measured: Sequence[Acceptance]) -> str:
    if not measured:
        return "Not measured."
    worst = sorted(measured, key=lambda one: one.alpha)[:3]
    named = ", ".join(f"{one.workload} at temperature {one.temperature:g} ({one.alpha:.2f})" for one in worst)
    return (
        f"Least accepted: {named}. It proposes only tokens of its draft vocabulary, and its training data are short "
        "continuations of English prompts for the most part."
    )
