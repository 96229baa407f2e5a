"""One pass for several requests: which of all their candidates are verified.

A pass costs time by its rows, whoever they belong to, and eight requests make eight rows before
anything is drafted. So the candidates of all requests compete: in the order of their chances as
many are taken as maximise

    (requests + sum of path probabilities) / (milliseconds of the pass and of drafting)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hasten.policies.cost_model import CostModel
from hasten.types import Draft

Item = tuple[float, int, int, int, float]
"""Minus the chance of a row, request, node (0: the whole draft), rows, and sum of chances."""


WORTH = 0.97
"""A token must be promised to cost less than this share of a plain one: promises aren't exact."""


@runtime_checkable
class Shared(Protocol):
    """A policy whose candidates can be compared with others'."""

    costs: CostModel
    draft_ms: float
    """What drafting takes a round."""

    def weigh(self, draft: Draft) -> list[float]:
        """For each node the probability that it is kept: never more than its parent's."""
        ...

    def keep(self, draft: Draft, nodes: Sequence[int], gain_ms: float) -> Draft:
        """Verify these nodes (increasing; none: a plain step), which promise to save so much."""
        ...


def share_pass(drafts: Sequence[tuple[Shared, Draft]], fixed: int, context: int) -> list[Draft]:
    """What of each draft is verified in a pass that has `fixed` rows besides them, at `context`
    tokens in the mean."""
    if not drafts:
        return []
    items: list[Item] = []
    for at, (policy, draft) in enumerate(drafts):
        items += _items(at, draft, policy.weigh(draft))
    items.sort()  # a child comes after its parent: its chance isn't larger, its number is
    costs = drafts[0][0].costs
    base = fixed + len(drafts)
    curve = costs.curve(base + sum(item[3] for item in items), context)
    spent = sum(policy.draft_ms for policy, _ in drafts)
    taken, price = _best(items, base, curve, spent)
    nodes: list[list[int]] = [[] for _ in drafts]
    chances = [0.0] * len(drafts)
    rows = [0] * len(drafts)
    for _, at, node, count, chance in items[:taken]:
        nodes[at] += [node] if node else range(1, len(drafts[at][1].tree))
        chances[at] += chance
        rows[at] += count
    total = sum(rows)
    row_ms = (curve[base + total - 1] - curve[base - 1]) / total if total else 0.0
    return [
        policy.keep(draft, sorted(mine), chance * price - count * row_ms)
        for (policy, draft), mine, chance, count in zip(drafts, nodes, chances, rows, strict=True)
    ]


def _items(at: int, draft: Draft, chance: Sequence[float]) -> list[Item]:
    """A draft's candidates; one with extra rows or rows already run is taken whole or not at
    all."""
    extra = 0 if draft.extra is None else len(draft.extra.tokens)
    if extra or draft.frontiers:
        rows, total = len(draft.tree) - 1 + extra, sum(chance[1:])
        return [(-total / rows, at, 0, rows, total)] if rows else []
    return [(-chance[node], at, node, 1, chance[node]) for node in range(1, len(draft.tree))]


def _best(
    items: Sequence[Item], base: int, curve: Sequence[float], spent: float
) -> tuple[int, float]:
    """How many of the ordered items to take, and the milliseconds a token costs then."""
    rows, tokens = base, float(base)
    plain = (curve[base - 1] + spent) / base
    best, price = 0, WORTH * plain
    for count, (_, _, _, more, chance) in enumerate(items, start=1):
        rows += more
        tokens += chance
        each = (curve[rows - 1] + spent) / tokens
        if each < price:
            best, price = count, each
    return best, price if best else plain


def observe_pass(policies: Sequence[Shared], rows: int, context: int, pass_ms: float) -> None:
    """A shared pass took so long: told once to each cost model."""
    for costs in {id(p.costs): p.costs for p in policies}.values():
        costs.observe(rows, context, pass_ms, 0.0)
