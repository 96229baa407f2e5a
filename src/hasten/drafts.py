"""Checks on what drafters propose, and what a target makes of it that can't run all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hasten.errors import DrafterError
from hasten.types import Budget, Draft, DraftTree


def check_draft(draft: Draft, root: int, budget: Budget, vocab_size: int) -> None:
    """Raise DrafterError when a draft breaks the contract."""
    if not isinstance(draft, Draft) or not isinstance(draft.tree, DraftTree):
        raise DrafterError(f"proposed a {type(draft).__name__}, not a Draft with a DraftTree")
    problem = _tree_problem(draft, root, budget, vocab_size) or _q_problem(draft, vocab_size)
    if problem:
        raise DrafterError(f"proposed a broken draft: {problem}")


def _tree_problem(draft: Draft, root: int, budget: Budget, vocab_size: int) -> str:
    tree = draft.tree
    extra = draft.extra.tokens if draft.extra is not None else ()
    if tree.tokens[0] != root:
        return f"its root is {tree.tokens[0]}, not the pending token {root}"
    if len(tree) > budget.nodes:
        return f"{len(tree)} nodes for a budget of {budget.nodes}"
    if max(tree.depths) > budget.depth:
        return f"depth {max(tree.depths)} for a budget of {budget.depth}"
    tokens = (*tree.tokens, *extra)
    # bool is refused with all that isn't an int: True reads as 1
    if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= vocab_size:
        return f"ids outside 0..{vocab_size - 1} (or not ints: use int(id) or tensor.tolist())"
    if len(set(zip(tree.parents, tree.tokens, strict=True))) != len(tree):
        return "two siblings carry the same token"
    if draft.extra is not None and not _parents_ok(draft.extra.parents, len(extra), len(tree)):
        return "an extra row's parent must be an earlier row"
    if any(each and len(each) != len(tree) for each in (draft.sources, draft.ranks)):
        return f"sources and ranks need one entry for each of the {len(tree)} nodes"
    return ""


def _q_problem(draft: Draft, vocab_size: int) -> str:
    for node, q in draft.q.items():
        if not 0 <= node < len(draft.tree):
            return f"q is given for node {node}, which isn't there"
        if not isinstance(q, torch.Tensor) or not q.is_floating_point() or q.shape != (vocab_size,):
            return f"q must be a float tensor of shape ({vocab_size},)"
    if not draft.q:
        return ""
    for token, parent in zip(draft.tree.tokens[1:], draft.tree.parents[1:], strict=True):
        # Such a token would be accepted however unlikely the target finds it.
        if parent in draft.q and not float(draft.q[parent][token]) > 0:
            return f"q gives the drawn token {token} no probability"
    return ""


def _parents_ok(parents: Sequence[int], count: int, first: int) -> bool:
    return len(parents) == count and all(0 <= p < first + i for i, p in enumerate(parents))


def without_far_rows(draft: Draft, depth: int) -> Draft:
    """The draft, without its extra rows when one of them lies deeper than `depth` (past the
    context)."""
    if draft.extra is None:
        return draft
    depths = list(draft.tree.depths)
    for parent in draft.extra.parents:
        depths.append(depths[parent] + 1)
    return draft if max(depths) <= depth else replace(draft, extra=None)


def collapse(draft: Draft) -> Draft:
    """The chain of first children (a drafter's first choice at each node), for targets without tree
    masks.

    The first child of a drawn node is its first draw, so its q stays right. Extra rows are dropped.
    Rows that already ran (frontiers) are a chain there, so they are on it.
    """
    kids = draft.tree.children()
    path = [0]
    while kids[path[-1]]:
        path.append(kids[path[-1]][0])
    tokens = [draft.tree.tokens[n] for n in path]
    return Draft(
        DraftTree.chain(tokens[0], tokens[1:]),
        q={i: draft.q[n] for i, n in enumerate(path) if n in draft.q},
        frontiers=draft.frontiers,
        sources=tuple(draft.sources[n] for n in path) if draft.sources else (),
        ranks=tuple(draft.ranks[n] for n in path) if draft.ranks else (),
        laws={i: draft.laws[n] for i, n in enumerate(path) if n in draft.laws},
    )


def prune(draft: Draft, keep: Sequence[int]) -> Draft:
    """The draft with the root and the nodes of `keep` only (increasing, closed under parents).

    Extra rows and early-exit frontiers aren't carried: a draft that has them is returned whole.
    """
    if draft.extra is not None or draft.frontiers or len(keep) == len(draft.tree) - 1:
        return draft
    old = [0, *keep]
    new = {node: index for index, node in enumerate(old)}
    tree = draft.tree
    tokens, parents, depths = tree.tokens, tree.parents, tree.depths
    return Draft(
        DraftTree.trusted(
            [tokens[n] for n in old],
            [-1, *[new[parents[n]] for n in keep]],
            [depths[n] for n in old],
        ),
        q={new[n]: q for n, q in draft.q.items() if n in new},
        sources=tuple([draft.sources[n] for n in old]) if draft.sources else (),
        ranks=tuple([draft.ranks[n] for n in old]) if draft.ranks else (),
        laws={new[n]: law for n, law in draft.laws.items() if n in new},
    )
