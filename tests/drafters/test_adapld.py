"""AdaPLD's tree: the paper's shape, its switches, and what grows beyond it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from hasten.drafters.adapld import AdaPLD
from hasten.drafters.base import DraftContext
from hasten.drafters.reuse_memory import ReuseMemory
from hasten.drafts import check_draft
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, Signals

DEEP = 1_000_000
LAYER = 3
SIZE = 40
PAPER: dict[str, object] = {
    "deep": False,
    "successor_length": 1,
    "blend": 0.0,
    "succ_semantic": True,
    "max_cand": 256,
}
EYE = torch.eye(SIZE)


def row(*first: int, start: int = 500) -> list[int]:
    """Nine candidates: these, then ids from `start` on."""
    return [*first, *range(start, start + 9 - len(first))]


def signals(
    text: Sequence[int],
    rows: dict[int, list[int]] | None = None,
    same: dict[int, int] | None = None,
) -> RowSignals:
    """Rows of a text. States are all different, but position i has that of ``same[i]``; candidates
    are `rows` of a position, else ids that occur nowhere."""
    hidden = torch.stack([EYE[i % SIZE] + i * EYE[(i + 1) % SIZE] for i in range(len(text))])
    for position, other in (same or {}).items():
        hidden[position] = hidden[other]
    listed = [(rows or {}).get(i, row(start=10_000 + 100 * i)) for i in range(len(text))]
    return RowSignals(topk_ids=torch.tensor(listed), hidden={LAYER: hidden})


def embed(ids: Sequence[int]) -> torch.Tensor:
    """Ids that are equal modulo 100 resemble each other, more or less (0.98 and less)."""
    return torch.stack([EYE[i % 100 % SIZE] + 0.1 * EYE[i // 100 % SIZE] for i in ids])


def begun(
    text: Sequence[int],
    rows: dict[int, list[int]] | None = None,
    same: dict[int, int] | None = None,
    **options: object,
) -> AdaPLD:
    """A drafter whose pending token is the last of `text`."""
    drafter = AdaPLD(LAYER, **options)  # type: ignore[arg-type]
    drafter.begin(tuple(text[:-1]), signals(text[:-1], rows, same))
    drafter.observe(Round(0, (text[-1],)))
    return drafter


def propose(drafter: AdaPLD, text: Sequence[int], nodes: int = 64, depth: int = DEEP) -> Draft:
    ctx = DraftContext(ids=text, sample=None, warp=None, greedy=True, embed=embed)  # type: ignore[arg-type]
    draft = drafter.propose(ctx, Budget(nodes, depth))
    check_draft(draft, text[-1], Budget(nodes, depth), 1_000_000)
    assert len(draft.sources) == len(draft.ranks) == len(draft.tree)
    return draft


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Token paths below the root."""
    tree = draft.tree
    return {tuple(tree.tokens[n] for n in tree.path(i)[1:]) for i in range(1, len(tree))}


def chain(*tokens: int) -> set[tuple[int, ...]]:
    """Every prefix of a path."""
    return {tokens[:n] for n in range(1, len(tokens) + 1)}


# -- the paper's tree ------------------------------------------------------------------------------


def test_the_tree_is_the_span_the_branches_and_their_successors() -> None:
    #       0  1  2  3  4  5  6  7  8
    text = [1, 5, 2, 6, 8, 3, 9, 4, 5]
    rows = {1: row(2, 6, 3, 77, start=520)}  # after the 5 at position 1
    draft = propose(begun(text, rows, **PAPER), text)
    expected = chain(2, 6, 8, 3, 9, 4, 5)  # up to the pending token itself
    expected |= chain(6, 8) | chain(3, 9)  # these branches occur in the text
    expected |= {(t,) for t in rows[1][3:8]}  # these don't; nor does anything resemble them
    assert paths(draft) == expected
    assert Counter(draft.sources[1:]) == {"copy": 7, "branch": 7, "successor": 2}


def test_the_anchor_is_where_the_state_before_is_nearest() -> None:
    #       0  1  2  3  4  5  6  7
    text = [1, 5, 2, 3, 5, 4, 6, 5]
    for like, follows in ((0, 2), (3, 4)):
        draft = propose(begun(text, same={6: like}, branches=False, **PAPER), text)
        assert draft.tree.tokens[1] == follows
    latest = begun(text, same={6: 0}, branches=False, rerank="latest", **PAPER)
    assert propose(latest, text).tree.tokens[1] == 4


def test_branches_are_those_stored_at_the_anchor() -> None:
    text = [1, 5, 2, 3, 5, 4, 6, 5]
    rows = {1: row(2, start=600), 4: row(4, start=700)}
    for like, stored in ((0, 600), (3, 700)):
        draft = propose(begun(text, rows, {6: like}, **PAPER), text)
        tree = draft.tree
        branches = {t for t, s in zip(tree.tokens, draft.sources, strict=True) if s == "branch"}
        assert branches == set(range(stored, stored + 7))


@pytest.mark.parametrize("copied_at", [0, 3, 7, 8])
def test_branches_never_hold_the_copied_token(copied_at: int) -> None:
    text = [1, 5, 2, 3, 5]
    listed = row(start=600)
    listed[copied_at] = 2
    for deep, count in ((False, 7 if copied_at < 8 else 8), (True, 8)):
        options = {**PAPER, "deep": deep, "successors": False}
        draft = propose(begun(text, {1: listed}, **options), text)
        tree = draft.tree
        at_root = [n for n in range(1, len(tree)) if tree.parents[n] == 0]
        assert [tree.tokens[n] for n in at_root].count(2) == 1
        assert sum(draft.sources[n] == "branch" for n in at_root) == count


def test_a_lexical_miss_takes_the_semantic_path() -> None:
    #       0  1  2  3  4  5    6
    text = [1, 5, 2, 6, 5, 3, 105]  # 105 never occurred, and resembles the 5s
    rows = {1: row(2, 6, start=600), 4: row(3, start=700)}
    for like, stored in ((0, rows[1]), (3, rows[4])):
        draft = propose(begun(text, rows, {5: like}, **{**PAPER, "successors": False}), text)
        assert paths(draft) == {(t,) for t in stored[:8]}  # no copy
        assert set(draft.sources[1:]) == {"semantic"}
    with_successors = propose(begun(text, rows, {5: 0}, **PAPER), text)
    assert chain(2, 6) | chain(6, 5) < paths(with_successors)
    assert len(with_successors.tree) <= 17
    off = begun(text, rows, semantic=False)
    assert propose(off, text).tree == DraftTree.chain(105)
    assert not off.needs.embeddings


def test_nothing_like_it_is_plain_decoding() -> None:
    text = [1, 2, 3, 17]
    assert propose(begun(text), text).tree == DraftTree.chain(17)


def test_successors_compare_the_state_they_were_told_to() -> None:
    #       0  1  2  3  4  5  6  7  8
    text = [1, 5, 2, 9, 7, 8, 3, 7, 4, 5]
    rows = {1: row(2, 7, start=600)}
    # The branch 7 occurred at 4 (before it position 3) and at 7 (before it position 6).
    for like_anchor, like_previous in ((3, 6), (6, 3)):
        same = {1: like_anchor, 8: like_previous}
        follow = {3: 8, 6: 4}
        for query, expected in (("anchor", like_anchor), ("previous", like_previous)):
            draft = propose(begun(text, rows, same, succ_query=query, **PAPER), text)
            assert (7, follow[expected]) in paths(draft)
            assert (7, follow[9 - expected]) not in paths(draft)


def test_a_branch_that_never_occurred_may_have_a_resembling_successor() -> None:
    text = [1, 5, 2, 3, 9, 5]
    rows = {1: row(2, 103, start=600)}
    on = propose(begun(text, rows, **PAPER), text)
    assert chain(103, 9) < paths(on)
    assert (103, 9) not in paths(
        propose(begun(text, rows, **{**PAPER, "succ_semantic": False}), text)
    )


@pytest.mark.parametrize(("copy", "length"), [(1, 1), (4, 2)])
def test_lengths_are_kept(copy: int, length: int) -> None:
    text = [1, 5, 2, 6, 8, 3, 9, 4, 5]
    options = {**PAPER, "copy": copy, "successor_length": length}
    draft = propose(begun(text, {1: row(2, 3)}, **options), text)
    found = paths(draft)
    copied = (2, 6, 8, 3, 9, 4, 5)
    assert copied[:copy] in found
    assert copied[: copy + 1] not in found
    branch = (3, 9, 4, 5)
    assert branch[: length + 1] in found
    assert branch[: length + 2] not in found


def test_the_papers_whole_tree_has_its_published_size() -> None:
    body = list(range(100, 160))
    text = [5, *body, *range(20, 28), 5]
    rows = {0: row(100, *range(20, 28))}
    draft = propose(begun(text, rows, **PAPER), text, 64)
    # breadth 8 with the copied token among them: 30 copied, 7 branches, 7 successors
    assert len(draft.tree) == 1 + 30 + 7 + 7
    none = propose(begun(text, {0: row(*range(20, 28))}, **PAPER), text, 64)
    assert len(none.tree) == 47


# -- switches --------------------------------------------------------------------------------------


def test_the_copy_alone_is_a_chain() -> None:
    text = [1, 5, 2, 6, 8, 5]
    drafter = begun(text, {1: row(2, 6)}, branches=False, semantic=False, **PAPER)
    assert propose(drafter, text).tree == DraftTree.chain(5, [2, 6, 8, 5])
    assert drafter.needs == Signals(hidden=(LAYER,), prompt=True)


def test_only_what_is_used_is_asked_for() -> None:
    assert AdaPLD(4).needs == Signals(topk=9, hidden=(4,), embeddings=True, prompt=True)
    lookup = AdaPLD(4, rerank="latest", branches=False)
    assert lookup.needs == Signals()
    lookup.begin((1, 5, 2, 3), RowSignals())
    lookup.observe(Round(0, (5,)))
    assert propose(lookup, [1, 5, 2, 3, 5], 3).tree.tokens == (5, 2, 3)


@pytest.mark.parametrize("rerank", ["hidden", "latest"])
def test_copies_alone_are_drafted_all_along_a_request(rerank: str) -> None:
    text = list(range(3, 9)) * 12
    drafts = follow(begun(text[:13], branches=False, rerank=rerank), text, 13, nodes=8)
    assert all(draft.tree.is_chain for draft in drafts)
    assert len(drafts) <= 9


def test_no_successors_leave_branches_bare() -> None:
    text = [1, 5, 2, 6, 8, 5]
    draft = propose(begun(text, {1: row(2, 6, 8)}, successors=False), text)
    assert (6,) in paths(draft)
    assert (6, 8) not in paths(draft)


# -- beyond the paper ------------------------------------------------------------------------------


def test_deep_trees_branch_below_drafted_tokens() -> None:
    text = [1, 5, 2, 6, 8, 3, 9, 4, 5]
    rows = {1: row(2, 6), 2: row(6, 41), 3: row(8, 42)}
    deep, flat = (propose(begun(text, rows, deep=d), text) for d in (True, False))
    assert {(2, 41), (2, 6, 42), (6, 42)} < paths(deep)
    assert not {(2, 41), (2, 6, 42), (6, 42)} & paths(flat)


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_copy_that_reaches_its_own_end_goes_on_repeating(period: int) -> None:
    cycle = [5, 6, 7][:period]
    text = [1, 2, *(cycle * 4)]
    same = {len(text) - 2: len(text) - 2 - period}
    for deep, length in ((True, 12), (False, period)):
        drafter = begun(text, same=same, branches=False, deep=deep)
        draft = propose(drafter, text, 13)
        assert draft.tree == DraftTree.chain(text[-1], (cycle * 12)[:length])


def test_a_small_budget_goes_to_the_likeliest() -> None:
    agreeing = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5]
    rows = {4: row(6, 9)}
    draft = propose(begun(agreeing, rows, {12: 3}), agreeing, 4)
    assert draft.tree == DraftTree.chain(5, [6, 7, 8])  # four tokens agree: copy on
    alone = [1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 5]
    draft = propose(begun(alone, {4: row(9, start=600)}), alone, 6)
    assert Counter(draft.tree.depths)[1] > 1  # nothing agrees: hedge


@pytest.mark.parametrize("options", [{}, PAPER])
def test_more_budget_keeps_what_less_had(options: dict[str, object]) -> None:
    rng = random.Random(5)
    text = [rng.randrange(8) for _ in range(120)]
    rows = {i: row(text[i + 1], *rng.sample(range(8), 3)) for i in range(118)}
    rows = {i: [*dict.fromkeys(r), 900, 901, 902][:9] for i, r in rows.items()}
    before: set[tuple[int, ...]] = set()
    for nodes in (1, 2, 4, 8, 16, 32):
        draft = propose(begun(text, rows, **options), text, nodes)
        assert before <= paths(draft)
        assert len(draft.tree) <= nodes
        before = paths(draft)


def test_nothing_follows_an_end_of_sequence_id() -> None:
    text = [1, 5, 2, 6, 8, 3, 9, 6, 5]
    rows = {1: row(2, 6)}
    eos = frozenset({6})
    found = paths(propose(begun(text, rows, eos_ids=eos), text))
    assert {(2, 6), (6,)} < found
    assert not [p for p in found if 6 in p[:-1]]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_node_is_deeper_than_the_budget(depth: int) -> None:
    text = [1, 5, 2, 6, 8, 3, 9, 4, 5]
    draft = propose(begun(text, {1: row(2, 6, 3)}), text, 48, depth)
    assert max(draft.tree.depths) == depth
    assert len(draft.tree) > depth + 1


def test_one_node_is_plain_decoding() -> None:
    text = [1, 5, 2, 5]
    assert propose(begun(text), text, 1).tree == DraftTree.chain(5)


# -- along a request -------------------------------------------------------------------------------


def follow(drafter: AdaPLD, text: Sequence[int], start: int, nodes: int = 16) -> list[Draft]:
    """Drafts along `text`; every row of a rejected node is broken."""
    out = []
    end = start
    truth = signals(text)
    assert truth.topk_ids is not None
    while end < len(text):
        draft = propose(drafter, text[:end], nodes, max(len(text) - end - 1, 1))
        out.append(draft)
        kids, tokens = draft.tree.children(), draft.tree.tokens
        accepted = [0]
        emitted = [text[end]]
        while end + len(emitted) < len(text):
            kid = next((k for k in kids[accepted[-1]] if tokens[k] == emitted[-1]), None)
            if kid is None:
                break
            accepted.append(kid)
            emitted.append(text[end + len(emitted)])
        hidden = torch.full((len(tokens), SIZE), float("nan"))
        listed = torch.full((len(tokens), 9), 999_999)
        for depth, node in enumerate(accepted):
            hidden[node] = truth.hidden[LAYER][end - 1 + depth]
            listed[node] = truth.topk_ids[end - 1 + depth]
        given = RowSignals(topk_ids=listed, hidden={LAYER: hidden})
        made = Round(1, tuple(emitted), draft.tree, tuple(accepted), signals=given)
        drafter.observe(made)
        end += len(emitted)
    return out


def test_the_memory_is_that_of_plain_decoding() -> None:
    rng = random.Random(1)
    text = [rng.randrange(9) for _ in range(90)]
    drafter = begun(text[:41])
    drafts = follow(drafter, text, 41)
    assert len(drafts) < 49, "some drafts were kept"
    plain = signals(text[:-1])
    assert plain.topk_ids is not None
    memory = drafter._memory
    assert memory.tokens == text
    assert memory.candidates == plain.topk_ids.tolist()
    hidden = torch.nn.functional.normalize(plain.hidden[LAYER], dim=1)
    assert torch.allclose(torch.from_numpy(memory._states.rows), hidden, atol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param([7] * 3000, id="one token"),
        pytest.param([t for i in range(1500) for t in (0, 5 + i)], id="hub"),
        pytest.param(list(range(10)) * 300, id="cycle of ten"),
        pytest.param(random.Random(0).sample(range(100_000), 3000), id="all different"),
    ],
)
def test_hard_texts_stay_in_bounds(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    cosines = ReuseMemory._cosines

    def spy(self: ReuseMemory, positions: Sequence[int], before: int) -> list[float]:
        compared.append(len(positions))
        return cosines(self, positions, before)

    monkeypatch.setattr(ReuseMemory, "_cosines", spy)
    for options, most in (({}, 32), (PAPER, 256)):
        drafter = begun(text, **options)
        drafts = follow(drafter, text + text[:20], len(text), nodes=24)
        assert all(len(draft.tree) <= 24 for draft in drafts)
        assert len(compared) <= 25 * len(drafts), "two looks for the root, one for each branch"
        assert 0 < max(compared) <= most
        compared.clear()


def test_the_end_of_a_request_leaves_nothing() -> None:
    text = [1, 5, 2, 6, 8, 5]
    drafter = begun(text)
    drafter.end()
    assert drafter._memory.tokens == []
    drafter.begin((5,), signals([5]))
    drafter.observe(Round(0, (105,)))
    assert set(propose(drafter, [5, 105]).sources) <= {"", "semantic"}


def test_a_prompt_run_in_part_is_drafted_from() -> None:
    text = [1, 5, 2, 6, 8, 3, 5]
    drafter = AdaPLD(LAYER)
    part = signals(text[:-1])
    assert part.topk_ids is not None
    drafter.begin(
        tuple(text[:-1]),
        RowSignals(topk_ids=part.topk_ids[4:], hidden={LAYER: part.hidden[LAYER][4:]}),
    )
    drafter.observe(Round(0, (5,)))
    draft = propose(drafter, text)
    assert (2, 6, 8, 3) in paths(draft)
    assert drafter._memory.candidates[:4] == [()] * 4
