"""The main job: the same answers, faster.

Answers a few prompts plainly and accelerated, turn about, on one model; prints both answers,
whether they are identical, and the measured speedup. Run it with `make demo`, or on your own model:

    python examples/demo.py --model Qwen/Qwen3-0.6B --method prompt-lookup,nodes=12 --dtype bfloat16

Exit code 1: an answer differs in float32, which must never happen.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# The first two repeat the prompt, the third repeats itself, the last two repeat little.
PROMPTS = {
    "correct spelling": """Correct the spelling and change nothing else:

The library opens at nine in the morning and closes at six in the evening. Childen under ten must \
come with an adult. Books can be borowed for three weeks, and you can renew them twice if nobody \
else has asked for them.""",
    "quote a text": """Use the text to answer, and quote the sentences you used.

Text: The Great Red Spot is a storm on Jupiter, bigger than the Earth. It has been watched since \
1831. It turns once in about six days, and it has been shrinking since the nineteenth century.

Question: How long does the Great Red Spot take to turn once?""",
    "write code": "Write four short Python functions that add, subtract, multiply and divide two \
numbers.",
    "explain freely": "Explain to a ten-year-old why the sky is blue.",
    "tell a story": "Tell a short story about a fox who learns to swim.",
}

console = Console(highlight=False)
notes = Console(stderr=True, highlight=False)


class Timed:
    """One way to answer one prompt: the answer, and its decoding time over all repeats."""

    def __init__(self) -> None:
        self.result = None
        self.tokens, self.seconds, self.passes = 0, 0.0, 0

    def add(self, result) -> None:
        if self.result is not None and result.tokens != self.result.tokens:
            raise SystemExit("error: two runs of the same method gave different answers")
        self.result = result
        self.tokens += result.metrics.pass_tokens
        self.seconds += result.metrics.decode_s
        self.passes += result.metrics.target_passes

    @property
    def speed(self) -> float:
        """Tokens per second after the first one."""
        return self.tokens / self.seconds if self.seconds else 0.0


def answer(llm, prompt: str, method: str, length: int, repeats: int, step) -> tuple[Timed, Timed]:
    """Plain and accelerated, in turn; who goes first changes: neither gains by a quiet moment."""
    plain, fast = Timed(), Timed()
    for repeat in range(repeats):
        order = [("ar", plain), (method, fast)]
        for name, timed in order if repeat % 2 == 0 else reversed(order):
            timed.add(llm.generate(prompt, method=name, max_new_tokens=length))
            step()
    return plain, fast


def show(title: str, prompt: str, plain: Timed, fast: Timed, method: str) -> bool:
    """Both answers side by side, and what they cost; True when they are identical."""
    same = plain.result.tokens == fast.result.tokens
    console.rule(f"[bold]{escape(title)}[/]", align="left", style="dim")
    console.print(prompt, style="dim", markup=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    half = min(console.width, 120) // 2 - 2
    table.add_column(f"plain: {plain.speed:.1f} tokens/s", width=half, overflow="fold")
    table.add_column(f"{method}: {fast.speed:.1f} tokens/s", width=half, overflow="fold")
    table.add_row(escape(plain.result.text.strip()), escape(fast.result.text.strip()))
    console.print(table)
    verdict = "[green]identical[/]" if same else "[bold red]DIFFERENT[/]"
    ratio = fast.speed / plain.speed if plain.speed else 1.0
    console.print(
        f"{verdict}; speedup [bold]{ratio:.2f}x[/] "
        f"({fast.result.metrics.mean_accepted_length:.2f} tokens a pass)\n"
    )
    return same


def summary(timed: dict[str, tuple[Timed, Timed]], same: int, label: str, *, busy: bool) -> None:
    """The table of all prompts."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=label, title_justify="left")
    for name in ("prompt", "plain\ntokens/s", "accelerated\ntokens/s", "speedup"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    ratios = []
    for title, (plain, fast) in timed.items():
        ratios.append(fast.speed / plain.speed if plain.speed else 1.0)
        table.add_row(title, f"{plain.speed:.1f}", f"{fast.speed:.1f}", f"{ratios[-1]:.2f}x")
    console.print(table)
    total = [
        sum(getattr(pair[which], name) for pair in timed.values())
        for which in (0, 1)
        for name in ("tokens", "seconds")
    ]
    micro = (total[2] / total[3]) / (total[0] / total[1]) if total[1] and total[3] else 1.0
    console.print(
        f"{same} of {len(timed)} answers identical; speedup [bold]{micro:.2f}x[/] over all tokens, "
        f"{sum(ratios) / len(ratios):.2f}x mean of the prompts\n"
        "[dim]Decoding only, from the first token on, against hasten's own plain decoding.[/]"
    )
    if busy:
        console.print("[yellow]Other work used this machine meanwhile: times are blurred.[/]")


def main(
    model: Annotated[
        str, typer.Option(help="An alias, Hugging Face id, folder or .gguf file.")
    ] = "smollm2-135m",
    method: Annotated[str, typer.Option(help="See `hasten methods`.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each way per prompt.")] = 2,
) -> None:
    """Answer a few prompts plainly and accelerated; compare answers and speed."""
    notes.print(
        f"loading {model} (the first time its weights are fetched: about 90 MB)",
        style="dim",
        markup=False,
    )
    import hasten

    try:
        llm = hasten.load(model, method=method, dtype=dtype)
        different = compare(llm, str(llm.method), max_new_tokens, repeats)
    except hasten.HastenError as error:
        notes.print(f"error: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if different:
        exact = str(llm.target.info.dtype) == "torch.float32"
        said = "float32 answers must be identical: please report this"
        why = (
            f"rounding can part answers in this precision: `hasten verify --dtype {dtype}` says why"
        )
        notes.print(said if exact else why)
        raise typer.Exit(1 if exact else 0)


def compare(llm, method: str, length: int, repeats: int) -> int:
    """Run and print everything; how many answers differ."""
    from hasten.environment import LoadMeter, is_busy, usable_cores

    info = llm.target.info
    llm.generate("Hello", max_new_tokens=8)  # the first passes of a process are slow
    timed: dict[str, tuple[Timed, Timed]] = {}
    same = 0
    meter = LoadMeter()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("answering", total=2 * repeats * len(PROMPTS))
        for title, prompt in PROMPTS.items():
            bar.update(task, description=title)
            pair = answer(llm, prompt, method, length, repeats, lambda: bar.advance(task))
            timed[title] = pair
            bar.stop()
            same += show(title, prompt, *pair, method)
            bar.start()
    dtype = str(info.dtype).removeprefix("torch.")
    busy = is_busy(meter.others() or 0.0, usable_cores())
    summary(timed, same, f"{info.name}, {dtype} on {info.device}, {method}", busy=busy)
    return len(timed) - same


if __name__ == "__main__":
    typer.run(main)
