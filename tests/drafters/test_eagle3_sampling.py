"""Sampled answers drafted by EAGLE-3 have the target's distribution: chains, trees, drawn chains.

Measured as in tests/conformance/test_distribution.py: chi-square over the next three tokens of a
tiny vocabulary against the exact joint distribution. A drafter that looks at what it has drawn
must fail the same test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.conformance.harness import request
from tests.conformance.test_distribution import BIASED, CUT, FAIR, FLAT, IDS, VOCAB, exact
from tests.conformance.test_distribution import p_value as chance_of
from tests.conformance.toy_target import ToyTarget
from tests.eagle3.eagle3_models import config, loaded

from hasten.decode import decode
from hasten.drafters.base import DraftContext
from hasten.drafters.eagle3 import Eagle3
from hasten.eagle3.bank import Eagle3Bank, assemble
from hasten.policies.base import FixedPolicy
from hasten.targets.fused_weights import make_linear
from hasten.types import Budget, Draft, DraftTree, SamplingParams

RUNS = 250
TARGET = ToyTarget(vocab=VOCAB, scale=1.0, seed=5, eos_ids=())


def bank(ids: tuple[int, ...] | None = None) -> Eagle3Bank:
    """Over the toy target."""
    made = config(
        hidden_size=VOCAB,
        vocab_size=VOCAB,
        taps=(1, 3),
        draft_vocab_size=VOCAB if ids is None else len(ids),
    )
    return assemble(TARGET, loaded(made, 1, ids), make_linear)


ALL, SOME = bank(), bank((0, 2, 5))
Make = Callable[[], Eagle3]
KINDS: dict[str, dict[str, Any]] = {
    "chain": {"length": 2},
    "drawn chain": {"length": 2, "sample": True},
    "tree": {"top_k": 3, "depth": 2},
}


def joint(
    make: Make, params: SamplingParams, verifier: str, runs: int = RUNS
) -> tuple[Counter[tuple[int, ...]], int]:
    """The first three tokens of `runs` answers, and how many drafted tokens were kept. A fourth is
    asked for, so that a draft may have two."""
    counts: Counter[tuple[int, ...]] = Counter()
    kept = 0
    params = replace(params, max_new_tokens=4)
    for seed in range(runs):
        asked = request(
            TARGET, IDS, params, make(), policy=FixedPolicy(7, 2), verifier=verifier, seed=seed
        )
        tokens: list[int] = []
        for _, made in decode([asked]):
            tokens.extend(made.emitted)
            if made.tree is not None:
                kept += len(made.accepted) - 1
            if len(tokens) >= 3:
                break
        counts[tuple(tokens[:3])] += 1
    return counts, kept


@pytest.mark.parametrize(
    ("kind", "verifier"),
    [*((kind, "rejection") for kind in KINDS), ("tree", "match"), ("drawn chain", "match")],
)
def test_the_targets_distribution_is_kept(kind: str, verifier: str) -> None:
    params = CUT if verifier == "rejection" else FLAT
    counts, kept = joint(lambda: Eagle3(ALL, **KINDS[kind]), params, verifier)
    assert chance_of(counts, exact(params, IDS, 3)) > FAIR
    assert kept > RUNS / 20, "nearly nothing is drafted and kept: this shows little"


def test_a_head_that_knows_few_ids_and_a_temperature_of_its_own_keep_it_too() -> None:
    def make() -> Eagle3:
        return Eagle3(SOME, length=2, sample=True, temperature=0.5)

    counts, kept = joint(make, FLAT, "rejection")
    assert chance_of(counts, exact(FLAT, IDS, 3)) > FAIR
    assert kept > 0


def test_a_tokens_q_is_what_it_was_drawn_from() -> None:
    drafter = Eagle3(SOME, length=3, sample=True, temperature=0.5)
    asked = request(TARGET, IDS, replace(CUT, max_new_tokens=9), drafter, verifier="rejection")
    asked.start()
    ctx = asked._context
    draft = drafter.propose(ctx, Budget(4, 3))
    assert sorted(draft.q) == [0, 1, 2]
    tokens = draft.tree.tokens[1:]
    with torch.inference_mode():
        state = drafter.pairs.last
        assert state is not None
        with drafter.pairs.branch() as branch:
            for node, probs in draft.q.items():
                logits = drafter.bank.net.logits(state[0, 0]) / 0.5
                want = ctx.warp([*ctx.ids, *tokens[:node]], drafter.bank.spread(logits))
                torch.testing.assert_close(probs, want)
                assert {i for i, p in enumerate(probs.tolist()) if p > 0} <= {0, 2, 5}
                assert float(probs[tokens[node]]) > 0
                state = branch.step([tokens[node]], state)
    asked.close()


def test_a_greedy_request_draws_nothing() -> None:
    greedy = SamplingParams(max_new_tokens=9, ignore_eos=True)
    drafts = []
    for sample in (True, False):
        drafter = Eagle3(ALL, length=3, sample=sample)
        asked = request(TARGET, IDS, greedy, drafter)
        asked.start()
        drafts.append(drafter.propose(asked._context, Budget(4, 3)))
        asked.close()
    assert drafts[0].q == {}
    assert drafts[0].tree == drafts[1].tree


class Looking(Eagle3):
    """Draws, looks how likely its tokens were, and takes back the first unlikely one and those
    after it."""

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        draft = super().propose(ctx, budget)
        likely = [float(q[draft.tree.tokens[1 + node]]) >= 0.25 for node, q in draft.q.items()]
        count = likely.index(False) if False in likely else len(likely)
        tree = DraftTree.chain(draft.tree.tokens[0], draft.tree.tokens[1 : 1 + count])
        return Draft(tree, q={node: q for node, q in draft.q.items() if node < count})


def test_the_measure_finds_a_drafter_that_looks_at_what_it_has_drawn() -> None:
    counts, _ = joint(lambda: Looking(ALL, length=2, sample=True), FLAT, "rejection", runs=700)
    assert chance_of(counts, exact(FLAT, IDS, 3)) < BIASED
