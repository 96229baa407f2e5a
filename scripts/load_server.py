"""Load test of ``hasten serve``: right answers only, nothing left behind.

    python scripts/load_server.py --requests 200 --concurrency 16

Starts the server on the embedded model (bfloat16), sends it requests of many kinds at a time (some
are cut off by their client, some can't be answered), and then compares every complete answer with
the library's own for the same options. Memory and KV bytes are read at rest, after a warm-up and at
the end. Prints a table; exits with 1 when an answer was wrong, a fault had another status than it
should, or KV bytes were left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
METHODS = ("auto", "racer", "prompt-lookup", "ar")
TOPICS = (
    "the sea", "tail recursion", "bread", "the planets", "a short poem", "sorting in Python",
    "the number 7", "trains", "Grüße aus Zürich", "世界",
)  # fmt: skip
SHAPES = ("Write about {}.", "Explain {} to a child.", "List five facts about {}.", "{}: why?")


@dataclass
class Planned:
    """A request: what is sent, and what should come of it.

    kind     ``"whole"``, ``"stream"``, ``"cut"`` (the client goes away) or ``"bad"``
    cut      events or seconds after which the client goes away
    status   that the server must answer with
    """

    kind: str
    path: str
    body: Any
    status: int = 200
    cut: float = 0.0


@dataclass
class Seen:
    """What came back."""

    outcome: str
    texts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    tokens: int = 0
    retries: int = 0


def plan(rng: random.Random, context: int) -> Planned:
    """A request at random."""
    draw = rng.random()
    if draw < 0.12:
        return bad(rng, context)
    topic = rng.choice(SHAPES).format(rng.choice(TOPICS))
    chat = rng.random() < 0.75
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 96), "method": rng.choice(METHODS)}
    body |= {"messages": [{"role": "user", "content": topic}]} if chat else {"prompt": topic}
    if rng.random() < 0.5:
        body["temperature"] = 0
    else:
        body |= {"temperature": rng.choice((0.5, 0.8, 1.2)), "seed": rng.randint(0, 10**6)}
        body["n"] = rng.choice((1, 1, 1, 2, 3))
    for name, value in (
        ("stop", [" and", "\n\n"]),
        ("top_p", 0.9),
        ("top_k", 40),
        ("repetition_penalty", 1.1),
        ("frequency_penalty", 0.4),
        ("logit_bias", {"30": -100, "260": 2}),
    ):
        if rng.random() < 0.15:
            body[name] = value
    stream = rng.random() < 0.5
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    path = CHAT if chat else COMPLETIONS
    if draw < 0.27:
        return Planned("cut", path, body | {"max_tokens": 400}, cut=rng.uniform(0.05, 1.5))
    return Planned("stream" if stream else "whole", path, body)


def bad(rng: random.Random, context: int) -> Planned:
    """A request that can't be answered."""
    hello = {"messages": [{"role": "user", "content": "Hello"}]}
    return rng.choice(
        (
            Planned("bad", CHAT, b"{no json", 400),
            Planned("bad", CHAT, {}, 400),
            Planned("bad", CHAT, hello | {"temperature": "hot"}, 400),
            Planned("bad", CHAT, hello | {"no_such_field": 1}, 400),
            Planned("bad", CHAT, hello | {"tools": [{}]}, 400),
            Planned("bad", CHAT, hello | {"n": 100}, 400),
            Planned("bad", CHAT, hello | {"model": "another"}, 404),
            Planned("bad", CHAT, hello | {"method": "draft-model,model=/"}, 400),
            Planned("bad", COMPLETIONS, {"prompt": [1] * (context + 1)}, 400),
            Planned("bad", COMPLETIONS, {"prompt": "x" * (3 << 20)}, 413),
            Planned("bad", "/v1/no/such/path", {}, 404),
        )
    )


# -- asking ----------------------------------------------------------------------------------------


async def send(client: httpx.AsyncClient, planned: Planned) -> Seen:
    """Send a request, again while the queue is full."""
    retries = 0
    while True:
        seen = await send_once(client, planned)
        if seen.outcome != "429":
            seen.retries = retries
            return seen
        retries += 1
        await asyncio.sleep(random.uniform(0.05, 0.3))


async def send_once(client: httpx.AsyncClient, planned: Planned) -> Seen:
    """Send it and read what comes."""
    body = planned.body
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = client.build_request(
        "POST", planned.path, content=content, headers={"Content-Type": "application/json"}
    )
    try:
        limit = planned.cut if planned.kind == "cut" else 600
        got = await asyncio.wait_for(client.send(request), limit)
    except asyncio.TimeoutError:
        return Seen("cut off by the client" if planned.kind == "cut" else "FAULT: no answer")
    if got.status_code == 429:
        return Seen("429")
    if planned.kind == "bad" or got.status_code != 200:
        fits = got.status_code == planned.status and "error" in got.json()
        return Seen(f"refused with {got.status_code}" if fits else f"FAULT: {got.status_code}")
    return read_stream(got.text) if body.get("stream") else read_whole(got.json())


def read_whole(answer: dict[str, Any]) -> Seen:
    """A whole response."""
    choices = answer["choices"]
    texts = [c["message"]["content"] if "message" in c else c["text"] for c in choices]
    finishes = [c["finish_reason"] for c in choices]
    return Seen("answered whole", texts, finishes, answer["usage"]["completion_tokens"])


def read_stream(text: str) -> Seen:
    """The events of a stream, put together."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    if not lines or lines[-1] != "[DONE]":
        return Seen("FAULT: a stream without an end")
    seen = Seen("answered as a stream")
    for chunk in map(json.loads, lines[:-1]):
        for choice in chunk["choices"]:
            while len(seen.texts) <= choice["index"]:
                seen.texts.append("")
                seen.finishes.append("")
            delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
            seen.texts[choice["index"]] += delta or ""
            seen.finishes[choice["index"]] = choice["finish_reason"] or ""
        if chunk["usage"]:
            seen.tokens = chunk["usage"]["completion_tokens"]
    return seen


async def run(client: httpx.AsyncClient, plans: list[Planned], concurrency: int) -> list[Seen]:
    """All requests, `concurrency` at a time."""
    free = asyncio.Semaphore(concurrency)

    async def one(planned: Planned) -> Seen:
        async with free:
            return await send(client, planned)

    return await asyncio.gather(*(one(planned) for planned in plans))


# -- the server ------------------------------------------------------------------------------------


async def at_rest(client: httpx.AsyncClient, pid: int) -> dict[str, float]:
    """Memory and KV bytes once nothing runs any more."""
    names = {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "hasten:kv_cache_bytes": "kv",
        "hasten:kept_prefix_tokens": "kept",
    }
    until = time.monotonic() + 60
    while True:
        found = {}
        for line in (await client.get("/metrics")).text.splitlines():
            if (name := line.partition("{")[0]) in names:
                found[names[name]] = float(line.rsplit(" ", 1)[1])
        if not found["running"] and not found["waiting"]:
            await asyncio.sleep(0.5)
            return found | {"rss": float(psutil.Process(pid).memory_info().rss)}
        if time.monotonic() > until:
            raise SystemExit("requests are still running a minute after the last answer")
        await asyncio.sleep(0.1)


def start(arguments: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    """The server and its address, once it is ready."""
    command = [sys.executable, "-m", "hasten", "serve", "--port", "0", "--dtype", "bfloat16"]
    command += ["--max-concurrency", str(arguments.max_concurrency), "--queue", "8"]
    command += ["--cache-tokens", str(arguments.cache_tokens)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert running.stdout is not None
    line = running.stdout.readline()
    if not line.startswith("http"):
        raise SystemExit("the server didn't start")
    print(line.strip(), file=sys.stderr)
    return running, line.split()[0]


# -- the library's answers -------------------------------------------------------------------------


def wrong_answers(plans: list[Planned], seen: list[Seen]) -> list[str]:
    """Every difference between what the server said and what the library says."""
    import hasten

    llm = hasten.load(dtype="bfloat16")
    names = {"max_tokens": "max_new_tokens"}
    kept = {
        "max_tokens", "temperature", "seed", "stop", "top_p", "top_k", "repetition_penalty",
        "frequency_penalty", "method",
    }  # fmt: skip
    wrong = []
    for planned, got in zip(plans, seen, strict=True):
        if not got.texts:
            continue
        body = planned.body
        options = {names.get(k, k): v for k, v in body.items() if k in kept}
        if "logit_bias" in body:
            options["logit_bias"] = {int(k): float(v) for k, v in body["logit_bias"].items()}
        prompt = body.get("messages") or body["prompt"]
        tokens = 0
        for index, (text, finish) in enumerate(zip(got.texts, got.finishes, strict=True)):
            if "seed" in body:
                options["seed"] = body["seed"] + index
            template = "messages" in body
            expected = llm.generate(prompt, template=template, **options)
            tokens += len(expected.tokens)
            assert expected.finish_reason is not None
            if (text, finish) != (expected.text, expected.finish_reason.value):
                wrong.append(
                    f"{body}\n  server:  {text!r} ({finish})\n  library: {expected.text!r}"
                )
        if tokens != got.tokens:
            wrong.append(f"{body}\n  usage says {got.tokens} tokens, the library {tokens}")
    return wrong


# -- the report ------------------------------------------------------------------------------------


async def measure(arguments: argparse.Namespace) -> int:
    """The whole test; the exit code."""
    rng = random.Random(arguments.seed)
    running, url = start(arguments)
    try:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            card = (await client.get("/v1/models")).json()["data"][0]
            plans = [plan(rng, card["max_model_len"]) for _ in range(arguments.requests)]
            warm = [plan(rng, card["max_model_len"]) for _ in range(arguments.warm_up)]
            await run(client, warm, arguments.concurrency)
            before = await at_rest(client, running.pid)
            since = time.monotonic()
            seen = await run(client, plans, arguments.concurrency)
            seconds = time.monotonic() - since
            after = await at_rest(client, running.pid)
    finally:
        running.terminate()
        running.wait(60)
    wrong = wrong_answers(plans, seen)
    for each in wrong:
        print(f"WRONG: {each}", file=sys.stderr)
    report(arguments, seen, wrong, before, after, seconds)
    faults = [s.outcome for s in seen if s.outcome.startswith("FAULT")]
    left = arguments.cache_tokens == 0 and after["kv"] > before["kv"]
    return int(bool(wrong or faults or left or running.returncode))


def report(
    arguments: argparse.Namespace,
    seen: list[Seen],
    wrong: list[str],
    before: dict[str, float],
    after: dict[str, float],
    seconds: float,
) -> None:
    """Print the table."""
    tokens, answers = sum(s.tokens for s in seen), sum(len(s.texts) for s in seen)
    print(f"\n{arguments.requests} requests, {arguments.concurrency} at a time, {seconds:.1f} s\n")
    print("| outcome | requests |\n|---|---|")
    for outcome, count in sorted(Counter(s.outcome for s in seen).items()):
        print(f"| {outcome} | {count} |")
    print("\n| figure | value |\n|---|---|")
    print(f"| complete answers compared with the library's | {answers} |")
    print(f"| wrong answers | {len(wrong)} |")
    print(f"| turned away with 429 and asked again | {sum(s.retries for s in seen)} |")
    print(f"| tokens/s of complete answers | {tokens / seconds:.1f} |")
    mib = 1 << 20
    for name, key in (("memory (RSS)", "rss"), ("KV", "kv")):
        drift = (after[key] - before[key]) / mib
        print(f"| {name} at rest, MiB: before, drift | {before[key] / mib:.1f}, {drift:+.1f} |")
    print(f"| kept prefix tokens at the end | {after['kept']:.0f} |")


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16, help="clients at a time")
    parser.add_argument("--warm-up", type=int, default=32, help="requests before measuring")
    parser.add_argument("--max-concurrency", type=int, default=16, help="of the server")
    parser.add_argument(
        "--cache-tokens", type=int, default=0, help="kept by the server; 0: KV must come back"
    )
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
