"""``hasten serve``: an OpenAI-compatible server for this machine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasten.cli import options as opt
from hasten.cli.screen import err, load_model, out
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.api import LLM
    from hasten.serve.settings import ServerOptions

_ADDRESS, _LIMITS = "Address", "Limits"


def _option(*names: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, **more)


Host = Annotated[
    str,
    _option(
        "--host",
        panel=_ADDRESS,
        help="Where to listen: 127.0.0.1 is this machine only, 0.0.0.0 everyone who reaches it.",
    ),
]
Port = Annotated[int, _option("--port", "-p", panel=_ADDRESS, help="0 takes a free one.")]
ServedName = Annotated[
    str | None,
    _option(
        "--served-model-name",
        panel=_ADDRESS,
        metavar="NAME",
        help="What clients call the model.",
        show_default="its own name",
    ),
]
ApiKey = Annotated[
    str | None,
    _option(
        "--api-key",
        panel=_ADDRESS,
        metavar="KEY",
        envvar="HASTEN_API_KEY",
        help="Answer only those who give it. Better set HASTEN_API_KEY: others see a command line.",
        show_default="none",
    ),
]
AllowOrigin = Annotated[
    list[str] | None,
    _option(
        "--allow-origin",
        panel=_ADDRESS,
        metavar="URL",
        help="A web origin whose pages may call the server (CORS); may be given again; * is any.",
        show_default="none",
    ),
]
AllowHost = Annotated[
    list[str] | None,
    _option(
        "--allow-host",
        panel=_ADDRESS,
        metavar="NAME",
        help="A Host header that is answered; may be given again.",
        show_default="this machine's names, or any where --host isn't this machine only",
    ),
]
Methods = Annotated[
    list[str] | None,
    _option(
        "--methods",
        panel="Model",
        metavar="NAMES",
        help="Methods that a request may ask for besides --method; may be given again.",
        show_default="those that need nothing trained",
    ),
]
Concurrency = Annotated[
    int, _option("--max-concurrency", panel=_LIMITS, help="Requests that share passes.")
]
Queue = Annotated[
    int, _option("--queue", panel=_LIMITS, help="Requests that may wait; more are turned away.")
]
MaxTokens = Annotated[
    int | None,
    _option(
        "--max-tokens",
        panel=_LIMITS,
        help="Most tokens of an answer that may be asked for.",
        show_default="the model's context",
    ),
]
CacheTokens = Annotated[
    int,
    _option("--cache-tokens", panel=_LIMITS, help="Tokens kept for the next turns of chats."),
]
BodyBytes = Annotated[int, _option("--max-body", panel=_LIMITS, help="Bytes of a request's body.")]
Grace = Annotated[
    float,
    _option("--grace", panel=_LIMITS, help="Seconds that requests under way get at the end."),
]
SharePrefixes = Annotated[
    bool,
    _option(
        "--share-prefixes",
        panel=_LIMITS,
        help="Let any request reuse what others' prompts left in the cache: quicker, but its "
        "time tells what was asked before.",
    ),
]
Log = Annotated[bool, _option("--log", panel="Output", help="A line for each request, no texts.")]


@opt.loads
def serve(
    model: opt.Model = None,
    method: opt.MethodOption = None,
    methods: Methods = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedName = None,
    api_key: ApiKey = None,
    allow_origin: AllowOrigin = None,
    allow_host: AllowHost = None,
    max_concurrency: Concurrency = 16,
    queue: Queue = 64,
    max_tokens: MaxTokens = None,
    cache_tokens: CacheTokens = 32_768,
    max_body: BodyBytes = 2 << 20,
    grace: Grace = 30.0,
    share_prefixes: SharePrefixes = False,
    log: Log = False,
    *,
    loading: opt.Loading,
) -> None:
    """Serve a model to OpenAI clients on this machine, with a page to chat on."""
    _need_extra()
    from hasten.methods import is_lossy, split
    from hasten.serve.app import create_app
    from hasten.serve.run import Server, address, bind
    from hasten.serve.settings import LOOPBACK, ServerOptions

    local = host in (*LOOPBACK, "::1") or host.startswith("127.")
    options = ServerOptions(
        served_model_name=served_model_name,
        api_key=api_key,
        methods=tuple(name for given in methods or () for name in split(given)),
        max_concurrency=max_concurrency,
        queue=queue,
        cache_tokens=cache_tokens,
        max_tokens=max_tokens,
        max_body=max_body,
        share_prefixes=share_prefixes,
        allow_origin=tuple(allow_origin or ()),
        allow_host=(*(LOOPBACK if local else ()), *(allow_host or ())),
        grace=grace,
    )
    with bind(host, port) as bound:  # before the model: a port in use is told at once
        llm = load_model(model, method, **loading)
        app = create_app(llm, options)
        if log:
            _log_requests()
        if is_lossy(llm.method):
            err().print(f"note: {llm.method} is lossy, and answers requests that name no method")
        if not local and api_key is None:
            err().print(f"note: whoever reaches {host} may use this server; see --api-key")

        def ready() -> None:
            out().print(_ready_line(llm, options, address(bound)), soft_wrap=True)

        def ending(running: int) -> None:
            if running:
                err().print(
                    f"ending: requests under way ({running}) have {grace:g} s; Ctrl-C again "
                    "cancels them",
                    soft_wrap=True,
                )

        Server(app, grace=grace, on_ready=ready, on_ending=ending).run(sockets=[bound])


def _ready_line(llm: LLM, options: ServerOptions, url: str) -> str:
    info = llm.target.info
    name = options.served_model_name or info.name
    dtype = str(info.dtype).removeprefix("torch.")
    return (
        f"{url} serves {name} ({llm.method}, {dtype}, {info.engine} engine): a page to chat on, "
        "and OpenAI's API under /v1. Ctrl-C ends"
    )


def _need_extra() -> None:
    """Raise OptionError when the packages of the extra aren't there."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "serve", f"needs the package {error.name}", "Install it: pip install 'hasten[serve]'"
        ) from error


def _log_requests() -> None:
    logger = logging.getLogger("hasten.serve")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
