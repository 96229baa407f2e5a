"""EAGLE-3 drafts: answers stay plain decoding's, and the network sees exactly the right pairs."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.eagle3.eagle3_models import bank, net, uncached
from tests.eagle3.test_tree import brute
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import GREEDY, SAMPLED, kept, plain, prompt_of, rounds_of, tokens_of

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.eagle3 import Eagle3
from hasten.eagle3.bank import Eagle3Bank
from hasten.eagle3.pairs import MOST_WAITING
from hasten.errors import CacheStateError, OptionError
from hasten.targets.fused import FusedTarget
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, SamplingParams

LONG = SamplingParams(max_new_tokens=60)


def twin() -> FusedTarget:
    """The target again, so that the books of the other stay those of the request."""
    return tiny.target((), 160)


class Checked(Eagle3):
    """Compares every draft with what the network says without any cache, path by path."""

    drafts = 0

    def __init__(self, seed: int = 0, ids: Sequence[int] | None = None, **options: Any) -> None:
        changes = {"taps": options.pop("taps")} if "taps" in options else {}
        super().__init__(bank(ids=ids, seed=seed, **changes), **options)
        self.plain = net(self.bank.config, seed)
        """As it was before it was packed."""

    def _after(self, ids: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        """Logits after `ids` and a drafted path."""
        taps, start, target = self.bank.config.taps, self.pairs.start, twin()
        sequence = target.open()
        hidden = target.prefill(sequence, ids[:-1], taps=taps).hidden
        target.close(sequence)
        features = torch.cat([hidden[layer] for layer in taps], 1)[start:]
        own, drafted = target.embed(ids[start + 1 :]), target.embed(path)
        return uncached(self.plain, own, features, drafted, start)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        draft = super().propose(ctx, budget)
        room = min(budget.nodes - 1, budget.depth)
        if room < 1:
            return draft
        self.drafts += 1
        seen: dict[tuple[int, ...], torch.Tensor] = {}
        ids, numbers = list(ctx.ids), self.bank.numbers

        class Model:
            """`brute` asks for logits after a path of places."""

            @staticmethod
            def logits(path: Sequence[int]) -> torch.Tensor:
                key = tuple(path)
                if key not in seen:
                    tokens = [numbers[place] for place in path]
                    with torch.inference_mode():
                        seen[key] = self._after(ids, tokens)
                return seen[key]

        if self.top_k:
            depth = min(self.depth, budget.depth)
            wanted = brute(Model, self.top_k, depth, budget.nodes - 1)  # type: ignore[arg-type]
            want = {tuple(numbers[place] for place in path) for path in wanted}
        else:
            path: list[int] = []
            for _ in range(min(self.length, room)):
                path.append(int(Model.logits(path).argmax()))
            tokens = [numbers[place] for place in path]
            want = {tuple(tokens[: 1 + at]) for at in range(len(tokens))}
        tree = draft.tree
        got = {
            tuple(tree.tokens[each] for each in tree.path(node)[1:]) for node in range(1, len(tree))
        }
        assert got == want
        return draft


class Mixed(BaseDrafter):
    """Rounds by chance: nothing, a copy of the answer made by somebody else, or the drafter."""

    name = "mixed"

    def __init__(self, own: Eagle3, truth: Sequence[int], seed: int) -> None:
        self.own, self.truth, self.coin = own, list(truth), random.Random(seed)
        self.needs = own.needs
        self.others = 0
        self.waited = 0

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        self.own.begin(prompt, signals)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        turn = self.coin.choice(("own", "nothing", "nothing", "copy", "tree"))
        self.waited = max(self.waited, self.own.pairs.waiting)
        if turn == "own":
            return self.own.propose(ctx, budget)
        self.others += 1
        root, at = ctx.ids[-1], len(ctx.ids)
        if turn == "nothing":
            return Draft(DraftTree.chain(root))
        right = self.coin.choice((1, 2, 5))
        guess = self.truth[at : at + min(right, budget.depth)]
        if turn == "copy":
            return Draft(DraftTree.chain(root, [*guess, (root + 1) % tiny.VOCAB][: budget.depth]))
        other = next(t for t in range(tiny.VOCAB) if t not in guess)
        tokens, parents = [root, other], [-1, 0]
        for depth, token in enumerate(guess):
            tokens.append(token)
            parents.append(0 if depth == 0 else len(tokens) - 2)
        return Draft(DraftTree(tuple(tokens), tuple(parents)))

    def observe(self, round: Round) -> None:
        self.own.observe(round)

    def end(self) -> None:
        self.own.end()


def run(drafter: Any, case: int = 0, params: SamplingParams = GREEDY, **how: Any) -> list[Round]:
    """The rounds; the answer is plain decoding's."""
    rounds = rounds_of(tiny.target(), prompt_of(case), params, drafter, seed=case, **how)
    want = tokens_of(plain(tiny.target(), prompt_of(case), params, seed=case))
    assert tokens_of(rounds) == want
    return rounds


class Counted:
    """Counts the passes of a bank's network."""

    def __init__(self, shared: Eagle3Bank) -> None:
        self.count, self._forward = 0, shared.net.forward
        shared.net.forward = self.forward  # type: ignore[method-assign]

    def forward(self, *args: Any) -> torch.Tensor:
        self.count += 1
        return self._forward(*args)


HALF = tuple(range(0, tiny.VOCAB, 2))
SHAPES: dict[str, dict[str, int]] = {
    "chain": {"length": 3},
    "tree": {"top_k": 3, "depth": 3},
    "wide tree": {"top_k": 5, "depth": 2},
}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_random_drafter_changes_nothing_and_drafts_as_the_reference(
    params: SamplingParams, shape: str
) -> None:
    for case, ids in ((0, None), (1, HALF)):
        drafter = Checked(case, ids, **SHAPES[shape])
        rounds = run(drafter, case, params, nodes=9)
        assert drafter.drafts > 4
        assert {s for made in rounds for s in made.sources} == {"", "eagle3"}
        assert max(made.drafted for made in rounds) == (3 if shape == "chain" else 8)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_rounds_that_others_drafted_are_caught_up_with_in_one_pass(shape: str) -> None:
    for case in range(3):
        truth = [*prompt_of(case), *tokens_of(plain(tiny.target(), prompt_of(case), LONG))]
        own = Checked(case, **SHAPES[shape])
        passes = Counted(own.bank)
        mixed = Mixed(own, truth, case)
        run(mixed, case, LONG, nodes=9)
        assert own.drafts > 4
        assert mixed.others > 10
        assert mixed.waited > 5
        # One for the prompt; a pass catches up, then one for every further token of a path.
        steps = SHAPES[shape].get("length", SHAPES[shape].get("depth", 0)) - 1
        assert passes.count == 1 + own.drafts * (1 + steps)


def test_many_rounds_without_a_draft_keep_few_states_waiting() -> None:
    drafter, waited = Eagle3(bank()), []
    observe = drafter.observe

    def spied(round: Round) -> None:
        observe(round)
        waited.append(drafter.pairs.waiting)

    drafter.observe = spied  # type: ignore[method-assign]
    rounds_of(tiny.target(), prompt_of(0), SamplingParams(max_new_tokens=90), drafter, nodes=1)
    assert max(waited) == MOST_WAITING - 1
    assert len(waited) == 90


def test_catching_up_early_changes_no_draft() -> None:
    class Early(Checked):
        def observe(self, round: Round) -> None:
            super().observe(round)
            self.catch_up()
            assert self.pairs.waiting == 0

    drafter = Early(length=3)
    run(drafter, 1)
    assert drafter.drafts > 4


class Knowing(Eagle3):
    """Drafts the answer, up to some token that isn't."""

    def __init__(self, made: Eagle3Bank, truth: Sequence[int], **options: Any) -> None:
        super().__init__(made, **options)
        self.truth, self.coin = list(truth), random.Random(0)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        self._at, self._right = len(ctx.ids), self.coin.choice((0, 1, 9))
        return super().propose(ctx, budget)

    def _likeliest(self, logits: torch.Tensor) -> int:
        token, self._at, self._right = self.truth[self._at], self._at + 1, self._right - 1
        return token if self._right >= 0 else (token + 1) % tiny.VOCAB


def test_the_pairs_are_right_however_much_of_a_draft_is_kept() -> None:
    truth = [*prompt_of(0), *tokens_of(plain(tiny.target(), prompt_of(0), LONG))]
    drafter = Knowing(bank(), truth, length=4)
    rounds = run(drafter, 0, LONG)
    assert {len(made.accepted) for made in rounds[1:-1]} >= {1, 2, 5}
    assert kept(rounds) > 20


def test_a_sequence_that_holds_part_of_the_prompt_gives_fewer_pairs() -> None:
    target, prompt = tiny.target(), prompt_of(1, 30)
    sequence = target.open()
    target.prefill(sequence, prompt[:20])
    drafter = Checked(length=3)
    rounds = rounds_of(target, prompt, GREEDY, drafter, sequence=sequence)
    target.close(sequence)
    assert tokens_of(rounds) == tokens_of(plain(target, prompt, GREEDY))
    assert drafter.drafts > 3


def ctx_of(ids: Sequence[int]) -> DraftContext:
    def never(*_: Any) -> Any:
        raise AssertionError("not asked for")

    return DraftContext(ids, never, never, True)


def test_nothing_follows_an_end_of_sequence_id() -> None:
    made, prompt = bank(), [5, 6, 7]
    for options in ({"length": 5}, {"top_k": 3, "depth": 3}):
        free = Eagle3(made, **options)
        ends = frozenset()
        for _ in range(2):
            drafter = Eagle3(made, **options, eos_ids=ends)
            drafter.begin(prompt, RowSignals(hidden={t: torch.ones(3, 32) for t in (2, 3, 5)}))
            drafter.observe(Round(0, (9,)))
            tree = drafter.propose(ctx_of([*prompt, 9]), Budget(30, 9)).tree
            inner = {tree.tokens[parent] for parent in tree.parents[2:] if parent > 0}
            assert not inner & ends
            ends = frozenset({tree.tokens[1]})
        assert tree.tokens[1] in ends
        free.begin(prompt, RowSignals())
        last = [*prompt, next(iter(ends))]
        drafter.observe(Round(0, (9,)))
        assert drafter.propose(ctx_of(last), Budget(9, 9)).tree.tokens == (last[-1],)


def test_a_round_that_was_not_observed_is_noticed_before_the_network_runs() -> None:
    drafter = Eagle3(bank())
    drafter.begin([5, 6, 7], RowSignals(hidden={t: torch.ones(3, 32) for t in (2, 3, 5)}))
    drafter.observe(Round(0, (8,)))
    with pytest.raises(CacheStateError, match="where 4 tokens stand"):
        drafter.propose(ctx_of([5, 6, 7, 8, 9]), Budget(5, 5))


def test_without_any_state_of_the_prompt_nothing_is_drafted() -> None:
    drafter = Eagle3(bank())
    drafter.begin([5, 6, 7], RowSignals())
    drafter.observe(Round(0, (8,)))
    assert len(drafter.propose(ctx_of([5, 6, 7, 8]), Budget(5, 5)).tree) == 1


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_broken_network_drafts_nothing_and_the_answer_stays(shape: str) -> None:
    made = bank()
    made.net.norm.weight.fill_(float("nan"))
    rounds = run(Eagle3(made, **SHAPES[shape]))
    assert sum(each.drafted for each in rounds) == 0
    drawn = Eagle3(made, sample=True)
    assert sum(each.drafted for each in run(drawn, params=SAMPLED)) == 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_nothing_of_a_request_outlives_it(shape: str) -> None:
    shared = bank()
    drafter = Eagle3(shared, **SHAPES[shape])
    held: list[weakref.ref[Any]] = []
    propose = drafter.propose

    def spied(ctx: DraftContext, budget: Budget) -> Draft:
        draft = propose(ctx, budget)
        cache = drafter.pairs._cache
        for store in (cache._keys, cache._values):
            held.extend(weakref.ref(each) for each in store.values())
        held.append(weakref.ref(drafter.pairs.last))
        return draft

    drafter.propose = spied  # type: ignore[method-assign]
    rounds_of(tiny.target(), prompt_of(0), GREEDY, drafter, nodes=8)
    gc.collect()
    assert held
    assert [each for each in held if each() is not None] == []
    assert tiny.target().bytes_in_use == 0
    assert (drafter.pairs.held, drafter.pairs.waiting, drafter.pairs.last) == (0, 0, None)


def test_a_cache_holds_one_row_a_pair_and_nothing_of_drafts() -> None:
    drafter = Eagle3(bank(), top_k=4, depth=4)
    held: list[int] = []
    observe = drafter.observe

    def spied(round: Round) -> None:
        observe(round)
        held.append(drafter.pairs.held + drafter.pairs.waiting)

    drafter.observe = spied  # type: ignore[method-assign]
    rounds = run(drafter, 2, nodes=12)
    emitted = [len(made.emitted) for made in rounds]
    prompt = len(prompt_of(2))
    assert held == [prompt - 1 + sum(emitted[: 1 + at]) for at in range(len(emitted))]


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(OptionError, match="draft_temperature"):
            Eagle3(bank(), temperature=wrong)
    for options in ({"length": 0}, {"depth": 0}, {"top_k": -1}, {"top_k": 2, "sample": True}):
        with pytest.raises(OptionError, match=r"eagle3\."):
            Eagle3(bank(), **options)  # type: ignore[arg-type]


def test_it_asks_for_each_tapped_layer_once() -> None:
    drafter = Checked(taps=(3, 2, 3), length=3)
    assert drafter.needs.hidden == (2, 3)
    run(drafter)
    assert drafter.drafts > 3


def test_a_policy_gives_no_more_than_was_asked_for() -> None:
    rounds = run(Eagle3(bank(), length=9), nodes=3)
    assert max(made.drafted for made in rounds) == 2


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
    made = bank(target)
    for case in range(3):
        want = tokens_of(plain(target, prompt_of(case), GREEDY))
        for shape in SHAPES.values():
            drafter = Eagle3(made, **shape)
            assert tokens_of(rounds_of(target, prompt_of(case), GREEDY, drafter)) == want
