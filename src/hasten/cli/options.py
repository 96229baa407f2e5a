"""The options that several commands share, named and checked as in the library.

An option that isn't given is not passed on, so the library's defaults rule; ``show_default`` only
tells them (a test compares).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hasten.types import SamplingParams


def _print_version(wanted: bool) -> None:
    if wanted:
        import hasten

        typer.echo(f"hasten {hasten.__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version."),
]

_MODEL, _SAMPLING, _OUTPUT = "Model", "Sampling", "Output"


def _option(*names: str, panel: str, help: str, default: str | bool = False, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, show_default=default, **more)


Name = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A known alias, a Hugging Face id, a folder or a .gguf file.",
        show_default="smollm2-135m, embedded",
    ),
]
Model = Annotated[
    str | None,
    _option(
        "--model",
        "-m",
        panel=_MODEL,
        default="smollm2-135m, embedded",
        metavar="NAME|PATH",
        help="A known alias, a Hugging Face id, a folder or a .gguf file.",
    ),
]
MethodOption = Annotated[
    str | None,
    _option(
        "--method",
        panel=_MODEL,
        default="auto",
        metavar="NAME",
        help="How to draft, as `NAME[:VARIANT][,key=value...]`; see `hasten methods`.",
    ),
]
Dtype = Annotated[
    str | None,
    _option(
        "--dtype",
        panel=_MODEL,
        default="the checkpoint's own",
        metavar="NAME",
        help="float32, bfloat16 or float16.",
    ),
]
Device = Annotated[
    str | None,
    _option(
        "--device",
        panel=_MODEL,
        default="cuda where there is one",
        metavar="NAME",
        help="cpu, cuda, ...",
    ),
]
Engine = Annotated[
    str | None,
    _option(
        "--engine",
        panel=_MODEL,
        default="auto",
        metavar="NAME",
        help="auto, fused (hasten's fast decoder) or transformers.",
    ),
]
Quantize = Annotated[
    str | None,
    _option(
        "--quantize",
        panel=_MODEL,
        default="no",
        metavar="NAME",
        help="int8 or int4 rounds the weights; gguf takes a GGUF file's own blocks as they are.",
    ),
]
Kernels = Annotated[
    str | None,
    _option(
        "--kernels",
        panel=_MODEL,
        default="auto",
        metavar="NAME",
        help="Of the fused engine on a CPU: native (hasten's own, compiled once), torch, or auto.",
    ),
]
KvDtype = Annotated[
    str | None,
    _option(
        "--kv-dtype",
        panel=_MODEL,
        default="the dtype",
        metavar="NAME",
        help="Of keys and values, with native kernels: float32, bfloat16, or int8, which rounds "
        "them (another model in effect).",
    ),
]
Exact = Annotated[
    bool,
    _option(
        "--exact",
        panel=_MODEL,
        help="Insist on the same bits for a token whatever else is in its pass; checked at load.",
    ),
]

Loading = dict[str, Any]
"""The options of `loads` that were given, by their names in `hasten.load`."""

_LOADING: dict[str, tuple[Any, Any]] = {
    "dtype": (Dtype, None),
    "device": (Device, None),
    "engine": (Engine, None),
    "quantize": (Quantize, None),
    "kernels": (Kernels, None),
    "kv_dtype": (KvDtype, None),
    "exact": (Exact, False),
}
"""Annotation and default by name."""


def loads(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of loading a model, which its parameter `loading` gets."""
    whole = signature(command, eval_str=True)
    own = [p for name, p in whole.parameters.items() if name != "loading"]
    kind = Parameter.KEYWORD_ONLY
    added = [
        Parameter(name, kind, default=default, annotation=annotation)
        for name, (annotation, default) in _LOADING.items()
    ]

    @wraps(command)
    def run(**values: Any) -> None:
        named = {name: values.pop(name) for name in _LOADING}
        given = {name: named[name] for name, (_, empty) in _LOADING.items() if named[name] != empty}
        command(**values, loading=given)

    made = whole.replace(parameters=[*own, *added])
    run.__signature__ = made  # type: ignore[attr-defined]  # typer reads both
    run.__annotations__ = {p.name: p.annotation for p in made.parameters.values()}
    return run


MaxNewTokens = Annotated[
    int | None,
    _option(
        "--max-new-tokens", "-n", panel=_SAMPLING, default="256", help="Longest answer, in tokens."
    ),
]
Temperature = Annotated[
    float | None,
    _option(
        "--temperature",
        "-t",
        panel=_SAMPLING,
        default="0.0",
        help="0 takes the likeliest token, more is freer.",
    ),
]
TopK = Annotated[
    int | None,
    _option(
        "--top-k",
        panel=_SAMPLING,
        default="0",
        help="Draw from the k likeliest tokens only; 0 is off.",
    ),
]
TopP = Annotated[
    float | None,
    _option(
        "--top-p",
        panel=_SAMPLING,
        default="1.0",
        help="Draw from the likeliest tokens that make up this probability.",
    ),
]
MinP = Annotated[
    float | None,
    _option(
        "--min-p",
        panel=_SAMPLING,
        default="0.0",
        help="Leave out tokens less likely than this share of the likeliest.",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    _option(
        "--repetition-penalty",
        panel=_SAMPLING,
        default="1.0",
        help="Above 1 makes tokens seen before less likely.",
    ),
]
Seed = Annotated[
    int | None,
    _option("--seed", panel=_SAMPLING, default="a fresh one", help="Same seed, same answer."),
]
Stop = Annotated[
    list[str] | None,
    _option(
        "--stop",
        panel=_SAMPLING,
        metavar="TEXT",
        help="Text that ends the answer; may be given again.",
    ),
]
IgnoreEos = Annotated[
    bool,
    _option("--ignore-eos", panel=_SAMPLING, help="Go on past the model's end-of-sequence token."),
]
Verify = Annotated[
    str | None,
    _option(
        "--verify",
        panel=_SAMPLING,
        default="greedy, or match when sampling",
        metavar="NAME",
        help="greedy, match or rejection: all lossless.",
    ),
]
System = Annotated[
    str | None,
    _option(
        "--system", panel="Prompt", metavar="TEXT", help="A system message put before the prompt."
    ),
]
Stats = Annotated[
    bool,
    _option(
        "--stats",
        panel=_OUTPUT,
        help="Print speed, accepted length and where the time went, to stderr.",
    ),
]
Json = Annotated[bool, _option("--json", panel=_OUTPUT, help="Print one JSON value instead.")]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        min=1,
        help="Take this many prompts, spread evenly over the suite.",
        show_default="all",
    ),
]


def sampling(**given: Any) -> SamplingParams:
    """The options that were given as `SamplingParams`; raises OptionError naming the bad one."""
    from hasten.types import SamplingParams

    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def check_method(method: str | None, params: SamplingParams, verify: str | None) -> None:
    """What a method refuses whatever the model, before one is loaded. Raises OptionError."""
    from hasten import methods
    from hasten.verify import pick_verifier

    kind = None if method is None else methods.get(methods.parse(method).name)
    if kind is None or not (kind.population or kind.arbitrates):
        pick_verifier(verify, greedy=params.is_greedy)
        return
    methods.check_verify(kind, verify)
    if kind.population:
        from hasten.smc.options import check_temperature

        check_temperature(params.temperature)


def make_folder(option: str, path: Path) -> None:
    """Make a folder for what a command writes. Raises OptionError naming `option`."""
    from hasten.errors import OptionError

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            option, f"can't make the folder {path} ({error.strerror or error})", "Name another"
        ) from error


def read_text(option: str, path: Path) -> str:
    """A text file's content. Raises OptionError naming `option`."""
    from hasten.errors import OptionError

    try:
        return path.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(
            option, f"{path} isn't UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    except OSError as error:
        raise OptionError(option, f"can't read {path} ({error.strerror or error})") from error
