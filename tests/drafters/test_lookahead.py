"""Lookahead: the window, the n-grams it completes, and how they are verified."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import pytest
from tests.conformance.harness import COSTS, load_other
from tests.conformance.toy_target import ToyTarget, ToyTokenizer
from tests.drafters.toy_rounds import begin, propose, row_paths, row_tokens, run, settle

from hasten import methods
from hasten.drafters.lookahead import Grams, Lookahead
from hasten.errors import CapabilityError, OptionError
from hasten.methods import MethodContext
from hasten.types import Budget

PROMPT = [3, 41, 5, 9, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]
SHAPES = [(5, 7), (3, 1), (4, 2), (2, 3), (3, 5)]


def cycle(ids: Sequence[int]) -> int:
    return 100 + (ids[-1] + 1) % 50


def distinct() -> Lookahead:
    return Lookahead(ngram=5, window=7, guesses=7, text=False)


@pytest.mark.parametrize(("ngram", "window"), SHAPES)
def test_a_row_of_the_window_sees_the_first_level_and_its_own_column(
    ngram: int, window: int
) -> None:
    drafter = Lookahead(ngram=ngram, window=window, text=False)
    fresh = count(1000)  # all rows differ, so none are fused
    ids = begin(drafter, PROMPT, lambda ids: next(fresh))
    for _ in range(ngram):
        settle(drafter, ids, propose(drafter, ids), lambda ids: next(fresh))
    drafter._levels[0] = [next(fresh) for _ in drafter._levels[0]]
    draft = propose(drafter, ids)
    assert len(draft.tree) == 1
    tokens, paths = row_tokens(draft), row_paths(draft)
    assert len(tokens) == (ngram - 1) * window
    seen = {tuple(tokens[r] for r in path) for path in paths}
    first = [ids[-1], *drafter._levels[0]]
    for level in range(ngram - 1):
        for column in range(window):
            own = [drafter._levels[k][column] for k in range(1, level + 1)]
            row = (*first[: column + 1], *own)
            # As many rows before it as its position: level + column after the pending token.
            assert len(row) == level + column + 1
            assert row in seen
    assert len(seen) == len(tokens)


def test_the_window_moves_on_by_one_position_a_round() -> None:
    drafter = distinct()
    fresh = count(1000)
    ids = begin(drafter, PROMPT, lambda ids: next(fresh))
    sizes = []
    for _ in range(6):
        before = [list(level) for level in drafter._levels]
        sizes.append([len(level) for level in before])
        settle(drafter, ids, propose(drafter, ids), lambda ids: next(fresh))
        after = drafter._levels
        if len(before) == 4:
            assert after[0] == before[1][1:]
            assert after[1:3] == before[2:]
        else:
            assert after[:-1] == [level[1:] for level in before]
    assert sizes == [[9], [8, 9], [7, 8, 8], [6, 7, 7, 7], [6, 7, 7, 7], [6, 7, 7, 7]]


def test_nothing_is_stored_before_the_window_is_full() -> None:
    drafter = distinct()
    fresh = count(1000)
    ids = begin(drafter, PROMPT, lambda ids: next(fresh))
    held = []
    for _ in range(5):
        settle(drafter, ids, propose(drafter, ids), lambda ids: next(fresh))
        held.append(len(drafter._grams))
    assert held[:3] == [0, 0, 0]
    assert held[3] == 7


@pytest.mark.parametrize(("ngram", "window"), SHAPES)
def test_stored_n_grams_are_chains_of_the_targets_own_choices(ngram: int, window: int) -> None:
    drafter = Lookahead(ngram=ngram, window=window, guesses=3, text=False)
    ids = begin(drafter, PROMPT, cycle)
    pending = set()
    for _ in range(3 * ngram):
        pending.add(ids[-1])
        settle(drafter, ids, propose(drafter, ids), cycle)
    checked = 0
    for key, grams in drafter._grams._keys.items():
        # The first column hangs on the pending token, whatever its guess for it was.
        for gram in grams if key in pending else [(key, *gram) for gram in grams]:
            chain = [token for token in gram if token >= 100]  # the others are seeds
            assert chain == [100 + (chain[0] + i) % 50 for i in range(len(chain))]
            checked += len(chain) > 1
    assert checked >= window


@pytest.mark.parametrize(("ngram", "window"), [(5, 7), (3, 5)])
def test_a_periodic_text_is_accepted_n_gram_and_bonus(ngram: int, window: int) -> None:
    drafter = Lookahead(ngram=ngram, window=window, guesses=3, text=False)
    _, lengths = run(drafter, PROMPT, cycle, 80)
    assert lengths[: ngram - 1] == [1] * (ngram - 1)
    assert min(lengths[-20:]) == ngram


def test_n_grams_share_their_prefixes_and_the_newest_comes_first() -> None:
    drafter = Lookahead(ngram=4, window=0, guesses=3)
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 6, 7, 8]
    ids = begin(drafter, text, lambda ids: 1)
    tree = propose(drafter, ids).tree
    assert tree.tokens == (1, 6, 7, 8, 2, 3, 5, 4)
    assert tree.parents == (-1, 0, 1, 2, 0, 4, 5, 5)
    assert len(propose(drafter, ids, Budget(6, 9)).tree) == 6
    assert max(propose(drafter, ids, Budget(60, 2)).tree.depths) == 2


def test_a_key_keeps_its_newest_n_grams() -> None:
    grams = Grams(2)
    for gram in ((1,), (2,), (1,), (3,)):
        grams.add(9, gram)
    assert grams.get(9) == [(3,), (1,)]
    assert len(grams) == 2


def test_the_key_touched_longest_ago_goes_when_there_are_too_many() -> None:
    grams = Grams(2, capacity=4)
    for key, token in ((1, 5), (1, 6), (2, 5), (3, 5), (1, 7), (4, 5)):
        grams.add(key, (token,))
    assert [grams.get(k) for k in (1, 2, 3, 4)] == [[(7,), (6,)], [], [(5,)], [(5,)]]
    assert len(grams) == 4


def test_the_texts_n_grams_are_stored_when_wanted() -> None:
    for on, tokens in ((True, (2, 3, 4)), (False, (2,))):
        drafter = Lookahead(ngram=3, window=0, text=on)
        ids = begin(drafter, [1, 2, 3, 4, 1], lambda ids: 2)
        assert propose(drafter, ids).tree.tokens == tokens


def test_no_end_is_ever_in_the_window() -> None:
    ends = frozenset({7, 8})
    rng = random.Random(1)
    drafter = Lookahead(ngram=4, window=4, guesses=3, text=False, eos_ids=ends)
    ids = begin(drafter, [7, *PROMPT, 8], lambda ids: 30)
    for _ in range(40):
        draft = propose(drafter, ids)
        assert ends.isdisjoint(row_tokens(draft)[1:])
        settle(drafter, ids, draft, lambda ids: rng.choice([7, 8, 30, 31]))
    # A prompt of nothing but ends has nothing better to offer.
    run(Lookahead(eos_ids=ends), [7], lambda ids: 30, 5)


def test_rounds_without_the_window_leave_it_as_it_is() -> None:
    drafter = distinct()
    ids = begin(drafter, PROMPT, cycle)
    for _ in range(6):
        settle(drafter, ids, propose(drafter, ids), cycle)
    levels = drafter._levels
    settle(drafter, ids, propose(drafter, ids), cycle, riding=False)
    assert drafter._levels == levels
    settle(drafter, ids, propose(drafter, ids), cycle)
    assert drafter._levels != levels


def test_the_end_of_a_request_leaves_nothing() -> None:
    drafter = Lookahead()
    first = run(drafter, PROMPT, cycle, 30)
    drafter.end()
    assert len(drafter._grams) == 0
    assert drafter._levels == drafter._tail == []
    assert run(drafter, PROMPT, cycle, 30) == first


# -- as registered ---------------------------------------------------------------------------------


def prepare(text: str, target: ToyTarget | None = None) -> methods.RequestMaker:
    context = MethodContext(target or ToyTarget(), ToyTokenizer(), load_other, COSTS)
    return methods.prepare(methods.parse(text), context)


def test_the_paper_variant_is_the_readmes_example() -> None:
    drafter, policy = prepare("lookahead:paper")()
    assert isinstance(drafter, Lookahead)
    given = (drafter.ngram, drafter.window, drafter.guesses, drafter.text)
    assert given == (5, 7, 7, False)
    assert getattr(policy, "nodes", None) == 29


def test_a_target_without_tree_masks_is_refused_before_any_pass() -> None:
    target = ToyTarget(tree=False)
    with pytest.raises(CapabilityError, match=r"lookahead.*tree"):
        prepare("lookahead", target)
    assert target.passes == 0


@pytest.mark.parametrize(("option", "value"), [("ngram", 1), ("window", -1), ("guesses", 0)])
def test_bad_options_are_refused_by_name(option: str, value: int) -> None:
    with pytest.raises(OptionError, match=rf"lookahead\.{option}"):
        prepare(f"lookahead,{option}={value}")
