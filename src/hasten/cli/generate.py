"""``hasten generate``: answer one prompt."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hasten.cli import options as opt
from hasten.cli.screen import (
    busy,
    err,
    load_model,
    out,
    print_json,
    stats_table,
    summary_json,
    table,
    tell_lossy,
    write,
)
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.api import LLM
    from hasten.types import Result

PromptArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="The prompt; `-`, or nothing with text piped in, reads stdin.",
        show_default=False,
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        help="Read the prompt from this file.",
        rich_help_panel="Prompt",
        show_default=False,
    ),
]
NoTemplate = Annotated[
    bool,
    typer.Option(
        "--no-template",
        help="Let the text in as it is, without the chat template.",
        rich_help_panel="Prompt",
    ),
]
StreamFlag = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Print the answer as it comes, or at once.",
        rich_help_panel="Output",
        show_default="stream",
    ),
]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace", help="Show which tokens were drafted, round by round.", rich_help_panel="Output"
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        help="Print each token's log-probability, and the N likeliest.",
        rich_help_panel="Output",
        show_default=False,
    ),
]


@opt.loads
def generate(
    prompt: PromptArgument = None,
    prompt_file: PromptFile = None,
    system: opt.System = None,
    no_template: NoTemplate = False,
    model: opt.Model = None,
    method: opt.MethodOption = None,
    max_new_tokens: opt.MaxNewTokens = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    seed: opt.Seed = None,
    verify: opt.Verify = None,
    stream: StreamFlag = None,
    stats: opt.Stats = False,
    trace: Trace = False,
    logprobs: Logprobs = None,
    json: opt.Json = False,
    *,
    loading: opt.Loading,
) -> None:
    """Answer one prompt, faster than plain decoding and (lossy methods aside) with its text."""
    from hasten.errors import ContextError

    _check_output(stream, trace=trace, json=json)
    text = _prompt(prompt, prompt_file)
    params = opt.sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        ignore_eos=ignore_eos,
        seed=seed,
        logprobs=logprobs,
    )
    if not text:
        raise ContextError("prompt: is empty. Give some text")
    _check_trace(trace, method)
    opt.check_method(method, params, verify)
    llm = load_model(model, method, **loading)
    tell_lossy(llm.method)
    request: dict[str, Any] = {
        "params": params,
        "verify": verify,
        "template": not no_template,
        "system": system,
    }
    streaming = stream is not False and not (trace or json)
    if streaming:
        result = _streamed(llm, text, request)
    else:
        with busy("answering"):
            result = llm.generate(text, trace=trace, **request)
    if json:
        print_json(_as_json(llm, result))
    elif trace:
        from hasten.cli.trace import print_trace

        print_trace(llm.tokenizer, result)
    elif not streaming:
        write(result.text + "\n")
    if logprobs is not None and not json:
        out().print(_logprob_table(llm, result))
    if stats:
        err().print(stats_table(result.metrics, result.method, llm.target.info.precision))


def _check_output(stream: bool | None, *, trace: bool, json: bool) -> None:
    """Refuse outputs that exclude each other."""
    if trace and json:
        raise OptionError("trace", "contradicts --json", "Choose one")
    if stream and (trace or json):
        raise OptionError("stream", f"contradicts --{'trace' if trace else 'json'}", "Choose one")


def _check_trace(trace: bool, method: str | None) -> None:
    """Refuse to mark kept drafts where none is kept or refused."""
    from hasten import methods

    if trace and method is not None:
        name = methods.parse(method).name
        if methods.get(name).population:
            problem = f"marks kept drafts, and {name} weighs them instead"
            raise OptionError("trace", problem, "Leave it out")


def _prompt(prompt: str | None, path: Path | None) -> str:
    """The prompt from where the user put it; a file's or pipe's last end of line is dropped."""
    if prompt is not None and path is not None:
        raise OptionError(
            "prompt_file", "contradicts the prompt on the command line", "Give one of the two"
        )
    if path is not None:
        return opt.read_text("prompt_file", path).removesuffix("\n")
    if prompt not in (None, "-"):
        return str(prompt)
    if prompt is None and sys.stdin.isatty():
        raise OptionError(
            "prompt",
            "is missing",
            'Give one: hasten generate "..."; or pipe text in; or --prompt-file FILE',
        )
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise OptionError(
            "prompt", f"stdin isn't UTF-8 text ({error.reason} at byte {error.start})"
        ) from error


def _streamed(llm: LLM, text: str, request: dict[str, Any]) -> Result:
    """Print the answer piece by piece. Stopped early, the line is ended all the same."""
    with llm.stream(text, **request) as stream:
        try:
            for piece in stream:
                write(piece)
        finally:
            write("\n")
        return stream.result


def _show(llm: LLM, token: int) -> str:
    return repr(llm.tokenizer.decode([token]))


def _logprob_table(llm: LLM, result: Result) -> Table:
    rows = table(
        "token",
        "text",
        "logprob",
        title="natural logarithm, under the raw logits",
        title_justify="left",
    )
    top = max((len(t.top) for t in result.logprobs or ()), default=0)
    if top:
        rows.add_column(f"{top} likeliest")
    for each in result.logprobs or ():
        row = [str(each.token), _show(llm, each.token), f"{each.logprob:.4f}"]
        if top:
            row.append(" ".join(f"{_show(llm, t)} {p:.2f}" for t, p in each.top))
        rows.add_row(*row)
    return rows


def _as_json(llm: LLM, result: Result) -> dict[str, Any]:
    """The whole result as plain data."""
    from hasten.methods import get

    value: dict[str, Any] = {
        "text": result.text,
        "tokens": list(result.tokens),
        "prompt_tokens": len(result.prompt_tokens),
        "finish_reason": result.finish_reason and result.finish_reason.value,
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "method": result.method,
        "lossless": get(llm.method.name).lossless,
        "model": llm.target.info.name,
        "dtype": str(llm.target.info.dtype).removeprefix("torch."),
        "kernels": llm.target.info.kernels,
        "quantize": llm.target.info.quantize,
        "metrics": summary_json(result.metrics),
    }
    if result.logprobs is not None:
        value["logprobs"] = [asdict(each) for each in result.logprobs]
    if result.overrides:
        value["overrides"] = [
            {
                "position": each.position,
                "drafted": each.drafted,
                "drafted_text": _show(llm, each.drafted),
                "target": each.target,
                "target_text": _show(llm, each.target),
            }
            for each in result.overrides
        ]
    if result.population is not None:
        value["population"] = asdict(result.population)
        for answer in value["population"]["answers"]:
            answer["text"] = llm.tokenizer.decode(answer["tokens"], skip_special_tokens=True)
    return value
