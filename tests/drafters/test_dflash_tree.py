"""DDTree: the likeliest paths through a block, and answers that stay plain decoding's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from tests.dflash.dflash_models import BLOCK, bank
from tests.drafters.test_dflash import GREEDY, LONG, SAMPLED, twin
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import kept, plain, prompt_of, rounds_of, tokens_of

from hasten.drafters.base import DraftContext
from hasten.drafters.dflash_tree import DFlashTree, grow
from hasten.drafters.ranks import BESIDE, MODULE_CHANCES, SLOT, module_rank, prior
from hasten.drafters.tree_builder import TreeBuilder
from hasten.exits.native_module import Pairs
from hasten.types import Budget, Draft, Round, RowSignals

SLOTS: list[Pairs] = [
    [(10, 0.5), (11, 0.3), (12, 0.1)],
    [(20, 0.7), (21, 0.2)],
    [(30, 0.6), (31, 0.25), (32, 0.1)],
]


def paths(tree: TreeBuilder) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, in the order the nodes were made."""
    out: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        out.append((*out[tree.parents[node]], tree.tokens[node]))
    return out[1:]


def best(slots: Sequence[Pairs], count: int) -> set[tuple[int, ...]]:
    """The likeliest paths, by trying all of them."""
    every = [path for depth in range(1, 1 + len(slots)) for path in product(*slots[:depth])]
    every.sort(key=lambda path: -prod(chance for _, chance in path))
    return {tuple(token for token, _ in path) for path in every[:count]}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 26])
def test_a_tree_is_of_the_likeliest_paths(count: int) -> None:
    tree = TreeBuilder(1, 1 + count, 9)
    grow(tree, SLOTS)
    assert set(paths(tree)) == best(SLOTS, count)
    assert len(paths(tree)) == min(count, 3 + 3 * 2 + 3 * 2 * 3)


def test_random_blocks_give_the_likeliest_paths_too() -> None:
    coin = random.Random(3)
    for _ in range(50):
        slots = []
        for depth in range(4):
            chances = sorted((coin.random() * 0.3 for _ in range(4)), reverse=True)
            slots.append([(10 * depth + i, chance) for i, chance in enumerate(chances)])
        tree = TreeBuilder(1, 20, 9)
        grow(tree, slots)
        assert set(paths(tree)) == best(slots, 19)


def test_tokens_that_follow_the_likeliest_ones_are_counted_apart() -> None:
    tree = TreeBuilder(1, 30, 9)
    grow(tree, SLOTS)
    first = [each[0][0] for each in SLOTS]
    for node, path in enumerate(paths(tree), start=1):
        above = list(path[:-1])
        assert tree.sources[node] == (SLOT if above == first[: len(above)] else BESIDE)
        chance = dict(SLOTS[len(path) - 1])[path[-1]]
        assert tree.ranks[node] == module_rank(chance)
    assert {SLOT, BESIDE} <= set(tree.sources)


def test_guesses_of_both_kinds_rise_with_the_chance() -> None:
    ranks = range(len(MODULE_CHANCES) + 1)
    for source in (SLOT, BESIDE):
        chances = [prior(source, rank, 1) for rank in ranks]
        assert chances == sorted(chances)
    assert all(prior(BESIDE, rank, 2) <= prior(SLOT, rank, 2) for rank in ranks)


def test_nothing_follows_an_end_but_other_tokens_stand_beside_it() -> None:
    tree = TreeBuilder(1, 30, 9, final=frozenset({10, 21}))
    grow(tree, SLOTS)
    found = set(paths(tree))
    assert (10,) in found
    assert (11, 21) in found
    assert not [path for path in found if path[0] == 10 and len(path) > 1]
    assert not [path for path in found if len(path) > 2 and path[1] == 21]
    assert (11, 20, 32) in found


def test_a_slot_that_says_nothing_ends_the_tree() -> None:
    tree = TreeBuilder(1, 30, 9)
    grow(tree, [SLOTS[0], [], SLOTS[2]])
    assert {len(path) for path in paths(tree)} == {1}
    tree = TreeBuilder(1, 30, 9)
    grow(tree, [])
    assert len(tree) == 1


class Checked(DFlashTree):
    """Compares every block with one pass of the network over the whole context, without a cache."""

    blocks = 0

    def _block(self, ctx: DraftContext) -> torch.Tensor:
        got = super()._block(ctx)
        target, config = twin(), self.bank.config
        sequence = target.open()
        hidden = target.prefill(sequence, ctx.ids[:-1], taps=config.taps).hidden
        target.close(sequence)
        features = torch.cat([hidden[layer] for layer in config.taps], 1).unsqueeze(0)
        block = target.embed([ctx.ids[-1], *[config.mask_token_id] * (config.block_size - 1)])
        positions = torch.arange(len(ctx.ids) - 1 + config.block_size).unsqueeze(0)
        net = self.bank.net
        want = net(block.unsqueeze(0), net.context(features), positions)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        self.blocks += 1
        return got


class Run:
    """Stands before a request's run: the true token is one of each slot's candidates."""

    def __init__(self, inner: Any, ask: Any) -> None:
        self._inner, self._ask = inner, ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def candidates(self, slots: torch.Tensor, width: int) -> list[Pairs]:
        return self._ask(len(slots), width)


class Knowing(Checked):
    """Knows the answer; the true token has this place among a slot's candidates."""

    def __init__(self, truth: Sequence[int], place: Any, **options: Any) -> None:
        self.truth, self.place = list(truth), place
        super().__init__(bank(), **options)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        self.at = len(ctx.ids)
        if not isinstance(self._run, Run):
            self._run = Run(self._run, self._said)  # type: ignore[assignment]
        return super().propose(ctx, budget)

    def _said(self, count: int, width: int) -> list[Pairs]:
        out = []
        for slot, token in enumerate(self.truth[self.at : self.at + count]):
            place = self.place(slot)
            others = [(token + 1 + i) % tiny.VOCAB for i in range(width)]
            ids = [*others[:place], token, *others[place:]][:width]
            out.append([(each, 0.5 * 0.8**i) for i, each in enumerate(ids)])
        return out


def run(drafter: DFlashTree, case: int, params: Any, nodes: int) -> list[Round]:
    """The rounds; the answer is plain decoding's."""
    rounds = rounds_of(tiny.target(), prompt_of(case), params, drafter, seed=case, nodes=nodes)
    assert tokens_of(rounds) == tokens_of(plain(tiny.target(), prompt_of(case), params, seed=case))
    return rounds


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ids", [None, range(0, tiny.VOCAB, 2)], ids=["all ids", "half"])
@pytest.mark.parametrize("nodes", [2, 7, 24])
def test_a_random_drafter_changes_nothing(params: Any, ids: Any, nodes: int) -> None:
    for case in range(3):
        drafter = Checked(bank(ids=ids, seed=case))
        rounds = run(drafter, case, params, nodes)
        assert drafter.blocks > 3
        assert max(made.drafted for made in rounds) == nodes - 1
        assert {s for made in rounds for s in made.sources} <= {"", SLOT, BESIDE}


def test_second_candidates_are_kept_which_a_chain_would_lose() -> None:
    truth = [*prompt_of(0), *tokens_of(plain(tiny.target(), prompt_of(0), GREEDY))]
    rounds = run(Knowing(truth, lambda slot: slot == 0), 0, GREEDY, 16)
    assert kept(rounds) >= 9
    chain = run(Knowing(truth, lambda slot: slot == 0, width=1), 0, GREEDY, 16)
    assert kept(chain) == 0


def test_the_context_is_right_whichever_branch_is_kept() -> None:
    for case in range(3):
        coin = random.Random(case)
        truth = [*prompt_of(case), *tokens_of(plain(tiny.target(), prompt_of(case), LONG))]
        drafter = Knowing(truth, lambda slot, coin=coin: coin.choice((0, 0, 1, 9)))
        rounds = run(drafter, case, LONG, 24)
        assert {len(made.accepted) for made in rounds[1:-1]} >= {1, 2, 3}
        assert len(rounds) - 2 <= drafter.blocks <= len(rounds) - 1


def test_a_block_has_no_more_depths_than_slots_and_no_more_than_may_be_emitted() -> None:
    drafter = Checked(bank())
    drafter.begin(prompt_of(0), RowSignals())
    depths = []
    propose = drafter.propose

    def spied(ctx: DraftContext, budget: Budget) -> Draft:
        draft = propose(ctx, budget)
        depths.append((max(draft.tree.depths), budget.depth))
        return draft

    drafter.propose = spied  # type: ignore[method-assign]
    run(drafter, 0, GREEDY, 40)
    assert all(depth <= min(BLOCK - 1, most) for depth, most in depths)
    assert max(depth for depth, _ in depths) >= 2


def test_a_broken_network_drafts_nothing_and_the_answer_stays() -> None:
    made = bank()
    made.net.norm.weight.fill_(float("nan"))
    assert sum(each.drafted for each in run(DFlashTree(made), 0, GREEDY, 9)) == 0
