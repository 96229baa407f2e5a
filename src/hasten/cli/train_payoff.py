"""``hasten train payoff``: what a copied draft will pay, learned from the model's own text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hasten.cli import options as opt
from hasten.cli.guard import INTERRUPTED
from hasten.cli.screen import err, load_model, out, table
from hasten.errors import OptionError

_CACHE, _FIT, _COLLECT = "The cache", "Fitting", "Collecting"


def _option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


OutFile = Annotated[
    Path | None,
    _option(
        "--out", "-o", metavar="FILE", help="The predictor, as payoff.npz.", show_default=False
    ),
]
Data = Annotated[
    list[str] | None,
    _option(
        "--data",
        metavar="DIR|FILE",
        help="Rows that `hasten train data` has made for this model; may be given again. Greedy "
        "ones are used.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str, _option("--dtype", metavar="NAME", help="The target's: float32, bfloat16, float16.")
]
Texts = Annotated[int, _option("--texts", help="Of each split at most; 0: all.")]

Longest = Annotated[int, _option("--longest", panel=_CACHE, help="Tokens drafted at most.")]
Depth = Annotated[int, _option("--max-tree-depth", panel=_CACHE, help="Longest string counted.")]
Factor = Annotated[
    float,
    _option("--max-spec-factor", panel=_CACHE, help="Tokens drafted per token matched; 0: any."),
]
Least = Annotated[
    float, _option("--min-token-prob", panel=_CACHE, help="Least probability of a path.")
]

Kind = Annotated[
    str,
    _option(
        "--kind", panel=_FIT, metavar="best|mlp|ridge", help="The paper's network, a regression, "
        "or the one that routes better on the validation texts.",
    ),
]  # fmt: skip
Epochs = Annotated[int, _option("--epochs", panel=_FIT, help="Times through the rows.")]
Batch = Annotated[
    int, _option("--batch", panel=_FIT, help="Rows of a step; 0: 65,536, fewer for few rows.")
]
Rate = Annotated[float, _option("--lr", panel=_FIT, help="Learning rate.")]
Seed = Annotated[int, _option("--seed", panel=_FIT, help="Of first weights and the rows' order.")]
Tau = Annotated[float, _option("--tau", panel=_FIT, help="Tokens that a routed draft should keep.")]
S0 = Annotated[
    float, _option("--s0", panel=_FIT, help="Score of the rule that plays the first rounds.")
]
Assumed = Annotated[
    float,
    _option(
        "--model-keeps", panel=_FIT, help="Tokens that the model arm's drafts keep in the mean, in "
        "rounds that are played.",
    ),
]  # fmt: skip
Dagger = Annotated[
    int,
    _option("--dagger", panel=_FIT, help="Times that rounds are played again under the predictor."),
]

Collect = Annotated[
    Path | None,
    _option(
        "--collect",
        panel=_COLLECT,
        metavar="DIR",
        help="First let the model answer prompts that make it copy, into this folder; it counts as "
        "--data. Without --out nothing else is done.",
        show_default=False,
    ),
]
Answers = Annotated[int, _option("--answers", panel=_COLLECT, help="That the folder should hold.")]
Minutes = Annotated[
    float | None,
    _option("--minutes", panel=_COLLECT, help="Stop after so many.", show_default=False),
]
NewTokens = Annotated[
    int, _option("--max-new-tokens", "-n", panel=_COLLECT, help="Longest answer, in tokens.")
]
PromptTokens = Annotated[
    int, _option("--max-prompt-tokens", panel=_COLLECT, help="Pass over prompts that are longer.")
]
CollectBatch = Annotated[
    int, _option("--collect-batch", panel=_COLLECT, help="Prompts answered together.")
]
CollectSeed = Annotated[int, _option("--collect-seed", panel=_COLLECT, help="Of the prompts.")]


def payoff(
    out_file: OutFile = None,
    data: Data = None,
    model: opt.Model = None,
    texts: Texts = 0,
    longest: Longest = 64,
    max_tree_depth: Depth = 64,
    max_spec_factor: Factor = 1.0,
    min_token_prob: Least = 0.1,
    kind: Kind = "best",
    epochs: Epochs = 20,
    batch: Batch = 0,
    lr: Rate = 1e-3,
    seed: Seed = 42,
    tau: Tau = 6.0,
    s0: S0 = 4.0,
    model_keeps: Assumed = 1.0,
    dagger: Dagger = 0,
    collect: Collect = None,
    answers: Answers = 600,
    minutes: Minutes = None,
    max_new_tokens: NewTokens = 320,
    max_prompt_tokens: PromptTokens = 900,
    collect_batch: CollectBatch = 32,
    collect_seed: CollectSeed = 0,
    dtype: Dtype = "bfloat16",
    device: opt.Device = None,
) -> None:
    """Learn how many tokens of a copied draft the model will keep, for `--method hvd`.

    Labels come from replaying the model's greedy answers: no pass of the model is needed. FILE.json
    has the report: precision and recall, beside the frequency rule and who always or never copies.
    """
    from hasten.payoff.features import class_table
    from hasten.payoff.predictor import CacheOptions
    from hasten.train.batched import keep_freed_memory
    from hasten.train.payoff import run
    from hasten.train.payoff.collect import CollectOptions
    from hasten.train.payoff.collect import collect as answer
    from hasten.train.payoff.fit import FitOptions

    if out_file is None and collect is None:
        raise OptionError("out", "is missing", "Name the file to write, or a folder to --collect")
    sources = [*(data or ()), *([] if collect is None else [str(collect)])]
    if not sources:
        raise OptionError("data", "is missing", "Name rows of `hasten train data`, or --collect")
    cache = CacheOptions(longest, max_tree_depth, max_spec_factor, min_token_prob).check()
    fit = FitOptions(epochs, batch, lr, seed=seed)
    options = run.Options(cache, kind, fit, tau, s0, model_keeps, dagger, texts)
    collecting = CollectOptions(
        answers, minutes, max_new_tokens, max_prompt_tokens, collect_batch, collect_seed
    )
    if out_file is not None:
        opt.make_folder("out", out_file.parent)
    if collect is not None:
        keep_freed_memory()
    llm = load_model(model, "ar", dtype=dtype, device=device, kernels="torch")
    with _shown() as show:
        try:
            if collect is not None:
                there = answer(llm, collect, collecting, show)
                err().print(f"{there} answers are in {collect}", soft_wrap=True)
            if out_file is None:
                return
            kinds = class_table(llm.tokenizer, llm.target.info.vocab_size)
            _, report = run.run(llm.target.info, kinds, sources, out_file, options, show)
        except KeyboardInterrupt:
            note = "stopped: no predictor was written"
            if collect is not None:
                note += f". {collect} keeps all finished waves; the same command goes on"
            err().print(note, soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
    _print(report, out_file)


@contextmanager
def _shown() -> Iterator[Callable[[str, int, int], None]]:
    """Progress on stderr: a bar on a terminal, else a line now and then."""
    console = err()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("start")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            last = done >= total
            if not console.is_terminal and (last or done % max(total // 10, 1) == 0):
                console.print(f"{what}: {done:,} of {total:,}", soft_wrap=True)

        yield show


def _print(report: dict[str, Any], out_file: Path) -> None:
    """The table of rules on the test texts."""
    from hasten.train.payoff.run import doubt, report_file

    lines = table("rule")
    for name in ("precision", "recall", "to the cache", "tokens a round"):
        lines.add_column(name, justify="right")
    for name, groups in report["test"].items():
        found = groups["overall"]
        states = found["states"]
        lines.add_row(
            name,
            f"{states['precision']:.1%}" if states["routed"] else "",
            f"{states['recall']:.1%}",
            f"{found['cached'] / max(found['rounds'], 1):.1%}",
            f"{found['tokens_per_round']:.2f}",
        )
    out().print(lines)
    count, tau = report["texts"]["test"], report["tau"]
    keeps = report["options"]["model_keeps"]
    words = f"{count} texts held out; tau {tau:g}; a model arm that keeps {keeps:g} is assumed. "
    states = report["test"]["always"]["overall"]["states"]
    if warning := doubt(states["states"], states["paying"]):
        words += f"Note: {warning}. "
    words += f"{report['kind']} is in {out_file}, all figures in {report_file(out_file)}"
    out().print(words, soft_wrap=True)
