"""``hasten verify --method smc``: how far a population's answers are from the model's law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hasten.cli.screen import counting, out, print_json, table
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.api import LLM, Prompt
    from hasten.smc.diagnose import Diagnosis

_LEGEND = """\
E[Z]: mean evidence, 1 where nothing is missed. relVar: its relative variance.
KL, TV: bounds on how far the answers' law is from the model's (nats; 0 to 1, none
where the bound says nothing).
ESS / N: share of particles that count. collapsed: rounds without any weight."""

RUNS = 16
"""Of each prompt."""


def diagnose(
    llm: LLM,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    json: bool,
) -> None:
    """Answer each prompt `RUNS` times and print what its evidence says."""
    from hasten.smc.diagnose import summarise

    if max_new_tokens < 1:
        raise OptionError("max_new_tokens", f"must be at least 1 here, got {max_new_tokens}")
    found: list[Diagnosis] = []
    with counting(f"{llm.method}, {RUNS} runs a prompt", len(prompts)) as bar:
        for prompt in prompts:
            runs = [
                llm.generate(
                    prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + run
                ).population
                for run in range(RUNS)
            ]
            found.append(summarise(runs, alpha=_alpha(llm)))
            bar.advance(bar.task_ids[0])
    if json:
        print_json({"method": str(llm.method), "prompts": [asdict(each) for each in found]})
        return
    _print(llm, found, temperature)


def _alpha(llm: LLM) -> float:
    return float(dict(llm.method.options).get("alpha", 1.0))


def _print(llm: LLM, found: Sequence[Diagnosis], temperature: float) -> None:
    from hasten.smc.diagnose import HEADER, row

    console, info = out(), llm.target.info
    console.print(f"{llm.method}: {info.name} in {info.precision}, temperature {temperature:g}")
    console.print("not lossless: how far the answers' law may be from the model's, by prompt")
    console.print()
    made = table()
    for at, name in enumerate(HEADER):
        made.add_column(name, justify="left" if at == 0 else "right", no_wrap=True)
    for number, each in enumerate(found):
        made.add_row(*row(str(number), each))
    console.print(made)
    console.print()
    console.print(_LEGEND, style="dim")
    trusted = sum(each.trusted for each in found)
    console.print(
        f"bounds that can be trusted: {trusted} of {len(found)}; '>' marks the others, whose true "
        "values are likely larger"
    )
