"""Arms: which there are to choose from, what they are worth, and how a request corrects that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.policies import lede_cases
from tests.policies.lede_cases import CHEAP

from hasten.drafters.ranks import LOOKUP, MODULE
from hasten.errors import ModelError
from hasten.policies import lede_arms
from hasten.policies.base import PlanContext
from hasten.policies.budget import AcceptanceBook
from hasten.policies.cost_model import CostTable
from hasten.policies.lede import ArmBudget
from hasten.policies.lede_arms import (
    ARMS,
    BY_NAME,
    COPY,
    FEATURES,
    PLAIN,
    WALK,
    ArmCosts,
    RoundState,
    offered,
)
from hasten.policies.lede_chooser import Chooser
from hasten.policies.lede_guard import Guard
from hasten.types import Draft, DraftTree, Round, Times

ALL = [arm.name for arm in ARMS]
X = np.zeros(len(FEATURES), np.float32)


def names(**switches: bool) -> set[str]:
    on = {"breadth": True, "retrieval": True, "plain": True, "walk": False, **switches}
    return {arm.name for arm in offered(ALL, **on)}


# -- switches --------------------------------------------------------------------------------------


def test_each_switch_takes_its_choices_away() -> None:
    assert names() == {"plain", "copy", *(f"copy+tree-{n}" for n in (1, 2, 3, 5, 8))}
    assert names(breadth=False) == {"plain", "copy", *(f"copy+chain-{n}" for n in (1, 2, 4))}
    assert names(retrieval=False) == {"plain", *(f"tree-{n}" for n in (1, 2, 3, 5, 8))}
    assert names(retrieval=False, breadth=False, plain=False) == {f"chain-{n}" for n in (1, 2, 4)}
    assert names(walk=True) == names() | {"walk"}


def test_a_file_without_an_arm_offers_it_to_nobody() -> None:
    made = offered(["copy", "tree-1"], breadth=True, retrieval=True, plain=True, walk=True)
    assert made == (COPY,)


# -- choosing --------------------------------------------------------------------------------------


def chooser(
    file: lede_arms.ArmFile,
    costs: ArmCosts = CHEAP,
    arms: tuple[str, ...] | None = None,
    **how: object,
) -> Chooser:
    chosen = tuple(BY_NAME[name] for name in arms or file.arms)
    return Chooser(file, costs, chosen, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in ALL if name != "plain"])
def test_what_keeps_most_is_chosen_where_it_costs_little(name: str) -> None:
    made = chooser(lede_cases.arms(name))
    assert made.choose(X) is made.arm is BY_NAME[name]


def test_a_dear_question_isnt_asked_for_the_same_tokens() -> None:
    file = lede_cases.arms("copy+tree-5")
    layer = file.layers[0][1].reshape(-1, 3).copy()
    layer[ALL.index("copy+tree-5"), 2] = 5.0
    file = replace(file, layers=((file.layers[0][0], layer.reshape(-1)),))
    cheap, dear = ArmCosts(CHEAP.verify, 0.05, 0.02), ArmCosts(CHEAP.verify, 0.8, 0.5)
    assert chooser(file, cheap).choose(X).name == "copy+tree-5"
    assert chooser(file, dear).choose(X) is PLAIN


def test_in_a_shared_pass_questions_weigh_more_and_nobody_walks() -> None:
    file = lede_cases.arms("copy+tree-2")
    bias = file.layers[0][1].reshape(-1, 3).copy()
    bias[ALL.index("copy+tree-2")] = (0.5, 1.0, 2.0)
    file = replace(file, layers=((file.layers[0][0], bias.reshape(-1)),))
    assert chooser(file).choose(X).name == "copy+tree-2"
    assert chooser(file).choose(X, others=7).name != "copy+tree-2"
    assert chooser(lede_cases.arms("walk")).choose(X) is WALK
    assert chooser(lede_cases.arms("walk")).choose(X, others=1) is not WALK


def test_a_family_that_disappoints_is_left_and_later_tried_again() -> None:
    file, dear = lede_cases.arms("copy"), ArmCosts((0.0, *(1.0 + n for n in range(9))), 1, 1)
    still, made = chooser(file, dear, online=False), chooser(file, dear)
    left = 0
    for _ in range(60):
        for each in (still, made):
            each.start()
            each.choose(X)
            each.learn(1, 2.0)
        assert still.arm is COPY
        left += made.arm is not COPY
    assert 0 < left < 60
    assert made._record[0] < 0


def test_the_price_follows_tokens_and_times_and_never_falls_below_one() -> None:
    made = chooser(lede_cases.arms("copy"))
    for _ in range(200):
        made.learn(3, 1.5)
    assert made.rho == pytest.approx(2.0, abs=0.01)
    for _ in range(200):
        made.learn(1, 1.5)
    assert made.rho == 1.0


def test_a_guard_makes_rounds_plain_while_drafting_doesnt_pay() -> None:
    made = chooser(lede_cases.arms("copy"), guard=Guard())
    assert made.choose(X) is COPY
    for _ in range(8):
        made.learn(1, 1.5)
    made.start()
    assert made.choose(X) is PLAIN


def test_the_same_rounds_lead_to_the_same_choices() -> None:
    def run() -> list[str]:
        made = chooser(lede_cases.arms(seed=3), guard=Guard())
        dice, chosen = np.random.default_rng(0), []
        for _ in range(100):
            made.start()
            chosen.append(made.choose(dice.random(len(FEATURES), np.float32)).name)
            made.learn(int(dice.integers(1, 4)), 1.2)
        return chosen

    assert run() == run()
    assert len(set(run())) > 3


# -- what is known at a round's start --------------------------------------------------------------


def features(state: RoundState, tokens: list[int], chances: list[float]) -> dict[str, float]:
    x = state.features(100, 20, tokens, chances, 3, 1.5, 1.0)
    return dict(zip(FEATURES, x.tolist(), strict=True))


def test_features_say_what_copies_and_rounds_have_shown() -> None:
    state = RoundState()
    first = features(state, [5, 6], [0.7, 0.2])
    assert (first["first"], first["second"]) == pytest.approx((0.7, 0.2))
    assert first["found"] == 1.0
    state.asked(9, 0.4)
    state.learn([9, 4, 4], 5, 2, 0.3)
    then = features(state, [], [])
    assert then["copy_hits"] < first["copy_hits"], "the copy named 5, and 9 came"
    assert then["module_hits"] > first["module_hits"]
    assert then["module_kept"] > first["module_kept"]
    assert (then["last"], then["refused"], then["since"]) == (0.25, 0.0, 0.0)
    assert then["said"] == pytest.approx(0.4)
    assert then["sure"] == pytest.approx(0.3)
    assert then["first"] == then["found"] == 0.0
    state.learn([1], 3, 0, None)
    last = features(state, [], [])
    assert (last["refused"], last["since"]) == (1.0, 0.125)
    assert all(-0.01 <= value <= 1.01 for value in last.values())


# -- the file --------------------------------------------------------------------------------------


def test_a_file_says_the_same_after_it_was_read(tmp_path: Path) -> None:
    made = lede_cases.arms(seed=1, target="t", exits="e")
    made.save(tmp_path / "a.npz")
    again = lede_arms.read(tmp_path / "a.npz", "a.npz")
    assert (again.arms, again.rho, again.facts) == (made.arms, made.rho, made.facts)
    x = np.random.default_rng(0).random((5, len(FEATURES)), np.float32)
    assert np.array_equal(again.predict(x), made.predict(x))
    assert made.predict(x).shape == (5, len(ALL), 3)
    assert np.allclose(made.predict(x[2]), made.predict(x)[2], atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_a_file_that_is_damaged_or_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    where = tmp_path / "mine.npz"
    cases = {
        "missing": lambda: None,
        "damaged": lambda: where.write_bytes(b"PK\x03\x04 no"),
        "other": lambda: np.savez(where, a=np.zeros(3)),
        "nan": lambda: replace(lede_cases.arms(), mean=X + np.nan).save(where),
        "sizes": lambda: replace(lede_cases.arms(), mean=X[:3]).save(where),
        "arms": lambda: replace(lede_cases.arms(), arms=("copy",)).save(where),
        "unknown": lambda: replace(lede_cases.arms(), arms=("x", *ALL[1:])).save(where),
    }
    for make in cases.values():
        make()
        with pytest.raises(ModelError, match=r"mine\.npz holds no arms.*hasten train lede arms"):
            lede_arms.read(where, str(where))


# -- the budget policy under arms ------------------------------------------------------------------

TABLE = CostTable("t", (1, 16, 64), (64,), ((10.0, 11.0, 14.0),))


def budget(name: str) -> tuple[ArmBudget, Chooser]:
    made = chooser(lede_cases.arms(name))
    return ArmBudget(TABLE, AcceptanceBook(), made, most=16), made


def settled(policy: ArmBudget, draft: Draft, emitted: tuple[int, ...]) -> Round:
    made = Round(
        1, emitted, draft.tree, tuple(range(len(emitted))), draft.sources,
        times=Times(0.012, 0.001, 0.01),
    )  # fmt: skip
    policy.learn(made)
    return made


def test_rows_of_a_tree_are_picked_and_those_of_a_walk_kept_whole() -> None:
    junk = Draft(DraftTree.chain(1, [2, 3, 4]), sources=("", *[MODULE] * 3), ranks=(0, 0, 0, 0))
    picked: dict[str, int] = {}
    for name in ("tree-2", "walk"):
        policy, made = budget(name)
        policy.plan(PlanContext(50, 20))
        made.choose(X)
        picked[name] = len(policy.select(junk).tree)
    assert picked["walk"] == 4
    assert picked["tree-2"] < 4, "an id that the module finds unlikely isn't worth a row"


def test_the_chooser_hears_what_rounds_cost() -> None:
    policy, made = budget("copy")
    policy.plan(PlanContext(50, 20))
    made.choose(X)
    draft = Draft(DraftTree.chain(1, [2, 3]), sources=("", LOOKUP, LOOKUP), ranks=(4, 4, 4))
    settled(policy, draft, (2, 3, 9))
    assert policy.spent == pytest.approx(CHEAP.verify[3])
    policy.plan(PlanContext(53, 17))
    assert made.arm is PLAIN, "a new round is plain until something is chosen"
    made.choose(X)
    made.steps = 2
    settled(policy, draft, (7,))
    assert policy.spent == pytest.approx(CHEAP.verify[3] + CHEAP.question + CHEAP.step)


def test_a_plain_choice_is_no_drafting_in_vain() -> None:
    policy, made = budget("plain")
    for _ in range(30):
        assert policy.plan(PlanContext(50, 20)).nodes == 16, "it never pauses"
        made.choose(X)
        assert made.arm is PLAIN
        settled(policy, policy.select(Draft(DraftTree.chain(1))), (2,))
