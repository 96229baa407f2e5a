"""RACER's tree: retrieved n-grams and copied logits, as the paper and its options say."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from hasten.drafters.base import DraftContext
from hasten.drafters.ngrams import NGramStore
from hasten.drafters.racer import Racer, RacerState
from hasten.drafters.successors import SuccessorTable
from hasten.drafts import check_draft
from hasten.errors import OptionError
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals

DEEP = 1_000_000


def context(ids: Sequence[int]) -> DraftContext:
    return DraftContext(ids=ids, sample=None, warp=None, greedy=True)  # type: ignore[arg-type]


def rows(ids: Sequence[int], vocab: int, k: int = 8) -> RowSignals:
    """Made-up top-k rows: the tokens after `ids`, one by one."""
    return RowSignals(
        topk_ids=torch.tensor([[(t * k + j + 1) % vocab for j in range(k)] for t in ids])
    )


def begun(prompt: Sequence[int], vocab: int = 1000, **options: object) -> Racer:
    drafter = Racer(**options)  # type: ignore[arg-type]
    drafter.begin(tuple(prompt), rows(prompt, vocab))
    return drafter


def propose(drafter: Racer, ids: Sequence[int], nodes: int, depth: int = DEEP) -> Draft:
    draft = drafter.propose(context(ids), Budget(nodes, depth))
    check_draft(draft, ids[-1], Budget(nodes, depth), 1_000_000)
    return draft


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Token paths below the root."""
    tree = draft.tree
    return {tuple(tree.tokens[n] for n in tree.path(i)[1:]) for i in range(1, len(tree))}


def levels(draft: Draft) -> list[int]:
    count = Counter(draft.tree.depths)
    return [count[d] for d in sorted(count)]


@pytest.mark.parametrize(
    ("schedule", "nodes", "shape"),
    [
        ("deep", 16, [1, 8, 7]),
        ("deep", 32, [1, 8, 12, 11]),
        ("deep", 64, [1, 8, 12, 17, 18, 8]),
        ("wide", 16, [1, 8, 7]),
        ("wide", 32, [1, 8, 19, 4]),
        ("wide", 64, [1, 8, 19, 24, 12]),
    ],
)
def test_the_logits_tree_has_the_published_shapes(
    schedule: str, nodes: int, shape: list[int]
) -> None:
    drafter = Racer(ngram=0, schedule=schedule)
    vocab = 100_000  # all rows known, all tokens of the tree distinct
    every = torch.arange(vocab // 8)
    ids = every[:, None] * 8 + torch.arange(8) + 1
    drafter._state.successors.update(every.tolist(), ids)
    assert levels(propose(drafter, [0], nodes)) == shape


@pytest.mark.parametrize("schedule", ["deep", "wide"])
def test_children_have_the_breadths_of_their_schedule(schedule: str) -> None:
    drafter = Racer(ngram=0, schedule=schedule)
    every = torch.arange(5000)
    drafter._state.successors.update(every.tolist(), every[:, None] * 8 + torch.arange(8) + 1)
    tree = propose(drafter, [0], 64).tree
    kids = tree.children()
    first = [len(kids[n]) for n in kids[0]]
    assert first == ([4, 2, 1, 1, 1, 1, 1, 1] if schedule == "deep" else [8, 4, 2, 1, 1, 1, 1, 1])
    assert [len(kids[n]) for n in kids[1]][:2] == [4, 2]


def test_a_row_that_is_not_known_drafts_nothing() -> None:
    drafter = Racer(ngram=0)
    assert propose(drafter, [5], 16).tree == DraftTree.chain(5)
    drafter.begin((5,), RowSignals(topk_ids=torch.tensor([[7, 8, 9, 1, 2, 3, 4, 6]])))
    draft = propose(drafter, [5], 64)
    assert 0 not in draft.tree.tokens
    assert len(draft.tree) == 9


def test_one_node_is_plain_decoding() -> None:
    drafter = begun([1, 2, 3, 1, 2])
    assert propose(drafter, [1, 2, 3, 1, 2], 1).tree == DraftTree.chain(2)
    assert propose(drafter, [1, 2, 3, 1, 2], 16, depth=0).tree == DraftTree.chain(2)


def test_what_followed_is_retrieved_before_logits_are_copied() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    draft = propose(begun(text), text, 4)
    assert paths(draft) == {(4,), (4, 5), (4, 5, 6)}
    assert draft.sources == ("", "retrieval", "retrieval", "retrieval")
    more = propose(begun(text), text, 24)
    assert {(4,), (4, 5), (4, 5, 6)} < paths(more)
    assert Counter(more.sources) == {"": 1, "retrieval": 6, "logits": 10}


@pytest.mark.parametrize(
    ("share", "nodes", "retrieved"),
    [(0.4, 5, 4), (0.4, 9, 8), (0.4, 16, 8), (0.4, 41, 16), (0.01, 41, 8), (1.0, 41, 40)],
)
def test_retrieval_takes_its_share_of_the_budget_and_eight_at_least(
    share: float, nodes: int, retrieved: int
) -> None:
    text = [token for i in range(40) for token in (7, 50 + i)] + [7]
    draft = propose(begun(text, retrieved=share), text, nodes)
    assert len(draft.tree) == nodes
    assert Counter(draft.sources)["retrieval"] == retrieved


def test_a_shorter_match_than_asked_for_is_not_retrieved() -> None:
    text = [1, 2, 9, 8, 7, 2]
    for min_match, found in ((1, {(9,), (9, 8)}), (2, set())):
        drafter = begun(text, breadth=0, min_match=min_match, retrieved=1.0)
        assert paths(propose(drafter, text, 3)) == found


def test_switched_off_sources_propose_nothing() -> None:
    text = [1, 2, 3, 1, 2]
    assert set(propose(begun(text, breadth=0), text, 16).sources) == {"", "retrieval"}
    assert set(propose(begun(text, ngram=0), text, 16).sources) == {"", "logits"}
    assert Racer(breadth=0).needs.topk == 0
    assert not Racer(breadth=0).needs.prompt


def test_leaves_are_grafted_with_logits() -> None:
    text = [1, 2, 3, 1, 2]  # retrieved: 3, 1 and 2 in a row
    tips = {}
    for graft in (True, False):
        drafter = begun(text, graft=graft)
        # The root, three retrieved, eight of the root's row, two more.
        draft = propose(drafter, text, 14)
        assert {(3,), (3, 1), (3, 1, 2)} < paths(draft)
        tips[graft] = {p for p in paths(draft) if len(p) == 4}
    assert tips[True] == {(3, 1, 2, 17), (3, 1, 2, 18)}  # row of token 2: 17, 18, ...
    assert tips[False] == set()


def test_refill_makes_up_for_what_both_sources_propose() -> None:
    # The row of 2 proposes 17..24; 17 and 18 followed it too.
    text = [2, 17, 2, 18, 2]
    filled = propose(begun(text, retrieved=1.0, graft=False), text, 14)
    not_filled = propose(begun(text, retrieved=1.0, graft=False, refill=False), text, 14)
    assert len(filled.tree) == 14
    assert len(not_filled.tree) == 12


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_node_is_deeper_than_the_budget(depth: int) -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    draft = propose(begun(text), text, 24, depth)
    assert max(draft.tree.depths) == depth
    assert len(draft.tree) > depth + 1


def test_agreement_of_both_sources_is_in_the_rank() -> None:
    # 17 is the first of the row of 2, 18 the second; 500 isn't in it.
    text = [2, 17, 2, 18, 2, 500, 2]
    draft = propose(begun(text, retrieved=1.0), text, 4, depth=1)
    agreement = {t: r % 3 for t, r in zip(draft.tree.tokens, draft.ranks, strict=True)}
    assert (agreement[17], agreement[18], agreement[500]) == (2, 1, 0)


def test_rejected_rows_are_learned_and_accepted_ones_win() -> None:
    drafter = begun([1, 2, 3])
    tree = DraftTree((3, 4, 5, 4), (-1, 0, 0, 2))
    ids = torch.tensor([[40 + 8 * i + j for j in range(8)] for i in range(4)])
    drafter.observe(Round(1, (4, 9), tree, (0, 1), signals=RowSignals(topk_ids=ids)))
    table = drafter._state.successors
    assert list(table.get(5)) == ids[2].tolist()
    assert list(table.get(4)) == ids[1].tolist()  # accepted, though 4 was rejected elsewhere later


def test_prompt_rows_of_a_kept_cache_are_those_of_its_end() -> None:
    drafter = Racer()
    drafter.begin((1, 2, 3), rows([2, 3], 1000))
    assert list(drafter._state.successors.get(1)) == []
    assert next(iter(drafter._state.successors.get(3))) == 25


def run(drafter: Racer, text: Sequence[int], start: int, nodes: int = 16) -> list[Draft]:
    """Drafts along `text`, one token a round."""
    out = []
    for end in range(start, len(text)):
        draft = propose(drafter, text[:end], nodes)
        out.append(draft)
        signals = rows(draft.tree.tokens, 1000)
        drafter.observe(Round(1, (text[end],), draft.tree, (0,), signals=signals))
    return out


def _text(seed: int, length: int, alphabet: int = 12) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, alphabet) for _ in range(length)]


def test_interleaved_requests_draft_as_if_alone() -> None:
    texts = [_text(1, 60), _text(2, 60)]
    alone = [run(begun(t[:20]), t, 20) for t in texts]
    one, two = begun(texts[0][:20]), begun(texts[1][:20])
    mixed: list[list[Draft]] = [[], []]
    for end in range(20, 60):
        for which, (drafter, text) in enumerate(zip((one, two), texts, strict=True)):
            mixed[which] += run(drafter, text[: end + 1], end)
    assert mixed == alone


def test_shared_state_is_learned_by_all_and_texts_stay_apart() -> None:
    state = RacerState()
    first, second = Racer(state=state), Racer(state=state)
    first.begin((1, 2, 3), RowSignals())
    second.begin((3, 4, 5, 4), RowSignals())
    first.observe(Round(0, (4,)))
    assert state.ngrams.count([4, 3]) == 0  # nobody wrote this
    assert state.ngrams.count([3, 4]) == 2
    first.end()
    assert paths(propose(second, [3, 4, 5, 4], 8)) >= {(5,), (5, 4)}
    third = Racer(state=state)
    third.begin((3,), RowSignals())
    assert (4,) in paths(propose(third, [3], 8))


def test_the_end_of_a_request_leaves_nothing() -> None:
    drafter = begun(_text(3, 40))
    drafter.end()
    assert len(drafter._state.ngrams) == len(drafter._state.successors) == 0
    assert propose(drafter, [5], 16).tree == DraftTree.chain(5)
    drafter.begin((7,), RowSignals())
    assert propose(drafter, [7], 16).tree == DraftTree.chain(7)


def test_after_a_reset_no_token_of_an_earlier_request_is_drafted() -> None:
    state = RacerState()
    earlier = Racer(state=state)
    earlier.begin(tuple(range(100, 160)) * 2, rows(list(range(100, 160)) * 2, 160))
    earlier.end()
    state.reset()
    drafter = Racer(state=state)
    text = [7, 101, 7, 101, 102, 7]
    drafter.begin(tuple(text), RowSignals())
    drafted = set(propose(drafter, text, 64).tree.tokens)
    assert drafted <= set(text)
    assert len(state.successors) == 0


def test_a_fork_and_its_origin_do_not_notice_each_other() -> None:
    state = RacerState()
    first = Racer(state=state)
    first.begin((1, 2, 3, 1), rows([1, 2, 3, 1], 50))
    other = state.fork()
    second = Racer(state=other)
    second.begin((1, 40, 1), rows([1, 40, 1], 49))
    assert state.ngrams.count([1, 40]) == 0
    assert other.ngrams.count([1, 2]) == 1
    assert (40,) not in paths(propose(first, [1, 2, 3, 1], 4, depth=1))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param([7] * 4000, id="one token"),
        pytest.param([t for i in range(2000) for t in (0, 5 + i)], id="hub"),
        pytest.param(list(range(10)) * 400, id="cycle of ten"),
    ],
)
def test_hard_texts_keep_memory_and_tree_in_bounds(text: list[int]) -> None:
    drafter = begun(text, 100_000, capacity=2000)
    for draft in run(drafter, text + text[:30], len(text), nodes=24):
        assert len(draft.tree) <= 24
    assert len(drafter._state.ngrams) <= 2000
    assert len(drafter._state.successors) <= len(set(text)) + 30 * 24


def test_memory_is_flat_over_two_hundred_requests() -> None:
    state = RacerState(NGramStore(10, 1000), SuccessorTable(300))
    sizes: list[int] = []
    for seed in range(200):
        drafter = Racer(state=state)
        text = _text(seed, 40, alphabet=500)
        drafter.begin(tuple(text[:30]), rows(text[:30], 500))
        run(drafter, text, 30)
        drafter.end()
        assert len(state.ngrams) <= 1000
        assert len(state.successors) <= 300
        for trie in (state.ngrams._young, state.ngrams._old):
            sizes.append(sum(len(kids or ()) for kids in trie.children))
            assert len(trie.top) <= len(trie.children)
    assert max(sizes) <= 500
    assert min(sizes[200:]) > 0  # both generations are in use


def test_drafts_are_the_same_in_every_process() -> None:
    code = (
        "from tests.drafters.test_racer import _text, begun, run\n"
        "text = _text(5, 200, 9)\n"
        "print([(d.tree.tokens, d.tree.parents) for d in run(begun(text[:150]), text, 150)])"
    )
    prints = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert prints[0] == prints[1]
    assert len(prints[0]) > 1000


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(OptionError, match=r"racer\.schedule.*deep, wide"):
        Racer(schedule="tall")


def test_nodes_are_in_topological_order_with_distinct_siblings() -> None:
    for seed in range(5):
        text = _text(seed, 80, 4)
        for draft in run(begun(text[:60]), text, 60, nodes=33):
            pairs = list(zip(draft.tree.parents, draft.tree.tokens, strict=True))
            assert len(set(pairs)) == len(pairs)
            assert all(p < i for i, p in enumerate(draft.tree.parents))
            assert len(draft.tree) == len(draft.sources) == len(draft.ranks) <= 33
