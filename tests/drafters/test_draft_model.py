"""The draft model: its cache stays in step, its drafts are its own argmax or draws."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.conformance.harness import prompt_of, request, run
from tests.conformance.toy_target import ToySequence, ToyTarget

import hasten.drafters.draft_model
from hasten.decode import decode
from hasten.drafters.base import DraftContext
from hasten.drafters.draft_model import DraftModel
from hasten.errors import OptionError
from hasten.policies.base import FixedPolicy, PlanContext
from hasten.types import Budget, Draft, Round, RowSignals, SamplingParams

GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.8, top_k=8)


class Watched(DraftModel):
    """Checks the draft model's sequence after every call."""

    rows = 0
    drafts: list[Draft]

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        super().begin(prompt, signals)
        self.drafts, self.proposed = [], False
        self.seen = list(prompt)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        before = self.model.prefilled  # type: ignore[attr-defined]
        draft = super().propose(ctx, budget)
        caught_up = self.model.prefilled - before  # type: ignore[attr-defined]
        assert self.drafts == [] or caught_up <= 2 or len(draft.tree) == 1
        self.drafts.append(draft)
        self.proposed = len(draft.tree) > 1
        return draft

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.seen.extend(round.emitted)
        sequence: ToySequence = self._sequence
        assert sequence.pending == 0
        assert sequence.tokens == self.seen[: sequence.length]
        proposed, self.proposed = self.proposed, False
        if proposed:
            assert len(self.seen) - sequence.length in (1, 2)


def _near(**options: object) -> ToyTarget:
    return ToyTarget(bigram=0.7, seed=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draw", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_its_cache_is_in_step_after_every_round(
    count: int, draw: bool, params: SamplingParams
) -> None:
    accepted = 0
    for case in range(4):
        target, model = ToyTarget(eos_ids=()), _near()
        drafter = Watched(model, vocab_size=24, num_tokens=count, draw=draw)
        prompt = prompt_of(case)
        got = run(target, prompt, params, drafter, nodes=count + 1, seed=case)
        assert got.tokens == target.plain(prompt, params, seed=case)
        assert model.live == []
        accepted += sum(len(r.accepted) - 1 for r in got.rounds[1:])
    assert accepted > 3


def test_a_perfect_draft_model_has_everything_accepted() -> None:
    target = ToyTarget(eos_ids=())
    drafter = Watched(ToyTarget(eos_ids=()), vocab_size=24, num_tokens=4)
    got = run(target, prompt_of(1), SamplingParams(max_new_tokens=41), drafter, nodes=5)
    assert len(got.rounds) - 1 == 8


def test_a_greedy_request_drafts_the_models_argmax() -> None:
    model = _near()
    drafter = Watched(model, vocab_size=24, num_tokens=4, draw=True)
    prompt = prompt_of(2)
    asked = request(ToyTarget(eos_ids=()), prompt, GREEDY, drafter, nodes=5)
    ids = list(prompt)
    for _, made in decode([asked]):
        if made.drafted:
            want = model.plain(ids, SamplingParams(max_new_tokens=4, ignore_eos=True))
            assert list(made.tree.tokens[1:]) == want[: made.drafted]  # type: ignore[union-attr]
        ids.extend(made.emitted)
    assert all(not draft.q for draft in drafter.drafts)


def test_a_drawn_draft_comes_with_the_distribution_it_was_drawn_from() -> None:
    model = _near()
    drafter = Watched(model, vocab_size=24, num_tokens=3, draw=True)
    prompt = prompt_of(2)
    asked = request(ToyTarget(eos_ids=()), prompt, SAMPLED, drafter, nodes=4, verifier="rejection")
    ids = list(prompt)
    drawn = 0
    for _, made in decode([asked]):
        if made.drafted:
            draft = drafter.drafts[-1]
            assert set(draft.q) == set(range(made.drafted))
            for node, q in draft.q.items():
                prefix = [*ids, *draft.tree.tokens[1 : node + 1]]
                own = asked.sampler.probs(prefix, model.logits_after(prefix))
                torch.testing.assert_close(q, own)
                assert q.count_nonzero() <= 8
                drawn += 1
        ids.extend(made.emitted)
    assert drawn > 20


def test_a_short_context_only_stops_drafting() -> None:
    target, model = ToyTarget(eos_ids=()), _near(context_limit=20)
    drafter = Watched(model, vocab_size=24, num_tokens=4)
    got = run(target, prompt_of(1), GREEDY, drafter, nodes=5)
    assert got.tokens == target.plain(prompt_of(1), GREEDY)
    assert any(r.drafted for r in got.rounds)
    assert not any(r.drafted for r in got.rounds[-10:])


def test_a_prompt_longer_than_its_context_is_answered_without_drafts() -> None:
    target = ToyTarget(eos_ids=())
    drafter = Watched(_near(context_limit=8), vocab_size=24)
    got = run(target, prompt_of(1), GREEDY, drafter, nodes=5)
    assert got.tokens == target.plain(prompt_of(1), GREEDY)
    assert not any(r.drafted for r in got.rounds)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_padding_ids_of_a_wider_head_are_never_drafted(params: SamplingParams) -> None:
    model = ToyTarget(vocab=60, seed=3)
    target = ToyTarget(eos_ids=())
    drafter = Watched(model, vocab_size=24, num_tokens=4, draw=True)
    got = run(target, prompt_of(1), params, drafter, nodes=5)
    assert sum(r.drafted for r in got.rounds) > 40
    assert max(max(r.tree.tokens) for r in got.rounds if r.tree) < 24


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_ids_that_it_lacks_stop_drafting_and_nothing_else(verifier: str) -> None:
    target, model = ToyTarget(eos_ids=()), ToyTarget(vocab=18, seed=0)
    drafter = Watched(model, vocab_size=24, num_tokens=4, draw=True)
    prompt = [t % 18 for t in prompt_of(1)]
    got = run(target, prompt, SAMPLED, drafter, nodes=5, verifier=verifier)
    assert len(got.tokens) == 40
    assert any(t >= 18 for t in got.tokens)
    for draft in drafter.drafts:
        assert max(draft.tree.tokens[1:], default=0) < 18
        assert all(q.shape == (24,) for q in draft.q.values())


@pytest.mark.parametrize("draw", [False, True])
def test_an_unsure_draft_model_stops_early(draw: bool) -> None:
    lengths = []
    for threshold in (0.0, 0.4, 0.999):
        drafter = Watched(_near(), vocab_size=24, num_tokens=6, draw=draw, threshold=threshold)
        target = ToyTarget(eos_ids=())
        params = SamplingParams(max_new_tokens=40, temperature=1.0) if draw else GREEDY
        run(target, prompt_of(1), params, drafter, nodes=7)
        lengths.append(sum(len(d.tree) - 1 for d in drafter.drafts) / len(drafter.drafts))
        for draft in drafter.drafts:
            for node, q in draft.q.items():
                assert node >= len(draft.tree) - 1 or float(q.max()) >= threshold
    assert lengths[0] > lengths[1] > lengths[2]
    assert lengths[2] < 1


def test_plain_rounds_in_between_are_caught_up_with() -> None:
    class Now(FixedPolicy):
        __slots__ = ("round",)

        def plan(self, context: PlanContext) -> Budget:
            self.round = getattr(self, "round", 0) + 1
            return Budget(4 if self.round % 3 == 0 else 1, 9)

    target = ToyTarget(eos_ids=())
    drafter = DraftModel(_near(), vocab_size=24, num_tokens=3)
    got = run(target, prompt_of(1), GREEDY, drafter, policy=Now(4))
    assert got.tokens == target.plain(prompt_of(1), GREEDY)
    assert any(len(r.accepted) > 1 for r in got.rounds)


def test_its_passes_are_counted_apart_from_host_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock, model = Clock(), _near()

    def slow(passes: int) -> None:
        clock.now += 2

    model.before_pass = slow
    monkeypatch.setattr(hasten.drafters.draft_model, "time", clock)
    drafter = DraftModel(model, vocab_size=24, num_tokens=3)
    drafter.begin([3, 4, 5], RowSignals())
    context = DraftContext([3, 4, 5], lambda p, n, c: [], lambda p, x: x, True)
    assert len(drafter.propose(context, Budget(4, 9)).tree) == 4
    assert context.model_seconds == 6, "a prefill and two rows"


def test_ending_or_beginning_again_closes_its_sequence() -> None:
    model = _near()
    drafter = DraftModel(model, vocab_size=24)
    drafter.begin([2, 3], RowSignals())
    drafter.begin([2, 3], RowSignals())
    assert len(model.live) == 1
    drafter.end()
    drafter.end()
    assert model.live == []


@pytest.mark.parametrize("options", [{"num_tokens": 0}, {"threshold": 1.0}, {"threshold": -0.1}])
def test_bad_options_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="draft-model"):
        DraftModel(_near(), vocab_size=24, **options)  # type: ignore[arg-type]
