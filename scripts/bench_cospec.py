"""CoSpec beside every other rule, on the embedded model: accuracies, and tokens a second.

    python scripts/bench_cospec.py --part accuracy --pair natural --json cospec_natural.json
    python scripts/bench_cospec.py --part accuracy --pair specialist --json cospec_specialist.json
    python scripts/bench_cospec.py --part print --json cospec_specialist.json
    python scripts/bench_cospec.py --part speed --problems 24 --json cospec_specialist.json

Parts:

- *accuracy*: all arms on held-out problems with exact answers, every knob chosen on validation
  problems (`hasten.train.arbiter.evaluate`); every answer goes to the JSON file. No time is
  measured, so it may run beside other work; what was answered is kept in `--work`, and the same
  command goes on.
- *print*: the tables again, from that file.
- *speed*: tokens a second of every arm, at the settings in that file, one after the other on each
  problem, decode only; they are added to the file. Needs an idle machine.

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hasten
from hasten.environment import command_line, machine, measure_load
from hasten.errors import HastenError, OptionError
from hasten.exits import store
from hasten.tasks import QUALIFYING
from hasten.train.arbiter import evaluate
from hasten.train.arbiter import speed as timing
from hasten.train.arbiter.run import ask

ASSETS = Path(hasten.__file__).parent / "assets" / "smollm2-135m"
PAIRS = {"natural": "draft=early-exit", "specialist": "draft=specialist"}
SHOWN = ("CoSpec A+B", "CoSpec A")
RIVALS = (
    "random, same rate", "shuffled labels", "cascade, token", "typical acceptance",
    "BiLD, roll back",
)  # fmt: skip
"""Arms that those are compared with, pair by pair."""


def groups() -> dict[str, tuple[str, ...]]:
    """What the specialist has learned, and the other families."""
    learned = tuple(store.read(ASSETS / "specialist").facts["families"])
    return {"learned": learned, "others": tuple(f for f in QUALIFYING if f not in learned)}


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """What --part accuracy has written."""
    path = Path(args.json)
    if not (args.json and path.is_file()):
        raise OptionError("json", f"there is no file {args.json!r}", "Run --part accuracy first")
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def folder_of(args: argparse.Namespace) -> Path:
    """The arbiters that are measured."""
    return Path(args.arbiter) if args.arbiter else ASSETS / "arbiter" / args.pair


def say(text: str) -> None:
    """How far it is, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


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
    work = Path(args.work) / args.pair
    print(f"{args.problems} problems; about {args.problems // 4} minutes on 2 cores, or less "
          f"where {work} knows answers", file=sys.stderr)  # fmt: skip
    made = evaluate.measure(llm, folder_of(args), options, work=work, say=say)
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
        for rival in RIVALS:
            if name in names and rival in names:
                print(f"{name} against {rival}: {evaluate.against(made, name, rival)}")
    if about["fallback"]:
        print("the arbiter fell back to target only: a negative result")
    show_speed(made)
    for group, families in about["options"]["groups"].items():
        some = [f for f in families if any(p["family"] == f for p in made["problems"])]
        if some:
            print(f"\n{group}: {', '.join(some)}\n")
            print(evaluate.markdown(made, some))


# -- speed -----------------------------------------------------------------------------------------


def speed(args: argparse.Namespace, made: dict[str, Any]) -> dict[str, Any]:
    """The table with tokens a second of its arms, at the settings that it has."""
    about = made["about"]
    llm = hasten.load(method="ar", dtype=about["dtype"])
    options = about["options"]
    asked = ask(options["families"], "test", args.problems, options["seed"])
    arms = timing.timed_arms(llm, folder_of(args), made)
    load = measure_load()
    runs = timing.measure(llm, arms, asked, args.repeats, say=say)
    said = {"command": command_line(), "machine": machine(), "load": asdict(load)}
    return {**made, "speed": runs, "speed_about": {**said, "problems": len(asked)}}


def show_speed(made: dict[str, Any]) -> None:
    """Say what the column of tokens a second is."""
    if "speed" in made:
        alone = evaluate.rates(made["speed"])[evaluate.ALONE]
        about = made["speed_about"]
        print(f"\ntokens/s: decode only, {about['problems']} of the problems, beside plain "
              f"decoding's {alone:.1f}")  # fmt: skip


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
    parser.add_argument("--json", default="", help="every answer and time goes here")
    args = parser.parse_args(arguments)
    try:
        made = accuracy(args) if args.part == "accuracy" else measured(args)
        if args.part == "speed":
            made = speed(args, made)
        if args.json and args.part != "print":
            evaluate.save(made, Path(args.json))
        show(made)
    except HastenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
