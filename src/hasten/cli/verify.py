"""``hasten verify``: does a method give plain decoding's answers?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from hasten.cli import options as opt
from hasten.cli import verify_smc
from hasten.cli.screen import busy, counting, err, load_model, out, print_json
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.api import LLM, Prompt
    from hasten.arbitration.examine import Examination
    from hasten.prove import Proof
    from hasten.targets.base import Target

SuiteOption = Annotated[
    str,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        help="A suite of `hasten bench`, a JSONL file (rows with turns or question), or a .txt "
        "file (one prompt a line).",
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", help="Of the sampled half of the check; above 0.")
]
Seed = Annotated[int, typer.Option("--seed", help="Prompt i draws with seed + i.")]
Length = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Longest answer, in tokens.")]


@opt.loads
def verify(
    name: opt.Name = None,
    model: opt.Model = None,
    method: opt.MethodOption = None,
    suite: SuiteOption = "mini",
    limit: opt.Limit = None,
    max_new_tokens: Length = 64,
    temperature: Temperature = 0.8,
    seed: Seed = 0,
    json: opt.Json = False,
    *,
    loading: opt.Loading,
) -> None:
    """Compare a method's answers with plain decoding's, greedy and sampled.

    The exit code is 1 when one differs without excuse. In float32, and with hasten's own kernels in
    any precision, every answer must be identical; else a difference is excused only as a measured
    near tie, re-scored in the same precision and in float32. smc isn't lossless: how far it is
    off is estimated instead, and the exit code is 0. cospec isn't either: its loop is checked with
    the rule target, which must be lossless, and what its own rule overrides is counted.
    """
    opt.sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    if temperature == 0:
        raise OptionError(
            "temperature",
            "must be above 0: the sampled half draws",
            "Greedy answers are checked too",
        )
    make_prompts = _prompts(suite, limit)
    if name is not None and model is not None:
        raise OptionError("model", "is given twice", "Name it once, with --model or without")
    model = model if name is None else name
    llm = load_model(model, method, **loading)
    prompts = make_prompts(llm)
    from hasten.methods import get

    kind = get(llm.method.name)
    if kind.population:
        verify_smc.diagnose(llm, prompts, max_new_tokens, temperature, seed, json)
        return
    reference = _reference(llm, model, loading.get("device"))
    if kind.arbitrates:
        found = _examine(llm, prompts, reference, max_new_tokens, seed)
        if json:
            print_json(_examined_json(found, llm, suite))
        else:
            _print_examined(found, llm, suite)
        if not found.proof.ok:
            raise typer.Exit(1)
        return
    proof = _prove(llm, prompts, reference, max_new_tokens, temperature, seed)
    if json:
        print_json(_as_json(proof, llm, suite))
    else:
        _print(proof, llm, suite, temperature)
    if not proof.ok:
        raise typer.Exit(1)


def _prompts(suite: str, limit: int | None) -> Callable[[LLM], list[Prompt]]:
    """The suite's first turns, read now; random prompts are made when the vocabulary is known."""
    if Path(suite).suffix == ".txt":
        lines = [line for line in opt.read_text("suite", Path(suite)).splitlines() if line.strip()]
        if not lines:
            raise OptionError("suite", f"{suite} holds no prompt", "Write one a line")
        count = len(lines) if limit is None else min(limit, len(lines))
        chosen = [lines[i * len(lines) // count] for i in range(count)]
        return lambda llm: list(chosen)

    from hasten.bench.adversarial import random_ids
    from hasten.bench.prompts import load_suite

    rows = load_suite(suite, limit).rows

    def make(llm: LLM) -> list[Prompt]:
        size, special = (
            llm.target.info.vocab_size,
            frozenset(getattr(llm.tokenizer, "all_special_ids", ())),
        )
        return [
            random_ids(row, size, special) if row.random_tokens else row.turns[0] for row in rows
        ]

    return make


def _reference(llm: LLM, model: str | None, device: str | None) -> Callable[[], Target] | None:
    """Judges near ties: the same weights in float32. None where no difference is excused: the
    native kernels give a row the same bits in every pass, and quantized weights run on them alone.
    """
    if llm.target.info.kernels == "native":
        return None

    def load() -> Target:
        from hasten.targets.load import load_target

        return load_target(model, dtype="float32", device=device).target

    return load


def _prove(
    llm: LLM,
    prompts: list[Prompt],
    reference: Callable[[], Target] | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Proof:
    from hasten.prove import RULES, prove

    with busy("checking the method"):
        spec = llm.prepare(llm.method)
    with counting(f"{spec} against plain decoding", len(RULES) * len(prompts)) as bar:
        return prove(
            llm,
            prompts,
            spec,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            reference=reference,
            on_check=lambda check: bar.advance(bar.task_ids[0]),
        )


def _examine(
    llm: LLM,
    prompts: list[Prompt],
    reference: Callable[[], Target] | None,
    max_new_tokens: int,
    seed: int,
) -> Examination:
    from hasten.arbitration.examine import examine

    with counting(f"{llm.method} against plain decoding", len(prompts)) as bar:
        return examine(
            llm,
            prompts,
            max_new_tokens=max_new_tokens,
            seed=seed,
            reference=reference,
            on_prompt=lambda: bar.advance(bar.task_ids[0]),
        )


def _print_examined(found: Examination, llm: LLM, suite: str) -> None:
    console, proof = out(), found.proof
    _print_heading(proof.method, llm, suite)
    console.print("not lossless, by design: only greedy answers are compared", style="yellow")
    same, count = proof.count("greedy")
    console.print(f"  with the rule target: {same}/{count} identical")
    _print_differences(proof)
    if proof.ok:
        console.print("the loop is lossless where the rule keeps nothing", style="bold green")
    else:
        console.print(_verdict(proof, native=llm.target.info.kernels == "native"))
    totals = found.totals
    console.print(
        f"  with its own rule: {found.answers - found.differ}/{found.answers} identical; of "
        f"{totals.mismatches} mismatches the draft's token was kept at {totals.overrides} "
        f"({totals.override_rate:.1%}), in {totals.new_tokens} tokens, "
        f"{totals.mean_accepted_length:.2f} a pass"
    )


def _examined_json(found: Examination, llm: LLM, suite: str) -> dict[str, Any]:
    totals = found.totals
    return {
        **_as_json(found.proof, llm, suite),
        "sampled": None,
        "own_rule": {
            "identical": found.answers - found.differ,
            "total": found.answers,
            "tokens": totals.new_tokens,
            "mismatches": totals.mismatches,
            "overrides": totals.overrides,
            "mean_accepted_length": totals.mean_accepted_length,
        },
    }


def _print_heading(method: str, llm: LLM, suite: str) -> None:
    info = llm.target.info
    kernels = f", {info.kernels} kernels" if info.kernels else ""
    out().print(
        f"{method} against plain decoding: {info.name} in {info.precision} "
        f"({info.engine} engine{kernels}), suite {suite}"
    )


def _print_differences(proof: Proof) -> None:
    for check in proof.checks:
        if check.difference is not None:
            out().print(
                f"  prompt {check.prompt}, {check.rule}: {check.difference.describe()}",
                soft_wrap=True,
            )
    for index, why in proof.skipped:
        err().print(f"skipped prompt {index}: {why}", soft_wrap=True)


def _print(proof: Proof, llm: LLM, suite: str, temperature: float) -> None:
    from hasten.methods import get

    console, info = out(), llm.target.info
    _print_heading(proof.method, llm, suite)
    lossless = get(llm.method.name).lossless
    if lossless != "yes":
        console.print(
            f"note: {llm.method.name} doesn't claim to be lossless: {lossless}", style="yellow"
        )
    for rule, label in (("greedy", "greedy"), ("sampled", f"sampled, temperature {temperature:g}")):
        same, count = proof.count(rule)
        console.print(
            Text(
                f"  {label}: {same}/{count} identical", style="green" if same == count else "yellow"
            )
        )
    _print_differences(proof)
    console.print(_verdict(proof, native=info.kernels == "native"))


def _verdict(proof: Proof, *, native: bool) -> Text:
    different = sum(not check.identical for check in proof.checks)
    if not proof.checks:
        return Text("nothing was compared: every prompt was skipped", style="bold red")
    if not different:
        return Text("lossless here: every answer is identical", style="bold green")
    if not proof.faults:
        return Text(
            f"lossless here up to rounding: answers that part at a measured near tie: {different}",
            style="bold green",
        )
    why = "not a near tie"
    if proof.exact or native:
        why = "float32 excuses" if proof.exact else "native kernels excuse"
        why += " no difference"
    return Text(
        f"NOT lossless: answers that differ without excuse: {len(proof.faults)} ({why})",
        style="bold red",
    )


def _as_json(proof: Proof, llm: LLM, suite: str) -> dict[str, Any]:
    counts = {
        rule: dict(zip(("identical", "total"), proof.count(rule), strict=True))
        for rule in ("greedy", "sampled")
    }
    return {
        "method": proof.method,
        "model": llm.target.info.name,
        "dtype": str(llm.target.info.dtype).removeprefix("torch."),
        "engine": llm.target.info.engine,
        "kernels": llm.target.info.kernels,
        "quantize": llm.target.info.quantize,
        "suite": suite,
        "ok": proof.ok,
        **counts,
        "faults": len(proof.faults),
        "differences": [
            {
                "prompt": c.prompt,
                "rule": c.rule,
                "near_tie": c.difference.near_tie,
                "explanation": c.difference.describe(),
            }
            for c in proof.checks
            if c.difference is not None
        ],
        "skipped": [{"prompt": index, "why": why} for index, why in proof.skipped],
    }
