"""A worker when requests, finalizers or the whole process go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten import methods
from hasten.api import LLM
from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.errors import HastenError, OptionError
from hasten.policies.base import FixedPolicy
from hasten.types import Budget, Draft, DraftTree
from hasten.worker import Worker
from tests.tiny_llm import PLAIN, make_model, make_tokenizer, meter, metered
from tests.worker_cases import until


@pytest.fixture(scope="module", params=["fused", "transformers"])
def shared(request: Any) -> LLM:
    return hasten.load((make_model(), make_tokenizer()), method="ar", engine=request.param)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    with metered(shared) as counted:
        yield counted


@pytest.fixture
def worker(llm: LLM) -> Iterator[Worker]:
    made = Worker(llm, most=4, waiting=16)
    yield made
    made.close(drain=False)


class _Ends(BaseDrafter):
    """Raises at its end."""

    name = "ends"

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        return Draft(DraftTree.chain(ctx.ids[-1]))

    def end(self) -> None:
        raise RuntimeError("on purpose")


@pytest.fixture
def bad_end(llm: LLM) -> Iterator[dict[str, Any]]:
    """Options of a request whose drafter raises at its end."""
    spec = methods.parse("prompt-lookup,nodes=3")
    before = dict(llm._prepared)
    llm._prepared[spec] = methods.RequestMaker(lambda _: (_Ends(), FixedPolicy(3)))
    yield {"method": spec}
    llm._prepared.clear()
    llm._prepared.update(before)


@pytest.mark.parametrize("how", ["cancel", "one", "long"])
def test_a_request_that_fails_at_its_end_takes_nobody_along(
    llm: LLM, worker: Worker, bad_end: dict[str, Any], how: str
) -> None:
    want = llm.generate("abc", **PLAIN).tokens
    beside = worker.submit("abc", **PLAIN)
    count = 1 if how == "one" else 60
    bad = worker.submit("xyz", max_new_tokens=count, ignore_eos=True, **bad_end)
    if how == "cancel":
        next(iter(bad))
        bad.cancel()
        assert bad.wait().finish_reason is None
    else:
        with pytest.raises(HastenError, match="on purpose"):
            bad.wait()
    assert beside.wait().tokens == want
    assert worker.submit("abc", **PLAIN).wait().tokens == want


def test_a_text_that_fails_takes_nobody_along(
    llm: LLM, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = llm.generate("abc", **PLAIN).tokens
    bad = llm._request("xyz", **PLAIN)

    def broken() -> str:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(bad.text, "take", broken)
    beside = worker.submit("abc", **PLAIN)
    with pytest.raises(RuntimeError, match="on purpose"):
        worker.enqueue(bad).wait()
    assert beside.wait().tokens == want


def test_streams_dropped_anywhere_never_wait_for_the_worker(llm: LLM, worker: Worker) -> None:
    live = meter(llm).live
    busy = worker.submit("a", max_new_tokens=100, ignore_eos=True)
    with worker._changed:  # what `submit` holds while the garbage collector may run
        for _ in range(20):
            stream = llm.stream("b", **PLAIN)
            next(stream)
            del stream
    assert len(busy.wait().tokens) == 100
    until(lambda: worker.active == 0)
    worker.close()
    assert meter(llm).live == live


EXITS = {
    "break": "async for _ in llm.astream('a', max_new_tokens=180, ignore_eos=True): break",
    "raise": "async for _ in llm.astream('a', max_new_tokens=180, ignore_eos=True): sys.exit(3)",
    "worker": "llm._shared_worker().submit('a', max_new_tokens=180, ignore_eos=True)",
}


@pytest.mark.parametrize("how", EXITS)
def test_a_process_ends_in_order_while_requests_are_under_way(how: str) -> None:
    code = (
        "import asyncio, sys, hasten\n"
        "from tests.tiny_llm import make_model, make_tokenizer\n"
        "llm = hasten.load((make_model(), make_tokenizer()), method='ar', engine='fused')\n"
        f"async def main():\n    {EXITS[how]}\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == (3 if how == "raise" else 0), done.stderr[-2000:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_starts_with_an_empty_worker(llm: LLM) -> None:
    worker = Worker(llm, most=2)
    worker.submit("a", max_new_tokens=2).wait()
    assert worker._thread is not None
    child = os.fork()
    if child == 0:
        os._exit(7 if worker._thread is None and not worker.active else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    worker.close()


def test_more_answers_than_ever_fit_are_refused_by_name(llm: LLM) -> None:
    worker = Worker(llm, most=1, waiting=1)
    with pytest.raises(OptionError, match="n: must be a whole number from 1 to 2"):
        worker.submit_n("a", 3)
    worker.close()
