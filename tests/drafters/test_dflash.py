"""DFlash drafts: answers stay plain decoding's, and the network sees exactly the right context."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.dflash.dflash_models import BLOCK, bank
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import answer, kept, plain, prompt_of, rounds_of, tokens_of

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.dflash.bank import DFlashBank
from hasten.dflash.lengths import BlockLength
from hasten.drafters.base import DraftContext
from hasten.drafters.blocks import MOST_WAITING
from hasten.drafters.dflash import DFlash
from hasten.errors import CacheStateError, OptionError
from hasten.policies.length import LengthPolicy
from hasten.targets.fused import FusedTarget
from hasten.types import Budget, Draft, Round, RowSignals, SamplingParams
from hasten.verify import VERIFIERS

GREEDY = SamplingParams(max_new_tokens=16)
SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.7, top_p=0.95)
LONG = SamplingParams(max_new_tokens=100)


def twin() -> FusedTarget:
    """The target again, so that the books of the other stay those of the request."""
    return tiny.target((), 160)


class Checked(DFlash):
    """Compares every block with one pass of the network over the whole context, without a cache."""

    blocks = 0

    def _block(self, ctx: DraftContext) -> torch.Tensor:
        got = super()._block(ctx)
        target, config = twin(), self.bank.config
        sequence = target.open()
        hidden = target.prefill(sequence, ctx.ids[:-1], taps=config.taps).hidden
        target.close(sequence)
        features = torch.cat([hidden[layer] for layer in config.taps], 1)
        features = features[self._cache.start :].unsqueeze(0)
        block = target.embed([ctx.ids[-1], *[config.mask_token_id] * (config.block_size - 1)])
        positions = torch.arange(self._cache.start, len(ctx.ids) - 1 + config.block_size)
        net = self.bank.net
        want = net(block.unsqueeze(0), net.context(features), positions.unsqueeze(0))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        self.blocks += 1
        return got


class Knowing(Checked):
    """Guesses the answer up to some slot, and something else behind it."""

    def __init__(self, made: DFlashBank, truth: Sequence[int], right: Callable[[], int]) -> None:
        super().__init__(made, fixed())
        self.truth, self.right = list(truth), right

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        self.at = len(ctx.ids)
        return super().propose(ctx, budget)

    def _likeliest(self, slots: torch.Tensor) -> list[int]:
        guess = [*self.truth[self.at : self.at + len(slots)], *[0] * len(slots)][: len(slots)]
        right = self.right()
        return [t if i < right else (t + 1) % tiny.VOCAB for i, t in enumerate(guess)]


def fixed(most: int = 0) -> BlockLength:
    return BlockLength(LengthPolicy(BLOCK, policy="fixed", most=most))


def run(drafter: DFlash, case: int = 0, params: SamplingParams = GREEDY, **how: Any) -> list[Round]:
    """The rounds; the answer is plain decoding's."""
    rounds = rounds_of(tiny.target(), prompt_of(case), params, drafter, seed=case, **how)
    want = tokens_of(plain(tiny.target(), prompt_of(case), params, seed=case))
    assert tokens_of(rounds) == want
    return rounds


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draw", [False, True], ids=["argmax", "sample"])
@pytest.mark.parametrize("ids", [None, range(0, tiny.VOCAB, 2)], ids=["all ids", "half"])
def test_a_random_drafter_changes_nothing(
    params: SamplingParams, draw: bool, ids: Sequence[int] | None
) -> None:
    for case in range(3):
        rounds = run(Checked(bank(ids=ids, seed=case), fixed(), draw=draw), case, params)
        assert max(made.drafted for made in rounds) == BLOCK - 1
        assert {s for made in rounds for s in made.sources} == {"", "dflash"}


def test_a_drafter_that_knows_the_answer_has_every_slot_kept() -> None:
    prompt, want = prompt_of(0), answer(0)
    drafter = Knowing(bank(), [*prompt, *want], lambda: BLOCK)
    rounds = run(drafter)
    assert [len(made.emitted) for made in rounds] == [1, 5, 5, 5]
    assert kept(rounds) == 4 + 4 + 4
    assert drafter.blocks == 3


def test_the_context_is_right_however_much_of_a_block_is_kept() -> None:
    for case in range(3):
        coin = random.Random(case)
        truth = [*prompt_of(case), *tokens_of(plain(tiny.target(), prompt_of(case), LONG))]
        drafter = Knowing(bank(), truth, lambda coin=coin: coin.choice((0, 1, 2, BLOCK)))
        rounds = run(drafter, case, LONG)
        assert {len(made.accepted) for made in rounds[1:-1]} >= {1, 2, 3, BLOCK}
        assert len(rounds) - 2 <= drafter.blocks <= len(rounds) - 1


def test_rounds_without_a_draft_are_caught_up_with_before_the_next_one() -> None:
    class Reluctant(BlockLength):
        """Drafts in the last rounds only, after more than are kept waiting."""

        rounds = 0

        def plan(self, context: Any) -> Budget:
            self.rounds += 1
            return super().plan(context) if self.rounds > MOST_WAITING + 9 else Budget(1, 0)

    policy = Reluctant(fixed().rule)
    drafter = Checked(bank(), policy)
    asked = Decoding(
        tiny.target(),
        prompt_of(0),
        LONG,
        drafter=drafter,
        policy=policy,
        verifier=VERIFIERS["greedy"],
    )
    got = [token for _, made in decode([asked]) for token in made.emitted]
    assert got == tokens_of(plain(tiny.target(), prompt_of(0), LONG))
    assert drafter.blocks > 5


def test_a_sequence_that_holds_part_of_the_prompt_gives_a_shorter_context() -> None:
    target, prompt = tiny.target(), prompt_of(1, 30)
    sequence = target.open()
    target.prefill(sequence, prompt[:20])
    drafter = Checked(bank(), fixed())
    starts: list[int] = []
    begin = drafter.begin

    def spied(prompt: Sequence[int], signals: RowSignals) -> None:
        begin(prompt, signals)
        starts.append(drafter._cache.start)

    drafter.begin = spied  # type: ignore[method-assign]
    rounds = rounds_of(target, prompt, GREEDY, drafter, sequence=sequence)
    target.close(sequence)
    assert tokens_of(rounds) == tokens_of(plain(target, prompt, GREEDY))
    assert starts == [20]
    assert drafter.blocks > 3


@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_more_is_verified_than_was_asked_for(most: int) -> None:
    rounds = run(DFlash(bank(), fixed(most + 1)))
    assert max(made.drafted for made in rounds) == most


def test_the_length_heads_word_is_what_is_verified() -> None:
    said: list[float] = []

    def worth(hidden: torch.Tensor) -> float:
        assert hidden.shape == (1, BLOCK, 32)
        said.append([0.1, 0.45, 0.99][len(said) % 3])
        return said[-1]

    made = replace(bank(length_head=6), length=worth)
    rounds = run(DFlash(made, BlockLength(LengthPolicy(BLOCK, policy="ratio"))))
    rows = [1, 2, 5]
    got = [made.drafted + 1 for made in rounds[1:]]
    assert got[:9] == [rows[i % 3] for i in range(9)]


def test_nothing_follows_an_end_of_sequence_id() -> None:
    truth = [*prompt_of(0), *answer(0)]
    stop = answer(0)[4]
    drafter = DFlash(bank(), fixed(), eos_ids=frozenset({stop}))
    drafter.begin(prompt_of(0), RowSignals())
    assert drafter.bank.head.local(()).id_of(5) == 5

    class Ending(DFlash):
        """Its slots all say the stop token."""

        def _block(self, ctx: DraftContext) -> torch.Tensor:
            return self.bank.head.rows[stop].expand(1, BLOCK, -1) * 100

    made = Ending(bank(), fixed(), eos_ids=frozenset({stop}))
    made.begin(prompt_of(0), RowSignals())
    ctx = DraftContext(truth[:10], _never, _never, True)
    assert made.propose(ctx, Budget(9, 9)).tree.tokens == (truth[9], stop)
    ctx = DraftContext([*truth[:10], stop], _never, _never, True)
    assert made.propose(ctx, Budget(9, 9)).tree.tokens == (stop,)


def _never(*_: Any) -> Any:
    raise AssertionError("not asked for")


def test_a_context_with_a_hole_is_refused_before_the_network_runs() -> None:
    drafter = DFlash(bank(), fixed())
    drafter.begin([5, 6, 7], RowSignals())
    ctx = DraftContext([5, 6, 7, 8, 9], _never, _never, True, embed=tiny.target().embed)
    with pytest.raises(CacheStateError, match="4 tokens stand before the anchor"):
        drafter.propose(ctx, Budget(5, 5))


def test_a_broken_network_drafts_nothing_and_the_answer_stays() -> None:
    made = bank(length_head=6)
    made.net.norm.weight.fill_(float("nan"))
    for draw in (False, True):
        rule = BlockLength(LengthPolicy(BLOCK, policy="ratio"))
        rounds = run(DFlash(made, rule, draw=draw), params=SAMPLED if draw else GREEDY)
        assert sum(made.drafted for made in rounds) == 0


def test_nothing_of_a_request_outlives_it() -> None:
    shared = bank()
    shared_bytes = sum(each.nbytes for each in shared.net.state_dict().values())
    drafter = DFlash(shared, fixed())
    held: list[weakref.ref[Any]] = []
    propose = drafter.propose

    def spied(ctx: DraftContext, budget: Budget) -> Draft:
        draft = propose(ctx, budget)
        for store in (drafter._cache._keys, drafter._cache._values):
            held.extend(weakref.ref(each) for each in store.values())
        held.extend(weakref.ref(each) for each in drafter._waiting)
        return draft

    drafter.propose = spied  # type: ignore[method-assign]
    rounds_of(tiny.target(), prompt_of(0), GREEDY, drafter)
    gc.collect()
    assert held
    assert [each for each in held if each() is not None] == []
    assert tiny.target().bytes_in_use == 0
    assert (drafter._cache.length, drafter._waiting, drafter._guesses) == (0, [], [])
    assert sum(each.nbytes for each in shared.net.state_dict().values()) == shared_bytes


def test_a_request_without_a_draft_keeps_few_states_waiting() -> None:
    drafter = DFlash(bank(), fixed())
    most = 0
    observe = drafter.observe

    def spied(round: Round) -> None:
        nonlocal most
        observe(round)
        most = max(most, drafter._rows_waiting())

    drafter.observe = spied  # type: ignore[method-assign]
    rounds_of(tiny.target(), prompt_of(0), LONG, drafter, nodes=1)
    assert 0 < most < MOST_WAITING


def test_a_drafters_temperature_must_be_one() -> None:
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(OptionError, match="draft_temperature"):
            DFlash(bank(), fixed(), temperature=wrong)


@pytest.mark.gpu
def test_on_cuda_answers_are_plain_decodings_too() -> None:
    from tests.targets.fused_models import llama, random_model

    model = random_model(llama(num_hidden_layers=tiny.LAYERS), initializer_range=0.3)
    target = FusedTarget.from_tensors(
        model.config,
        dict(model.state_dict()),
        name="tiny",
        dtype=torch.float32,
        device=torch.device("cuda"),
        eos_ids=(),
    )
    made = bank(target, length_head=6)
    for case in range(3):
        want = tokens_of(plain(target, prompt_of(case), GREEDY))
        for policy in ("fixed", "ratio"):
            drafter = DFlash(made, BlockLength(LengthPolicy(BLOCK, policy=policy)))
            assert tokens_of(rounds_of(target, prompt_of(case), GREEDY, drafter)) == want
