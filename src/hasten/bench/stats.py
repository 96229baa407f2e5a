"""Single answers -> rows: medians over repeats, sums over prompts, ratios to plain decoding."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.bench.drafted import drafted_from
from hasten.bench.output import OVERALL, Row
from hasten.choices import Choice
from hasten.metrics import Summary

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of one method, timed.

    tokens         new ids, the first included
    decode_tokens  those that came after the first output (what a peer puts out together with
                   its first token took no measured time, and is not counted)
    decode_s       seconds from the first output to the last token
    ttft_s         seconds to the first output
    passes         passes after the first output; None when a peer doesn't tell
    summary        hasten's own counts; None for peers
    choices        what each round drafted, the prefill left out; none of peers
    decided, deciding_s   decisions of a learned policy, and the seconds they took
    """

    tokens: tuple[int, ...]
    decode_tokens: int
    decode_s: float
    ttft_s: float
    passes: int | None = None
    summary: Summary | None = None
    choices: tuple[Choice, ...] = ()
    decided: int = 0
    deciding_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt as it was run: a turn of a suite's row, in token ids. `row` is the row's index."""

    row: int
    row_id: str
    category: str
    turn: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that isn't plain decoding's.

    kind: ``"near tie"``, ``"fault"`` or ``"unexplained"``.
    """

    method: str
    item: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A method's answers to one prompt: the median time, and the run nearest to it."""

    chosen: Answer
    decode_s: float
    ttft_s: float
    identical: bool
    summary: Summary | None
    """Of all repeats together, for times per round."""

    @classmethod
    def of(cls, answers: Sequence[Answer], plain: Sequence[int]) -> Cell:
        """`answers` are the repeats (at least one); `plain` is plain decoding's answer."""
        ranked = sorted(answers, key=lambda a: a.decode_s)
        merged: Summary | None = None
        if all(a.summary is not None for a in answers):
            merged = Summary()
            for each in answers:
                assert each.summary is not None
                merged.merge(each.summary)
        return cls(
            chosen=ranked[(len(ranked) - 1) // 2],
            decode_s=statistics.median(a.decode_s for a in answers),
            ttft_s=statistics.median(a.ttft_s for a in answers),
            identical=all(a.tokens == tuple(plain) for a in answers),
            summary=merged,
        )

    @property
    def decoding(self) -> tuple[int, float]:
        """Tokens and seconds after the first output."""
        return self.chosen.decode_tokens, self.decode_s

    @property
    def whole(self) -> tuple[int, float]:
        """Tokens and seconds from the prompt on."""
        return len(self.chosen.tokens), self.ttft_s + self.decode_s

    @property
    def tokens_per_s(self) -> float:
        """Decode only; 0 when nothing came after the first token."""
        return self.chosen.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


Measured = Mapping[str, Sequence[Sequence[Answer]]]
"""method -> item -> repeats."""


def build_rows(
    items: Sequence[Item],
    measured: Measured,
    *,
    plain: str,
    seed: int,
    differences: Sequence[Difference] = (),
) -> tuple[Row, ...]:
    """One row per (method, category) and per (method, ``"overall"``), in the order of `measured`.

    `plain` names the baseline in `measured`. Tokens, prompts and passes of a method's
    categories add up to its overall row.
    """
    answers = [repeats[0].tokens for repeats in measured[plain]]
    base = [Cell.of(r, a) for r, a in zip(measured[plain], answers, strict=True)]
    groups = {c: [i for i, it in enumerate(items) if it.category == c] for c in _categories(items)}
    groups[OVERALL] = list(range(len(items)))
    rows = []
    for method, per_item in measured.items():
        cells = [Cell.of(r, a) for r, a in zip(per_item, answers, strict=True)]
        mine = [d for d in differences if d.method == method]
        for category, places in groups.items():
            rows.append(_row(method, category, places, items, cells, base, mine, seed))
    return tuple(rows)


def build_prompts(
    items: Sequence[Item], measured: Measured, *, plain: str
) -> tuple[dict[str, Any], ...]:
    """One entry per (method, prompt); see `hasten.bench.output.Report`."""
    out = []
    for method, per_item in measured.items():
        for item, repeats, base in zip(items, per_item, measured[plain], strict=True):
            cell = Cell.of(repeats, base[0].tokens)
            tokens, seconds = cell.decoding
            out.append(
                {
                    "method": method,
                    "category": item.category,
                    "row": item.row_id,
                    "turn": item.turn,
                    "decode_tokens": tokens,
                    "decode_s": seconds,
                    "target_passes": cell.chosen.passes,
                    "identical": cell.identical,
                }
            )
    return tuple(out)


def _categories(items: Sequence[Item]) -> list[str]:
    return list(dict.fromkeys(item.category for item in items))


def _row(
    method: str,
    category: str,
    places: Sequence[int],
    items: Sequence[Item],
    cells: Sequence[Cell],
    base: Sequence[Cell],
    differences: Sequence[Difference],
    seed: int,
) -> Row:
    mine, theirs = [cells[i] for i in places], [base[i] for i in places]
    chosen = [cell.chosen for cell in mine]
    decode_tokens = sum(a.decode_tokens for a in chosen)
    decode_s = sum(cell.decode_s for cell in mine)
    counted = [a.passes for a in chosen if a.passes is not None]
    passes = sum(counted) if len(counted) == len(chosen) else None
    times = _round_times(mine)
    here = [d for d in differences if d.item in set(places)]
    rates = _rates(mine, theirs, [items[i].row for i in places], seed)
    extra: dict[str, Any] = {
        "decode_tokens": decode_tokens,
        "decode_s": decode_s,
        "speedup_micro_interval": rates["interval"],
        "e2e_speedup_micro": rates["e2e"],
        "ttft_ms": 1e3 * statistics.fmean(cell.ttft_s for cell in mine),
        "distinct_4gram_share": distinct_share([a.tokens for a in chosen], 4),
        **times,
        **_acceptance(chosen),
        **_kinds(here),
    }
    if category == OVERALL:
        extra["differences"] = [d.text for d in here]
        extra |= drafted_from(chosen, [items[i].row_id for i in places])
    return Row(
        method=method,
        category=category,
        prompts=len(places),
        tokens=sum(len(a.tokens) for a in chosen),
        target_passes=passes,
        mean_accepted_length=_mean_accepted(decode_tokens, passes),
        tokens_per_s=decode_tokens / decode_s if decode_s > 0 else 0.0,
        speedup_macro=rates["macro"],
        speedup_micro=rates["micro"],
        identical=sum(cell.identical for cell in mine),
        draft_ms_per_round=extra.pop("draft_ms"),
        verify_ms_per_round=extra.pop("verify_ms"),
        extra=extra,
    )


def _mean_accepted(tokens: int, passes: int | None) -> float | None:
    if passes is None:
        return None
    return tokens / passes if passes else 1.0


def _kinds(differences: Sequence[Difference]) -> dict[str, int]:
    count = Counter(d.kind for d in differences)
    names = {"near_ties": "near tie", "faults": "fault", "unexplained": "unexplained"}
    return {name: count[kind] for name, kind in names.items()}


# -- speedups --------------------------------------------------------------------------------------


def _rates(
    mine: Sequence[Cell], base: Sequence[Cell], clusters: Sequence[int], seed: int
) -> dict[str, Any]:
    """Speedups over `base`, cell by cell the same prompts; None where nothing was decoded."""
    ratios = [
        m.tokens_per_s / b.tokens_per_s
        for m, b in zip(mine, base, strict=True)
        if m.tokens_per_s > 0 and b.tokens_per_s > 0
    ]
    pairs = list(zip(mine, base, strict=True))
    table = np.array([(*m.decoding, *b.decoding) for m, b in pairs])
    ends = np.array([(*m.whole, *b.whole) for m, b in pairs])
    return {
        "macro": statistics.fmean(ratios) if ratios else None,
        "micro": micro_ratio(table.sum(0)),
        "e2e": micro_ratio(ends.sum(0)),
        "interval": bootstrap_interval(table, clusters, seed),
    }


def micro_ratio(sums: Sequence[float] | np.ndarray) -> float | None:
    """(tokens / seconds) / (baseline's tokens / seconds) of four sums; None when one is zero."""
    tokens, seconds, base_tokens, base_seconds = (float(x) for x in sums)
    if min(tokens, seconds, base_tokens, base_seconds) <= 0:
        return None
    return (tokens / seconds) / (base_tokens / base_seconds)


def bootstrap_interval(
    table: np.ndarray, clusters: Sequence[int], seed: int
) -> tuple[float, float] | None:
    """The 95% percentile interval of `micro_ratio`, ``(low, high)``; None with one cluster.

    table     ``(prompts, 4)``: tokens, seconds, baseline's tokens, baseline's seconds
    clusters  for each prompt what it is resampled with: turns of one conversation stay together
    """
    names, where = np.unique(np.asarray(clusters), return_inverse=True)
    if len(names) < 2:
        return None
    sums = np.zeros((len(names), 4))
    np.add.at(sums, where, table)
    draws = np.random.default_rng(seed).integers(0, len(names), (RESAMPLES, len(names)))
    totals = sums[draws].sum(1)
    totals = totals[(totals > 0).all(1)]
    if not len(totals):
        return None
    ratios = (totals[:, 0] / totals[:, 1]) / (totals[:, 2] / totals[:, 3])
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


# -- what rounds tell ------------------------------------------------------------------------------


def _round_times(cells: Sequence[Cell]) -> dict[str, float | None]:
    """Milliseconds per round, over all repeats."""
    names = ("draft_ms", "verify_ms", "pass_ms", "topk_ms", "host_ms", "topk_share", "host_share")
    total = _merged([cell.summary for cell in cells])
    if total is None:
        return dict.fromkeys(names)
    draft, run = total.per_pass_ms("draft"), total.per_pass_ms("target")
    topk, host = total.per_pass_ms("topk"), total.per_pass_ms("host")
    shares = (topk / run, host / run) if run > 0 else (0.0, 0.0)
    verify = max(total.per_pass_ms("decode") - draft, 0.0)
    return dict(zip(names, (draft, verify, run, topk, host, *shares), strict=True))


def _merged(summaries: Sequence[Summary | None]) -> Summary | None:
    """All of them together; None unless each is there."""
    out = Summary()
    for each in summaries:
        if each is None:
            return None
        out.merge(each)
    return out


def _acceptance(answers: Sequence[Answer]) -> dict[str, Any]:
    """What was drafted and kept."""
    total = _merged([a.summary for a in answers])
    if total is None:
        return {}
    return {
        "drafted_per_round": total.drafted / total.target_passes if total.target_passes else 0.0,
        "layer_rows_per_round": total.layer_rows_per_round,
        "accepted_length_histogram": {str(k): v for k, v in sorted(total.accepted_lengths.items())},
        "acceptance_by_depth": _shares(total.depth_drafted, total.depth_accepted),
        "acceptance_by_source": _shares(total.source_drafted, total.source_accepted),
    }


def _shares(drafted: Mapping[Any, int], accepted: Mapping[Any, int]) -> dict[str, dict[str, Any]]:
    return {
        str(key): {
            "drafted": count,
            "accepted": accepted.get(key, 0),
            "rate": accepted.get(key, 0) / count,
        }
        for key, count in sorted(drafted.items())
        if count
    }


def distinct_share(answers: Sequence[Sequence[int]], n: int) -> float | None:
    """Distinct n-grams / all n-grams, counted within each answer; None when all are too short."""
    distinct = every = 0
    for tokens in answers:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        distinct += len(set(grams))
        every += len(grams)
    return distinct / every if every else None
