"""However a request ends, nothing stays behind and nothing of the user's is changed."""

from __future__ import annotations

import gc

import pytest

from hasten import methods
from hasten.decode import decode
from hasten.drafters.base import DraftContext
from hasten.types import Budget, Draft, Round, RowSignals, SamplingParams, Signals
from tests.conformance.drafters import Flaky, Oracle, Resuming, TestDrafter
from tests.conformance.harness import TREE_DRAFTERS, load_other, prompt_of, request
from tests.conformance.toy_target import ToyTarget, ToyTokenizer

PARAMS = SamplingParams(max_new_tokens=30)


def _interrupted_at(target: ToyTarget, number: int) -> None:
    def interrupt(passes: int) -> None:
        if passes == number:
            raise KeyboardInterrupt

    target.before_pass = interrupt


@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_an_interrupt_inside_a_pass_closes_everything(name: str) -> None:
    for number in (1, 2, 4):
        target = ToyTarget(eos_ids=())
        plain = target.plain(prompt_of(1), PARAMS)
        drafter = TREE_DRAFTERS[name](target, prompt_of(1) + plain, 0)
        _interrupted_at(target, number)
        with pytest.raises(KeyboardInterrupt):
            list(decode([request(target, prompt_of(1), PARAMS, drafter)]))
        assert target.live == []
        if isinstance(drafter, TestDrafter):
            assert drafter.calls[-1:] == ([] if number == 1 else ["end"])


@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_an_abandoned_generator_closes_everything(name: str) -> None:
    for taken in (1, 2, 3):
        target = ToyTarget(eos_ids=())
        plain = target.plain(prompt_of(1), PARAMS)
        drafter = TREE_DRAFTERS[name](target, prompt_of(1) + plain, 0)
        loop = decode([request(target, prompt_of(1), PARAMS, drafter)])
        for _ in range(taken):
            next(loop)
        assert len(target.live) == 1
        del loop
        gc.collect()
        assert target.live == []
        if isinstance(drafter, TestDrafter):
            assert drafter.calls[-1] == "end"


def test_a_generator_never_begun_opens_nothing() -> None:
    target = ToyTarget()
    drafter = Oracle()
    decode([request(target, prompt_of(1), PARAMS, drafter)])
    assert target.live == []
    assert drafter.calls == []


def test_an_interrupt_in_a_batch_closes_all_requests() -> None:
    for packed in (True, False):
        for number in (1, 2, 4, 5, 9):
            target = ToyTarget(packed=packed, eos_ids=())
            drafters = [Flaky([], 24, i) for i in range(3)]
            _interrupted_at(target, number)
            asked = [request(target, prompt_of(i), PARAMS, d) for i, d in enumerate(drafters)]
            with pytest.raises(KeyboardInterrupt):
                list(decode(asked))
            assert target.live == []
            assert all(d.calls[-1:] in ([], ["end"]) for d in drafters)


def test_an_interrupt_leaves_a_lent_sequence_open_and_nothing_wrong_committed() -> None:
    target = ToyTarget(eos_ids=())
    plain = target.plain(prompt_of(1), PARAMS)
    sequence = target.open()
    asked = request(target, prompt_of(1), PARAMS, Resuming(prompt_of(1) + plain, 24, 1))
    asked.lend(sequence)
    _interrupted_at(target, 6)
    with pytest.raises(KeyboardInterrupt):
        list(decode([asked]))
    assert target.live == [sequence]
    target.rollback(sequence)
    assert sequence.tokens == [*prompt_of(1), *plain][: sequence.length]


def test_an_interrupt_inside_a_drafter_closes_everything() -> None:
    class Pressed(TestDrafter):
        name = "pressed"

        def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
            raise KeyboardInterrupt

    target, drafter = ToyTarget(), Pressed()
    with pytest.raises(KeyboardInterrupt):
        list(decode([request(target, prompt_of(1), PARAMS, drafter)]))
    assert target.live == []
    assert drafter.calls[-1] == "end"


def test_the_draft_models_sequences_are_closed_too() -> None:
    other = load_other("near")
    context = methods.MethodContext(ToyTarget(), ToyTokenizer(), lambda name: other)
    make = methods.prepare(methods.parse("draft-model,model=near"), context)
    for number in (None, 3):
        target = ToyTarget(eos_ids=())
        loop = decode([request(target, prompt_of(1), PARAMS, make()[0])])
        for _ in loop:
            if number is not None:
                break
        loop.close()  # type: ignore[attr-defined]
        assert target.live == []
        assert other[0].live == []


def test_a_failing_end_still_closes_the_sequence_and_the_other_requests() -> None:
    class Stubborn(Oracle):
        name = "stubborn"

        def end(self) -> None:
            raise KeyError("no end")

    target = ToyTarget(eos_ids=())
    good = Oracle([], 24)
    asked = [request(target, prompt_of(i), PARAMS, d) for i, d in enumerate((Stubborn(), good))]
    loop = decode(asked)
    for _ in range(4):
        next(loop)
    with pytest.raises(Exception, match="stubborn"):
        loop.close()  # type: ignore[attr-defined]
    assert target.live == []
    assert good.calls[-1] == "end"


def test_rounds_hold_no_tensors() -> None:
    """Rounds outlive their pass (traces, metrics); a drafter's signals must not live on in them."""

    class Hungry(Flaky):
        name = "hungry"
        needs = Signals(topk=4, hidden=(1,), probs=True)
        seen = 0

        def observe(self, round: Round) -> None:
            super().observe(round)
            self.seen += round.signals.topk_ids is not None

    target, drafter = ToyTarget(), Hungry([], 24, 0)
    rounds = [r for _, r in decode([request(target, prompt_of(1), PARAMS, drafter)])]
    assert drafter.seen == len(rounds) - 1
    assert all(r.signals == RowSignals() for r in rounds)
