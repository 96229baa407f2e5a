"""``--trace`` of methods that draft from exits: exit, length and acceptance of each round."""

from __future__ import annotations

from pathlib import Path

import pytest

import hasten
from hasten.choices import Choice
from hasten.cli.trace import tokens_told
from hasten.policies import cost
from hasten.policies.cost_model import CostTable
from tests.cli.conftest import Hasten
from tests.policies import lede_cases

PROMPT = "abcabc abcabc abc"
TABLE = CostTable("tiny", (1, 4, 16), (64,), ((10.0, 11.0, 14.0),))


@pytest.fixture
def agent(llm: hasten.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cost, "load_or_measure", lambda target: TABLE)
    info = llm.target.info
    return str(lede_cases.agent_file(tmp_path / "agent.npz", info, (1,)))


def test_exit_length_and_acceptance_stand_beside_each_round(
    generate: Hasten, llm: hasten.LLM, agent: str
) -> None:
    method = f"lede:paper,agent={agent},head=own,length=3,guard=off"
    wanted = llm.generate(PROMPT, max_new_tokens=24, method=method, trace=True)
    result = generate(PROMPT, "-n", "24", "--method", method, "--trace")
    assert result.exit_code == 0, result.output
    assert "each kept one by its exit" in result.stdout
    table = result.stdout.partition("\n\nround")[2]
    rows = [
        words for line in table.splitlines() if (words := line.split())[:1] and words[0].isdigit()
    ]
    assert len(rows) == len(wanted.rounds)
    kept = 0
    for made, cells in zip(wanted.rounds[1:], rows[1:], strict=True):
        if made.drafted:
            count = len(made.accepted) - 1
            assert cells[1:3] == [str(made.drafted), str(count)]
            assert cells[4:6] == ["exit", "1"]
            assert cells[6] == "1" * count + "·" * (made.drafted - count)
            kept += count
        else:
            assert cells[4] == "plain"
    assert kept > 0
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_methods_without_exits_have_the_table_they_had(generate: Hasten) -> None:
    result = generate(PROMPT, "-n", "16", "--method", "prompt-lookup", "--trace")
    assert "kept one by its exit" not in result.stdout


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (Choice(("exit 4",), 3, 3, ("exit 4", "exit 4")), "44·"),
        (Choice(("exit 12",), 3, 3, ("exit 12", "exit 12")), "12 12·"),
        (Choice(("copy", "exit 0", "stored"), 5, 3, ("copy", "exit 0", "stored")), "c0s··"),
        (Choice(), ""),
    ],
)
def test_a_rounds_tokens_fit_in_a_few_letters(chosen: Choice, told: str) -> None:
    assert tokens_told(chosen) == told
