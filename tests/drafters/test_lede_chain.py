"""Chains under LEDE's agent: plain decoding's answers whatever the agent does, each row through
each layer once, and the target's distribution when sampled. A drafter that drops after looking
must fail the same test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.conformance.test_distribution import BIASED, CUT, FAIR, FLAT, IDS, exact
from tests.conformance.test_distribution import p_value as chance_of
from tests.drafters.test_early_exit_sampling import ALL, RUNS, TARGET, joint
from tests.exits import exit_models as tiny
from tests.exits.exit_models import LAYERS
from tests.exits.exit_requests import (
    AT,
    CANDIDATES,
    EVEN,
    GREEDY,
    SAMPLED,
    answer,
    bank,
    kept,
    plain,
    prompt_of,
    rounds_of,
    run,
    tokens_of,
)
from tests.policies import lede_cases

from hasten.drafters.base import DraftContext
from hasten.drafters.early_exit import MAX_LENGTH
from hasten.drafters.lede_chain import LedeChain
from hasten.exits.bank import ExitBank
from hasten.policies.exits import Probe
from hasten.policies.lede import LedePolicy
from hasten.policies.lede_guard import Guard
from hasten.types import FinishReason, SamplingParams

AGENTS: dict[str, Callable[[], lede_cases.Ruled]] = {
    "eager": lede_cases.eager,
    "reluctant": lede_cases.reluctant,
    "random": lambda: lede_cases.tossing(3),
    "adversarial": lede_cases.adversarial,
    "of the second exit": lambda: lede_cases.Ruled(
        lambda x: x[lede_cases.feature("phase")] == 1 or x[lede_cases.feature("layer")] > 0
    ),
}


def drafter(
    agent: lede_cases.Ruled,
    over: ExitBank | None = None,
    guard: Guard | None = None,
    **options: object,
) -> LedeChain:
    over = over or bank(CANDIDATES)
    facts = lede_cases.facts(over.layers, LAYERS)
    made = LedePolicy(agent, facts, steps=MAX_LENGTH, guard=guard)
    return LedeChain(over, made, **options)  # type: ignore[arg-type]


# -- lossless --------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", AGENTS)
def test_greedy_and_match_answers_are_plain_decodings_under_any_agent(agent: str) -> None:
    # `rounds_of` holds the target's own counter to (drafted + 1) x layers in every round
    rounds = [*run(drafter(AGENTS[agent]()), 0), *run(drafter(AGENTS[agent]()), 1, SAMPLED)]
    run(drafter(AGENTS[agent](), draw=False), 1, SAMPLED, verifier="rejection")
    lengths = {each.drafted for each in rounds}
    assert (lengths == {0}) == (agent == "reluctant")
    if agent == "eager":
        assert kept(rounds) > 0


def test_going_on_everywhere_is_plain_decoding_with_probes_only() -> None:
    agent = lede_cases.reluctant()
    rounds = run(drafter(agent), 2)
    assert {each.drafted for each in rounds} == {0}
    # before the last token there is no room for a draft: nobody is asked
    assert len(agent.seen) == len(AT) * (len(rounds) - 2)


def test_a_guard_that_pauses_leaves_probes_out() -> None:
    agent = lede_cases.adversarial(0.0)
    made = drafter(agent, guard=Guard())
    params = SamplingParams(max_new_tokens=60)
    over = tiny.target()
    rounds = rounds_of(over, prompt_of(0), params, made)
    assert tokens_of(rounds) == tokens_of(plain(over, prompt_of(0), params))
    quiet = [each for each in rounds[1:] if each.drafted == 0]
    assert len(quiet) > 10, "bad drafts stop"
    assert made.decided < 60


def test_the_agent_hears_of_pending_and_drafted_tokens_only() -> None:
    told: list[tuple[str, int]] = []

    class Telling(LedePolicy):
        def root(self, token: int) -> None:
            told.append(("root", token))
            super().root(token)

        def leave(self, probe: Probe) -> bool:
            told.append(("asked", probe.drafted))
            return super().leave(probe)

        def drew(self, token: int) -> None:
            told.append(("drew", token))
            super().drew(token)

    facts = lede_cases.facts(AT, LAYERS)
    made = LedeChain(bank(CANDIDATES), Telling(lede_cases.eager(), facts, steps=3), length=3)
    rounds = run(made, 0)
    first = rounds[1]
    assert first.tree is not None
    root, *drafts = first.tree.tokens
    assert told[:7] == [
        ("root", root), ("asked", 0), ("drew", drafts[0]), ("asked", 1), ("drew", drafts[1]),
        ("asked", 2), ("drew", drafts[2]),
    ]  # fmt: skip
    assert told[7][0] == "root", "a full draft isn't probed"


def test_an_end_id_and_limits_end_answers_as_in_plain_decoding() -> None:
    for end in answer(0)[::3]:
        over = tiny.target(eos_ids=(end,))
        near = tiny.bank((("lens", 2), ("lens", 4)), EVEN, over=over)
        got = rounds_of(
            over, prompt_of(0), GREEDY, drafter(lede_cases.eager(), near, eos_ids=over.info.eos_ids)
        )
        assert tokens_of(got) == answer(0)[: answer(0).index(end) + 1]
        assert (got[-1].finish, got[-1].stop_reason) == (FinishReason.STOP, end)
    for count in (0, 1, 2, 5):
        params = replace(GREEDY, max_new_tokens=count)
        got = rounds_of(tiny.target(), prompt_of(0), params, drafter(lede_cases.eager()))
        assert tokens_of(got) == answer(0)[:count]
    short = tiny.target(context=24)
    near = tiny.bank(CANDIDATES, EVEN, over=short)
    params = SamplingParams(max_new_tokens=100)
    got = rounds_of(short, prompt_of(0), params, drafter(lede_cases.eager(), near))
    assert tokens_of(got) == tokens_of(plain(short, prompt_of(0), params))


def test_a_prompt_of_one_token_and_longest_drafts_of_one_work() -> None:
    want = tokens_of(plain(tiny.target(), [7], GREEDY))
    for options in ({}, {"length": 1}):
        made = drafter(lede_cases.eager(), **options)
        assert tokens_of(rounds_of(tiny.target(), [7], GREEDY, made)) == want


def test_a_conversation_goes_on_with_signals_of_its_new_tokens_only() -> None:
    over, sequence, text = tiny.target(), tiny.target().open(), prompt_of(1)
    for turn in range(3):
        want = tokens_of(plain(over, text, GREEDY))
        got = rounds_of(over, text, GREEDY, drafter(lede_cases.tossing(turn)), sequence=sequence)
        assert tokens_of(got) == want
        text = [*text, *want, *prompt_of(5 + turn, 4)]
    over.close(sequence)


# -- sampled ---------------------------------------------------------------------------------------

DRAWN: dict[str, Callable[[int], lede_cases.Ruled]] = {
    "random": lambda seed: lede_cases.tossing(seed, 0.7),
    "adversarial": lambda seed: lede_cases.adversarial(0.6),
    "by all it is told": lambda seed: lede_cases.Ruled(
        lambda x: x[lede_cases.feature("rate")] + x[lede_cases.feature("prior")] > 0.85
    ),
}


def sampling(agent: lede_cases.Ruled, kind: type[LedeChain] = LedeChain) -> LedeChain:
    facts = lede_cases.facts((1, 3), TARGET.info.num_layers)
    return kind(ALL, LedePolicy(agent, facts, steps=3), length=3)


@pytest.mark.parametrize("agent", DRAWN)
def test_rejection_keeps_the_targets_distribution(agent: str) -> None:
    counts, kept_ones = joint(lambda seed: sampling(DRAWN[agent](seed)), CUT)
    assert chance_of(counts, exact(CUT, IDS, 3)) > FAIR
    assert kept_ones > RUNS / 10, "nearly nothing is drafted and kept: this shows little"


class Peeking(LedeChain):
    """Draws the token first, and lets it decide whether there is one."""

    def _token(
        self, ctx: DraftContext, prefix: list[int], probe: Probe
    ) -> tuple[int | None, torch.Tensor | None]:
        token, probs = super()._token(ctx, prefix, probe)
        if token is not None and probs is not None and float(probs[token]) < 0.3:
            return None, None
        return token, probs


def test_an_agent_that_peeks_at_the_drawn_id_fails_the_same_test() -> None:
    mass = exact(FLAT, IDS, 3)
    peeking = joint(lambda seed: sampling(lede_cases.eager(), Peeking), FLAT, runs=700)[0]
    assert chance_of(peeking, mass) < BIASED
    honest = joint(lambda seed: sampling(lede_cases.eager()), FLAT)[0]
    assert chance_of(honest, mass) > FAIR
