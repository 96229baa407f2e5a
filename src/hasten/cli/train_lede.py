"""``hasten train lede``: experience of early exits, the agent that learns from it, and replay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hasten.cli import options as opt
from hasten.cli import train_lede_shown as said
from hasten.cli.guard import INTERRUPTED, Commands
from hasten.cli.screen import err, load_model, out, table
from hasten.cli.train_lede_arms import arms
from hasten.errors import OptionError

lede = typer.Typer(
    cls=Commands,
    help="LEDE: experience of early exits, an agent that learns from it, policies scored on it.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)
lede.command("arms")(arms)

From = Annotated[
    Path,
    typer.Option(
        "--experience", "-e", metavar="DIR", help="What `collect` has made.", show_default=False
    ),
]
OutFolder = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="DIR", help="Folder to write to.", show_default=False),
]
Exits = Annotated[
    str,
    typer.Option(
        "--exits",
        metavar="LAYER+...",
        help="Candidate exits, as 2+4+8.",
        show_default="all that have a module",
    ),
]
Modules = Annotated[
    str,
    typer.Option("--modules", metavar="DIR", help="Exit modules.", show_default="those shipped"),
]
Head = Annotated[
    str, typer.Option("--head", help="modules, or own: the model's own norm and head.")
]
Domains = Annotated[
    str | None,
    typer.Option("--domains", metavar="NAME,...", help="Only these.", show_default="all"),
]
LeaveOut = Annotated[
    str | None,
    typer.Option("--leave-out", metavar="NAME", help="Not this one.", show_default=False),
]
Costs = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="What operations cost, as `costs` writes it.",
        show_default="DIR/costs.json",
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="NAME", help="The target's: float32, bfloat16, float16.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of all that is drawn.")]


@lede.command("collect")
def collect(
    out_folder: OutFolder,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="DIR|FILE",
            help="Rows that `hasten train data` has made; may be given again. Only the splits "
            "policy and test are read.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            metavar="DOMAIN[=PATH]",
            help="Prompts for domains that lack documents; as in `hasten train data`.",
            show_default="chat=self, code, summarisation, translation",
        ),
    ] = None,
    model: opt.Model = None,
    exits: Exits = "",
    modules: Modules = "",
    head: Head = "modules",
    docs: Annotated[int, typer.Option("--docs", help="For each domain, to learn from.")] = 40,
    domains: Domains = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Longest new answer, in tokens.")
    ] = 160,
    depths: Annotated[int, typer.Option("--depths", help="Draft depths of the tables.")] = 12,
    rollouts: Annotated[
        int, typer.Option("--rollouts", help="Exploratory answers through the engine.")
    ] = 200,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Stop after so many.", show_default=False)
    ] = None,
    seed: Seed = 0,
    dtype: Dtype = "bfloat16",
    device: opt.Device = None,
) -> None:
    """Log what every exit says on the model's own greedy text, and play exploratory rounds.

    The same command goes on where it was stopped. Sets that results are measured on are refused.
    """
    from hasten.train.batched import keep_freed_memory
    from hasten.train.lede.collect import CollectOptions, collect
    from hasten.train.lede.texts import DEFAULT_SOURCES, TextOptions

    chosen: dict[str, Any] = {"domains": said.names(domains)} if domains else {}
    options = CollectOptions(
        exits=said.layers(exits),
        modules=modules,
        own=said.own(head),
        texts=TextOptions(
            docs=docs,
            sources=tuple(source) if source else DEFAULT_SOURCES,
            max_new_tokens=max_new_tokens,
            seed=seed,
            **chosen,
        ),
        depths=depths,
        rollouts=rollouts,
        minutes=minutes,
    )
    keep_freed_memory()
    llm = load_model(model, "ar", dtype=dtype, device=device, kernels="torch")
    with said.shown() as show:
        try:
            made = collect(llm, data or [], out_folder, options, show)
        except KeyboardInterrupt:
            note = f"stopped. {out_folder} keeps what is finished; the same command goes on"
            err().print(note, soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
    said.print_experience(made)


@lede.command("costs")
def costs(
    out_file: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="File to write.", show_default=False),
    ],
    model: opt.Model = None,
    exits: Exits = "",
    modules: Modules = "",
    head: Head = "modules",
    dtype: Dtype = "bfloat16",
    device: opt.Device = None,
) -> None:
    """Measure what passes and probes cost here. The machine should have nothing else to do."""
    from hasten.builtin.exit_sources import exit_costs, find_exits
    from hasten.policies.cost import load_or_measure
    from hasten.policies.exit_rules import STEPS
    from hasten.train.lede.logs import write_costs

    said.layers(exits)
    said.own(head)
    target = load_model(model, "ar", dtype=dtype, device=device).target
    found = find_exits(target, exits, modules, head, method="lede", several=True)
    priced = exit_costs(target, found.bank, load_or_measure(target), STEPS)
    write_costs(out_file, priced)
    lines = table("exit")
    for name in ("layers below", "probe"):
        lines.add_column(name, justify="right")
    for layer, below, probe in zip(found.bank.layers, priced.layer, priced.probe, strict=True):
        lines.add_row(str(layer), f"{below:.3f}", f"{probe:.3f}")
    console = out()
    console.print(lines)
    widths = ", ".join(f"{n} rows {priced.verify[n]:.2f}" for n in (1, 2, 4, 8, STEPS))
    console.print(f"in plain steps; a pass of {widths}. They are in {out_file}", soft_wrap=True)


@lede.command("fit")
def fit(
    experience: From,
    out_folder: OutFolder,
    preset: Annotated[
        str, typer.Option("--preset", help="paper: its learning rate; fast: minutes.")
    ] = "fast",
    reward: Annotated[
        str, typer.Option("--reward", help="throughput, match or ratio.")
    ] = "throughput",
    state: Annotated[
        str, typer.Option("--state", help="full, or minimal: confidence and place alone.")
    ] = "full",
    exits: Annotated[
        str,
        typer.Option(
            "--exits",
            metavar="LAYER+...",
            help="Some of those collected, neighbours.",
            show_default="all",
        ),
    ] = "",
    steps: Annotated[
        int,
        typer.Option("--steps", help="Longest draft, 1 to 12; the row after it costs no probe."),
    ] = 12,
    length: Annotated[
        int, typer.Option("--length", help="Every draft has so many tokens; 0: the agent decides.")
    ] = 0,
    expected: Annotated[
        bool, typer.Option("--expected", help="Count drafts by sum min(p, q), for drawn text.")
    ] = False,
    updates: Annotated[
        int | None,
        typer.Option("--updates", help="At each price of time.", show_default="preset's"),
    ] = None,
    prices: Annotated[
        int | None, typer.Option("--prices", help="Times it is set.", show_default="preset's")
    ] = None,
    kappa: Annotated[
        float | None,
        typer.Option("--kappa", help="Weight of the conservative term.", show_default="preset's"),
    ] = None,
    domains: Domains = None,
    leave_out: LeaveOut = None,
    costs: Costs = None,
    seed: Seed = 0,
) -> None:
    """Let an agent learn from experience; DIR gets agent.npz and the curve."""
    from hasten.policies.lede_features import FEATURES, MINIMAL
    from hasten.train.lede import fit as fits
    from hasten.train.lede.learn import PRESETS
    from hasten.train.lede.logs import Experience
    from hasten.train.lede.report import costs_among
    from hasten.train.lede.transitions import among
    from hasten.train.lede.world import build, part_of

    if preset not in PRESETS:
        raise OptionError("preset", f"must be one of {', '.join(PRESETS)}, got {preset!r}")
    if state not in ("full", "minimal"):
        raise OptionError("state", f"must be full or minimal, got {state!r}")
    given: dict[str, Any] = {"updates": updates, "prices": prices, "kappa": kappa}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"reward": reward, "fixed": length, "expected": expected, "seed": seed}
    given |= {"features": FEATURES if state == "full" else MINIMAL}
    options = replace(PRESETS[preset], **given)
    there = Experience(experience)
    priced, world, chosen = there.costs(costs), build(there), said.chosen(domains, leave_out)
    rollouts = said.rollouts(there, chosen)
    if not 1 <= steps <= world.steps:
        raise OptionError("steps", f"must be 1 to {world.steps}, got {steps}")
    world = replace(world, steps=steps)
    layers = said.layers(exits) or world.at
    rollouts = list(among(rollouts, part_of(world.at, layers), steps))
    priced, world = costs_among(priced, world.at, layers), world.among(layers)
    with said.shown() as show:
        made = fits.fit(
            world,
            world.docs("policy", chosen),
            world.docs("select", chosen),
            priced,
            options,
            rollouts=rollouts,
            meta=there.meta,
            notes={"domains": sorted(chosen) if chosen else "all", "preset": preset},
            log=show,
        )
    made.agent.save(out_folder / "agent.npz")
    fits.write_curve(out_folder, made.rows)
    (out_folder / "fit.json").write_text(json.dumps(made.agent.facts.notes, indent=1) + "\n")
    e, d = made.fixed
    console = out()
    console.print(
        f"selected: {made.score.rho:.3f} tokens per plain step's time; exit {world.at[e]} with "
        f"{d} tokens each time earns {made.agent.facts.notes['best_fixed_rho']:.3f} on what it "
        f"learned from. The agent is {out_folder / 'agent.npz'}",
        soft_wrap=True,
    )


@lede.command("replay")
def replay(
    experience: From,
    agent: Annotated[
        list[str] | None,
        typer.Option(
            "--agent", metavar="[NAME=]FILE", help="May be given again.", show_default=False
        ),
    ] = None,
    exits: Annotated[
        str,
        typer.Option(
            "--exits",
            metavar="LAYER+...",
            help="Some of those collected, neighbours.",
            show_default="all",
        ),
    ] = "",
    split: Annotated[str, typer.Option("--split", help="Documents reported on.")] = "test",
    domains: Domains = None,
    leave_out: Annotated[
        str | None,
        typer.Option(
            "--leave-out",
            metavar="NAME",
            help="Report on this one, and tune what is tuned on the others.",
            show_default=False,
        ),
    ] = None,
    rules: Annotated[bool, typer.Option("--rules/--no-rules", help="Other policies too.")] = True,
    costs: Costs = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the table.", show_default=False),
    ] = None,
) -> None:
    """Score fixed settings, oracles, rules and agents on documents they haven't seen.

    How much there is to gain at all comes first: below 5% there is nothing to learn.
    """
    from hasten.policies.lede_agent import LedeAgent
    from hasten.train.lede import report
    from hasten.train.lede.fit import facts_for
    from hasten.train.lede.logs import Experience
    from hasten.train.lede.world import build

    named = dict(said.named(text) for text in agent or ())
    loaded = {name: LedeAgent.load(path) for name, path in named.items()}
    there = Experience(experience)
    world, chosen = build(there), said.chosen(domains, None)
    train, test = world.docs("policy", chosen), world.docs(split, chosen)
    if leave_out is not None:
        others = said.chosen(domains, leave_out)
        train, test = world.docs("policy", others), world.docs(split, said.names(leave_out))
    if not len(train) or not len(test):
        raise OptionError("split", f"{split!r} has no documents of these domains")
    priced = there.costs(costs)
    if layers := said.layers(exits):
        priced, world = report.costs_among(priced, world.at, layers), world.among(layers)
    bench = report.Bench(world, train, test, facts_for(world, train, priced))
    found = report.headroom(bench)
    rows = [report.row(name, score, world) for name, score in found.items()]
    best, oracle = rows[0]["rho"], found["foresight"].rho
    said.print_headroom(rows, report.HEADROOM)
    for name, score in report.rules(bench) if rules else ():
        rows.append(report.row(name, score, world))
    for name, score in report.agents(bench, loaded):
        rows.append(report.row(name, score, world))
    for each in rows:
        each["gap_closed"] = report.gap_closed(each["rho"], best, oracle)
    said.print_rows(rows)
    if json_file is not None:
        json_file.write_text(json.dumps({"experience": str(experience), "rows": rows}, indent=1))
