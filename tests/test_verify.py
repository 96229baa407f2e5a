"""Verifiers by a scripted judge: which nodes are kept, which tokens come out, what is asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hasten.errors import OptionError
from hasten.types import DraftTree
from hasten.verify import VERIFIERS, Verdict, pick_verifier, rejection, walk

V = 6


class Script:
    """A judge whose choices, distributions and uniforms are given by path."""

    def __init__(
        self,
        choices: dict[tuple[int, ...], int] | None = None,
        probs: Sequence[float] = (1 / V,) * V,
        uniforms: Sequence[float] = (),
    ) -> None:
        self.choices, self.p, self.uniforms = choices or {}, torch.tensor(probs), list(uniforms)
        self.asked: list[tuple[object, ...]] = []
        self.drawn_from: torch.Tensor | None = None

    def choose(self, node: int, path: Sequence[int]) -> int:
        self.asked.append(("choose", node, tuple(path)))
        return self.choices[tuple(path)]

    def probs(self, node: int, path: Sequence[int]) -> torch.Tensor:
        self.asked.append(("probs", node, tuple(path)))
        return self.p

    def uniform(self, path: Sequence[int], index: int) -> float:
        self.asked.append(("uniform", tuple(path), index))
        return self.uniforms.pop(0)

    def draw(self, probs: torch.Tensor, path: Sequence[int]) -> int:
        self.asked.append(("draw", tuple(path)))
        self.drawn_from = probs
        return int(probs.argmax())


#   0:9 -- 1:2 -- 3:4
#      \-- 2:3 -- 4:4 -- 6:5
#              \- 5:1
TREE = DraftTree((9, 2, 3, 4, 4, 1, 5), (-1, 0, 0, 1, 2, 2, 4))


@pytest.mark.parametrize("verifier", [walk, rejection])
@pytest.mark.parametrize(
    ("choices", "verdict"),
    [
        ({(): 7}, Verdict((0,), (7,))),
        ({(): 2, (2,): 3}, Verdict((0, 1), (2, 3))),
        ({(): 3, (3,): 1, (3, 1): 0}, Verdict((0, 2, 5), (3, 1, 0))),
        (
            {(): 3, (3,): 4, (3, 4): 5, (3, 4, 5): 5},
            Verdict((0, 2, 4, 6), (3, 4, 5, 5)),
        ),
    ],
)
def test_the_targets_choices_are_followed_through_the_tree(
    verifier: object, choices: dict[tuple[int, ...], int], verdict: Verdict
) -> None:
    judge = Script(choices)
    assert verifier(TREE, {}, judge) == verdict  # type: ignore[operator]
    nodes = [(n, verdict.tokens[:i]) for i, n in enumerate(verdict.nodes)]
    assert judge.asked == [("choose", n, path) for n, path in nodes]


@pytest.mark.parametrize("verifier", VERIFIERS.values())
def test_a_lone_root_gives_the_targets_token(verifier: object) -> None:
    assert verifier(DraftTree.chain(5), {}, Script({(): 0})) == Verdict((0,), (0,))  # type: ignore[operator]


def test_walking_ignores_q() -> None:
    q = {0: torch.full((V,), 1 / V)}
    assert walk(DraftTree.chain(0, [1]), q, Script({(): 2})) == Verdict((0,), (2,))


def test_a_drawn_child_is_kept_when_u_is_below_p_over_q() -> None:
    p, q = [0.2, 0.3, 0.5, 0, 0, 0], torch.tensor([0.1, 0.6, 0.3, 0, 0, 0])
    tree = DraftTree.chain(0, [1])
    kept = Script({(1,): 4}, p, [0.499])
    assert rejection(tree, {0: q}, kept) == Verdict((0, 1), (1, 4))
    assert kept.asked == [("probs", 0, ()), ("uniform", (), 0), ("choose", 1, (1,))]
    refused = Script({}, p, [0.501])
    assert rejection(tree, {0: q}, refused).nodes == (0,)
    assert refused.asked[-1] == ("draw", ())
    assert refused.drawn_from is not None
    torch.testing.assert_close(refused.drawn_from, torch.tensor([1 / 3, 0, 2 / 3, 0, 0, 0]))


def test_a_token_the_target_likes_better_than_the_drafter_is_always_kept() -> None:
    p, q = [0.2, 0.3, 0.5, 0, 0, 0], torch.tensor([0.1, 0.6, 0.3, 0, 0, 0])
    judge = Script({(2,): 0}, p, [1 - 1e-9])
    assert rejection(DraftTree.chain(0, [2]), {0: q}, judge).nodes == (0, 1)


def test_a_token_the_target_rules_out_is_never_kept() -> None:
    q = torch.tensor([0.5, 0.5, 0, 0, 0, 0])
    judge = Script({}, [0, 0.5, 0.5, 0, 0, 0], [1e-12])
    assert rejection(DraftTree.chain(0, [0]), {0: q}, judge) == Verdict((0,), (2,))


def test_siblings_are_tested_against_what_is_left_of_p_and_q() -> None:
    p, q = [0.1, 0.2, 0.3, 0.4, 0, 0], torch.tensor([0.4, 0.3, 0.2, 0.1, 0, 0])
    tree = DraftTree((0, 0, 1, 2), (-1, 0, 0, 0))
    # after token 0: p = (0, 0, .1, .3)/.4, q = (0, 3, 2, 1)/6; token 1 can't be kept (p is 0);
    # then p = (.25-2/6)+, (.75-1/6)+ -> all on 3, q = (0, 0, 2, 1)/3; nor can token 2.
    judge = Script({}, p, [0.3, 1e-9, 1e-9])
    assert rejection(tree, {0: q}, judge) == Verdict((0,), (3,))
    assert judge.drawn_from is not None
    torch.testing.assert_close(judge.drawn_from, torch.tensor([0, 0, 0, 1.0, 0, 0]))
    assert [a for a in judge.asked if a[0] == "uniform"] == [("uniform", (), i) for i in range(3)]
    # a second sibling kept: u * q'(3) < p'(3) with q'(3) = .1/.6, p'(3) = .75
    second = Script({(3,): 1}, p, [0.3, 1 - 1e-9])
    tree = DraftTree((0, 0, 3), (-1, 0, 0))
    assert rejection(tree, {0: q}, second) == Verdict((0, 2), (3, 1))


def test_a_drafters_q_is_left_as_it_was() -> None:
    q = torch.tensor([0.4, 0.3, 0.2, 0.1, 0, 0])
    before = q.clone()
    judge = Script({}, [0.1, 0.2, 0.3, 0.4, 0, 0], [0.9, 0.9])
    rejection(DraftTree((0, 0, 1), (-1, 0, 0)), {0: q}, judge)
    assert torch.equal(q, before)
    assert judge.p.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0, 0])


def test_equal_distributions_always_keep_the_draft() -> None:
    p = [0.1, 0.2, 0.3, 0.4, 0, 0]
    for token in range(4):
        judge = Script({(token,): 0}, p, [1 - 2**-53])
        got = rejection(DraftTree.chain(0, [token]), {0: torch.tensor(p)}, judge)
        assert got.nodes == (0, 1)


def test_a_residual_of_nothing_leaves_p_standing() -> None:
    p = [0.5, 0.5, 0, 0, 0, 0]
    judge = Script({}, p, [1.0])  # can't come, rounding apart
    rejection(DraftTree.chain(0, [0]), {0: torch.tensor(p)}, judge)
    assert judge.drawn_from is not None
    assert judge.drawn_from.tolist() == p


def test_all_of_q_refused_draws_from_what_is_left() -> None:
    q = torch.tensor([1.0, 0, 0, 0, 0, 0])
    judge = Script({}, [0.5, 0.5, 0, 0, 0, 0], [0.9])
    assert rejection(DraftTree((0, 0), (-1, 0)), {0: q}, judge) == Verdict((0,), (1,))


def test_q_in_another_precision_is_compared_in_float32() -> None:
    q = torch.tensor([0.1, 0.6, 0.3, 0, 0, 0], dtype=torch.bfloat16)
    judge = Script({}, [0.2, 0.3, 0.5, 0, 0, 0], [0.6])
    rejection(DraftTree.chain(0, [1]), {0: q}, judge)
    assert judge.drawn_from is not None
    assert judge.drawn_from.dtype == torch.float32


def test_deeper_nodes_are_judged_with_the_path_to_them() -> None:
    even = torch.full((V,), 1 / V)
    judge = Script({(3, 4, 5): 1}, uniforms=[0.5] * 3)
    tree = DraftTree.chain(9, [3, 4, 5])
    assert rejection(tree, {0: even, 1: even, 2: even}, judge) == Verdict(
        (0, 1, 2, 3), (3, 4, 5, 1)
    )
    paths = [a[2] for a in judge.asked if a[0] == "probs"]
    assert paths == [(), (3,), (3, 4)]


def test_a_q_without_children_changes_nothing() -> None:
    q = {0: torch.full((V,), 1 / V)}
    judge = Script({(): 2})
    assert rejection(DraftTree.chain(0), q, judge) == Verdict((0,), (2,))


def test_the_default_verifier_follows_the_temperature() -> None:
    assert pick_verifier(None, greedy=True)[0] == "greedy"
    assert pick_verifier(None, greedy=False)[0] == "match"
    assert pick_verifier("rejection", greedy=True)[1] is rejection


def test_an_unknown_or_contradicting_verifier_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"verify: unknown.*'typical'.*greedy, match, rejection"):
        pick_verifier("typical", greedy=True)
    with pytest.raises(OptionError, match=r"verify: 'greedy' contradicts temperature"):
        pick_verifier("greedy", greedy=False)
