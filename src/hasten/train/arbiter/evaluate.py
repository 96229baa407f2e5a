"""The table of arms: measuring, keeping every answer, and printing it again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.arbitration.arbiter import Arbiter, check_belongs
from hasten.arbitration.rules import LinearJudge
from hasten.tasks import Problem
from hasten.tasks.grading import bootstrap_mean, mcnemar
from hasten.train.arbiter.arms import Answered, Arm, Bench, grid, voters
from hasten.train.arbiter.engine import Engine, lucky_for
from hasten.train.arbiter.episodes import Decide, Decisions, Memory, Point
from hasten.train.arbiter.judge import FILE
from hasten.train.arbiter.nets import Gate
from hasten.train.arbiter.oracle import branches, headroom
from hasten.train.arbiter.run import ask, identity

if TYPE_CHECKING:
    from hasten.api import LLM

PLAIN = "target only"
ALONE = "plain decoding"
"""Without any draft: what tokens a second are compared with."""
STAGES = {
    "shuffled labels": "stages/shuffled.json",
    "CoSpec A, first": "stages/stage_a_first.json",
    "CoSpec A": "stages/stage_a.json",
    "CoSpec A+B": "stages/stage_b_arbiter.json",
}
"""Arms that were trained, and where; the last one is shown beside random decisions."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured: the draft, families of tasks, and how many problems of them.

    groups  families by what they are to the draft, for figures of their own
    """

    families: tuple[str, ...]
    draft: str = "draft=early-exit"
    validation: int = 240
    test: int = 500
    length: int = 4
    seed: int = 0
    groups: Mapping[str, tuple[str, ...]] | None = None

    @property
    def method(self) -> str:
        """The method whose draft is arbitrated."""
        return f"cospec:target,{self.draft},length={self.length}"


def deployed(arbiter: Arbiter, gate: Gate) -> Decide:
    """What an arbiter's net decides at its threshold, whether or not it fell back."""

    def decide(point: Point, before: Decisions) -> bool:
        if not gate.allows(point, before):
            return False
        return float(arbiter.chance([point.scalars])[0]) >= arbiter.theta

    return decide


def measure(
    llm: LLM, folder: Path, options: Options, *, work: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Every arm on the test problems, with the arbiters in `folder`; answers are kept in `work`."""
    about = identity(llm, options.method)
    arbiter = Arbiter.load(folder)
    check_belongs(arbiter, target=about["target"], draft=about["draft"], where=str(folder))
    judge = judge_of(llm, folder)
    rules = grid(judge)
    # The judge's votes are remembered with the answers: another judge has other votes.
    told = {**about, "judge": _digest(judge)}
    started = time.monotonic()
    memories: list[Memory] = []
    engines: list[Engine] = []
    asked: list[list[Problem]] = []
    for split, count in (("validation", options.validation), ("test", options.test)):
        some = ask(options.families, split, count, options.seed)
        engine = Engine(llm, some, options.method, voters=voters(rules))
        path = work / f"arms_{split}.jsonl"
        names = [each.id for each in some]
        engines.append(engine)
        votes = tuple(voters(rules))
        memories.append(Memory(engine, names, path=path, identity=told, voters=votes))
        asked.append(some)
    bench = Bench(asked[0], asked[1], engines[0], engines[1], memories[0], memories[1], say)
    try:
        arms = _arms(bench, arbiter, folder, rules)
    finally:
        for memory in memories:
            memory.close()
    return {
        "about": {**about, "options": _plain(options), "fallback": arbiter.fallback},
        "minutes": round((time.monotonic() - started) / 60, 1),
        "problems": [
            {"id": p.id, "family": p.family, "item": p.item, "held_out": p.held_out,
             "answer": p.answer}
            for p in bench.test
        ],
        **arms,
    }  # fmt: skip


def _plain(options: Options) -> dict[str, Any]:
    return {**asdict(options), "groups": {k: list(v) for k, v in (options.groups or {}).items()}}


def judge_of(llm: LLM, folder: Path) -> LinearJudge | None:
    """The linear judge in an arbiter's folder, if there is one."""
    path = folder / FILE
    if not path.is_file():
        return None
    info = llm.target.info
    return LinearJudge.load(path, size=info.hidden_size, target=info.fingerprint)


def _digest(judge: LinearJudge | None) -> str:
    if judge is None:
        return ""
    return hashlib.sha256(judge.w.numpy().tobytes() + str(judge.b).encode()).hexdigest()[:16]


def _arms(bench: Bench, arbiter: Arbiter, folder: Path, rules: Mapping[str, Any]) -> dict[str, Any]:
    arms = [*bench.fixed(), *bench.voted(rules), bench.mentored()]
    open_, gate = Gate(0.0, 0), Gate(arbiter.gate, arbiter.consecutive)
    learned = {
        name: Arbiter.load(folder / path)
        for name, path in STAGES.items()
        if (folder / path).is_file()
    }
    stages = [
        bench.arm(name, f"theta {each.theta:.2f}", deployed(each, gate))
        for name, each in learned.items()
    ]
    last = list(learned.items())[-1:]
    stages += [
        bench.arm(f"{name}, no gate", f"theta {each.theta:.2f}", deployed(each, open_))
        for name, each in last
    ]
    if stages:
        shown = stages[len(learned) - 1]
        arms.append(bench.random(shown.override_rate))
    arms += stages
    oracle, room = _oracle(bench)
    arms.append(oracle)
    return {
        "arms": [
            {
                "name": arm.name,
                "note": arm.note,
                "answers": [_row(each) for each in arm.answers],
                "draws": [[_row(each) for each in run] for run in arm.draws],
            }
            for arm in arms
        ],
        "headroom": room,
    }


def _oracle(bench: Bench) -> tuple[Arm, dict[str, Any]]:
    """The best branch of each problem, and how much of that is luck."""
    bench.say("oracle")
    numbers = range(len(bench.test))
    some = branches(bench.asked, numbers)
    best = [next((each for each in tree if each.correct), tree[0]) for tree in some]
    room = headroom(bench.asked, numbers, lucky_for(bench.test))
    arm = Arm("oracle, first 4", f"luck {100 * room.lucky:+.1f}", [Answered.of(e) for e in best])
    return arm, room.to_json()


def _row(each: Answered) -> list[Any]:
    return [
        int(each.correct), each.tokens, each.passes, each.mismatches, each.overrides, each.text
    ]  # fmt: skip


def _answered(row: Sequence[Any]) -> Answered:
    return Answered(bool(row[0]), *row[1:])


def arms_of(made: Mapping[str, Any]) -> list[Arm]:
    """The arms of what `measure` gave (or its JSON)."""
    return [
        Arm(
            each["name"],
            each["note"],
            [_answered(row) for row in each["answers"]],
            [[_answered(row) for row in run] for run in each["draws"]],
        )
        for each in made["arms"]
    ]


# -- printing --------------------------------------------------------------------------------------

HEADS = (
    "rule", "setting", "accuracy", "against target only (95%)", "McNemar p", "tokens a pass",
    "overrides",
)  # fmt: skip
SPEED = "tokens/s"
"""A column more, where `hasten.train.arbiter.speed` has measured it; of all families only."""


def table(made: Mapping[str, Any], families: Sequence[str] = ()) -> list[list[str]]:
    """Rows of cells, the first one their heads; `families`: only problems of those."""
    kept = [at for at, p in enumerate(made["problems"]) if not families or p["family"] in families]
    items = [made["problems"][at]["item"] for at in kept]
    arms = [_only(arm, kept) for arm in arms_of(made)]
    plain = next(arm for arm in arms if arm.name == PLAIN)
    rows = [list(HEADS), *(_cells(arm, plain, items) for arm in arms)]
    speed = {} if families else rates(made.get("speed", {}))
    if speed:
        names = [SPEED, *(_rate(arm.name, speed) for arm in arms)]
        rows = [[*row, cell] for row, cell in zip(rows, names, strict=True)]
    return rows


def rates(runs: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """Tokens a second of each arm that was timed, over all problems."""
    return {
        name: sum(run[0] for run in some) / max(sum(run[1] for run in some), 1e-9)
        for name, some in runs.items()
    }


def _rate(name: str, speed: Mapping[str, float]) -> str:
    if name not in speed:
        return ""
    return f"{speed[name]:.0f} ({speed[name] / speed[ALONE]:.2f}x)"


def _only(arm: Arm, kept: Sequence[int]) -> Arm:
    return Arm(
        arm.name,
        arm.note,
        [arm.answers[at] for at in kept],
        [[run[at] for at in kept] for run in arm.draws],
    )


def _cells(arm: Arm, plain: Arm, items: Sequence[str]) -> list[str]:
    cells = [arm.name, arm.note, f"{100 * arm.accuracy:.1f}%"]
    if arm.name == PLAIN:
        cells += ["", ""]
    else:
        cells += [_gap(arm, plain, items), f"{_p_value(arm, plain):.2g}" if not arm.draws else ""]
    return [*cells, f"{arm.tokens_a_pass:.2f}", f"{100 * arm.override_rate:.0f}%"]


def _gap(arm: Arm, other: Arm, items: Sequence[str]) -> str:
    gaps = np.array(arm.right) - np.array(other.right)
    low, high = bootstrap_mean(gaps, items, 0)
    return f"{100 * gaps.mean():+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _p_value(arm: Arm, other: Arm) -> float:
    gaps = np.array(arm.right) - np.array(other.right)
    return mcnemar(int((gaps > 0).sum()), int((gaps < 0).sum()))


def against(made: Mapping[str, Any], name: str, other: str) -> str:
    """Accuracy of one arm less another's, with its paired interval, in points."""
    arms = {arm.name: arm for arm in arms_of(made)}
    items = [p["item"] for p in made["problems"]]
    return _gap(arms[name], arms[other], items)


def markdown(made: Mapping[str, Any], families: Sequence[str] = ()) -> str:
    """The table."""
    heads, *rows = table(made, families)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def save(made: Mapping[str, Any], path: Path) -> None:
    """Write everything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made) + "\n")
