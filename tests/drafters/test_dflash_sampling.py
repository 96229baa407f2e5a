"""Sampled answers drafted by DFlash have the target's distribution, whatever decides their length.

Measured as in tests/conformance/test_distribution.py: chi-square over the next three tokens of a
tiny vocabulary against the exact joint distribution. A drafter that looks at what it has drawn
must fail the same test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.conformance.harness import request
from tests.conformance.test_distribution import BIASED, CUT, FAIR, FLAT, IDS, VOCAB, exact
from tests.conformance.test_distribution import p_value as chance_of
from tests.conformance.toy_target import ToyTarget
from tests.dflash.dflash_models import config, loaded

from hasten.decode import decode
from hasten.dflash.bank import DFlashBank, assemble
from hasten.dflash.lengths import BlockLength, CostedLength
from hasten.drafters.base import DraftContext
from hasten.drafters.dflash import DFlash
from hasten.policies.cost_model import CostModel, CostTable
from hasten.policies.length import LengthPolicy, SurvivalBook
from hasten.targets.fused_weights import make_linear
from hasten.types import Budget, Draft, DraftTree, SamplingParams

RUNS = 250
TARGET = ToyTarget(vocab=VOCAB, scale=1.0, seed=5, eos_ids=())
COSTS = CostTable("toy", (1, 4, 16), (64,), ((10.0, 11.0, 14.0),))


def bank(ids: tuple[int, ...] | None = None) -> DFlashBank:
    """Over the toy target; its length head spreads its words widely."""
    made = config(
        hidden_size=VOCAB,
        vocab_size=VOCAB,
        num_target_layers=4,
        target_layer_ids=(1, 3),
        num_layers=1,
        block_size=4,
        length_head=6,
        draft_vocab_size=VOCAB if ids is None else len(ids),
    )
    stored = loaded(made, 1, ids)
    with torch.no_grad():
        stored.net.thresh_head_two_model.out.weight.mul_(8.0)
    return assemble(TARGET, stored, make_linear)


ALL, SOME = bank(), bank((0, 2, 5))

Make = Callable[[int], DFlash]


def ruled(policy: str) -> BlockLength:
    rule = LengthPolicy(4, policy=policy)
    if policy == "cost":
        return CostedLength(rule, CostModel(COSTS), SurvivalBook())
    return BlockLength(rule)


def joint(
    make: Make, params: SamplingParams, verifier: str = "rejection", runs: int = RUNS
) -> tuple[Counter[tuple[int, ...]], Counter[int], int]:
    """The first three tokens of `runs` answers, the lengths of their drafts, and how many drafted
    tokens were kept. A fourth token is asked for, so that a draft may have two."""
    counts: Counter[tuple[int, ...]] = Counter()
    lengths: Counter[int] = Counter()
    kept = 0
    params = replace(params, max_new_tokens=4)
    for seed in range(runs):
        drafter = make(seed)
        asked = request(
            TARGET, IDS, params, drafter, policy=drafter.length, verifier=verifier, seed=seed
        )
        tokens: list[int] = []
        for _, made in decode([asked]):
            tokens.extend(made.emitted)
            if made.tree is not None:
                lengths[made.drafted] += 1
                kept += len(made.accepted) - 1
            if len(tokens) >= 3:
                break
        counts[tuple(tokens[:3])] += 1
    return counts, lengths, kept


@pytest.mark.parametrize(
    ("policy", "draw"), [("fixed", True), ("ratio", True), ("cost", True), ("ratio", False)]
)
def test_rejection_keeps_the_targets_distribution(policy: str, draw: bool) -> None:
    book = SurvivalBook()

    def make(seed: int) -> DFlash:
        length = ruled(policy)
        if policy == "cost":
            length = CostedLength(length.rule, CostModel(COSTS), book)
        return DFlash(ALL, length, draw=draw)

    counts, lengths, kept = joint(make, CUT)
    assert chance_of(counts, exact(CUT, IDS, 3)) > FAIR
    assert kept > RUNS / 20, "nearly nothing is drafted and kept: this shows little"
    assert policy != "ratio" or len(lengths) >= 3


@pytest.mark.parametrize("draw", [True, False], ids=["sample", "argmax"])
def test_match_keeps_the_targets_distribution(draw: bool) -> None:
    counts, _, kept = joint(lambda seed: DFlash(ALL, ruled("ratio"), draw=draw), FLAT, "match")
    assert chance_of(counts, exact(FLAT, IDS, 3)) > FAIR
    assert kept > 0


def test_a_head_that_knows_few_ids_and_a_temperature_of_its_own_keep_it_too() -> None:
    def make(seed: int) -> DFlash:
        return DFlash(SOME, ruled("ratio"), draw=True, temperature=0.5)

    counts, _, kept = joint(make, FLAT)
    assert chance_of(counts, exact(FLAT, IDS, 3)) > FAIR
    assert kept > 0


def test_a_slots_q_is_what_it_was_drawn_from() -> None:
    drafter = DFlash(SOME, ruled("fixed"), draw=True, temperature=0.5)
    asked = request(TARGET, IDS, replace(CUT, max_new_tokens=9), drafter, verifier="rejection")
    asked.start()
    ctx = asked._context
    draft = drafter.propose(ctx, Budget(4, 3))
    assert sorted(draft.q) == [0, 1, 2]
    known = {0, 2, 5} | set(IDS)
    for slot, probs in draft.q.items():
        row = drafter._head.spread(drafter._head(_slots(drafter, ctx))[slot] / 0.5)
        want = ctx.warp([*ctx.ids, *draft.tree.tokens[1 : 1 + slot]], row)
        torch.testing.assert_close(probs, want)
        assert {i for i, p in enumerate(probs.tolist()) if p > 0} <= known
        assert float(probs[draft.tree.tokens[1 + slot]]) > 0
    asked.close()


class Wary(CostedLength):
    """Finds nothing worth verifying, as after many refusals."""

    def rows(self, fraction: float | None) -> int:
        return 1


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_where_nothing_is_worth_verifying_a_drawing_request_still_learns(verifier: str) -> None:
    book = SurvivalBook()
    length = Wary(LengthPolicy(4, policy="cost"), CostModel(COSTS), book)
    params = replace(FLAT, max_new_tokens=30)
    drafter = DFlash(ALL, length, draw=True)
    asked = request(TARGET, IDS, params, drafter, policy=length, verifier=verifier, seed=1)
    rounds = [made for _, made in decode([asked])]
    assert sum(made.drafted for made in rounds) == 0
    assert {slot for _, slot in book.counts} == {1}, "of the first slot, and of none beyond"
    assert sum(reached for _, reached in book.counts.values()) > 2


def _slots(drafter: DFlash, ctx: DraftContext) -> torch.Tensor:
    """The block's states once more, behind a context that is in the cache already."""
    with torch.inference_mode():
        return drafter._block(ctx)[0, 1:]


class Looking(DFlash):
    """Draws, looks how likely its tokens were, and takes back the first unlikely one and those
    after it."""

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        draft = super().propose(ctx, budget)
        likely = [float(q[draft.tree.tokens[1 + slot]]) >= 0.25 for slot, q in draft.q.items()]
        count = likely.index(False) if False in likely else len(likely)
        tree = DraftTree.chain(draft.tree.tokens[0], draft.tree.tokens[1 : 1 + count])
        return Draft(tree, q={slot: q for slot, q in draft.q.items() if slot < count})


def test_the_measure_finds_a_drafter_that_looks_at_what_it_has_drawn() -> None:
    counts, _, _ = joint(lambda seed: Looking(ALL, ruled("fixed"), draw=True), FLAT, runs=700)
    assert chance_of(counts, exact(FLAT, IDS, 3)) < BIASED
