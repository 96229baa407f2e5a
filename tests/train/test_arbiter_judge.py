"""The linear judge's states are those that it sees at work."""

from __future__ import annotations

from pathlib import Path

import torch

from hasten.arbitration.mismatch import Mismatch
from hasten.arbitration.rules import LinearJudge, Rule
from hasten.train.arbiter.engine import Engine
from hasten.train.arbiter.episodes import Memory, never
from hasten.train.arbiter.judge import FILE, fit_judge, states, train_judge
from hasten.train.arbiter.labels import mine
from tests.tiny_llm import metered
from tests.train.arbiter_cases import METHOD, asked, tiny


class Looking(Rule):
    """Notes what a judge is shown at the first mismatch of an answer."""

    needs_hidden = True

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], torch.Tensor] = {}

    def keep(self, m: Mismatch) -> bool:
        self.seen[m.position, m.drafted] = m.drafted_hidden.float().clone()
        return False


def test_the_states_learned_from_are_those_shown_at_work() -> None:
    some = asked(4)
    with metered(tiny()) as llm:
        memory = Memory(Engine(llm, some, METHOD), [each.id for each in some])
        pairs = mine(memory, range(4), never, each=3)
        memory.close()
        found = states(llm.target, [llm.tokenize(each.prompt) for each in some], pairs)
    for problem, each in enumerate(some):
        rule = Looking()
        tiny().generate(each.prompt, method=METHOD, rule=rule, max_new_tokens=16, temperature=0.0)
        mine_ = [(at, pair) for at, pair in enumerate(pairs) if pair.problem == problem]
        for at, pair in mine_:
            shown = rule.seen[pair.point.position, pair.point.draft]
            torch.testing.assert_close(found[at], shown, rtol=1e-3, atol=1e-4)
    assert len(pairs) > 4


def test_a_judge_learns_what_can_be_told_and_is_read_back(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(0)
    hidden = 3 + 2 * torch.randn(400, 32, generator=source)
    same = hidden[:, 5] > 3
    judge = fit_judge(hidden[:300], same[:300])
    guessed = torch.sigmoid(hidden[300:] @ judge.w + judge.b) > 0.5
    assert (guessed == same[300:]).float().mean() > 0.8
    pairs = mine(_memory(), range(3), never)
    made = train_judge(
        tiny().target, [tiny().tokenize(each.prompt) for each in asked(3)], pairs, tmp_path
    )
    mark = tiny().target.info.fingerprint
    read = LinearJudge.load(tmp_path / FILE, size=32, target=mark)
    assert torch.equal(read.w, made.w)


def _memory() -> Memory:
    return Memory(Engine(tiny(), asked(3), METHOD), ["a", "b", "c"])
