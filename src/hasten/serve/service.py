"""Between requests and the worker: methods, prompts, grammars, tickets. Nothing here blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from hasten import grammar, methods
from hasten.errors import CapabilityError, OptionError
from hasten.serve.faults import ApiError, bad, shutting_down, too_long
from hasten.serve.meters import Meters
from hasten.serve.requests import GrammarRequest, Request
from hasten.serve.settings import OFFERED, ServerOptions
from hasten.serve.token_texts import TokenTexts
from hasten.tickets import Ticket
from hasten.worker import Worker

if TYPE_CHECKING:
    from hasten.api import LLM

_Made = TypeVar("_Made")

_MOST_METHODS = 16
"""Each holds what it has loaded and learned."""


@dataclass(slots=True, eq=False)
class Job:
    """A request under way: its tickets in the order of the answer's choices."""

    request: Request
    tickets: list[Ticket]

    def cancel(self) -> None:
        """End what hasn't ended."""
        for ticket in self.tickets:
            if not ticket.ended:
                ticket.cancel()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum(t.prompt_tokens for t in self.tickets[:: self.request.n])

    @property
    def cached_tokens(self) -> int:
        """Of those, the ones that an earlier request had run."""
        return sum(t.cached_tokens for t in self.tickets[:: self.request.n])


class Service:
    """One model, and the requests it answers.

    Tokenizing and checking run on a few threads, loading a method or compiling a grammar on one of
    their own, and passes on the worker's: the event loop only hands things over.
    """

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm, self.options = llm, options
        self.name = options.served_model_name or llm.target.info.name
        self.methods = offered_methods(llm, options)
        self.worker = Worker(
            llm,
            most=options.max_concurrency,
            waiting=options.queue,
            cache_tokens=options.cache_tokens,
        )
        self.texts = TokenTexts(llm.tokenizer)
        self.meters = Meters(self.name, self.worker, llm.target)
        self.jobs: set[Job] = set()
        self.draining = False
        self._hurried = False
        self._starting = 0
        self._quick = ThreadPoolExecutor(4, "hasten-serve")
        self._slow = ThreadPoolExecutor(1, "hasten-prepare")
        self._ready = set(self.methods if options.methods else [llm.method])

    # -- one request -----------------------------------------------------------------------------

    async def start(self, request: Request) -> Job:
        """Check everything and hand the request in. Raises ApiError and the library's errors; then
        nothing of it runs."""
        if self.draining:
            raise shutting_down()
        self._starting += 1
        try:
            job = Job(request, await self._tickets(request))
        finally:
            self._starting -= 1
        self.jobs.add(job)
        return job

    async def _tickets(self, request: Request) -> list[Ticket]:
        if request.model not in (None, self.name):
            raise ApiError(
                404,
                f"There is no model {request.model!r} here. It's called {self.name!r}",
                param="model",
                code="model_not_found",
            )
        count = len(request.prompts) * request.n
        most = min(self.options.choices, self.options.max_concurrency + self.options.queue)
        if count > most:
            raise bad("n", f"this server gives up to {most} answers at a time")
        limit = self.options.max_tokens
        if limit is not None and (request.max_tokens or 0) > limit:
            raise bad("max_tokens", f"this server gives up to {limit} tokens a request")
        spec = await self._method(request.method)
        held = await self._grammar(request.grammar)
        return await self._handed_in(partial(self._submit, request, spec, held))

    def finish(self, job: Job) -> None:
        """The request is over, whatever the reason: end what is left of it."""
        job.cancel()
        self.jobs.discard(job)

    def _submit(
        self, request: Request, spec: methods.MethodSpec, held: grammar.Grammar | None
    ) -> list[Ticket]:
        """Hand in all answers, or none."""
        tickets: list[Ticket] = []
        try:
            for prompt in request.prompts:
                ids = self._ids(prompt, chat=request.chat)
                processors = () if held is None else (held,)
                tickets += self.worker.submit_n(
                    ids,
                    request.n,
                    scope=self._scope(request),
                    pieces=request.stream,
                    params=replace(
                        request.params,
                        max_new_tokens=self._longest(request, len(ids)),
                        processors=processors,
                    ),
                    # naming the default waits for the model's lock for nothing
                    method=None if spec == self.llm.method else spec,
                    verify=request.verify,
                )
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets

    def _ids(self, prompt: Any, *, chat: bool) -> list[int]:
        info = self.llm.target.info
        ids = self.llm.tokenize(prompt, template=chat)
        if len(ids) >= info.context_limit:
            raise too_long(len(ids), info.context_limit, "messages" if chat else "prompt")
        if not all(0 <= i < info.vocab_size for i in ids):
            raise bad("prompt", f"holds ids outside of 0..{info.vocab_size - 1}")
        return ids

    def _longest(self, request: Request, prompt: int) -> int:
        """The most tokens of an answer; the context ends it earlier by itself."""
        room = self.llm.target.info.context_limit - prompt
        most = room if self.options.max_tokens is None else self.options.max_tokens
        return most if request.max_tokens is None else request.max_tokens

    def _scope(self, request: Request) -> str | None:
        if self.options.share_prefixes:
            return "all"
        return None if request.cache_key is None else f"key {request.cache_key}"

    # -- what may take seconds -------------------------------------------------------------------

    async def _method(self, name: str | None) -> methods.MethodSpec:
        """The method asked for, loaded."""
        spec = self.llm.method if name is None else methods.parse(name)
        if spec not in self.methods:
            raise bad(
                "method",
                f"{str(spec)!r} isn't offered here. Choose one of: "
                f"{', '.join(str(each) for each in self.methods)}",
            )
        if spec not in self._ready:
            await self._on(self._slow, lambda: self.llm.prepare(spec))
            self._ready.add(spec)
        return spec

    async def _grammar(self, wanted: GrammarRequest | None) -> grammar.Grammar | None:
        if wanted is None:
            return None
        info = self.llm.target.info
        make = getattr(grammar, wanted.kind)
        given = () if wanted.value is None else (wanted.value,)
        named = {"vocab_size": info.vocab_size, "eos_ids": info.eos_ids}
        made: grammar.Grammar = await self._on(
            self._slow, lambda: make(self.llm.tokenizer, *given, **named)
        )
        return made

    async def _on(self, threads: ThreadPoolExecutor, run: Callable[[], _Made]) -> _Made:
        return await asyncio.get_running_loop().run_in_executor(threads, run)

    async def _handed_in(self, submit: Callable[[], list[Ticket]]) -> list[Ticket]:
        """Run `submit`. When the client goes away meanwhile its tickets are cancelled."""
        handing = asyncio.ensure_future(self.off_loop(submit))
        try:
            return await asyncio.shield(handing)
        except asyncio.CancelledError:
            handing.add_done_callback(_cancel_tickets)
            raise

    async def off_loop(self, run: Callable[[], _Made]) -> _Made:
        """What takes milliseconds and needs no pass."""
        return await self._on(self._quick, run)

    async def scrape(self) -> bytes:
        """The metrics page."""
        return await self.off_loop(lambda: self.meters.page(self.llm))

    # -- the end ---------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Take no more requests; wait for those under way, then cancel them."""
        self.draining = True
        until = monotonic() + seconds
        while (self.jobs or self._starting) and monotonic() < until and not self._hurried:
            await asyncio.sleep(0.02)
        for job in self.jobs:
            job.cancel()
        told = monotonic() + 5  # handlers say so to their clients
        while self.jobs and monotonic() < told:
            await asyncio.sleep(0.02)

    def hurry(self) -> None:
        """Cancel what `drain` is waiting for."""
        self._hurried = True

    async def close(self) -> None:
        """End the worker and free its sequences."""
        self.draining = True
        for job in self.jobs:
            job.cancel()
        # not on the threads that are about to end, nor on the loop's
        await asyncio.to_thread(lambda: self.worker.close(drain=False))
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)


def _cancel_tickets(handed: asyncio.Future[list[Ticket]]) -> None:
    if not handed.cancelled() and handed.exception() is None:
        for ticket in handed.result():
            ticket.cancel()


def offered_methods(llm: LLM, options: ServerOptions) -> tuple[methods.MethodSpec, ...]:
    """The methods that requests may ask for, the default first.

    Those that the operator named are loaded, and what `LLM.prepare` finds wrong is raised; of the
    usual ones those that the model can't carry are left out, and the rest wait for a request.
    """
    if len(options.methods) >= _MOST_METHODS:
        raise OptionError("methods", f"fewer than {_MOST_METHODS} may be offered")
    found = [llm.method]
    for name in options.methods or OFFERED:
        spec = methods.parse(name)
        if options.methods:
            llm.prepare(spec)
        elif not _carries(llm, spec):
            continue
        if spec not in found:
            found.append(spec)
    return tuple(found)


def _carries(llm: LLM, spec: methods.MethodSpec) -> bool:
    try:
        methods.check_capabilities(methods.get(spec.name), llm.target)
    except CapabilityError:
        return False
    return True
