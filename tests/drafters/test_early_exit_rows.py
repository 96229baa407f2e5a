"""What runs: each row through each layer once; what policies are told; what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.exits import exit_models as tiny
from tests.exits.exit_models import LAYERS, VOCAB
from tests.exits.exit_requests import (
    GREEDY,
    POLICIES,
    answer,
    bank,
    drafter,
    plain,
    prompt_of,
    rounds_of,
    run,
    tokens_of,
)

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.base import DraftContext
from hasten.drafters.early_exit import EarlyExit
from hasten.errors import CapabilityError, DrafterError, OptionError
from hasten.exits.modules import ExitState
from hasten.policies import exit_rules
from hasten.policies.base import FixedPolicy
from hasten.policies.exits import Outcome
from hasten.types import (
    Budget,
    Draft,
    DraftTree,
    Pass,
    Round,
    RowSignals,
)
from hasten.verify import VERIFIERS

# -- each row through each layer once --------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_round_runs_each_row_through_each_layer_once(policy: str) -> None:
    # `rounds_of` holds the target's own counter to (drafted + 1) x layers in every round
    rounds = run(drafter(POLICIES[policy]()), 3)
    lengths = {r.drafted for r in rounds[1:]}
    if policy in ("reluctant", "an exit that isn't there"):
        assert lengths == {0}
    elif policy in ("random", "adversarial", "thresholds"):
        assert {0, 1} < lengths, "plain steps, short drafts and longer ones"


def _logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of every pass that is settled from now on."""
    seen: list[torch.Tensor] = []
    settle = Decoding.settle

    def spy(self: Decoding, passed: Pass, seconds: float) -> Round:
        assert passed.logits is not None
        seen.append(passed.logits.clone())
        return settle(self, passed, seconds)

    monkeypatch.setattr(Decoding, "settle", spy)
    return seen


def test_going_on_at_the_last_candidate_is_a_plain_step_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer(2)  # known from here on: only the passes of two runs are seen
    seen = _logits(monkeypatch)
    plain(tiny.target(), prompt_of(2), GREEDY)
    wanted, count = list(seen), len(seen)
    seen.clear()
    made = drafter(POLICIES["reluctant"]())
    ranges = _layer_ranges(monkeypatch)
    run(made, 2)
    # before the last token there is no room for a draft: nobody is asked
    assert ranges == [*[(0, 2), (2, 4), (4, LAYERS)] * (count - 1), None]
    assert len(seen) == count
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))


def _layer_ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int] | None]:
    """The layers of every pass from now on, as they come."""
    ranges: list[tuple[int, int] | None] = []
    target: Any = tiny.target()
    forward = type(target).forward

    def spy(self: Any, batch: Any, *, layers: Any = None, taps: Any = ()) -> Any:
        ranges.append(layers)
        return forward(self, batch, layers=layers, taps=taps)

    monkeypatch.setattr(type(target), "forward", spy)
    return ranges


def test_an_exit_nobody_wants_costs_no_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = _layer_ranges(monkeypatch)
    run(drafter(exit_rules.Static(2, 2)), 0)
    assert set(ranges) == {(0, 4), (4, LAYERS), None}


# -- what policies are told ------------------------------------------------------------------------


class Recorder(exit_rules.Random):
    """Leaves by its coin and keeps what it is told."""

    shadow = True

    def __init__(self, chance: float = 0.7) -> None:
        super().__init__(1, chance)
        self.told: list[Outcome] = []

    def learn(self, outcome: Outcome) -> None:
        self.told.append(outcome)


def test_a_policy_hears_of_every_round_it_decided() -> None:
    policy = Recorder(0.3)
    rounds = run(drafter(policy, (("adapter", 2), ("lens", 4)), length=4), 1)
    # the last token is emitted by a round with no room for a draft, or with one it decided
    decided = rounds[1 : 1 + len(policy.told)]
    assert len(rounds) - 2 <= len(policy.told) <= len(rounds) - 1
    for made, told in zip(decided, policy.told, strict=True):
        assert told.drafted == made.drafted
        assert told.accepted == len(made.accepted) - 1
        assert told.layer in ((None,) if not made.drafted else (2, 4))
        walk = [p for p in told.probes if p.phase == "select"]
        assert [p.layer for p in walk] == [2, 4][: len(walk)]
        later = [p.drafted for p in told.probes if p.phase == "draft"]
        assert later == list(range(1, len(later) + 1))
        assert made.drafted - 1 <= len(later) <= made.drafted if made.drafted else not later
    assert {told.layer for told in policy.told} == {None, 2, 4}


def test_shadows_are_each_modules_word_on_the_rows_kept() -> None:
    policy, kinds = Recorder(), (("adapter", 2), ("lens", 4), ("deep", 5))
    rounds = run(drafter(policy, kinds, length=4), 2)
    text = [*prompt_of(2), *answer(2)]
    wanted = _firsts(kinds, text)
    at = len(prompt_of(2)) - 1
    for made, told in zip(rounds[1:], policy.told, strict=False):
        at += 1
        rows = range(at, at + len(made.accepted))
        for exit, (guesses, truths, p1) in enumerate(told.shadows):
            assert truths == list(made.emitted) == text[rows.start + 1 : rows.stop + 1]
            assert guesses == [wanted[exit][row][0] for row in rows]
            assert p1 == pytest.approx([wanted[exit][row][1] for row in rows], abs=1e-4)
        at += len(made.accepted) - 1
    assert at > len(prompt_of(2)) + 10


def _firsts(kinds: tiny.Kinds, text: Sequence[int]) -> list[list[tuple[int, float]]]:
    """For each module the likeliest id after each row of the text, and its probability, by whole
    passes."""
    target, over = tiny.target(), bank(kinds)
    sequence = target.open()
    taps = tuple(sorted({layer for _, layer in kinds} | {3, LAYERS}))
    hidden = target.prefill(sequence, text, taps=taps).hidden
    target.close(sequence)
    head, out = over.head.local(prompt_of(2)), []
    with torch.inference_mode():
        for module in over.modules:
            rows, features = hidden[module.config.layer], None
            if module.config.deep:
                fused = module.fused([hidden[layer] for layer in module.config.deep])
                features = torch.cat([torch.zeros_like(fused[:1]), fused[:-1]])
            made = module.run(ExitState(), rows, features, verified=len(text), want=len(text))
            p1, best = torch.softmax(head(over.normed(module, made)), -1).max(-1)
            out.append(
                [(head.id_of(b), p) for b, p in zip(best.tolist(), p1.tolist(), strict=True)]
            )
    return out


def test_of_a_draft_the_answer_ends_inside_only_what_is_known_is_told() -> None:
    class Sure(Recorder):
        shadow = False

    cuts = 0
    for end in answer(0):
        over, policy = tiny.target(eos_ids=(end,)), Sure(1.0)
        # a drafter that doesn't know the end goes on after it
        made = EarlyExit(bank((("lens", 4),), None), policy, length=5)
        last = rounds_of(over, prompt_of(0), GREEDY, made)[-1]
        if last.tree is not None and last.tree.tokens[len(last.accepted) : -1].count(end):
            told = policy.told[-1]
            if last.tree.tokens[len(last.accepted)] == end:
                cuts += 1
                assert told.drafted == told.accepted == len(last.accepted) < last.drafted
    assert cuts > 0


# -- what must not happen --------------------------------------------------------------------------


class Meddling(EarlyExit):
    """Runs rows as it should, then says something else about them."""

    def __init__(self, change: Callable[[DraftContext, Draft], Draft]) -> None:
        super().__init__(bank((("lens", 2),), None), exit_rules.Static(0, 3), length=3)
        self.change = change

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        return self.change(ctx, super().propose(ctx, budget))


def _with(draft: Draft, *frontiers: int) -> Draft:
    return Draft(draft.tree, frontiers=frontiers)


def _again(ctx: DraftContext, draft: Draft) -> Draft:
    assert ctx.run_rows is not None
    ctx.run_rows([draft.tree.tokens[0]], [-1], (0, 2))
    return draft


def _elsewhere(ctx: DraftContext, draft: Draft) -> Draft:
    assert ctx.run_rows is not None
    ctx.run_rows(draft.tree.tokens[:1], [-1], (3, 4))
    return draft


def _one_of_them(ctx: DraftContext, draft: Draft) -> Draft:
    assert ctx.run_rows is not None
    ctx.run_rows(draft.tree.tokens[1:2], [0], (2, 4))
    return draft


def _another_token(ctx: DraftContext, draft: Draft) -> Draft:
    tokens = (*draft.tree.tokens[:1], (draft.tree.tokens[1] + 1) % VOCAB, *draft.tree.tokens[2:])
    return Draft(DraftTree(tokens, draft.tree.parents), frontiers=draft.frontiers)


MEDDLING: dict[str, tuple[Callable[[DraftContext, Draft], Draft], str]] = {
    "rows are resumed further up than they stand": (lambda c, d: _with(d, 3, 3, 3), "frontiers"),
    "rows are resumed further down than they stand": (lambda c, d: _with(d, 1, 1, 1), "frontiers"),
    "a row that ran is left out": (lambda c, d: _with(d, 2, 2), "frontiers"),
    "a row that ran carries another token": (_another_token, "frontiers"),
    "the root is run a second time": (_again, "earlier row"),
    "a row is run from a layer it doesn't stand at": (_elsewhere, "stand at layer 3"),
    "one row of several is run on": (_one_of_them, "stand at layer 2"),
}


@pytest.mark.parametrize("fault", MEDDLING)
def test_a_drafter_that_meddles_with_its_rows_is_refused(fault: str) -> None:
    change, words = MEDDLING[fault]
    with pytest.raises(DrafterError, match=words):
        rounds_of(tiny.target(), prompt_of(0), GREEDY, Meddling(change))
    tiny.target().check()


def test_rows_that_are_given_up_run_again_and_the_count_shows_it() -> None:
    made = Meddling(lambda ctx, draft: Draft(draft.tree))
    asked = Decoding(
        tiny.target(),
        prompt_of(0),
        GREEDY,
        drafter=made,
        policy=FixedPolicy(13),
        verifier=VERIFIERS["greedy"],
    )
    rounds = [each for _, each in decode([asked])]
    assert tokens_of(rounds) == answer(0)
    assert rounds[1].layer_rows == 4 * LAYERS + 3 * 2


def test_a_target_without_layer_ranges_is_refused_in_words() -> None:
    made = drafter(POLICIES["eager"](), (("lens", 2),))
    ctx = DraftContext([1, 2], lambda *_: [], lambda *_: torch.zeros(1), True)
    made.begin([1, 2], RowSignals())
    with pytest.raises(CapabilityError, match="runs some of its layers"):
        made.propose(ctx, Budget(4, 4))


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(OptionError, match=r"early-exit\.length"):
        drafter(POLICIES["eager"](), length=0)


def test_a_drafter_keeps_nothing_of_a_finished_request() -> None:
    made = drafter(POLICIES["eager"]())
    run(made, 0)
    assert made._session.runs == []
    assert made._probes == []
