"""Which families of tasks a model gets right now and then: a markdown table.

    python scripts/screen_tasks.py --count 100 --dtype bfloat16 --json screened.json

Plain greedy answers to problems of the training split. A family qualifies where accuracy lies
between 20% and 80% and surely above blind guesses.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import hasten
from hasten.environment import command_line, machine
from hasten.errors import HastenError
from hasten.tasks import FAMILIES, Problem, screen
from hasten.tasks.screening import LEAST, MOST, Screened


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Accuracy of plain decoding, family by family.")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--count", type=int, default=100, help="problems of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers of each")
    parser.add_argument("--json", type=Path, help="also write environment, figures and answers")
    return parser.parse_args()


def main() -> None:
    """Print a row a family, as soon as it is known."""
    args = arguments()
    answers: list[tuple[Problem, str]] = []
    found: list[Screened] = []
    try:
        llm = hasten.load(args.model, method="ar", dtype=args.dtype)
        print("| family | right | 95% | chance | by wording | qualifies |\n" + "|---" * 6 + "|")
        for name in args.families.split(","):
            start = len(answers)
            found += screen(
                llm,
                [name],
                count=args.count,
                seed=args.seed,
                answered=lambda problem, text: answers.append((problem, text)),
            )
            print(row(found[-1]), flush=True)
            show([each for each in answers[start:] if not each[0].correct(each[1])][: args.show])
    except HastenError as error:
        raise SystemExit(f"error: {error}") from error
    good = [each.family for each in found if each.qualifies]
    print(f"\nbetween {LEAST:.0%} and {MOST:.0%}, and above chance: {', '.join(good) or 'none'}")
    if args.json:
        write(args.json, found, answers)


def row(each: Screened) -> str:
    """A family's line of the table."""
    wordings = [f"{name} {100 * g.accuracy:.0f}%" for name, g in each.by_template.items()]
    cells = [
        each.family,
        f"{100 * each.grade.accuracy:.0f}% of {each.grade.count}",
        f"{100 * each.grade.low:.0f} to {100 * each.grade.high:.0f}",
        f"{100 * each.chance:.0f}%",
        ", ".join(wordings),
        "yes" if each.qualifies else "no",
    ]
    return f"| {' | '.join(cells)} |"


def show(wrong: list[tuple[Problem, str]]) -> None:
    """Wrong answers, to see what goes wrong; not part of the table."""
    for problem, text in wrong:
        print(f"  {problem.question!r}: {text!r}, not {problem.answer!r}", file=sys.stderr)


def write(path: Path, found: list[Screened], answers: list[tuple[Problem, str]]) -> None:
    """Environment, figures and every answer."""
    made = {
        "environment": {**machine(), "command": command_line()},
        "families": [{**asdict(each), "qualifies": each.qualifies} for each in found],
        "answers": [
            {"id": problem.id, "text": text, "right": problem.correct(text)}
            for problem, text in answers
        ],
    }
    path.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
