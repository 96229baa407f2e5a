"""What the operator of a server decides, checked."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.errors import OptionError
from hasten.methods import parse

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine in a Host header."""

OFFERED = ("ar", "auto", "prompt-lookup", "recycling", "racer", "suffix")
"""Methods that a request may ask for where the operator names none: they need nothing trained."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """A server's limits and rules.

    served_model_name  what clients call the model; None: its own name
    api_key            asked for as ``Authorization: Bearer KEY``, but at ``/`` and ``/health``
    methods            that a request may ask for, as method strings; the model's default always
                       may be; empty: `OFFERED`
    max_concurrency    requests that share passes; each of ``n`` answers counts as one
    queue              requests that may wait; more get 429
    choices            most answers one request may ask for (prompts x ``n``)
    cache_tokens       tokens of finished requests kept for their next turns
    max_tokens         most tokens of an answer that may be asked for; None: the model's context
    max_body           bytes of the longest request body; a longer one gets 413
    body_seconds       time that a body may take to come; then 408
    share_prefixes     any request may reuse what another's prompt left in the cache. Faster, but
                       the time to the first token tells whether somebody asked the same before
    allow_origin       web origins whose pages may call the server (CORS); ``"*"``: any
    allow_host         Host headers that are answered (without port); empty: any. It keeps out web
                       pages whose name was made to point at this machine (DNS rebinding)
    grace              seconds that requests under way get at the end
    """

    served_model_name: str | None = None
    api_key: str | None = None
    methods: tuple[str, ...] = ()
    max_concurrency: int = 16
    queue: int = 64
    choices: int = 16
    cache_tokens: int = 32_768
    max_tokens: int | None = None
    max_body: int = 2 << 20
    body_seconds: float = 30.0
    share_prefixes: bool = False
    allow_origin: tuple[str, ...] = ()
    allow_host: tuple[str, ...] = LOOPBACK
    grace: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (
            ("max_concurrency", 1),
            ("queue", 0),
            ("choices", 1),
            ("cache_tokens", 0),
            ("max_tokens", 1),
            ("max_body", 1),
        ):
            value = getattr(self, name)
            if value is None and name == "max_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(name, f"must be a whole number >= {least}, got {value!r}")
        for name in ("body_seconds", "grace"):
            if not getattr(self, name) >= 0:
                raise OptionError(name, f"must be a number >= 0, got {getattr(self, name)!r}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise OptionError("api_key", "must be some ASCII text", "Leave it out for no key")
        for name in self.methods:
            try:
                parse(name)
            except OptionError as error:
                raise OptionError("methods", str(error).partition(": ")[2]) from error
        for origin in self.allow_origin:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise OptionError(
                    "allow_origin", f"{origin!r} isn't an origin", "Write https://example.com"
                )
