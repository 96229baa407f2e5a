"""A request's answer on its way to the client: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import monotonic
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from hasten.serve.faults import as_api_error, shutting_down
from hasten.serve.requests import Request
from hasten.serve.service import Job, Service
from hasten.serve.shapes import Shapes, usage
from hasten.serve.speculation import Marks, Speculation
from hasten.tickets import Ticket, Update

logger = logging.getLogger("hasten.serve")


class Reply:
    """Runs a request and sends its answer. When the client goes away the request is cancelled."""

    def __init__(self, service: Service, request: Request) -> None:
        self._service, self._request = service, request
        fingerprint = service.llm.target.info.fingerprint or None
        self._shapes = Shapes(request, service.name, fingerprint, service.texts)
        self._speculation = Speculation()
        self._since = monotonic()
        self._first: dict[int, float] = {}
        """When each answer's first token came."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI response. Raises what went wrong before anything was sent."""
        work = asyncio.create_task(self._work(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if work.cancelled():
            logger.info("the client went away: its request was cancelled")
        else:
            work.result()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = await self._service.start(self._request)
        try:
            if self._request.stream:
                await self._stream(job, send)
            else:
                body = await self._whole(job)
                await JSONResponse(body)(scope, receive, send)
        finally:
            self._service.finish(job)
            self._count_ends(job)

    def _count_ends(self, job: Job) -> None:
        meters, seconds = self._service.meters, monotonic() - self._since
        for at, ticket in enumerate(job.tickets):
            if at % self._request.n == 0 and ticket.started:
                meters.prompt(ticket.prompt_tokens, ticket.cached_tokens)
            finish = ticket.result.finish_reason
            other = "abort" if ticket.cancelled else "error"
            meters.ended(other if finish is None else finish.value, seconds)

    # -- rounds ----------------------------------------------------------------------------------

    async def _updates(self, job: Job) -> AsyncGenerator[tuple[int, Update], None]:
        """Every round of every answer, counted. Raises when one was cut short."""
        async with aclosing(_merged(job.tickets)) as merged:
            async for index, update in merged:
                if index not in self._first:
                    self._first[index] = monotonic()
                    self._service.meters.first(self._first[index] - self._since)
                self._service.meters.round(update.round)
                self._speculation.add(update.round)
                yield index, update
        if any(ticket.result.finish_reason is None for ticket in job.tickets):
            raise shutting_down()  # nobody else cancels

    async def _whole(self, job: Job) -> dict[str, Any]:
        async with aclosing(self._updates(job)) as updates:
            async for _ in updates:
                pass
        # Thousands of log-probabilities with their texts take a while.
        choices = await self._service.off_loop(lambda: self._choices(job))
        return self._shapes.answer(choices, usage=self._usage(job), metrics=self._metrics(job))

    def _choices(self, job: Job) -> list[dict[str, Any]]:
        choices = []
        for index, ticket in enumerate(job.tickets):
            result = ticket.result
            finish = result.finish_reason.value if result.finish_reason is not None else None
            choices.append(self._shapes.choice(index, result.text, result.logprobs, finish))
        return choices

    async def _stream(self, job: Job, send: Send) -> None:
        async with aclosing(self._updates(job)) as updates:
            # What fails before the first token is told by its status.
            update = await anext(updates)
            events = _Events(send)
            await events.open()
            try:
                await self._send_pieces(job, events, update, updates)
                await events.put("[DONE]")
            except Exception as error:
                await events.put(as_api_error(error).body)
            await events.close()

    async def _send_pieces(
        self,
        job: Job,
        events: _Events,
        first: tuple[int, Update],
        rest: AsyncGenerator[tuple[int, Update], None],
    ) -> None:
        request, shapes = self._request, self._shapes
        blank = {"usage": None} if request.include_usage else {}
        if request.chat:
            for index in range(len(job.tickets)):
                await events.put(shapes.answer([shapes.role(index)], **blank))
        marks = [Marks(self._service.llm.tokenizer) for _ in job.tickets] if request.marks else []
        left = len(job.tickets)
        async for index, update in _chained(first, rest):
            made = update.round
            logprobs = made.logprobs if request.params.logprobs is not None else None
            left -= made.finish is not None
            if not (update.text or logprobs or marks or made.finish is not None):
                continue
            finish = None if made.finish is None else made.finish.value
            piece = shapes.piece(index, update.text, logprobs, finish)
            if marks:
                piece["hasten"] = {"pieces": marks[index].pieces(update)}
            last = not left and not request.include_usage
            more = {"metrics": self._metrics(job)} if last else {}
            await events.put(shapes.answer([piece], **blank, **more))
        if request.include_usage:
            used, metrics = self._usage(job), self._metrics(job)
            await events.put(shapes.answer([], usage=used, metrics=metrics))

    # -- figures ---------------------------------------------------------------------------------

    def _usage(self, job: Job) -> dict[str, Any]:
        emitted = sum(ticket.result.metrics.new_tokens for ticket in job.tickets)
        return usage(job.prompt_tokens, job.cached_tokens, emitted)

    def _metrics(self, job: Job) -> dict[str, Any]:
        now, first = monotonic(), min(self._first.values(), default=self._since)
        emitted = sum(ticket.result.metrics.new_tokens for ticket in job.tickets)
        later = emitted - len(job.tickets)
        return {
            "speculative_decoding": self._speculation.as_json(),
            "hasten": {
                "method": job.tickets[0].method,
                "seeds": [ticket.seed for ticket in job.tickets],
                "tokens_per_pass": self._speculation.tokens_per_pass,
                "time_to_first_token_seconds": first - self._since,
                "tokens_per_second": later / (now - first) if now > first else 0.0,
            },
        }


class _Events:
    """Server-sent events."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def open(self) -> None:
        """Send the head."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # a proxy that gathers a stream defeats it
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def put(self, value: Any) -> None:
        """Send one event: an object, or a word as it is."""
        # Escaped: some readers of events take other characters than \n for the end of a line.
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        body = f"data: {text}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def close(self) -> None:
        """The end of the stream."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _merged(tickets: list[Ticket]) -> AsyncGenerator[tuple[int, Update], None]:
    """The updates of all tickets as they come. The first error ends it."""
    queue: asyncio.Queue[tuple[int, Update | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, ticket: Ticket) -> None:
        try:
            async for update in ticket:
                queue.put_nowait((index, update))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    pumps = [asyncio.create_task(pump(i, t)) for i, t in enumerate(tickets)]
    left = len(pumps)
    try:
        while left:
            index, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _chained(
    first: tuple[int, Update], rest: AsyncGenerator[tuple[int, Update], None]
) -> AsyncGenerator[tuple[int, Update], None]:
    yield first
    async for each in rest:
        yield each


async def _disconnected(receive: Receive) -> None:
    """Come back when the client is gone; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
