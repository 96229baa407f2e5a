"""PTD: rows, harvest, feedback and what comes of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from tests.conformance.harness import COSTS, load_other, prompt_of
from tests.conformance.harness import run as answer
from tests.conformance.toy_target import ToyTarget, ToyTokenizer
from tests.drafters.toy_rounds import begin, propose, row_paths, row_tokens, run, settle

from hasten import methods
from hasten.drafters.ptd import PTD
from hasten.errors import CapabilityError, OptionError
from hasten.methods import MethodContext
from hasten.types import Budget, DraftTree, Round, RowSignals, SamplingParams

PROMPT = [3, 41, 5, 9, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]
PAPER: dict[str, Any] = {
    "width": 4,
    "depth": 6,
    "roots": 4,
    "guess": 60,
    "reach": 12,
    "key": 1,
    "text": False,
}


def cycle(ids: Sequence[int]) -> int:
    """Periodic, and known by the last token: a row's guess is right wherever it stands."""
    return 100 + (ids[-1] + 1) % 10


def muddle(ids: Sequence[int]) -> int:
    """Looks back three tokens; the same continuations come now and then."""
    return (ids[-1] * 5 + ids[-2] * 3 + ids[-3] // 7) % 60


@pytest.mark.parametrize(("width", "depth"), [(2, 4), (4, 6), (1, 3)])
def test_a_periodic_text_is_accepted_as_deep_as_the_tree_after_warm_up(
    width: int, depth: int
) -> None:
    options = {**PAPER, "width": width, "depth": depth, "reach": 2 * depth, "feedback": False}
    _, lengths = run(PTD(**options), PROMPT, cycle, 60)
    assert lengths[: depth - 1] == [1] * (depth - 1)  # the tree isn't deep enough to harvest
    assert min(lengths[-20:]) >= depth


def test_feedback_lets_guesses_outgrow_the_tree() -> None:
    options = {**PAPER, "depth": 3, "reach": 8}
    with_it = run(PTD(**options), PROMPT, cycle, 60)[1]
    without = run(PTD(**options, feedback=False), PROMPT, cycle, 60)[1]
    assert max(without) <= 4
    assert min(with_it[-10:]) >= 7
    assert max(with_it) == 9


def test_without_harvest_nothing_is_accepted() -> None:
    options = {**PAPER, "harvest": False, "feedback": False}
    drafts, lengths = run(PTD(**options), PROMPT, cycle, 60)
    assert set(lengths) == {1}
    assert all(len(draft.tree) == 1 for draft in drafts)
    assert max(len(row_tokens(draft)) for draft in drafts) > 8  # the tree grew all the same


@pytest.mark.parametrize("spine", [True, False])
def test_draft_rows_see_their_own_ancestors_and_the_spine_only(spine: bool) -> None:
    drafter = PTD(width=3, depth=4, roots=3, guess=12, spine=spine)
    ids = begin(drafter, PROMPT, muddle)
    riding = 0
    for _ in range(60):
        draft = propose(drafter, ids)
        tokens, paths, tree = row_tokens(draft), row_paths(draft), drafter._tree
        parents = tree.row_parents(spine)
        for node, row in enumerate(drafter._rows):
            seen = [node]
            while parents[seen[-1]] >= 0:
                seen.append(parents[seen[-1]])
            # The position after the pending token is the number of rows seen.
            assert [tokens[r] for r in paths[row][1:]] == [tree.tokens[n] for n in seen[::-1]]
        riding += len(tokens) - len(draft.tree)
        settle(drafter, ids, draft, muddle)
    assert riding > 100


def test_equal_rows_are_run_once() -> None:
    drafter = PTD(**PAPER)
    ids = begin(drafter, PROMPT, cycle)
    shared = 0
    for _ in range(40):
        draft = propose(drafter, ids)
        parents = [*draft.tree.parents, *(draft.extra.parents if draft.extra else ())]
        rows = list(zip(parents, row_tokens(draft), strict=True))
        assert len(set(rows)) == len(rows)
        shared += sum(row < len(draft.tree) for row in drafter._rows)
        settle(drafter, ids, draft, cycle)
    assert shared > 10


def test_the_harvest_is_taken_before_the_tree_grows() -> None:
    drafter = PTD(**{**PAPER, "depth": 2, "feedback": False})
    ids = begin(drafter, PROMPT, cycle)
    for _ in range(12):
        draft = propose(drafter, ids)
        tree = drafter._tree
        deep = tree.depth >= 2
        leaves = [(tree.tokens[n], tree.tokens[p]) for n, p in enumerate(tree.parents) if p >= 0]
        settle(drafter, ids, draft, cycle)
        for leaf, parent in leaves if deep else ():
            assert (leaf, cycle([leaf])) in set(drafter._pool.paths(parent))


def test_rounds_without_riding_rows_leave_the_tree_as_it_is() -> None:
    drafter = PTD(width=2, depth=3, roots=2)
    ids = begin(drafter, PROMPT, muddle)
    for _ in range(8):
        settle(drafter, ids, propose(drafter, ids), muddle)
    before = list(drafter._tree.tokens)
    pool = len(drafter._pool)
    draft = propose(drafter, ids)
    assert draft.extra is not None
    settle(drafter, ids, draft, muddle, riding=False)
    assert drafter._tree.tokens == before
    assert len(drafter._pool) >= pool  # feedback goes on
    plain = Round(1, (7,), DraftTree.chain(ids[-1]), (0,), signals=RowSignals())
    drafter.observe(plain)
    assert drafter._tree.tokens == before
    ids.append(7)
    settle(drafter, ids, propose(drafter, ids), muddle)
    assert drafter._tree.tokens != before


def test_no_more_is_guessed_than_asked_for() -> None:
    for guess, budget, most in ((3, 50, 4), (12, 5, 5), (12, 1000, 13)):
        drafter = PTD(guess=guess)
        ids = begin(drafter, [1, 2, 3] * 20, lambda ids: ids[-3])
        draft = propose(drafter, ids, Budget(budget, 100))
        assert len(draft.tree) == min(most, 9)  # guesses reach 8 tokens
    draft = propose(drafter, ids, Budget(50, 2))
    assert max(draft.tree.depths) == 2


def test_the_texts_own_n_grams_are_guessed_at_once() -> None:
    text = [1, 2, 3, 4, 5, 1]
    for on in (True, False):
        drafter = PTD(text=on)
        ids = begin(drafter, text, lambda ids: 2)
        assert list(propose(drafter, ids).tree.tokens) == ([2, 3, 4, 5, 1, 2] if on else [2])


def test_ends_are_neither_grown_nor_guessed() -> None:
    ends = frozenset({7, 8})
    drafter = PTD(width=3, depth=4, roots=3, guess=20, text=False, eos_ids=ends)
    ids = begin(drafter, [7, *PROMPT, 8, *PROMPT], muddle)
    seen, rng = 0, random.Random(2)
    for _ in range(80):
        draft = propose(drafter, ids)
        assert ends.isdisjoint(row_tokens(draft)[1:])
        settle(drafter, ids, draft, lambda ids: rng.randrange(12))
        seen += bool(ends & set(ids[-3:]))
    assert seen > 5
    pool = drafter._pool
    for key in pool.keys():  # noqa: SIM118
        assert all(ends.isdisjoint(path) for path in pool.paths(key))


@pytest.mark.parametrize("prompt", [[4], [4, 4], [7], [7, 7, 7]])
def test_a_prompt_too_short_for_seeds_starts_from_the_first_pass(prompt: list[int]) -> None:
    drafter = PTD(**PAPER, eos_ids=frozenset({7}))
    drafts, lengths = run(drafter, prompt, cycle, 50)
    assert max(len(row_tokens(draft)) for draft in drafts) > 4
    assert lengths[-1] > 4


def test_a_tree_switched_off_has_no_riding_rows() -> None:
    drafts, lengths = run(PTD(roots=0), PROMPT, cycle, 80)
    assert all(draft.extra is None for draft in drafts)
    assert lengths[-1] == 9


@pytest.mark.parametrize("options", [{}, PAPER], ids=["default", "paper"])
def test_hard_texts_keep_memory_and_rows_in_bounds(options: dict[str, Any]) -> None:
    rng = random.Random(3)
    for prompt in ([7] * 4000, [t for i in range(500) for t in (0, 5 + i)], PROMPT):
        drafter = PTD(**options)
        ids = begin(drafter, prompt, lambda ids: rng.randrange(40_000))
        for _ in range(40):
            draft = propose(drafter, ids)
            assert len(draft.tree) <= drafter.guess + 1
            assert len(row_tokens(draft)) <= drafter.guess + 1 + 124
            settle(drafter, ids, draft, lambda ids: rng.randrange(40_000))
        assert len(drafter._pool) <= drafter._pool.capacity


def test_the_end_of_a_request_leaves_nothing() -> None:
    drafter = PTD(**PAPER)
    first, lengths = run(drafter, PROMPT, cycle, 30)
    assert len(drafter._pool) > 0
    drafter.end()
    assert len(drafter._pool) == len(drafter._tree) == 0
    assert run(drafter, PROMPT, cycle, 30) == (first, lengths)


def test_drafts_are_the_same_in_every_process() -> None:
    code = (
        "from tests.drafters.test_ptd import PROMPT, muddle\n"
        "from tests.drafters.toy_rounds import row_tokens, run\n"
        "from hasten.drafters.ptd import PTD\n"
        "print([row_tokens(d) for d in run(PTD(roots=3), PROMPT, muddle, 60)[0]])"
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


# -- as registered ---------------------------------------------------------------------------------


def prepare(text: str, target: ToyTarget | None = None) -> methods.RequestMaker:
    context = MethodContext(target or ToyTarget(), ToyTokenizer(), load_other, COSTS)
    return methods.prepare(methods.parse(text), context)


def test_the_paper_variant_has_the_papers_numbers() -> None:
    drafter, policy = prepare("ptd:paper")()
    assert isinstance(drafter, PTD)
    given = {name: getattr(drafter, name) for name in PAPER}
    assert given == PAPER
    assert (drafter.spine, drafter.harvest, drafter.feedback) == (True, True, True)
    assert (drafter.max_nodes, drafter.seed_depth) == (60, 2)
    assert drafter.eos_ids == ToyTarget().info.eos_ids
    assert getattr(policy, "nodes", None) == 61


def test_a_target_without_tree_masks_is_refused_before_any_pass() -> None:
    target = ToyTarget(tree=False)
    with pytest.raises(CapabilityError, match=r"ptd.*tree"):
        prepare("ptd", target)
    assert target.passes == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("width", 0),
        ("depth", 1),
        ("roots", -1),
        ("guess", 0),
        ("reach", 0),
        ("key", 3),
        ("max_nodes", 0),
        ("seed_depth", 0),
    ],
)
def test_bad_options_are_refused_by_name(option: str, value: int) -> None:
    with pytest.raises(OptionError, match=rf"ptd\.{option}"):
        prepare(f"ptd,{option}={value}")


@pytest.mark.parametrize("text", ["ptd", "ptd:paper", "ptd,spine=off,roots=3"])
def test_answers_to_the_end_of_the_context_are_plain(text: str) -> None:
    target = ToyTarget(context_limit=40, eos_ids=())
    drafter, policy = prepare(text, target)()
    params = SamplingParams(max_new_tokens=100)
    got = answer(target, prompt_of(2), params, drafter, policy=policy)
    assert got.tokens == target.plain(prompt_of(2), params)
