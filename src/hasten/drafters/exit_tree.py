"""Growing a draft tree from an exit module: a row's likeliest ids, and those of rows they lead to.

A module at exit 0 runs before the trunk does, several rows at a time, and its second to fourth
choices are right often enough to be worth a row: small trees, expanded best first (the idea of
EAGLE-2's dynamic trees, arXiv 2406.16858, with a stop by what another step may gain).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from hasten.drafters.base import DraftContext
from hasten.drafters.exit_session import ExitSession, ModuleRun
from hasten.drafters.ranks import MODULE, module_rank
from hasten.drafters.tree_builder import TreeBuilder
from hasten.exits.native_module import Pairs


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


def grow(
    tree: TreeBuilder,
    session: ExitSession,
    run: ModuleRun,
    ctx: DraftContext,
    growth: Growth,
    *,
    eos_ids: frozenset[int] = frozenset(),
) -> dict[int, Pairs]:
    """Add the candidates of a module at exit 0 to `tree`; what it said at each node it looked at:
    (id, chance) pairs, likeliest first."""
    started = time.perf_counter()
    frontier, parents = [0], [-1]
    rows = {0: 0}  # nodes looked at, and their numbers among the rows asked about
    reached = {0: 1.0}
    said: dict[int, Pairs] = {}
    for step in range(1, growth.steps + 1):
        answers = session.ask(run, [tree.tokens[n] for n in frontier], parents, growth.width)
        said.update(zip(frontier, answers, strict=True))
        made = _children(tree, frontier, answers, reached, growth.least)
        if step == growth.steps or tree.full:
            break
        deeper = (
            n for n in made if tree.tokens[n] not in eos_ids and tree.depths[n] < tree.max_depth
        )
        frontier = sorted(sorted(deeper, key=lambda n: -reached[n])[: growth.expand])
        if not frontier or sum(reached[n] for n in frontier) < growth.mass:
            break
        parents = [rows[tree.parents[n]] for n in frontier]
        for node in frontier:
            rows[node] = len(rows)
    ctx.model_seconds += time.perf_counter() - started
    return said


def _children(
    tree: TreeBuilder,
    frontier: Sequence[int],
    answers: Sequence[Pairs],
    reached: dict[int, float],
    least: float,
) -> list[int]:
    """Candidates below the frontier's nodes that are reached often enough; the nodes they are."""
    made: list[tuple[float, float, int, int]] = []
    for node, pairs in zip(frontier, answers, strict=True):
        above = reached[node]
        for token, chance in pairs:
            if above * chance < least:
                break  # the others are less likely
            made.append((above * chance, chance, node, token))
    made.sort(key=itemgetter(0), reverse=True)
    nodes = []
    for reach, chance, parent, token in made:
        added = tree.add(parent, token, MODULE, module_rank(chance))
        if added is not None:
            reached[added] = reach
            nodes.append(added)
    return nodes
