"""A request between its options and its result, and the stream of its text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.metrics import Summary
from hasten.smc.run import SMCRun
from hasten.stopping import Stopper
from hasten.text import TextStream
from hasten.types import Decision, Result, Round, SamplingParams
from hasten.verify import Verifier

if TYPE_CHECKING:
    from hasten.api import LLM
    from hasten.tickets import Ticket, Update
    from hasten.worker import Worker


class Request:
    """A request between its options and its result.

    drafting  a drafter and a policy; without a verifier a proposal and the options of ``smc``
    """

    def __init__(
        self,
        llm: LLM,
        ids: list[int],
        params: SamplingParams,
        seed: int,
        method: str,
        drafting: Sequence[Any],
        verifier: Verifier | None,
        text: TextStream | None,
        trace: bool,
    ) -> None:
        info = llm.target.info
        stopper = Stopper(params, info.eos_ids, len(ids), info.context_limit, text)
        self.llm, self.ids, self.params, self.seed, self.method = llm, ids, params, seed, method
        self.text, self.trace, self.keep = text, trace, False
        self.decoding: Decoding | SMCRun
        if verifier is None:
            proposal, options = drafting
            self.decoding = SMCRun(
                llm.target,
                ids,
                params,
                options,
                proposal=proposal,
                seed=seed,
                stopper=stopper,
                tokenizer=llm.tokenizer,
            )
        else:
            drafter, policy = drafting
            self.decoding = Decoding(
                llm.target,
                ids,
                params,
                drafter=drafter,
                policy=policy,
                verifier=verifier,
                seed=seed,
                stopper=stopper,
            )
        self.rounds: list[Round] = []
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.overrides: list[Decision] = []
        self.metrics = Summary()
        self.last: Round | None = None

    def kept(self) -> Request:
        """The same request, whose sequence stays for the next turn of a conversation."""
        self.keep = True
        return self

    def take(self, made: Round) -> None:
        """Count a round."""
        self.metrics.add(made)
        self.tokens.extend(made.emitted)
        self.logprobs.extend(made.logprobs)
        self.overrides.extend(each for each in made.decisions if each.kept)
        self.last = made
        if self.trace:
            self.rounds.append(made)

    def result(self) -> Result:
        """The result so far (of a finished request: the answer)."""
        last = self.last
        return Result(
            prompt_tokens=tuple(self.ids),
            tokens=tuple(self.tokens),
            text=self.text.text if self.text is not None else "",
            finish_reason=last.finish if last is not None else self.decoding.finish,
            stop_reason=last.stop_reason if last is not None else None,
            seed=self.seed,
            method=self.method,
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            metrics=self.metrics,
            rounds=tuple(self.rounds),
            population=getattr(self.decoding, "info", None),
            overrides=tuple(self.overrides),
        )


class Stream(Iterator[str]):
    """Pieces of an answer; their concatenation is ``result.text``.

    ``result`` is what there is so far, complete once the iterator ends. Usable as a context
    manager; ``close()`` (or dropping it) ends the request and frees its cache.
    """

    def __init__(self, llm: LLM, request: Request) -> None:
        self._request = request
        # The generators don't hold the stream: dropping it frees the request's cache at once.
        self._rounds = _run(llm, request)
        self._pieces = _pieces(request, self._rounds)

    def rounds(self) -> Iterator[Round]:
        """The rounds themselves instead of text (use one or the other)."""
        return self._rounds

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def finish(self) -> Result:
        """Run to the end and give the result."""
        for _ in self:
            pass
        return self.result

    @property
    def result(self) -> Result:
        """The result so far; complete once the iterator has ended."""
        return self._request.result()

    def close(self) -> None:
        """End the request and free its cache."""
        self._pieces.close()  # type: ignore[attr-defined]
        self._rounds.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncStream(AsyncIterator[str]):
    """Pieces of an answer, for ``async for``; their concatenation is ``result.text``.

    ``result`` is what there is so far, complete once the iterator ends. Usable with ``async with``;
    ``close()`` (or dropping it) ends the request.
    """

    def __init__(self, request: Request, worker: Worker) -> None:
        self._request, self._worker = request, worker
        self._ticket: Ticket | None = None
        self._updates: AsyncIterator[Update] | None = None

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        if self._updates is None:
            self._ticket = self._worker.enqueue(self._request)
            self._updates = aiter(self._ticket)
        try:
            while not (text := (await anext(self._updates)).text):
                pass
        except BaseException:  # the end, an error, or the task is cancelled
            self.close()
            raise
        return text

    async def finish(self) -> Result:
        """Run to the end and give the result."""
        async for _ in self:
            pass
        return self.result

    @property
    def result(self) -> Result:
        """The result so far; complete once the iterator has ended."""
        return self._request.result()

    def close(self) -> None:
        """End the request and free its cache, before the next pass."""
        if self._ticket is not None:
            self._ticket.cancel()

    def __del__(self) -> None:
        self.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


def _run(llm: LLM, request: Request) -> Iterator[Round]:
    """Drive the loop, one round per lock."""
    sequence: Any = None
    if request.keep:
        with llm._lock:
            # a population looks at the whole prompt
            shares = isinstance(request.decoding, Decoding)
            sequence = llm._borrow(request.ids) if shares else None
            sequence = llm.target.open() if sequence is None else sequence
            request.decoding.lend(sequence)
    loop = decode([request.decoding])

    def drop() -> None:
        loop.close()  # type: ignore[attr-defined]
        if request.keep:
            llm.target.close(sequence)

    try:
        while True:
            with llm._lock:
                item = next(loop, None)
            if item is None:
                break
            request.take(item[1])
            yield item[1]
    except GeneratorExit:
        # Perhaps the garbage collector's, in the middle of anything: waiting could be for ever.
        llm._lock.later(drop)
        raise
    except BaseException:
        with llm._lock:
            drop()
        raise
    if request.keep:
        with llm._lock:
            llm._keep([*request.ids, *request.tokens], sequence)


def _pieces(request: Request, rounds: Iterator[Round]) -> Iterator[str]:
    """The text of each round as far as it is certain, and the rest at the end."""
    text = request.text
    for _ in rounds:
        if text is not None and (piece := text.take()):
            yield piece
    if text is not None and (piece := text.flush()):
        yield piece
