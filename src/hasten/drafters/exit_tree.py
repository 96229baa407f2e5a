"""Growing a draft tree from an exit module: a row's likeliest ids, and those of rows they lead to.

A module at exit 0 runs before the trunk does, several rows at a time, and its second to fourth
choices are right often enough to be worth a row: small trees, expanded best first (the idea of
EAGLE-2's dynamic trees, arXiv 2406.16858, with a stop by what another step may gain).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hasten.drafters.base import DraftContext
from hasten.drafters.exit_session import ExitSession, ModuleRun
from hasten.drafters.ranks import MODULE, module_rank
from hasten.drafters.tree_builder import TreeBuilder


@dataclass(frozen=True, slots=True)
class Growth:
    """How a tree grows.

    width     ids taken of a row at most, none less likely than `least` (along the path)
    expand    rows that a step runs through the module, at most
    steps     steps at most, the first (the root's) included
    mass      another step only if the rows it would run are reached with this probability in all
    """

    width: int = 8
    least: float = 0.02
    expand: int = 4
    steps: int = 3
    mass: float = 0.3


Rank = Callable[[int, int, float], int]
"""``(parent, token, chance) -> rank`` of a module's node."""


def grow(
    tree: TreeBuilder,
    session: ExitSession,
    run: ModuleRun,
    ctx: DraftContext,
    growth: Growth,
    *,
    eos_ids: frozenset[int] = frozenset(),
    state: torch.Tensor | None = None,
) -> dict[int, list[tuple[int, float]]]:
    """Add the module's candidates to `tree`; what it said at each node it looked at: (id, chance)
    pairs, likeliest first. `state` is the root's state at the exit, None at exit 0."""
    said: dict[int, list[tuple[int, float]]] = {}
    started = time.perf_counter()
    hidden = run.first(tree.tokens[0], state)
    reached = {0: 1.0}
    frontier, outputs = [0], {0: hidden}
    columns: dict[int, int] = {}
    for step in range(1, growth.steps + 1):
        made = _children(tree, session, run, frontier, outputs, reached, growth, said)
        ends = {n for n in made if tree.tokens[n] in eos_ids or tree.depths[n] == tree.max_depth}
        fresh = sorted(set(made) - ends, key=lambda n: -reached[n])[: growth.expand]
        if (
            step == growth.steps
            or tree.full
            or not fresh
            or sum(reached[n] for n in fresh) < growth.mass
        ):
            break
        fresh.sort()
        for node in fresh:
            columns[node] = len(columns)
        rows = _expand(tree, run, fresh, outputs, columns)
        outputs |= {node: rows[i : i + 1] for i, node in enumerate(fresh)}
        frontier = fresh
    ctx.model_seconds += time.perf_counter() - started
    return said


def _children(
    tree: TreeBuilder,
    session: ExitSession,
    run: ModuleRun,
    frontier: list[int],
    outputs: dict[int, torch.Tensor],
    reached: dict[int, float],
    growth: Growth,
    said: dict[int, list[tuple[int, float]]],
) -> list[int]:
    """Candidates below the frontier's nodes; the nodes they are."""
    rows = [outputs[node] for node in frontier]
    logits = session.logits(run, torch.cat(rows) if len(rows) > 1 else rows[0])
    top = torch.topk(logits, min(growth.width, logits.shape[1]))
    chances = (top.values - torch.logsumexp(logits, -1, keepdim=True)).exp_().tolist()
    made: list[tuple[float, int, int]] = []
    for node, row, places in zip(frontier, chances, top.indices.tolist(), strict=True):
        pairs = [
            (session.head.id_of(place), chance) for place, chance in zip(places, row, strict=True)
        ]
        said[node] = pairs
        made += [
            (reached[node] * chance, node, token)
            for token, chance in pairs
            if reached[node] * chance >= growth.least
        ]
    nodes = []
    for chance, parent, token in sorted(made, key=lambda each: -each[0]):
        rank = module_rank(chance / max(reached[parent], 1e-9))
        added = tree.add(parent, token, MODULE, rank)
        if added is not None:
            reached[added] = chance
            nodes.append(added)
    return nodes


def _expand(
    tree: TreeBuilder,
    run: ModuleRun,
    nodes: list[int],
    outputs: dict[int, torch.Tensor],
    columns: dict[int, int],
) -> torch.Tensor:
    """The module's outputs at `nodes`, siblings and cousins in one go."""
    above = torch.cat([outputs[tree.parents[node]] for node in nodes])
    width = len(columns) + 1  # scratch rows: the root, then every node expanded so far
    mask = torch.full((len(nodes), width), -torch.inf)
    for i, node in enumerate(nodes):
        mask[i, 0] = 0.0
        while node:
            mask[i, 1 + columns[node]] = 0.0
            node = tree.parents[node]
    tokens = [tree.tokens[node] for node in nodes]
    depths = [tree.depths[node] for node in nodes]
    return run.more(tokens, None, above, depths, mask.to(above.device))
