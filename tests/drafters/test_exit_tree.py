"""Trees from exit 0: plain decoding's answers; nodes are what the module says along their path."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from tests.exits import exit_models as tiny
from tests.exits.exit_models import LAYERS, VOCAB
from tests.exits.exit_requests import (
    EVEN,
    GREEDY,
    SAMPLED,
    answer,
    kept,
    plain,
    prompt_of,
    rounds_of,
    run,
    tokens_of,
)

from hasten.drafters.base import DraftContext
from hasten.drafters.exit_lookup import ExitTree
from hasten.drafters.exit_session import ExitSession
from hasten.drafters.exit_tree import Growth, grow
from hasten.drafters.ranks import MODULE
from hasten.drafters.tree_builder import TreeBuilder
from hasten.exits.bank import ExitBank
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals

WIDE = Growth(width=4, least=0.0, expand=3, steps=3, mass=1e-9)
"""Grows as far as the budget lets it, however unsure."""
TEXT = prompt_of(6, 14)


@cache
def bank(ids: Sequence[int] | None = EVEN) -> ExitBank:
    return tiny.bank((("deep", 0),), ids)


def tree_drafter(growth: Growth = WIDE, *, lookup: bool = False, **options: object) -> ExitTree:
    return ExitTree(bank(), growth, lookup=lookup, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("lookup", [False, True], ids=["module", "lookup"])
@pytest.mark.parametrize("nodes", [2, 5, 16])
def test_greedy_and_match_answers_are_plain_decodings(nodes: int, lookup: bool) -> None:
    for case, params in enumerate((GREEDY, SAMPLED)):
        rounds = run(tree_drafter(lookup=lookup), case, params, nodes=nodes)
        assert max(r.drafted for r in rounds) == nodes - 1
    run(tree_drafter(lookup=lookup), 1, SAMPLED, nodes=nodes, verifier="rejection")


def test_some_nodes_are_kept_or_this_shows_little() -> None:
    wide = Growth(width=40, least=0.0, expand=8, steps=3, mass=1e-9)
    assert sum(kept(run(tree_drafter(wide), case, nodes=120)) for case in range(3)) > 3


@pytest.mark.parametrize("lookup", [False, True], ids=["module", "lookup"])
def test_a_prompt_of_one_token_works(lookup: bool) -> None:
    want = tokens_of(plain(tiny.target(), [7], GREEDY))
    assert tokens_of(rounds_of(tiny.target(), [7], GREEDY, tree_drafter(lookup=lookup))) == want


def test_a_conversation_goes_on_with_signals_of_its_new_tokens_only() -> None:
    over, sequence, text = tiny.target(), tiny.target().open(), prompt_of(1)
    for turn in range(3):
        want = tokens_of(plain(over, text, GREEDY))
        got = rounds_of(over, text, GREEDY, tree_drafter(lookup=True), sequence=sequence)
        assert tokens_of(got) == want
        text = [*text, *want, *prompt_of(5 + turn, 4)]
    over.close(sequence)


# -- how a tree grows ------------------------------------------------------------------------------


def context(ids: Sequence[int]) -> DraftContext:
    return DraftContext(ids, lambda *_: [], lambda *_: torch.zeros(1), True)


def test_copies_come_first_and_the_module_where_there_are_none() -> None:
    def draft(ids: list[int]) -> Draft:
        made = tree_drafter(lookup=True)
        made.begin(ids[:-1], RowSignals())
        made.observe(Round(0, (ids[-1],)))
        return made.propose(context(ids), Budget(5, 9))

    copy = draft([9, 12, 33, 14, 52, 70, 9, 12])
    assert copy.tree == DraftTree.chain(12, [33, 14, 52, 70])
    own = draft([9, 12, 33, 14, 52, 70, 12, 9])
    assert set(own.sources[1:]) == {MODULE}
    assert len(own.tree) == 5


def session(upto: int = len(TEXT) - 1) -> ExitSession:
    """Fed with the text up to its pending last token."""
    target = tiny.target()
    sequence = target.open()
    hidden = target.prefill(sequence, TEXT[:upto], taps=bank().taps).hidden
    target.close(sequence)
    made = ExitSession(bank())
    made.begin(TEXT[:upto], RowSignals(hidden=hidden))
    return made


def grown(
    growth: Growth, nodes: int = 40, depth: int = 9, eos_ids: frozenset[int] = frozenset()
) -> tuple[TreeBuilder, dict[int, list[tuple[int, float]]]]:
    tree, made = TreeBuilder(TEXT[-1], nodes, depth), session()
    with torch.inference_mode():
        said = grow(tree, made, made.runs[0], context(TEXT), growth, eos_ids=eos_ids)
    return tree, said


def path(tree: TreeBuilder, node: int) -> list[int]:
    out: list[int] = []
    while node:
        out.append(tree.tokens[node])
        node = tree.parents[node]
    return out[::-1]


def chain_logits(tokens: Sequence[int]) -> torch.Tensor:
    """The module's logits after the text and these drafted tokens, one row at a time."""
    made = session()
    (run_,) = made.runs
    with torch.inference_mode():
        out = run_.first(TEXT[-1], None)
        for depth, token in enumerate(tokens, 1):
            out = run_.more([token], None, out, (depth,))
        return made.logits(run_, out)[0]


def test_a_nodes_children_are_the_likeliest_ids_after_its_path() -> None:
    tree, said = grown(WIDE)
    assert {tree.depths[node] for node in said} == {0, 1, 2}
    for node, pairs in said.items():
        logits = chain_logits(path(tree, node))
        probs = torch.softmax(logits, 0)
        order = torch.topk(logits, 4).indices.tolist()
        head = session().head
        assert [token for token, _ in pairs] == [head.id_of(place) for place in order]
        assert [chance for _, chance in pairs] == pytest.approx(probs[order].tolist(), abs=1e-4)
        kids = [n for n, parent in enumerate(tree.parents) if parent == node]
        assert [tree.tokens[kid] for kid in kids] == [token for token, _ in pairs]
    assert set(tree.sources[1:]) == {MODULE}


def test_only_paths_that_are_likely_enough_become_nodes() -> None:
    loose, said = grown(WIDE)
    chances = {0: 1.0}
    for node in range(1, len(loose)):
        parent = loose.parents[node]
        chances[node] = chances[parent] * dict(said[parent])[loose.tokens[node]]
    least = sorted(chances.values())[len(chances) // 2]
    strict, _ = grown(Growth(width=4, least=least, expand=3, steps=3, mass=1e-9))
    assert 1 < len(strict) < len(loose)
    wanted = {tuple(path(loose, node)) for node, chance in chances.items() if chance >= least}
    assert {tuple(path(strict, node)) for node in range(len(strict))} == wanted


@pytest.mark.parametrize(
    ("growth", "depth"),
    [
        (Growth(width=4, least=0.0, expand=3, steps=1, mass=1e-9), 1),
        (Growth(width=4, least=0.0, expand=3, steps=2, mass=1e-9), 2),
        (Growth(width=4, least=0.0, expand=3, steps=5, mass=1.01), 1),
    ],
)
def test_growth_ends_after_its_steps_or_where_little_is_reached(growth: Growth, depth: int) -> None:
    tree, _ = grown(growth)
    assert max(tree.depths) == depth


@pytest.mark.parametrize(("nodes", "depth"), [(2, 9), (6, 9), (40, 1), (40, 2)])
def test_a_tree_keeps_to_its_budget(nodes: int, depth: int) -> None:
    tree, _ = grown(WIDE, nodes, depth)
    assert len(tree) <= nodes
    assert max(tree.depths) <= depth
    seen = {(parent, token) for parent, token in zip(tree.parents, tree.tokens, strict=True)}
    assert len(seen) == len(tree), "siblings are distinct"


def test_nothing_grows_after_an_end_id() -> None:
    tree, _ = grown(WIDE)
    end = tree.tokens[1]
    stopped, said = grown(WIDE, eos_ids=frozenset({end}))
    ends = [node for node, token in enumerate(stopped.tokens) if token == end]
    assert ends
    assert not set(ends) & said.keys()
    assert not set(ends) & set(stopped.parents)


def test_an_end_id_as_the_pending_token_drafts_nothing() -> None:
    over = tiny.target(eos_ids=(answer(0)[3],))
    params = type(GREEDY)(max_new_tokens=8, ignore_eos=True)
    made = ExitTree(bank(), WIDE, eos_ids=over.info.eos_ids)
    rounds = rounds_of(over, prompt_of(0), params, made)
    assert tokens_of(rounds) == answer(0)[:8]
    for each in rounds[1:]:
        assert each.tree is not None
        if each.tree.tokens[0] in over.info.eos_ids:
            assert each.drafted == 0


def test_a_drafter_keeps_nothing_of_a_finished_request() -> None:
    made = tree_drafter(lookup=True)
    run(made, 0)
    assert made._session.runs == []


def test_one_round_runs_one_pass_of_as_many_rows_as_nodes() -> None:
    rounds = run(tree_drafter(), 2, nodes=9)
    assert {r.layer_rows for r in rounds[1:]} <= {LAYERS * n for n in range(1, 10)}
    assert max(r.layer_rows for r in rounds) == 9 * LAYERS
    assert all(token < VOCAB for r in rounds[1:] for token in r.tree.tokens)  # type: ignore[union-attr]
