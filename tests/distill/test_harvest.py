"""What is harvested is what the target says and sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.backends.native import to_request
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.distill.examples import Harvest, collate
from specdec.distill.harvest import STORED_DTYPE, HarvestPlan, harvest, load_shard, shard_sizes
from specdec.drafters.none import NoDrafter
from specdec.errors import UsageError
from specdec.models.loading import LoadedModel
from specdec.types import Prompt, SamplingParams
from specdec.verifiers.rejection import RejectionVerifier

PLAN = HarvestPlan((1, 3), temperatures=(0.0, 1.0), max_new_tokens=8, batch_size=3)
PROMPTS = [Prompt(f"p{n}", text="word " * (1 + n % 4) + str(n), max_new_tokens=99, stop=("x",)) for n in range(8)]


@pytest.fixture(scope="module")
def shards(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harvest")
    assert sum(harvest(target, PROMPTS, PLAN, folder)) == sum(
        len(one.tokens) for shard in folder.iterdir() for one in load_shard(shard)
    )
    return folder


def test_features_are_those_of_a_forward_over_the_whole(target: LoadedModel, shards: Path) -> None:
    for shard in sorted(shards.iterdir()):
        for one in load_shard(shard):
            cache = target.model.new_cache(1, len(one.tokens))
            positions = torch.arange(len(one.tokens))[None]
            output = target.model.forward(one.tokens[None], positions, cache.view([0]), hidden_layers=(1, 3))
            assert output.hidden is not None
            torch.testing.assert_close(
                one.features.float(), output.hidden[0, :-1].to(STORED_DTYPE).float(), rtol=0.02, atol=0.02
            )


def test_continuations_are_plain_decoding(target: LoadedModel, shards: Path) -> None:
    engine = Engine(target.model, NoDrafter(), RejectionVerifier(), FixedController(0), tokenizer=target.tokenizer)
    expected = set()
    for index, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=PLAN.temperatures[index % 2], seed=PLAN.seed)
        request = to_request(Prompt(prompt.id, text=prompt.text, max_new_tokens=8), sampling, target)
        expected.add((*request.prompt_ids, *engine.generate([request])[0].token_ids))
    found = {tuple(one.tokens.tolist()) for shard in shards.iterdir() for one in load_shard(shard)}
    assert found == expected


def test_an_interrupted_harvest_goes_on(target: LoadedModel, shards: Path, tmp_path: Path) -> None:
    first = harvest(target, PROMPTS, PLAN, tmp_path)
    next(first)
    first.close()
    (kept,) = tmp_path.iterdir()
    made = kept.stat().st_mtime_ns
    list(harvest(target, PROMPTS, PLAN, tmp_path))
    assert kept.stat().st_mtime_ns == made
    assert [s.read_bytes() for s in sorted(tmp_path.iterdir())] == [s.read_bytes() for s in sorted(shards.iterdir())]


def test_the_fingerprint_tells_plans_prompts_and_targets_apart(target: LoadedModel) -> None:
    from dataclasses import replace

    found = {
        PLAN.fingerprint(target, PROMPTS),
        PLAN.fingerprint(target, PROMPTS[1:]),
        replace(PLAN, max_new_tokens=9).fingerprint(target, PROMPTS),
        PLAN.fingerprint(replace(target, fingerprint="another"), PROMPTS),
    }
    assert len(found) == 4


def test_batches_cover_an_epoch_once_and_resume_where_they_stopped(shards: Path) -> None:
    data = Harvest(shards, [0], batch_size=2, seed=3)
    epoch = [examples for examples, _ in zip(data.batches(0), range(data.batches_per_epoch), strict=False)]
    sizes = sum(shard_sizes(shard)[0] for shard in shards.iterdir())
    assert sum(len(examples.tokens) for examples in epoch) == sizes
    for start in range(1, data.batches_per_epoch):
        assert torch.equal(next(data.batches(start)).tokens, epoch[start].tokens)


def test_roots_have_a_following_token_and_its_features(shards: Path) -> None:
    found = [one for shard in sorted(shards.iterdir()) for one in load_shard(shard)]
    examples = collate(found, [0, 1])
    for row, one in enumerate(found):
        roots = examples.scored[row].nonzero()[:, 0].tolist()
        assert roots == list(range(one.num_prompt - 1, len(one.tokens) - 2))
        for root in roots:
            assert torch.equal(examples.features[row, root + 1], one.features[root + 1].float())
    hidden, known = examples.ahead(2)
    expected = [
        one.features[root + 2, -1].float() if root + 2 < len(one.features) else None
        for row, one in enumerate(found)
        for root in examples.scored[row].nonzero()[:, 0].tolist()
    ]
    assert known.tolist() == [feature is not None for feature in expected]
    assert all(torch.equal(h, e) for h, e in zip(hidden, expected, strict=True) if e is not None)


def test_the_draft_vocabulary_is_ranked_by_what_was_said(shards: Path) -> None:
    said = torch.cat([one.tokens[one.num_prompt :] for s in shards.iterdir() for one in load_shard(s)])
    counts = said.bincount(minlength=264)
    ranked = Harvest(shards, [0], 2).frequent_tokens(40, 264).tolist()
    assert len(set(ranked)) == 40
    assert [int(counts[token]) for token in ranked] == sorted(counts.tolist(), reverse=True)[:40]


@pytest.mark.parametrize(
    ("plan", "prompts", "said"),
    [
        (PLAN, [], "no prompts"),
        (HarvestPlan((1,)), PROMPTS, "lacks the last layer 3"),
        (HarvestPlan((3,), max_prompt_tokens=2), PROMPTS, "max_prompt_tokens=2"),
    ],
)
def test_bad_plans(target: LoadedModel, tmp_path: Path, plan: HarvestPlan, prompts: list[Prompt], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        list(harvest(target, prompts, plan, tmp_path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no harvested continuations"):
        Harvest(tmp_path, [0], 2)
