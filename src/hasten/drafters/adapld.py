"""AdaPLD: copy what followed an earlier place like this one, and branch where it may go elsewhere.

One step (arXiv 2606.05742): find an *anchor*, the earlier occurrence of the last token whose hidden
state before it is nearest to the present one; only when the token never occurred, one of a token
that resembles it. Draft the tokens that followed the anchor; beside them branches, the target's own
candidates stored at the anchor; and after each branch a successor, the token that followed the
branch's own anchor. PLD+ (arXiv 2412.01447) is the copy alone. What follows the papers, what is
ours and what is unknown: docs/methods/adapld.md.

Candidates are added best first by how often their like is kept, so that a budget smaller than the
tree is well spent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

import torch

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.reuse_memory import Anchor, Embed, ReuseMemory
from hasten.drafters.reuse_ranks import (
    BRANCH,
    BY_RESEMBLANCE,
    CHANCES,
    COPY,
    SEMANTIC,
    SUCCESSOR,
    branch_rank,
    copy_rank,
    nearness,
    place_of,
    semantic_rank,
    strength,
)
from hasten.drafters.tree_builder import TreeBuilder
from hasten.errors import OptionError
from hasten.types import Budget, Draft, Round, RowSignals, Signals

RERANKS = ("hidden", "latest")
QUERIES = ("anchor", "previous")

_COPY_CHANCES, _BRANCH_CHANCES = CHANCES[COPY], CHANCES[BRANCH]

_HOPE = 0.5
"""A branch's successor is looked for when its chance could be this much of the branch's."""


class AdaPLD(BaseDrafter):
    """A tree of a copied span, branches from stored candidates, and their successors.

    layer             whose outputs are compared, 1 to the number of layers
    breadth           branches at an anchor (the paper's K)
    copy              longest copied span (its ell)
    tau               least embedding cosine of a resembling token
    blend             weight of that cosine beside the hidden states' (ours; the paper's: 0)
    max_cand          most anchors compared
    rerank            ``hidden``, or ``latest``: the most recent occurrence (plain prompt lookup)
    semantic          look for resembling tokens when the last one never occurred
    branches          draft stored candidates
    successors        ... and what followed each of them elsewhere
    successor_length  tokens copied after a branch
    succ_semantic     let a branch that never occurred have the successor of a resembling token,
                      where `semantic` is on
    succ_query        the hidden state a branch's anchors are compared with: the one at the
                      ``anchor`` it was stored at, or the ``previous`` one, before the pending token
    deep              branch off below drafted tokens too, and go on where a copy reaches the end of
                      the text (ours)
    eos_ids           nothing is drafted after these
    """

    name = "adapld"

    def __init__(
        self,
        layer: int,
        *,
        breadth: int = 8,
        copy: int = 30,
        tau: float = 0.1,
        blend: float = 1.0,
        max_cand: int = 32,
        rerank: str = "hidden",
        semantic: bool = True,
        branches: bool = True,
        successors: bool = True,
        successor_length: int = 30,
        succ_semantic: bool = False,
        succ_query: str = "anchor",
        deep: bool = True,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        for option, value, known in (
            ("rerank", rerank, RERANKS),
            ("succ_query", succ_query, QUERIES),
        ):
            if value not in known:
                raise OptionError(
                    f"adapld.{option}", f"unknown {value!r}", f"Choose one of {', '.join(known)}"
                )
        self.layer, self.breadth, self.copy, self.deep = layer, breadth, copy, deep
        self.semantic, self.branches = semantic and branches, branches
        self.successors = successors and branches
        self.successor_length = successor_length
        self.succ_semantic = succ_semantic and self.semantic
        self.succ_query, self.eos_ids = succ_query, eos_ids
        hidden = rerank == "hidden"
        self.needs = Signals(
            topk=breadth + 1 if branches else 0,
            hidden=(layer,) if hidden else (),
            embeddings=self.semantic,
            prompt=branches or hidden,
        )
        self._memory = ReuseMemory(
            width=breadth + 1, max_cand=max_cand, tau=tau, blend=blend, rerank=hidden
        )

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Remember the prompt, with the signals of its last rows."""
        self._memory.begin(prompt, signals.hidden.get(self.layer), self._listed(signals))

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The best candidates that fit the budget."""
        tree = TreeBuilder(ctx.ids[-1], budget.nodes, budget.depth)
        memory = self._memory
        before = len(memory) - 1
        anchor = memory.retrieve(ctx.ids[-1], before, ctx.embed if self.semantic else None)
        if anchor is not None and not tree.full:
            agreement = memory.agreement(anchor.position, before)
            near = 0
            if anchor.semantic:
                near = nearness(anchor.score)
            elif agreement == 0 and memory.rerank:
                near = nearness(memory.cosine(anchor.position, before))
            _Growth(self, memory, tree, ctx.embed).run(anchor, agreement, near)
        return tree.draft()

    def observe(self, round: Round) -> None:
        """Remember what was kept: rows of rejected nodes, which had another text before them, are
        left out."""
        signals = round.signals
        self._memory.commit(
            round.emitted, round.accepted, signals.hidden.get(self.layer), self._listed(signals)
        )

    def _listed(self, signals: RowSignals) -> torch.Tensor | None:
        """The stored candidates, where this drafter asked for them."""
        return signals.topk_ids if self.branches else None

    def end(self) -> None:
        """Forget the request."""
        self._memory.clear()


class _Growth:
    """One tree on its way: steps wait in a heap, the likeliest is taken next.

    Entries are ``(-chance, order, step, arguments)``; `order` is unique, so that no more is ever
    compared. A step is called with its chance and its arguments.

    A node *stands* at the position where the memory has its token; `agreement` is how many tokens
    before that position are those before the node.
    """

    __slots__ = ("_chain", "_drafter", "_embed", "_heap", "_last", "_memory", "_order", "_tree")

    def __init__(
        self, drafter: AdaPLD, memory: ReuseMemory, tree: TreeBuilder, embed: Embed | None
    ) -> None:
        self._drafter, self._memory, self._tree = drafter, memory, tree
        self._embed = embed if drafter.succ_semantic else None
        self._last = len(memory)
        """Position of the pending token."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._chain: tuple[int, int] | None = None
        """Where the root stands, and its agreement, if a copy may go on from there."""

    def run(self, anchor: Anchor, agreement: int, near: int) -> None:
        """Grow from the root, which stands at `anchor`, until nothing more fits."""
        position = anchor.position
        if anchor.semantic:
            row = self._memory.candidates[position][: self._drafter.breadth]
            self._next_semantic(position, row, 0, near, agreement)
        else:
            if self._drafter.deep:
                self._chain = position, agreement
            self._expand(0, position, agreement, 1.0, self._drafter.copy, near)
        heap, tree = self._heap, self._tree
        tokens, limit = tree.tokens, tree.limit
        while heap and len(tokens) < limit:
            chance, _, step, arguments = heappop(heap)
            step(-chance, *arguments)

    def _push(self, chance: float, step: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._order += 1
        heappush(self._heap, (-chance, self._order, step, arguments))

    def _expand(
        self, node: int, position: int, agreement: int, chance: float, left: int, near: int = 0
    ) -> None:
        """Propose the children of `node`, itself kept with probability `chance`: what followed its
        position (`left` tokens may still be copied), and the candidates stored there."""
        memory = self._memory
        follow, row = memory.tokens[position + 1], memory.candidates[position]
        if left > 0:
            rank = copy_rank(strength(agreement, near), place_of(follow, row))
            arguments = (node, position + 1, agreement + 1, left - 1, COPY, rank)
            self._push(chance * _COPY_CHANCES[rank], self._add_copy, arguments)
        if row and (node == 0 or self._drafter.deep):
            self._next_branch(node, position, agreement, chance, 0, 0)

    def _next_branch(
        self, node: int, position: int, agreement: int, chance: float, place: int, count: int
    ) -> None:
        """Propose the stored candidate at `place`, or the one after it where that is the copied
        token; each follows when the one before it was added, of which there are `count`."""
        memory, drafter = self._memory, self._drafter
        row = memory.candidates[position]
        if place < len(row) and row[place] == memory.tokens[position + 1]:
            place += 1
        enough = count if drafter.deep else place  # the paper's are not made up to the breadth
        if place >= len(row) or enough >= drafter.breadth:
            return
        rank = branch_rank(place, agreement)
        arguments = (node, position, agreement, chance, place, count + 1, rank)
        self._push(chance * _BRANCH_CHANCES[rank], self._add_branch, arguments)

    def _next_semantic(
        self, position: int, row: Sequence[int], place: int, near: int, agreement: int
    ) -> None:
        """Propose the candidate at `place`, stored at the root's semantic anchor."""
        if place < len(row):
            rank = semantic_rank(place, near, agreement)
            arguments = (position, row, place, near, agreement, rank)
            self._push(CHANCES[SEMANTIC][rank], self._add_semantic, arguments)

    # -- steps -------------------------------------------------------------------------------------

    def _add_copy(
        self,
        chance: float,
        node: int,
        position: int,
        agreement: int,
        left: int,
        source: str,
        rank: int,
    ) -> None:
        """Add the token at `position`, and propose what comes after it."""
        token = self._memory.tokens[position]
        child = self._tree.add(node, token, source, rank)
        if child is None or token in self._drafter.eos_ids:
            return
        if position == self._last:
            # The copy has reached the pending token, which stands at the root's anchor: what comes
            # after the one should come after the other, and so the text repeats.
            if self._chain is None:
                return
            position, agreement = self._chain[0], min(agreement, self._chain[1])
        self._expand(child, position, agreement, chance, left)

    def _add_branch(
        self,
        chance: float,
        node: int,
        position: int,
        agreement: int,
        above: float,
        place: int,
        count: int,
        rank: int,
    ) -> None:
        """Add the stored candidate at `place`, and propose the one after it."""
        token = self._memory.candidates[position][place]
        child = self._tree.add(node, token, BRANCH, rank)
        if child is not None:
            self._next_branch(node, position, agreement, above, place + 1, count)
            self._hope(chance, child, token, position)

    def _add_semantic(
        self,
        chance: float,
        position: int,
        row: Sequence[int],
        place: int,
        near: int,
        agreement: int,
        rank: int,
    ) -> None:
        """The same below a root that stands at a semantic anchor."""
        child = self._tree.add(0, row[place], SEMANTIC, rank)
        if child is not None:
            self._next_semantic(position, row, place + 1, near, agreement)
            self._hope(chance, child, row[place], position)

    def _hope(self, chance: float, node: int, token: int, stored_at: int) -> None:
        """Look for the branch's successor later, if its chance is up to it."""
        if self._drafter.successors and token not in self._drafter.eos_ids:
            self._push(_HOPE * chance, self._find_successor, (node, token, stored_at, chance))

    def _find_successor(
        self, _: float, node: int, token: int, stored_at: int, chance: float
    ) -> None:
        """Find the branch's own anchor and propose what followed it."""
        tree, drafter, memory = self._tree, self._drafter, self._memory
        before = stored_at if drafter.succ_query == "anchor" else self._last - 1
        anchor = memory.retrieve(token, before, self._embed)
        if anchor is None:
            return
        above = []
        parent = tree.parents[node]
        while parent > 0:
            above.append(tree.tokens[parent])
            parent = tree.parents[parent]
        position = anchor.position
        agreement = memory.agreement(position, self._last, above)
        rank = BY_RESEMBLANCE if anchor.semantic else strength(agreement)
        agreeing = 0 if anchor.semantic else agreement + 1  # the branch's own token agrees too
        after = (node, position + 1, agreeing, drafter.successor_length - 1, SUCCESSOR, rank)
        self._push(chance * CHANCES[SUCCESSOR][rank], self._add_copy, after)
        if drafter.deep and not anchor.semantic:
            self._next_branch(node, position, agreement, chance, 0, 0)
