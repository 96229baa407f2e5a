"""What a user of ``smc`` may rely on, whatever the draft."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hasten.errors import CapabilityError, ContextError, DrafterError, ModelError, OptionError
from hasten.smc.population import Population
from hasten.stopping import Stopper
from hasten.text import TextStream
from hasten.types import FinishReason, Pass, SamplingParams
from tests.conformance.toy_target import ToyTarget, ToyTokenizer
from tests.smc import requests
from tests.smc.requests import PROMPT, SAMPLED, ask, near, start, toy

LONG = replace(SAMPLED, ignore_eos=True)


# -- length, ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 14))
def test_exactly_as_many_tokens_as_asked_for(length: int) -> None:
    answer = ask(replace(LONG, max_new_tokens=length), seed=length)
    assert len(answer.tokens) == length
    assert answer.rounds[-1].finish is FinishReason.LENGTH
    assert answer.info is not None
    assert all(len(each.tokens) == length for each in answer.info.answers if each.weight)


def test_no_token_asked_for_runs_nothing() -> None:
    target = toy()
    answer = ask(replace(SAMPLED, max_new_tokens=0), target=target)
    assert target.passes == 0
    assert answer.tokens == []


def test_answers_end_at_an_end_of_sequence_id_with_nothing_after() -> None:
    stopped = 0
    for seed in range(30):
        answer = ask(seed=seed, length=5)
        assert answer.info is not None
        for each in answer.info.answers:
            assert 1 not in each.tokens[:-1]
            if each.weight:
                ended = each.tokens[-1] == 1
                assert each.finish_reason is FinishReason("stop" if ended else "length")
                assert each.stop_reason == (1 if ended else None)
        stopped += answer.tokens[-1] == 1
    assert 0 < stopped < 30


def test_stop_strings_end_an_answer_at_the_token_that_completes_them() -> None:
    params = replace(LONG, stop=("j", "nf", "ff"), max_new_tokens=24)
    seen = set()
    for seed in range(40):
        answer = ask(params, seed=seed)
        seen.add(answer.rounds[-1].stop_reason)
        assert not any(stop in answer.text for stop in params.stop)
        assert answer.info is not None
        for each in (each for each in answer.info.answers if each.weight):
            text = TextStream(ToyTokenizer(), params.stop)
            alone = Stopper(params, frozenset({1}), len(PROMPT), 512, text)
            cut = alone.push(each.tokens)
            assert (cut.kept, cut.finish) == (len(each.tokens), each.finish_reason)
            assert cut.stop_reason == each.stop_reason
    assert len(seen) >= 3


def test_min_new_tokens_keeps_an_answer_from_ending_early() -> None:
    params = replace(SAMPLED, min_new_tokens=9, stop=("f",), max_new_tokens=12)
    for seed in range(15):
        assert len(ask(params, seed=seed).tokens) >= 9


def test_the_context_ends_an_answer_and_never_overflows() -> None:
    for limit in range(len(PROMPT) + 1, len(PROMPT) + 9):
        answer = ask(LONG, target=toy(context_limit=limit), length=4)
        assert len(answer.tokens) == limit - len(PROMPT)
        assert answer.rounds[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("limit", [2, 4, 5, 6, 9, 12])
def test_a_draft_models_short_context_stops_drafting_only(limit: int) -> None:
    answer = ask(LONG, draft=near(context_limit=limit))
    assert len(answer.tokens) == LONG.max_new_tokens
    assert answer.info is not None
    assert answer.info.rounds > 7


# -- randomness ------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_answer_whatever_ran_before() -> None:
    target, draft = toy(), near()
    first = ask(target=target, draft=draft, seed=3)
    other = ask(target=target, draft=draft, seed=4)
    again = ask(target=target, draft=draft, seed=3)
    assert first.info == again.info
    assert first.info != other.info


def test_global_generators_stay_as_they_were() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    ask(seed=1, threshold=1.01)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


def test_copies_of_a_particle_go_their_own_ways() -> None:
    texts = []
    for seed in range(10):
        info = ask(LONG, seed=seed, particles=6, threshold=1.01).info
        assert info is not None
        assert info.copies > 0
        texts.append(len({each.tokens for each in info.answers}))
    assert sum(texts) > 30


def test_targets_that_pack_nothing_give_the_same_answer() -> None:
    packed = ask(seed=6, threshold=0.9)
    alone = ask(seed=6, threshold=0.9, target=toy(packed=False), draft=near(packed=False))
    assert packed.tokens == alone.tokens
    assert packed.info is not None
    assert alone.info is not None
    assert packed.info.answers == alone.info.answers
    assert alone.info.target_passes > packed.info.target_passes == packed.info.rounds


# -- streaming, figures ----------------------------------------------------------------------------


def test_a_committed_population_streams_every_rounds_tokens() -> None:
    rounds = ask(LONG, population="committed").rounds
    assert [len(made.emitted) for made in rounds] == [1, 4, 4, 4, 4, 3]


def test_what_all_particles_agree_on_comes_before_the_end() -> None:
    early = 0
    for seed in range(8):
        rounds = ask(replace(LONG, max_new_tokens=40), seed=seed, threshold=0.9).rounds
        early += sum(len(made.emitted) for made in rounds[:-1])
    assert early > 8 * 10


def test_a_shared_first_token_is_emitted_at_once() -> None:
    assert len(ask(LONG).rounds[0].emitted) == 1
    apart = [ask(LONG, first_token="per_particle", seed=seed) for seed in range(8)]
    assert 0 in [len(each.rounds[0].emitted) for each in apart]


def test_rows_and_copies_are_counted() -> None:
    answer = ask(LONG, particles=3, threshold=1.01)
    info = answer.info
    assert info is not None
    # 1 + 4 + 4 + 4 + 4 + 3 tokens, of which one a round is the target's own
    assert info.drafted == 3 * (4 * 3 + 2)
    assert info.target_rows == 3 * (4 * 4 + 3)
    assert sum(made.layer_rows for made in answer.rounds) == 4 * info.target_rows
    assert info.resampled == (1, 2, 3, 4)
    assert len(info.ess) == 5, "the last round's weights too, which the answer is picked by"
    assert all(1 <= size <= 3 + 1e-9 for size in info.ess)


def test_logprobs_are_those_of_the_targets_raw_logits() -> None:
    target = toy()
    params = replace(LONG, temperature=0.8, logprobs=2, logit_bias={3: 1.0})
    for changes in ({"threshold": 1.01}, {"population": "committed"}):
        answer = ask(params, target=target, **changes)
        given = [each for made in answer.rounds for each in made.logprobs]
        assert [each.token for each in given] == answer.tokens
        for at, each in enumerate(given):
            row = target.logits_after([*PROMPT, *answer.tokens[:at]]).log_softmax(0)
            assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-5)
            assert [i for i, _ in each.top] == row.topk(2).indices.tolist()


# -- ends of another kind --------------------------------------------------------------------------


def test_an_abandoned_request_frees_everything() -> None:
    for count in range(4):
        target, draft = toy(), near()
        rounds = start(LONG, target=target, draft=draft).rounds()
        for _ in range(count):
            next(rounds)
        rounds.close()  # type: ignore[attr-defined]
        assert not target.live
        assert not draft.live


def test_a_request_driven_by_hand_can_be_closed_at_any_time_and_twice() -> None:
    for count in range(3):
        target, draft = toy(), near()
        run = start(LONG, target=target, draft=draft, seed=6)
        emitted = list(run.start().emitted)
        for _ in range(count):
            emitted += run.step().emitted
        run.close()
        run.close()
        assert not target.live
        assert not draft.live
        assert emitted == ask(LONG, seed=6).tokens[: len(emitted)]


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_an_error_in_a_pass_frees_everything(broken: str) -> None:
    for at in range(1, 6):
        models = {"target": toy(), "draft": near()}

        def fail(number: int, at: int = at) -> None:
            if number == at:
                raise RuntimeError("out of memory")

        models[broken].before_pass = fail
        with pytest.raises(RuntimeError, match="out of memory"):
            list(start(LONG, **models).rounds())
        assert not models["target"].live
        assert not models["draft"].live


def test_a_lent_sequence_stays_open_and_holds_the_prompt() -> None:
    for held in (0, 2, 4, 6):
        target = toy()
        lent = target.open()
        if held:
            target.prefill(lent, [*PROMPT, 7, 7][:held])
        run = start(LONG, target=target, seed=2)
        run.lend(lent)
        tokens = [token for made in run.rounds() for token in made.emitted]
        assert tokens == ask(LONG, seed=2).tokens
        assert target.live == [lent]
        assert tuple(lent.tokens) == PROMPT


def test_a_prompt_that_has_run_already_isnt_run_again() -> None:
    target = toy()
    lent = target.open()
    passed = target.prefill(lent, PROMPT)
    run = start(LONG, target=target, seed=2)
    run.lend(lent, passed)
    tokens = [token for made in run.rounds() for token in made.emitted]
    assert tokens == ask(LONG, seed=2).tokens
    assert target.prefilled == len(PROMPT)
    assert target.live == [lent]
    assert tuple(lent.tokens) == PROMPT


# -- one lineage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_one_lineage_runs_each_text_once_and_answers_alike_without_trees(seed: int) -> None:
    case: dict[str, Any] = {"population": "committed", "particles": 6, "seed": seed}
    shared = ask(LONG, **case)
    apart = ask(LONG, target=toy(tree=False), draft=near(tree=False), **case)
    assert shared.info is not None
    assert apart.info is not None
    assert shared.tokens == apart.tokens
    assert shared.info.answers == apart.info.answers
    assert shared.info.log_evidence == pytest.approx(apart.info.log_evidence)
    assert apart.info.target_rows == 6 * (4 * 4 + 3)
    assert shared.info.target_rows < 0.8 * apart.info.target_rows
    assert shared.info.drafted == apart.info.drafted


def test_one_lineage_needs_no_packed_passes() -> None:
    info = ask(LONG, target=toy(packed=False), population="committed").info
    assert info is not None
    assert info.target_passes == info.rounds


@pytest.mark.parametrize("seed", range(6))
def test_one_lineage_ends_where_its_answer_does(seed: int) -> None:
    params = replace(SAMPLED, max_new_tokens=40, temperature=1.5)
    for changes in ({"particles": 1}, {"particles": 2}, {"particles": 5, "length": 1}):
        ask(params, seed=seed, population="committed", **changes)


@pytest.mark.parametrize("top_k", [1, 3])
def test_one_lineage_survives_rounds_without_weight(top_k: int) -> None:
    info = ask(replace(LONG, top_k=top_k), population="committed", particles=2, seed=1).info
    assert info is not None
    assert info.collapsed > 0


def test_an_abandoned_lineage_frees_everything() -> None:
    for count in range(4):
        target, draft = toy(), near()
        rounds = start(LONG, target=target, draft=draft, population="committed").rounds()
        for _ in range(count):
            next(rounds)
        rounds.close()  # type: ignore[attr-defined]
        assert not target.live
        assert not draft.live


# -- broken or awkward models ----------------------------------------------------------------------


class Broken(ToyTarget):
    """NaN from the third pass on."""

    def _forward(self, *args: Any) -> Pass:
        passed = super()._forward(*args)
        if self.passes >= 3 and passed.logits is not None:
            passed.logits[-1, 2] = math.nan
        return passed


def test_a_draft_that_gives_nan_is_named() -> None:
    with pytest.raises(DrafterError, match=r"'draft-model'.*NaN"):
        list(start(LONG, draft=Broken(packed=True)).rounds())


@pytest.mark.parametrize("more", [{}, {"top_k": 3}])
def test_a_target_that_gives_nan_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="NaN"):
        list(start(replace(LONG, **more), target=Broken(packed=True)).rounds())


@pytest.mark.parametrize("vocab", [9, 20, 24, 30])
def test_a_draft_model_may_know_fewer_ids_or_more(vocab: int) -> None:
    draft = toy(seed=1, vocab=vocab)
    for seed in range(6):
        answer = ask(LONG, draft=draft, seed=seed)
        assert len(answer.tokens) == 20
        assert not draft.live


def test_a_draft_that_misses_ids_needs_mixing() -> None:
    with pytest.raises(OptionError, match=r"smc\.mix.*biased.*Leave mix out"):
        start(draft=toy(seed=1, vocab=20), mix=0.0)
    start(draft=toy(seed=1, vocab=24), mix=0.0)


def test_where_no_particle_fits_the_target_answers_itself_and_it_is_counted() -> None:
    """With top_k=1 one text alone has any weight: an answer must be that one."""
    target = toy()
    params = replace(LONG, top_k=1)
    plain = target.plain(PROMPT, params)
    for seed in range(5):
        answer = ask(params, target=target, particles=2, seed=seed)
        assert answer.tokens == plain
        assert answer.info is not None
        assert answer.info.collapsed > 0


def test_never_resampling_leaves_particles_without_weight_behind() -> None:
    params = replace(LONG, top_k=2)
    for seed in range(10):
        answer = ask(params, threshold=0.0, particles=12, seed=seed)
        assert answer.info is not None
        assert not answer.info.resampled
        gone = [each for each in answer.info.answers if not each.weight]
        assert all(len(each.tokens) <= 20 for each in gone)


def test_a_particle_is_never_asked_about_what_follows_a_banned_token() -> None:
    """A matcher raises when it is asked about text that its grammar doesn't allow."""
    banned = 7

    def picky(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answer = ids[0, len(PROMPT) :].tolist()
        assert banned not in answer, "asked beyond a banned token"
        assert 1 not in answer, "asked beyond the end"
        scores = scores.clone()
        scores[:, banned] = -math.inf
        return scores

    for seed in range(10):
        answer = ask(replace(SAMPLED, processors=(picky,)), seed=seed, threshold=0.3)
        assert banned not in answer.tokens


# -- refusals --------------------------------------------------------------------------------------


def test_greedy_requests_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"temperature: smc needs.*lossless"):
        start(SamplingParams())


def test_what_cannot_be_honoured_is_refused_before_any_pass() -> None:
    target = toy()
    with pytest.raises(OptionError, match="stop"):
        start(replace(SAMPLED, stop=("x",)), target=target)
    with pytest.raises(ContextError):
        start(target=target, prompt=[5] * 512)
    with pytest.raises(CapabilityError, match=r"SMC's target.*one row at a time"):
        start(target=toy(rollback=False))
    unforked = toy()
    unforked.capabilities = replace(unforked.capabilities, fork=False)
    with pytest.raises(CapabilityError, match="can't be forked"):
        start(target=unforked)
    with pytest.raises(CapabilityError, match="SMC's draft model"):
        requests.ModelProposal(unforked, vocab_size=24)
    assert target.passes == 0


def test_a_pick_is_drawn_and_not_the_heaviest() -> None:
    population = Population(
        2,
        lambda: Stopper(SAMPLED, frozenset(), 1, 9, None),
        seed=0,
        resampler="systematic",
        threshold=0.5,
        single=False,
    )
    population.log_weights = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64)
    picks = 0
    for seed in range(400):
        population._seed = seed
        picks += population.pick()
    assert abs(picks - 100) < 4 * math.sqrt(400 * 0.25 * 0.75)
