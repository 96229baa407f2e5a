"""Each rule against examples of four tokens worked out by hand (C9)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hasten.arbitration import rules
from hasten.arbitration.mismatch import Counts
from hasten.arbitration.rules import Rule
from hasten.errors import HastenError, ModelError, OptionError
from tests.arbitration.cases import mismatch

P = (0.5, 0.3, 0.15, 0.05)
Q = (0.1, 0.6, 0.2, 0.1)
# H(P) = 1.142, so Medusa's bound is min(epsilon, 0.319 delta).
# KL(P, Q) = 0.519; TV = 0.4; JS = 0.112.

CASES: list[tuple[Rule, int, bool]] = [
    (rules.Target(), 1, False),
    (rules.Always(), 3, True),
    (rules.Threshold(0.3), 2, False),
    (rules.Threshold(0.14), 2, True),
    (rules.Typical(), 2, True),  # 0.15 > min(0.09, 0.0957)
    (rules.Typical(), 3, False),  # 0.05
    (rules.Typical(epsilon=0.5, delta=0.5), 2, False),  # 0.15 > min(0.5, 0.1596)
    (rules.Typical(epsilon=0.5, delta=0.4), 2, True),  # 0.15 > 0.1277
    (rules.Fuzzy("tv", 0.41), 1, True),
    (rules.Fuzzy("tv", 0.39), 1, False),
    (rules.Fuzzy("kl", 0.53), 3, True),
    (rules.Fuzzy("js", 0.10), 1, False),
    (rules.Fuzzy("js", 0.13), 1, True),
    (rules.KL(0.51), 1, False),
    (rules.KL(0.53), 1, True),
    (rules.BiLD(), 3, True),  # -log 0.05 = 3.0 <= 5
    (rules.BiLD(rollback=2.9), 3, False),
    (rules.BiLD(rollback=1.9), 2, True),  # -log 0.15 = 1.897
    (rules.Cascade("chow", 0.5), 1, True),
    (rules.Cascade("chow", 0.3), 1, False),
    (rules.Cascade("diff", 0.0), 1, True),
    (rules.Cascade("opt", 0.2), 1, True),
    (rules.Cascade("token", 0.5), 1, True),  # 0.3 >= 0.25
    (rules.Cascade("token", 0.3), 1, False),  # 0.3 >= 0.35
    (rules.Mentored(0.0), 1, False),
    (rules.Mentored(0.6), 1, True),  # the budget reaches q
    (rules.Random(0.0), 1, False),
    (rules.Random(1.0), 1, True),
]


@pytest.mark.parametrize(("rule", "drafted", "kept"), CASES)
def test_a_rule_decides_as_worked_out_by_hand(rule: Rule, drafted: int, kept: bool) -> None:
    assert rule.keep(mismatch(P, Q, drafted, 0)) is kept
    assert rule.choose(mismatch(P, Q, drafted, 0)).kept is kept


def test_random_keeps_its_share_by_seed_and_position() -> None:
    rule = rules.Random(0.3)
    kept = [
        rule.keep(mismatch(P, Q, 1, 0, seed=s, answered=a)) for s in range(40) for a in range(25)
    ]
    assert sum(kept) / len(kept) == pytest.approx(0.3, abs=0.05)
    again = [
        rule.keep(mismatch(P, Q, 1, 0, seed=s, answered=a)) for s in range(40) for a in range(25)
    ]
    assert again == kept


def test_a_script_decides_by_number_and_says_so() -> None:
    rule = rules.Scripted({0: True, 2: False}, rules.Always())
    said = [rule.choose(mismatch(P, Q, 1, 0, counts=Counts(n))) for n in range(4)]
    assert [(c.kept, c.forced) for c in said] == [
        (True, True), (True, False), (False, True), (True, False),
    ]  # fmt: skip


def test_a_linear_judge_looks_at_the_drafted_tokens_own_state() -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0], [-9.0, -9.0, 0.0, 0.0]])
    w = torch.tensor([1.0, -1.0, 0.0, 0.0])
    for b, kept in ((0.9, False), (1.1, True)):  # 1 - 2 + b > 0
        rule = rules.LinearJudge(w, b)
        assert rule.needs_hidden
        assert rule.keep(mismatch(P, Q, 1, 0, later=[2], hidden={2: rows})) is kept
    with pytest.raises(HastenError, match="weren't read"):
        rules.LinearJudge(w).keep(mismatch(P, Q, 1, 0))


def test_a_judges_file_is_for_one_model(tmp_path: Path) -> None:
    path = tmp_path / "judge.safetensors"
    save_file({"w": torch.ones(4), "b": torch.tensor(0.5)}, path, metadata={"target": "mine"})
    assert rules.LinearJudge.load(path, size=4, target="mine", threshold=0.7).threshold == 0.7
    for size, target in ((5, "mine"), (4, "other"), (4, "")):
        with pytest.raises(ModelError, match="belongs to other weights"):
            rules.LinearJudge.load(path, size=size, target=target)
    path.write_bytes(b"no")
    for broken in (path, tmp_path):
        with pytest.raises(ModelError, match="no linear judge"):
            rules.LinearJudge.load(broken, size=4, target="mine")


@pytest.mark.parametrize(
    ("w", "b"), [(float("nan"), 0.0), (float("inf"), 0.0), (1.0, float("nan")), (1.0, -math.inf)]
)
def test_a_judge_with_numbers_that_are_none_is_refused(w: float, b: float, tmp_path: Path) -> None:
    path = tmp_path / "judge.safetensors"
    save_file({"w": torch.full((4,), w), "b": torch.tensor(b)}, path, metadata={"target": "mine"})
    with pytest.raises(ModelError, match=r"judge\.safetensors.*aren't finite"):
        rules.LinearJudge.load(path, size=4, target="mine")


def test_a_judges_file_is_found_from_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tensors = {"w": torch.ones(4), "b": torch.tensor(0.5)}
    save_file(tensors, tmp_path / "judge.safetensors", metadata={"target": "mine"})
    assert rules.LinearJudge.load("~/judge.safetensors", size=4, target="mine").b == 0.5


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: rules.Random(1.1), "rate"),
        (lambda: rules.Threshold(float("nan")), "threshold"),
        (lambda: rules.Typical(epsilon=-1), "epsilon"),
        (lambda: rules.Fuzzy("euclid"), "divergence"),
        (lambda: rules.KL(-0.1), "threshold"),
        (lambda: rules.Mentored(-1), "budget"),
        (lambda: rules.Mentored(math.inf), "budget"),
        (lambda: rules.Cascade("niagara"), "cascade"),
        (lambda: rules.Cascade(alpha=2), "alpha"),
        (lambda: rules.BiLD(-1), "rollback"),
    ],
)
def test_options_out_of_range_are_refused_by_name(make: object, option: str) -> None:
    with pytest.raises(OptionError, match=rf"cospec\.{option}"):
        make()  # type: ignore[operator]
