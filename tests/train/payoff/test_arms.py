"""What an arm's candidates would keep at every token of an answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hasten.decode import decode
from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.draft_model import DraftModel
from hasten.methods import RequestMaker
from hasten.policies.base import FixedPolicy
from hasten.train.payoff.arms import kept_everywhere
from hasten.types import Budget, Draft, DraftTree, SamplingParams
from tests.conformance.harness import prompt_of, request
from tests.conformance.toy_target import ToyTarget

PARAMS = SamplingParams(max_new_tokens=30, ignore_eos=True)


class Knowing(BaseDrafter):
    """Drafts the answer's next three tokens, the last of them wrong at every third place."""

    def __init__(self, truth: Sequence[int]) -> None:
        self._truth = list(truth)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        place = len(ctx.ids)
        tokens = self._truth[place : place + min(3, budget.depth)]
        if place % 3 == 0 and tokens:
            tokens[-1] = (tokens[-1] + 1) % 24
        return Draft(DraftTree.chain(ctx.ids[-1], tokens))


def test_every_place_says_what_the_text_goes_on_with_and_the_answer_is_plain() -> None:
    target, prompt = ToyTarget(), prompt_of(0)
    plain = target.plain(prompt, PARAMS)
    maker = RequestMaker(lambda shared: (Knowing([*prompt, *plain]), FixedPolicy(8)))
    answer, kept = kept_everywhere(target, maker, prompt, PARAMS)
    assert answer == plain
    assert len(kept) == len(plain)
    for place, count in enumerate(kept):
        length = len(prompt) + place + 1
        most = min(3, len(plain) - place - 2)  # the last round's own token isn't drafted
        assert count == max(most - (length % 3 == 0), 0), place
    assert target.live == []


@pytest.mark.parametrize("nodes", [2, 4])
def test_it_agrees_with_the_arms_own_rounds(nodes: int) -> None:
    """Where the arm's own rounds begin, it keeps what they kept."""
    target, prompt = ToyTarget(bigram=0.9, seed=2), prompt_of(2)

    def arm() -> DraftModel:
        return DraftModel(ToyTarget(bigram=0.8, seed=2), vocab_size=24, num_tokens=nodes - 1)

    maker = RequestMaker(lambda shared: (arm(), FixedPolicy(nodes)))
    _, kept = kept_everywhere(target, maker, prompt, PARAMS)
    place, seen = -1, 0
    for _, made in decode([request(target, prompt, PARAMS, arm(), nodes=nodes)]):
        if made.tree is not None:
            assert kept[place] == len(made.accepted) - 1
            seen += kept[place]
        place += len(made.emitted)
    assert seen > 0
