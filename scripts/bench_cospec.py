"""CoSpec beside every other rule, on the embedded model: accuracies, and tokens a second.

    python scripts/bench_cospec.py --part accuracy --pair natural --json cospec_natural.json
    python scripts/bench_cospec.py --part accuracy --pair specialist --json cospec_specialist.json
    python scripts/bench_cospec.py --part print --json cospec_specialist.json
    python scripts/bench_cospec.py --part speed --problems 24 --json cospec_speed.json

Parts:

- *accuracy*: all arms on held-out problems with exact answers, every knob chosen on validation
  problems (`hasten.train.arbiter.evaluate`); every answer goes to the JSON file. No time is
  measured, so it may run beside other work; what was answered is kept in `--work`, and the same
  command goes on.
- *print*: the tables again, from that file.
- *speed*: tokens a second of plain decoding, of the draft's lossless use and of CoSpec, one after
  the other on each problem; decode only. Needs an idle machine.

Pairs: *natural* is the exit module that ships for the model; *specialist* the constructed draft
(`hasten train arbiter specialist`), tuned so that it beats the model on some families: a
demonstration of routing, not a reproduction.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hasten
from hasten.environment import command_line, machine, measure_load
from hasten.errors import HastenError
from hasten.exits import store
from hasten.tasks import QUALIFYING, Problem
from hasten.tasks.screening import MAX_NEW_TOKENS
from hasten.train.arbiter import evaluate
from hasten.train.arbiter.run import ask

ASSETS = Path(hasten.__file__).parent / "assets" / "smollm2-135m"
PAIRS = {"natural": "draft=early-exit", "specialist": "draft=specialist"}
SHOWN = ("CoSpec A+B", "CoSpec A")


def groups() -> dict[str, tuple[str, ...]]:
    """What the specialist has learned, and the other families."""
    learned = tuple(store.read(ASSETS / "specialist").facts["families"])
    return {"learned": learned, "others": tuple(f for f in QUALIFYING if f not in learned)}


def accuracy(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all arms; gives what is printed."""
    families = tuple(args.families.split(",")) if args.families else QUALIFYING
    options = evaluate.Options(
        families=families,
        draft=args.draft or PAIRS[args.pair],
        validation=args.validation,
        test=args.problems,
        seed=args.seed,
        groups=groups() if args.pair == "specialist" else None,
    )
    llm = hasten.load(method="ar", dtype=args.dtype)
    folder = Path(args.arbiter) if args.arbiter else ASSETS / "arbiter" / args.pair
    work = Path(args.work) / args.pair
    print(f"{args.problems} problems; about {args.problems // 4} minutes on 2 cores, or less "
          f"where {work} knows answers", file=sys.stderr)  # fmt: skip

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    made = evaluate.measure(llm, folder, options, work=work, say=say)
    return {**made, "command": command_line(), "machine": machine()}


def show(made: dict[str, Any]) -> None:
    """Print the tables."""
    about, room = made["about"], made["headroom"]
    print(f"\n{len(made['problems'])} problems, draft `{about['options']['draft']}`, "
          f"{about['dtype']}\n")  # fmt: skip
    print(evaluate.markdown(made))
    print(f"\noracle {room['gain']:+.1%} over target only, {room['lucky']:+.1%} of it such as luck "
          f"alone gives; {room['mismatches']:.2f} mismatches an answer")  # fmt: skip
    names = [arm["name"] for arm in made["arms"]]
    for name in SHOWN:
        if name in names:
            print(f"{name} against random at its rate: "
                  f"{evaluate.against(made, name, 'random, same rate')}")  # fmt: skip
    if about["fallback"]:
        print("the arbiter fell back to target only: a negative result")
    for group, families in about["options"]["groups"].items():
        some = [f for f in families if any(p["family"] == f for p in made["problems"])]
        if some:
            print(f"\n{group}: {', '.join(some)}\n")
            print(evaluate.markdown(made, some))


# -- speed -----------------------------------------------------------------------------------------


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of some methods, interleaved problem by problem."""
    llm = hasten.load(method="ar", dtype=args.dtype)
    draft = args.draft or PAIRS[args.pair]
    folder = Path(args.arbiter) if args.arbiter else ASSETS / "arbiter" / args.pair
    methods = {
        "plain decoding": "ar",
        "lossless, the same draft": f"cospec:target,{draft}",
        "CoSpec": f"cospec,{draft},arbiter={folder}",
        "draft always": f"cospec:draft,{draft},bonus=on",
    }
    families = tuple(args.families.split(",")) if args.families else QUALIFYING
    asked = ask(families, "test", args.problems, args.seed)
    figures: dict[str, list[tuple[int, float, int]]] = {name: [] for name in methods}
    for method in methods.values():  # once to warm up
        _timed(llm, asked[0], method)
    for problem in asked:
        for name, method in methods.items():
            figures[name].append(_best(llm, problem, method, args.repeats))
    return {
        "speed": figures, "command": command_line(), "machine": machine(),
        "load": measure_load(), "dtype": args.dtype, "draft": draft,
    }  # fmt: skip


def _best(llm: hasten.LLM, problem: Problem, method: str, repeats: int) -> tuple[int, float, int]:
    runs = [_timed(llm, problem, method) for _ in range(repeats)]
    return sorted(runs, key=lambda run: run[1])[len(runs) // 2]


def _timed(llm: hasten.LLM, problem: Problem, method: str) -> tuple[int, float, int]:
    """Tokens of the passes after the prompt's, their seconds, and how many passes."""
    made = llm.generate(problem.prompt, method=method, max_new_tokens=MAX_NEW_TOKENS)
    summary = made.metrics
    # Plain decoding has its first token from the prompt's pass, CoSpec from a pass of its own.
    return summary.pass_tokens, summary.end_to_end_s - summary.prefill_s, summary.target_passes


def show_speed(made: dict[str, Any]) -> None:
    """Print tokens a second and how they compare with plain decoding's."""
    print(f"\ndecode only, {made['dtype']}, draft `{made['draft']}`\n")
    print("| method | tokens/s | against plain |\n|---|---|---|")
    rates = {}
    for name, runs in made["speed"].items():
        tokens, seconds = sum(r[0] for r in runs), sum(r[1] for r in runs)
        rates[name] = tokens / seconds if seconds else 0.0
    plain = rates["plain decoding"]
    for name, rate in rates.items():
        print(f"| {name} | {rate:.1f} | {rate / plain:.2f}x |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("accuracy", "print", "speed"), default="accuracy")
    parser.add_argument("--pair", choices=tuple(PAIRS), default="specialist")
    parser.add_argument("--draft", default="", help="options of cospec, instead of the pair's")
    parser.add_argument("--arbiter", default="", help="folder of arbiters, instead of the shipped")
    parser.add_argument("--families", default="", help="names with commas; default: qualifying")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--validation", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--work", default="cospec_work", help="folder of answers kept")
    parser.add_argument("--json", default="", help="every answer or time goes here")
    args = parser.parse_args(arguments)
    try:
        if args.part == "print":
            made = json.loads(Path(args.json).read_text())
        else:
            made = speed(args) if args.part == "speed" else accuracy(args)
            if args.json:
                evaluate.save(made, Path(args.json))
        (show_speed if "speed" in made else show)(made)
    except HastenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
