"""Self-speculation through the loop: the answers are plain decoding's."""

from __future__ import annotations

import math

import pytest
import torch
from tests.exits import exit_models as tiny
from tests.exits.exit_models import LAYERS, VOCAB
from tests.exits.exit_requests import (
    CANDIDATES,
    EVEN,
    GREEDY,
    POLICIES,
    SAMPLED,
    answer,
    bank,
    drafter,
    kept,
    plain,
    prompt_of,
    rounds_of,
    run,
    tokens_of,
)

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.base import DraftContext
from hasten.drafters.early_exit import MAX_LENGTH, EarlyExit
from hasten.exits.bank import ExitBank
from hasten.policies import exit_rules
from hasten.policies.base import FixedPolicy
from hasten.types import (
    Budget,
    Draft,
    FinishReason,
    SamplingParams,
)
from hasten.verify import VERIFIERS

# -- losslessness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_and_match_answers_are_plain_decodings(policy: str) -> None:
    run(drafter(POLICIES[policy]()), 0)
    run(drafter(POLICIES[policy]()), 1, SAMPLED)
    run(drafter(POLICIES[policy](), draw=False), 1, SAMPLED, verifier="rejection")


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("deep", 0), *((kind, at) for kind in ("lens", "affine", "adapter", "deep") for at in (2, 4))],
)
def test_every_module_at_every_exit_and_length_gives_plain_decodings_answer(
    kind: str, layer: int
) -> None:
    tried = 0
    for case, length in enumerate((1, 2, 5, MAX_LENGTH)):
        made = drafter(exit_rules.Static(0, length), ((kind, layer),), length=length)
        rounds = run(made, case)
        assert max(r.drafted for r in rounds) <= length
        assert {s for r in rounds for s in r.sources[1:]} == {f"exit-{layer}"}
        tried += kept(rounds)
    assert tried or not layer, "nothing was kept: this shows little"


@pytest.mark.parametrize("kinds", [CANDIDATES, (("deep", 0),), (("adapter", 2), ("deep", 4))])
def test_a_prompt_of_one_token_works(kinds: tiny.Kinds) -> None:
    want = tokens_of(plain(tiny.target(), [7], GREEDY))
    for policy in ("eager", "random"):
        got = rounds_of(tiny.target(), [7], GREEDY, drafter(POLICIES[policy](), kinds))
        assert tokens_of(got) == want


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_exactly_as_many_tokens_as_asked_for(count: int) -> None:
    params = SamplingParams(max_new_tokens=count)
    got = rounds_of(tiny.target(), prompt_of(0), params, drafter(POLICIES["eager"]()))
    assert tokens_of(got) == answer(0)[:count]


def test_answers_are_plain_up_to_the_context_limit() -> None:
    over = tiny.target(context=24)
    params = SamplingParams(max_new_tokens=100)
    want = tokens_of(plain(over, prompt_of(0), params))
    for policy in POLICIES.values():
        made = EarlyExit(tiny.bank(CANDIDATES, EVEN, over=over), policy())
        got = rounds_of(over, prompt_of(0), params, made)
        assert tokens_of(got) == want
        assert got[-1].finish is FinishReason.LENGTH
    assert len(want) == 24 - len(prompt_of(0))


def test_an_end_id_ends_the_answer_inside_a_draft_or_after_it() -> None:
    inside = after = 0
    for end in answer(0):
        over = tiny.target(eos_ids=(end,))
        made = EarlyExit(
            bank((("lens", 4),), None), exit_rules.Static(0, 5), eos_ids=over.info.eos_ids
        )
        got = rounds_of(over, prompt_of(0), GREEDY, made)
        assert tokens_of(got) == answer(0)[: answer(0).index(end) + 1]
        assert (got[-1].finish, got[-1].stop_reason) == (FinishReason.STOP, end)
        for each in got[1:]:
            assert each.tree is not None
            assert end not in each.tree.tokens[:-1], "something was drafted after the end"
        last = got[-1]
        if last.tree is not None:
            where = len(last.accepted)
            found = where < len(last.tree) and last.tree.tokens[where] == end
            inside, after = inside + found, after + (not found)
    assert inside > 1
    assert after > 1


def test_a_conversation_goes_on_with_signals_of_its_new_tokens_only() -> None:
    over, sequence = tiny.target(), tiny.target().open()
    text = prompt_of(1)
    for turn in range(3):
        want = tokens_of(plain(over, text, GREEDY))
        made = drafter(POLICIES["random"](), (("deep", 0), ("adapter", 2), ("deep", 4)))
        held = sequence.length
        got = rounds_of(over, text, GREEDY, made, sequence=sequence)
        assert tokens_of(got) == want
        assert (held > 0) == (turn > 0)
        assert made.needs.prompt
        text = [*text, *want, *prompt_of(5 + turn, 4)]
    over.close(sequence)


def test_several_requests_share_passes_and_keep_their_answers() -> None:
    asked = [
        Decoding(
            tiny.target(),
            prompt_of(case),
            GREEDY,
            drafter=drafter(policy()),
            policy=FixedPolicy(13),
            verifier=VERIFIERS["greedy"],
            seed=case,
        )
        for case, policy in enumerate(list(POLICIES.values())[:4])
    ]
    before, rows = tiny.target().layer_rows, 0
    answers: dict[int, list[int]] = {}
    for index, made in decode(asked):
        answers.setdefault(index, []).extend(made.emitted)
        rows += made.layer_rows if made.tree is not None else len(prompt_of(index)) * LAYERS
    assert tiny.target().layer_rows - before == rows
    assert answers == {case: answer(case) for case in range(4)}


# -- the draft vocabulary --------------------------------------------------------------------------


def test_only_ids_of_the_vocabulary_and_of_the_prompt_are_drafted() -> None:
    prompt = [3, 5, 9, 4, 3, 5, 77, 9]
    known = {*EVEN, *prompt}
    drafted: set[int] = set()
    for params in (GREEDY, SAMPLED):
        for kinds in ((("lens", 2),), (("adapter", 4),)):
            rounds = rounds_of(tiny.target(), prompt, params, drafter(POLICIES["eager"](), kinds))
            drafted |= {t for r in rounds[1:] for t in r.tree.tokens[1:]}  # type: ignore[union-attr]
    assert drafted <= known
    assert drafted & set(prompt) - {*EVEN}, "no id of the prompt alone was drafted"


def test_draws_come_from_the_exits_distribution_over_these_ids_through_the_options() -> None:
    seen: list[tuple[Draft, list[int]]] = []

    class Watched(EarlyExit):
        def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
            draft = super().propose(ctx, budget)
            seen.append((draft, list(ctx.ids)))
            return draft

    params = SamplingParams(max_new_tokens=12, temperature=0.8, top_k=7)
    made = Watched(bank(), POLICIES["eager"](), length=3)
    rounds_of(tiny.target(), prompt_of(4), params, made, verifier="rejection")
    known = torch.tensor(sorted({*EVEN, *prompt_of(4)}))
    for draft, _ in seen:
        nodes = range(len(draft.tree) - 1)
        assert set(draft.q) == set(nodes), "every node with a child says what it was drawn from"
        for node in nodes:
            q = draft.q[node]
            assert q.shape == (VOCAB,)
            assert q.dtype == torch.float32
            assert math.isclose(float(q.sum()), 1.0, rel_tol=1e-5)
            assert 1 <= int((q > 0).sum()) <= 7
            assert math.isclose(float(q[known].sum()), 1.0, rel_tol=1e-5)
            assert q[draft.tree.tokens[node + 1]] > 0
    assert max(len(draft.tree) for draft, _ in seen) == 4


def test_options_that_ban_all_a_head_knows_end_the_draft() -> None:
    def odd(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = scores.clone()
        out[:, ::2] = -math.inf
        return out

    params = SamplingParams(max_new_tokens=10, temperature=1.0, processors=(odd,))
    prompt = [2, 4, 6]
    want = tokens_of(plain(tiny.target(), prompt, params))
    rounds = rounds_of(tiny.target(), prompt, params, drafter(POLICIES["eager"]()))
    assert tokens_of(rounds) == want
    assert all(r.drafted == 0 for r in rounds)


def test_a_broken_module_drafts_nothing_and_harms_nothing() -> None:
    made = tiny.module(tiny.config("affine", 2, 32))
    made._bias = made._bias * math.nan
    broken = ExitBank([made], bank().head, bank().ends)
    for params in (GREEDY, SAMPLED):
        rounds = run(EarlyExit(broken, exit_rules.Static(0, 3)), 0, params)
        assert all(r.drafted == 0 for r in rounds)


def test_half_precision_runs_with_each_row_through_each_layer_once() -> None:
    target = tiny.target(dtype=torch.bfloat16)
    for policy in ("random", "eager", "thresholds"):
        made = EarlyExit(tiny.bank(CANDIDATES, EVEN, over=target), POLICIES[policy]())
        rounds = rounds_of(target, prompt_of(0), GREEDY, made)
        assert len(tokens_of(rounds)) == GREEDY.max_new_tokens
