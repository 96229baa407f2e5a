"""HVD's gate and arms on suites: who drafts, how well that is chosen, and how far it is from best.

    python scripts/bench_hvd.py --suite editing --suite agent --predictor payoff.npz --limit 16

For every suite it prints

- the gate: precision and recall of each rule in the rounds that it had (does a draft of the cache
  that it took keep tau tokens or more, by replay of the answer), and the share of rounds by arm;
- each arm alone, the frequency rule and hvd: tokens a pass, and tokens a second over plain
  decoding's, every method on every prompt in turn;
- the ceiling: rounds of who knows what either arm will keep (all of the model arm's candidates
  count, verified or not, so no policy reaches it).

Answers are greedy, and must equal plain decoding's. One run a prompt: for claims about speed take
`hasten bench`, which repeats and says how sure it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import hasten
from hasten import methods
from hasten.api import LLM
from hasten.bench.prompts import SUITES, SuiteRow, load_suite
from hasten.bench.session import first_ids
from hasten.builtin.hvd import arm_of
from hasten.drafters.ranks import SUFFIX
from hasten.environment import command_line, machine, measure_load
from hasten.errors import HastenError
from hasten.methods import MethodContext
from hasten.metrics import Summary
from hasten.payoff.features import class_table
from hasten.payoff.gate import LEAST_SCORE, TAU
from hasten.payoff.predictor import CacheOptions
from hasten.train.payoff.arms import kept_everywhere
from hasten.train.payoff.evaluate import Scores, best_of, replay, scores
from hasten.train.payoff.traces import Trace, trace_of
from hasten.types import Result, SamplingParams

PLAIN = "ar"
ARMS = ("cache", "model", "plain")


def say(text: str) -> None:
    """How far it is, on stderr."""
    print(text, file=sys.stderr, flush=True)


def contestants(args: argparse.Namespace) -> dict[str, str]:
    """Methods by the name they are shown under."""
    model = f"model={args.model_arm}" if args.model_arm else ""
    cache = ",".join(f"{name}={value}" for name, value in asdict(cache_of(args)).items())
    made = {
        PLAIN: PLAIN,
        "cache alone": f"hvd,rule=cache,model=none,{cache}",
        "model arm alone": ",".join(filter(None, ("hvd,rule=model", model))),
        "cache, else model": ",".join(filter(None, ("hvd,rule=cache", model, cache))),
        "frequency": ",".join(filter(None, (f"hvd:frequency,s0={args.s0:g}", model, cache))),
    }
    if args.predictor:
        gate = f"predictor={args.predictor}"
        made["hvd"] = ",".join(filter(None, ("hvd", f"tau={args.tau:g}", gate, model, cache)))
        made["hvd:cost"] = ",".join(filter(None, ("hvd:cost", gate, model, cache)))
    return made


def cache_of(args: argparse.Namespace) -> CacheOptions:
    """Options of the cache."""
    return CacheOptions(longest=args.longest)


# -- prompts ---------------------------------------------------------------------------------------


def prompts(llm: LLM, row: SuiteRow, params: SamplingParams) -> Iterator[list[int]]:
    """A row's prompts: later turns have the model's own answers before them."""
    yield first_ids(llm, row)
    messages = [{"role": "user", "content": row.turns[0]}]
    for turn in row.turns[1:]:
        said = llm.generate(messages, method=PLAIN, params=params).text
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": turn}]
        yield llm.tokenize(messages)


# -- what is counted -------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Of one method on some prompts.

    kept     of every round's start that the cache had a draft at, what that would keep
    routed   and whether the cache drafted there
    """

    summary: Summary = field(default_factory=Summary)
    arms: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ARMS, 0))
    kept: list[int] = field(default_factory=list)
    routed: list[bool] = field(default_factory=list)
    identical: int = 0
    prompts: int = 0

    def add(self, result: Result, plain: Sequence[int], trace: Trace) -> None:
        """One more answer; `trace` is the cache's replay of it."""
        self.prompts += 1
        self.identical += list(result.tokens) == list(plain)
        self.summary.merge(result.metrics)
        states = dict(zip(trace.at.tolist(), trace.kept.tolist(), strict=True))
        place = -1
        for each in result.rounds:
            if each.tree is not None:
                source = each.sources[1] if each.drafted else ""
                arm = "cache" if source == SUFFIX else "model" if source else "plain"
                self.arms[arm] += 1
                if place in states:
                    self.kept.append(states[place])
                    self.routed.append(arm == "cache")
            place += len(each.emitted)

    def scores(self, tau: float) -> Scores:
        """How well the states of its rounds were told apart."""
        return scores(np.array(self.kept, np.int64), np.array(self.routed, bool), tau)


@dataclass(slots=True)
class Suite:
    """Everything about one suite."""

    tallies: dict[str, Tally]
    traces: list[Trace] = field(default_factory=list)
    models: list[list[int]] = field(default_factory=list)
    """Tokens that the model arm's candidates keep, by prompt and place."""

    def ceiling(self, tau: float) -> dict[str, Any]:
        """Rounds of who knows."""
        known = [
            (lambda place, kept=kept: kept[place] if place < len(kept) else 0)
            for kept in self.models
        ]
        return asdict(replay(self.traces, best_of, known, tau))


def measure(llm: LLM, name: str, args: argparse.Namespace) -> Suite:
    """Every method on every prompt of a suite, in turn."""
    rows = load_suite(name, args.limit).rows
    listed, info = contestants(args), llm.target.info
    table = class_table(llm.tokenizer, info.vocab_size)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=0.0)
    suite = Suite({shown: Tally() for shown in listed})
    spec = arm_of(args.model_arm, llm.target)
    assert spec is not None
    maker = methods.prepare(spec, MethodContext(llm.target, llm.tokenizer, _no_other))
    for number, row in enumerate(rows, 1):
        for ids in prompts(llm, row, params):
            answers = {
                shown: llm.generate(ids, method=method, params=params, trace=True)
                for shown, method in listed.items()
            }
            plain = answers[PLAIN].tokens
            trace = trace_of(ids, plain, cache_of(args), table, eos_ids=info.eos_ids, group=name)
            suite.traces.append(trace)
            for shown, answer in answers.items():
                suite.tallies[shown].add(answer, plain, trace)
            suite.models.append(kept_everywhere(llm.target, maker, ids, params)[1])
        say(f"{name}: {number} of {len(rows)}")
    return suite


def _no_other(name: str) -> Any:
    raise HastenError(f"the ceiling isn't known for a draft model ({name}): take another arm")


# -- what is printed -------------------------------------------------------------------------------


def as_data(suite: Suite, tau: float) -> dict[str, Any]:
    """The suite's figures."""
    base = suite.tallies[PLAIN].summary.tokens_per_s
    found: dict[str, Any] = {}
    for name, tally in suite.tallies.items():
        rounds = max(sum(tally.arms.values()), 1)
        found[name] = {
            "prompts": tally.prompts,
            "identical": tally.identical,
            "mean_accepted_length": tally.summary.mean_accepted_length,
            "speedup_micro": tally.summary.tokens_per_s / base if base else 0.0,
            "rounds": {arm: count / rounds for arm, count in tally.arms.items()},
            "gate": asdict(tally.scores(tau)),
        }
    return {"methods": found, "ceiling": suite.ceiling(tau)}


def show(name: str, made: dict[str, Any], tau: float) -> None:
    """Print a suite's tables."""
    print(f"\n{name}\n")
    print("| method | tokens a pass | over plain | cache | model | plain | precision | recall | "
          "identical |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for shown, each in made["methods"].items():
        shares = " | ".join(f"{each['rounds'][arm]:.1%}" for arm in ARMS)
        gate = each["gate"]
        told = "| " if not gate["routed"] else f"{gate['precision']:.1%} | {gate['recall']:.1%}"
        print(f"| {shown} | {each['mean_accepted_length']:.2f} | {each['speedup_micro']:.2f}x | "
              f"{shares} | {told} | {each['identical']}/{each['prompts']} |")  # fmt: skip
    best = made["ceiling"]
    share = best["cached"] / max(best["rounds"], 1)
    print(f"\nceiling: {best['tokens_per_round']:.2f} tokens a round, {share:.1%} of them the "
          f"cache's; precision and recall at {tau:g} tokens")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--suite", action="append", help=f"{', '.join(SUITES)}, or a file; may be given again"
    )
    parser.add_argument("--limit", type=int, default=16, help="rows of a suite")
    parser.add_argument("--model", default=None, help="the default model, where none is named")
    parser.add_argument("--model-arm", default="", help="as hvd's option model")
    parser.add_argument("--predictor", default="", help="file; empty: no hvd, the other rules only")
    parser.add_argument("--tau", type=float, default=TAU)
    parser.add_argument("--s0", type=float, default=LEAST_SCORE)
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--json", default="", help="all figures go here")
    args = parser.parse_args(arguments)
    try:
        llm = hasten.load(args.model, method=PLAIN, **({"dtype": args.dtype} if args.dtype else {}))
        if arm_of(args.model_arm, llm.target) is None:
            parser.error("no model arm: none is shipped for this model, so name one (--model-arm)")
        load, made = measure_load(), {}
        for name in args.suite or ("editing", "agent"):
            made[name] = as_data(measure(llm, name, args), args.tau)
            show(name, made[name], args.tau)
    except HastenError as error:
        say(f"error: {error}")
        return 2
    if args.json:
        about = {"command": command_line(), "machine": machine(), "load": asdict(load)}
        said = {"about": about, "tau": args.tau, "suites": made}
        Path(args.json).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
