"""Parts of bench_smc.py about laws: draft against target, the second token's law, bounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from smc_common import CHUNK, Bench, announced, by_prompt, line, table, with_error

from hasten.smc.diagnose import HEADER, diagnose, row
from hasten.smc.proposals import Lane, chain, run_rows
from hasten.smc.run import SMCRun
from hasten.types import Rows

LIKELY = 20
"""Tokens told apart in the law part; the others count as one."""
FIRST_TOKENS = 1024
"""First tokens summed over for the second token's law; what they miss is printed."""
BOUND = 0.1
"""Nats: the divergence that the draft part asks particles for."""


# -- draft against target --------------------------------------------------------------------------


def part_draft(bench: Bench) -> list[dict[str, Any]]:
    """How far q is from p, token by token, on plain answers: for draft temperatures and mixtures.

    chi2 is the variance of p / q under q. Particles of one drafted token need about
    ``chi2 / (exp(KL) - 1)`` for a round's bound to be KL.
    """
    args = bench.args
    cells: dict[tuple[int, float, float], list[tuple[int, float, float]]] = {}
    numbered = list(enumerate(bench.prompts))
    for number, prompt in announced(numbered, len(numbered), "draft"):
        answer = plain(bench, prompt, number)
        for step, p_row, q_row in walk(bench, prompt, answer, args.length):
            p = torch.softmax(p_row.float() / args.temperature, 0)
            for warm in args.warm:
                for hot in args.hot:
                    q = draft_law(q_row, args.temperature * warm, args.temperature, hot)
                    far = float((p - q).abs().sum()) / 2
                    chi2 = float((p * p / q.clamp_min(1e-38)).sum()) - 1
                    cells.setdefault((step, warm, hot), []).append((number, far, chi2))
    table(
        "drafted token", "draft temperature", "hot share", "TV(p, q)", "s.e.", "chi2, median",
        "upper quartile", "mean", f"N for KL {BOUND}, median", "upper quartile"
    )  # fmt: skip
    rows = []
    for (step, warm, hot), found in sorted(cells.items()):
        far, error = by_prompt([(number, each) for number, each, _ in found])
        chi2 = sorted(each for _, _, each in found)
        half, upper = chi2[len(chi2) // 2], chi2[3 * len(chi2) // 4]
        need = [each / math.expm1(BOUND) for each in (half, upper)]
        mean = statistics.fmean(chi2)
        spread = [f"{each:.3g}" for each in (half, upper, mean, *need)]
        line(step + 1, f"{warm:g} T", f"{hot:g}", f"{far:.3f}", f"{error:.3f}", *spread)
        rows.append({"step": step + 1, "warm": warm, "hot": hot, "tv": far, "tv_error": error,
                     "chi2_median": half, "chi2_upper": upper, "chi2_mean": mean})  # fmt: skip
    return rows


def draft_law(logits: torch.Tensor, temperature: float, warm: float, hot: float) -> torch.Tensor:
    """q, of which a share `hot` is the draft at temperature ``2 * warm``."""
    rows = logits.float()
    law = torch.softmax(rows / temperature, 0)
    return law if not hot else (1 - hot) * law + hot * torch.softmax(rows / (2 * warm), 0)


def plain(bench: Bench, prompt: Sequence[int], seed: int) -> list[int]:
    """A plain answer's ids."""
    result = bench.llm.generate(
        prompt,
        method="ar",
        max_new_tokens=bench.args.tokens,
        temperature=bench.args.temperature,
        seed=seed,
        ignore_eos=True,
    )
    return list(result.tokens)


def walk(
    bench: Bench, prompt: Sequence[int], answer: Sequence[int], length: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Draft along an answer that is known: (step, target's logits, draft's logits)."""
    target, proposal = bench.llm.target, bench.make()
    sequence = target.open()
    passed = target.prefill(sequence, prompt, taps=proposal.taps)
    proposal.begin(prompt, passed.hidden, 1)
    for at in range(0, len(answer) - length, length + 1):
        lane = Lane(0, answer[at], sequence)
        following = list(answer[at + 1 : at + 1 + length])
        heard: list[torch.Tensor] = []

        def choose(
            logits: torch.Tensor,
            of: Sequence[int],
            heard: list[torch.Tensor] = heard,
            following: list[int] = following,
        ) -> list[int]:
            heard.append(logits[of[0]])
            return [following[len(heard) - 1]]

        frontier = proposal.draft([lane], length, choose)
        layers = (frontier, target.info.num_layers) if frontier else None
        taps = [tap for tap in proposal.taps if tap > frontier]
        (found,) = run_rows(target, [chain(sequence, [lane.root, *following])], layers, taps)
        assert found.logits is not None
        for step, q_row in enumerate(heard):
            yield step, found.logits[step], q_row
        target.commit(sequence, range(length + 1))
        proposal.observe([lane], length + 1, [found.hidden])
    proposal.close()
    target.close(sequence)


# -- the second token's law ------------------------------------------------------------------------


def second_law(bench: Bench, prompt: Sequence[int]) -> tuple[dict[int, float], float]:
    """The target's law of the second token: its likeliest ones, -1 for the others; and the mass of
    first tokens that were left out."""
    target, temperature = bench.llm.target, bench.args.temperature
    sequence = target.open()
    logits = target.prefill(sequence, prompt).logits
    assert logits is not None
    first = torch.softmax(logits[-1].float() / temperature, 0)
    tokens = first.topk(min(FIRST_TOKENS, len(first))).indices
    tokens = tokens[first[tokens] > 1e-6].tolist()
    law = torch.zeros_like(first)
    for start in range(0, len(tokens), CHUNK):
        some = tuple(tokens[start : start + CHUNK])
        (passed,) = target.forward([Rows(sequence, some, (-1,) * len(some))])
        assert passed.logits is not None
        after = torch.softmax(passed.logits.float() / temperature, 1)
        law += (first[list(some)].unsqueeze(1) * after).sum(0)
        target.rollback(sequence)
    target.close(sequence)
    mass = float(law.sum())
    likely = law.topk(LIKELY).indices.tolist()
    made = {token: float(law[token]) / mass for token in likely}
    made[-1] = 1 - sum(made.values())
    return made, 1 - mass


def part_law(bench: Bench) -> list[dict[str, Any]]:
    """Total variation of the second token's law."""
    args = bench.args
    table("prompt", "N", "TV", "TV of so many plain answers", "first tokens left out", "collapsed")
    rows: list[dict[str, Any]] = []
    numbered = list(enumerate(bench.prompts))
    for number, prompt in announced(numbered, len(numbered), "law"):
        exact, missed = second_law(bench, prompt)
        chance = sum(math.sqrt(2 * p * (1 - p) / (math.pi * args.runs)) for p in exact.values()) / 2
        for n in args.particles:
            law = dict.fromkeys(exact, 0.0)
            collapsed = 0
            for seed in range(args.runs):
                info, _ = bench.answer(prompt, seed, bench.options.length + 2, particles=n)
                collapsed += info.collapsed
                for each in info.answers:
                    token = each.tokens[1]
                    law[token if token in exact else -1] += each.weight / args.runs
            far = sum(abs(law[t] - p) for t, p in exact.items()) / 2
            line(number, n, f"{far:.3f}", f"{chance:.3f}", f"{missed:.3f}", collapsed)
            rows.append({"prompt": number, "particles": n, "tv": far, "chance": chance})
    table("N", "mean TV", "s.e. over prompts", "less than at the N before", "s.e.")
    for at, n in enumerate(args.particles):
        mine = [each["tv"] for each in rows if each["particles"] == n]
        cells = [f"{value:.3f}" for value in with_error(mine)]
        if at:
            before = [each["tv"] for each in rows if each["particles"] == args.particles[at - 1]]
            falls = [b - a for a, b in zip(mine, before, strict=True)]
            cells += [f"{value:.3f}" for value in with_error(falls)]
        line(n, *cells)
    return rows


# -- bounds ----------------------------------------------------------------------------------------


def part_bound(bench: Bench) -> list[dict[str, Any]]:
    """The diagnosis of each prompt; answers of one round first (a first token, the drafts, and the
    target's own), then of ``--tokens``."""
    args = bench.args
    rows = []
    lengths = dict.fromkeys((bench.options.length + 2, *args.bound_tokens))
    units = [(t, n) for t in lengths for n in args.particles]
    table("tokens", "N", *(head.replace("\n", " ").replace("- ", "") for head in HEADER))
    for tokens, n in announced(units, len(units), "bound"):
        bounds = []
        for number, prompt in enumerate(bench.prompts):

            def start(seed: int, prompt: list[int] = prompt, n: int = n, t: int = tokens) -> SMCRun:
                return bench.start(prompt, seed, t, particles=n)

            found = diagnose(start, args.runs)
            line(tokens, n, *(cell.replace("\n", " ") for cell in row(str(number), found)))
            bounds.append((found.kl_bound, found.trusted))
        middle = statistics.median(bound for bound, _ in bounds)
        trusted = sum(each for _, each in bounds)
        line(tokens, n, "median", "", "", "", f"{middle:.3g}", "", "", f"{trusted} trusted")
        rows.append({"tokens": tokens, "particles": n, "kl": [bound for bound, _ in bounds],
                     "kl_median": middle, "trusted": trusted})  # fmt: skip
    return rows
