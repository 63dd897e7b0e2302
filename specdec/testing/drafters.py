"""`check_drafter`: the contract of `specdec.drafters.base.Drafter`, rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from specdec.controllers.fixed import FixedController
from specdec.drafters.base import Drafter
from specdec.models.loading import LoadedModel
from specdec.sampling.uniforms import Purpose
from specdec.testing.cases import FALSE_ALARM, Bench, DrafterCase, as_factory
from specdec.testing.fit import declared_p_value
from specdec.testing.forms import Row
from specdec.testing.probes import AcceptScript, Proposal, Recorder, Schedule, StopAt
from specdec.testing.report import Inapplicable, Report, require, run_checks
from specdec.testing.tiny import tiny_target
from specdec.types import PADDING, Draft, FinishReason, Verdict
from specdec.verifiers.base import Verifier

_LONGEST_WINDOW = 1024  # tokens: a longer one takes too long to fill
_RAGGED = Schedule((0, 3, 1, 5, 2))


def check_drafter(
    drafter: Drafter | Callable[[], Drafter],
    target: LoadedModel | None = None,
    *,
    verifier: Verifier | None = None,
    num_samples: int = 2000,
    only: Collection[str] = (),
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Put a drafter through every rule of its contract; the report says what was checked, and what was not and why.

    drafter: what makes a fresh one (a class or a function), or an instance, which is copied for every check.
    target: what it drafts for; None: `tiny_target()`, seconds; a real one takes minutes. verifier: the rule it is
    judged by; None: rejection sampling, for trees the greedy walk. num_samples: requests of the two statistical
    checks, each of which fails a drafter without fault with probability `FALSE_ALARM`; seeds are fixed, so results
    repeat. only, skip: names of checks.

    Raises `ConformanceError`, an `AssertionError`, at the first rule that is broken.
    """
    make = as_factory(drafter, Drafter)
    case = DrafterCase(make, Bench(target or tiny_target(), num_samples, verifier))
    return run_checks(type(make()).__name__, DRAFTER_CHECKS, case, only, skip)


def check_declarations(case: DrafterCase) -> None:
    """What a drafter declares has the right type and fits the target."""
    drafter, model = case.fresh(), case.bench.target.model
    drafter.bind(model, case.bench.target.tokenizer)
    for name in ("proposes_trees", "greedy_only", "synthetic"):
        value = getattr(drafter, name)
        require(isinstance(value, bool), f"{name} is {value!r}, not True or False")
    for layer in drafter.hidden_layers:
        known = isinstance(layer, int) and 0 <= layer <= model.num_layers
        require(known, f"hidden_layers names layer {layer!r}, and the target has 0 to {model.num_layers}")


def check_form(case: DrafterCase) -> str:
    """A draft has the shapes, padding, parents and normalised probabilities that `Draft` says."""
    drafted = [
        case.run(case.bench.requests(temperature), controller)[0].num_drafted
        for temperature in case.temperatures
        for controller in (FixedController(4), _RAGGED)
    ]
    return f"{sum(drafted)} draft tokens"


def check_max_tokens(case: DrafterCase) -> None:
    """No row is deeper than its max_tokens; a row that may draft nothing stays empty, and decoding goes on."""
    for temperature in case.temperatures:
        for counts in ((1,), (0, 2), (0, 0, 4, 1)):
            drafter, _ = case.run(case.bench.requests(temperature), Schedule(counts))
            for proposal in drafter.proposals:
                for row, limit in enumerate(proposal.max_tokens):
                    length = int(proposal.draft.lengths[row])
                    require(limit > 0 or length == 0, f"row {row} has {length} nodes, and max_tokens allowed none")


def check_stop(case: DrafterCase) -> str:
    """After `stop` says so a row gets no deeper, and the token it was asked about stays."""
    asked = 0
    for temperature in case.temperatures:
        requests = case.bench.requests(temperature)
        unstopped = [case.run([request], StopAt(4, depth=0))[0] for request in requests]
        for depth in (1, 2):
            together, _ = case.run(requests, StopAt(4, depth))
            for request, free in zip(requests, unstopped, strict=True):
                stopped, _ = case.run([request], StopAt(4, depth))
                asked += sum(len(proposal.stops) for proposal in stopped.proposals)
                for proposal in stopped.proposals:
                    _require_obedience(proposal, depth)
                if not stopped.proposes_trees:
                    _require_prefix(stopped.proposals[:1], free.proposals[:1], depth)
                _require_same(
                    stopped, together, f"drafted {{}} when `stop` said so at depth {depth} to a batch of three"
                )
    if not asked:
        raise Inapplicable("it never asks `stop`: its drafts are not drawn token by token")
    return f"asked {asked} times"


def _require_obedience(proposal: Proposal, depth: int) -> None:
    """Of one request alone."""
    for call in proposal.stops:
        shape = [1, proposal.context.vocab_size]
        require(list(call.probs.shape) == shape, f"stop was given probabilities {list(call.probs.shape)}, not {shape}")
        total = float(call.probs.sum())
        require(abs(total - 1) < 1e-3, f"stop was given probabilities that sum to {total:.6g}")
    depths = [call.depth for call in proposal.stops]
    require(depths == list(range(1, len(depths) + 1)), f"stop was asked at depths {depths}, not 1, 2, ...")
    if any(call.answer.any() for call in proposal.stops):
        deepest = max(proposal.draft.node_depths()[0].tolist(), default=0)
        require(deepest <= depth, f"stop said so at depth {depth}, and the draft is {deepest} deep")


def _require_prefix(stopped: list[Proposal], free: list[Proposal], depth: int) -> None:
    """Dropping a token after seeing it would change the distribution: with P = (.7, .3), Q = (.5, .5) to (.85, .15)."""
    for short, long in zip(stopped, free, strict=True):
        wanted, found = long.row().tokens[:depth], short.row().tokens
        if short.stops:
            require(
                found == wanted,
                f"stopped at depth {depth} it drafts {list(found)} and not {list(wanted)}, what it drafts when it is "
                "not stopped: `stop` withholds only later tokens",
            )


def check_arguments_are_left_alone(case: DrafterCase) -> None:
    """What a drafter is given it does not write to."""
    for temperature in case.temperatures:
        drafter, _ = case.run(case.bench.requests(temperature), _RAGGED)
        require(not drafter.altered, f"it wrote to {', '.join(sorted(set(drafter.altered)))}")


def check_randomness(case: DrafterCase) -> None:
    """Randomness comes from the uniforms handed in, for drafting only, so the same question gets the same draft."""
    for temperature in case.temperatures:
        requests = case.bench.requests(temperature)
        (one, _), (two, _) = (case.run(requests, FixedController(3)) for _ in range(2))
        for first, second in zip(one.proposals, two.proposals, strict=False):
            taken = first.purposes & {Purpose.ACCEPT, Purpose.TARGET}
            names = ", ".join(purpose.name for purpose in taken)
            require(not taken, f"it drew uniforms of {names}, which decide what is kept of its own draft")
            drawn = ", ".join(first.generators)
            require(not drawn, f"it drew from the global generator of {drawn}; use uniforms.draw(Purpose.DRAFT, ...)")
            for row in range(first.context.batch_size):
                difference = first.row(row).difference(second.row(row))
                require(difference is None, f"asked twice the same, it drafted {difference}")


def check_declared_probabilities(case: DrafterCase) -> str:
    """Tokens are drawn from the probabilities declared for them (chi-square, false alarm 1e-4)."""
    drafters, _ = case.sampled
    first = [drafter.proposals[0] for drafter in drafters if drafter.proposals]
    rows = [proposal.row(index) for proposal in first for index in range(proposal.context.batch_size)]
    drawn = [(row.tokens, row.probs) for row in rows if row.probs is not None]
    if not drawn:
        raise Inapplicable("its drafts are deterministic (probs is None), or it never drafted")
    nodes = max(len(tokens) for tokens, _ in drawn)
    notes = []
    for node in range(nodes):
        pairs = [(tokens[node], probs[node]) for tokens, probs in drawn if len(tokens) > node]
        p_value = declared_p_value(torch.tensor([t for t, _ in pairs]), torch.stack([probs for _, probs in pairs]))
        require(
            p_value >= FALSE_ALARM / nodes,
            f"{len(pairs)} tokens of draft node {node} do not come from the probabilities declared for them "
            f"(p = {p_value:.2g})",
        )
        notes.append(f"p = {p_value:.2g}")
    return ", ".join(notes)


def check_batch_invariance(case: DrafterCase) -> None:
    """A request's drafts are the same alone, in a ragged batch, and in another order."""
    if not case.together:
        raise Inapplicable("it takes one request at a time")
    for temperature in case.temperatures:
        requests = case.bench.requests(temperature)
        together, _ = case.run(requests, _RAGGED)
        turned, _ = case.run(requests[::-1], _RAGGED)
        for request in requests:
            alone, _ = case.run([request], _RAGGED)
            _require_same(alone, together, "drafted {} in a batch of three, where alone it did otherwise")
            _require_same(alone, turned, "drafted {} in a batch in another order, where alone it did otherwise")


def _require_same(wanted: Recorder, found: Recorder, sentence: str) -> None:
    """Wherever both were asked, both drafted the same."""
    rows = found.rows()
    for (name, step), row in wanted.rows().items():
        difference = rows[name, step].difference(row) if (name, step) in rows else "nothing"
        require(difference is None, f"at step {step} of request {name} it {sentence.format(difference)}")


def check_rollback(case: DrafterCase) -> str:
    """After none, some or all of a draft was kept, it drafts what a fresh one does that was shown the same tokens."""
    return _compare_with_fresh(case, at_once=1)


def check_cascade(case: DrafterCase) -> str:
    """It follows tokens that another drafter proposed: rows of length 0 whose path is not empty."""
    return _compare_with_fresh(case, at_once=3)


def _compare_with_fresh(case: DrafterCase, at_once: int) -> str:
    compared = 0
    for temperature in case.temperatures:
        request = case.bench.request("rollback", temperature=temperature, max_new_tokens=24)
        drafter, _ = case.run([request], FixedController(3), AcceptScript((0, 1, 3, 3, 2, 0)))
        for proposal in drafter.proposals[1:]:
            difference = proposal.row().difference(_replayed(case, drafter, proposal, at_once))
            length = len(proposal.context.tokens[0])
            require(
                difference is None,
                f"after {length} tokens, some of them its own drafts, it drafted {difference} by a fresh one that was "
                f"shown them {at_once} at a time",
            )
            compared += len(proposal.row().tokens)
    if not compared:
        raise Inapplicable("it drafted nothing on this target")
    return f"{compared} draft tokens"


def _replayed(case: DrafterCase, recorder: Recorder, proposal: Proposal, at_once: int) -> Row:
    """What a fresh drafter proposes that was shown the same tokens by steps with no draft of its own."""
    fresh, context, start = case.make(), proposal.context, recorder.begun[0]
    tokens, name = context.tokens[0], context.request_ids[0]
    fresh.bind(case.bench.target.model, case.bench.target.tokenizer)
    fresh.reserve(1, len(tokens) + fresh.max_nodes(max(proposal.max_tokens)) + 1)
    if fresh.synthetic:
        plain = case.bench.plain([case.bench.request(name, max_new_tokens=24)])[0]
        fresh.reveal(name, plain.token_ids)
    features = torch.cat(recorder.features[name]) if name in recorder.features else None
    first = len(start.tokens[0])
    fresh.begin(start, None if features is None else [features[: first - 1]])
    for end in range(first, len(tokens), at_once):
        shown = torch.from_numpy(tokens[end : end + at_once]).to(context.device)
        path = torch.arange(len(shown) - 1, device=context.device)[None]
        empty = Draft(torch.full_like(path, PADDING), torch.zeros(1, dtype=torch.long))
        verdict = Verdict(path, torch.tensor([len(shown) - 1]), torch.tensor([len(shown) - 1]), shown[-1:])
        hidden = None if features is None else features[None, end - 1 : end - 1 + len(shown)]
        fresh.observe(replace(context, tokens=(tokens[:end],)), empty, verdict, hidden)
    return Row.of(fresh.propose(context, proposal.max_tokens, _never, proposal.uniforms), 0)


def _never(probs: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
    return torch.zeros_like(tokens, dtype=torch.bool)


def check_reset(case: DrafterCase) -> None:
    """A request that ends takes its own state with it and no other's."""
    if not case.together:
        raise Inapplicable("it takes one request at a time")
    for temperature in case.temperatures:
        short = case.bench.request("short", 5, temperature=temperature, max_new_tokens=3)
        long = case.bench.request("long", 11, temperature=temperature)
        alone, _ = case.run([long], FixedController(3))
        for pair in ([short, long], [long, short]):
            both, _ = case.run(pair, FixedController(3))
            _require_same(alone, both, "drafted {} beside a request that had ended, where alone it did otherwise")


def check_requests_are_independent(case: DrafterCase) -> None:
    """Nothing of an earlier request reaches a later one, not even under the same slot and name."""
    for temperature in case.temperatures:
        first = case.bench.request("first", 15, temperature=temperature)
        second = case.bench.request("second", 10, temperature=temperature)
        namesake = case.bench.request("first", 10, temperature=temperature, seed=1)
        for later in (second, namesake):
            alone, _ = case.run([later], FixedController(3))
            used = case.fresh()
            case.bench.decode(used, [first, later], FixedController(3), together=False)
            used.proposals = used.proposals[used.starts[-1] :]
            _require_same(alone, used, "drafted {} after another request, where fresh it did otherwise")


def check_context_window(case: DrafterCase) -> None:
    """At the end of the context window drafts get shorter or empty, and output stays plain decoding's."""
    window = case.bench.target.model.max_positions
    if window > _LONGEST_WINDOW:
        raise Inapplicable(f"the target's window of {window} tokens takes too long to fill")
    for length in (window - 8, window - 1):
        request = case.bench.request("window", length, max_new_tokens=50)
        _, traces = case.run([request], FixedController(4))
        case.bench.require_plain_output([request], traces, f"a prompt of {length} in a window of {window}")
        require(
            traces[0].finish_reason is FinishReason.WINDOW, f"it ended by {traces[0].finish_reason}, not the window"
        )


def check_greedy_losslessness(case: DrafterCase) -> str:
    """At temperature 0 output is plain decoding's token for token, whatever the draft length."""
    requests = case.bench.requests()
    case.bench.plain(requests)  # before the drafter is let near the target
    accepted = drafted = 0
    for controller in (FixedController(1), FixedController(3), FixedController(6), _RAGGED, StopAt(4, depth=2)):
        drafter, traces = case.run(requests, controller)
        case.bench.require_plain_output(
            requests, traces, f"{type(controller).__name__} up to {controller.max_draft_tokens}"
        )
        accepted += sum(step.num_accepted for trace in traces for step in trace.steps)
        drafted += drafter.num_drafted
    return f"{accepted} of {drafted} draft tokens kept"


def check_sampled_losslessness(case: DrafterCase) -> str:
    """At temperature 1 one, two and three tokens have the target's exact joint (chi-square, false alarm 1e-4)."""
    _, traces = case.sampled
    accepted = sum(step.num_accepted for trace in traces for step in trace.steps)
    return f"p = {case.bench.require_target_joint(traces):.2g}, {accepted} draft tokens kept"


DRAFTER_CHECKS: tuple[Callable[[DrafterCase], str | None], ...] = (
    check_declarations,
    check_form,
    check_max_tokens,
    check_stop,
    check_arguments_are_left_alone,
    check_randomness,
    check_declared_probabilities,
    check_batch_invariance,
    check_rollback,
    check_cascade,
    check_reset,
    check_requests_are_independent,
    check_context_window,
    check_greedy_losslessness,
    check_sampled_losslessness,
)
