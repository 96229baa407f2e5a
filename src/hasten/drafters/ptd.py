"""Progressive tree drafting (arXiv 2607.10661): the target drafts for itself.

Each pass carries the pending token, continuations of it found in a pool (verified), and a draft
tree (`hasten.drafters.ptd_tree`) that rides along: every node of it yields one more guessed token.
What the draft tree has grown into goes to the pool. docs/methods/ptd.md says what follows the paper
and what is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.ngram_pool import NOTHING, NGramPool
from hasten.drafters.ptd_tree import FlatTree
from hasten.drafters.riding import Riders, prompt_kinds, prompt_random
from hasten.drafters.tree_builder import TreeBuilder
from hasten.types import Budget, Draft, Round, RowSignals, Signals

SEEDS = 2
"""Chains of prompt tokens that a request's draft tree starts with (the authors' code)."""


class PTD(BaseDrafter):
    """A pool of guesses, fed by a tree that the target grows itself.

    width       most children of a draft tree's node (the paper's w)
    depth       edges at which a subtree of it slides (d)
    roots       subtrees of it (R); 0 switches it off
    guess       most continuations verified in a pass
    reach       longest continuation that the pool keeps (ours)
    key         tokens that continuations are looked up by: 1, or 2 with 1 as a second choice (ours)
    spine       subtrees see the roots of those before them and stand one position apart
    harvest     put the draft tree into the pool; off for comparison only
    feedback    put what was verified, with the target's choice after every row, into the pool
    text        put the prompt's and the answer's own n-grams into the pool (ours)
    max_nodes   most nodes of a key's trie
    seed_depth  longest seed chain
    eos_ids     never in the draft tree, nor taken from the target's predictions; the text's own may
                be guessed
    """

    name = "ptd"
    needs = Signals(topk=1)

    def __init__(
        self,
        *,
        width: int = 2,
        depth: int = 2,
        roots: int = 1,
        guess: int = 8,
        reach: int = 8,
        key: int = 2,
        spine: bool = True,
        harvest: bool = True,
        feedback: bool = True,
        text: bool = True,
        max_nodes: int = 60,
        seed_depth: int = 2,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.width, self.depth, self.roots, self.guess = width, depth, roots, guess
        self.reach, self.key, self.spine, self.harvest = reach, key, spine, harvest
        self.feedback, self.text = feedback, text
        self.max_nodes, self.seed_depth, self.eos_ids = max_nodes, seed_depth, eos_ids
        self._forget()

    def _forget(self) -> None:
        self._tree = FlatTree()
        self._pool = NGramPool(key=self.key, max_nodes=self.max_nodes, max_depth=self.reach)
        self._tail: list[int] = []
        """The text's last two tokens."""
        self._rows: list[int] = []
        """The row of each node of the draft tree in the pass under way, of `_size` rows."""
        self._size = 0

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Seed the draft tree with chains of prompt tokens."""
        self._forget()
        kinds, rng = prompt_kinds(prompt, self.eos_ids), prompt_random(prompt)
        firsts = rng.sample(kinds, min(SEEDS, self.roots, len(kinds)))
        for first in firsts:
            more = rng.randrange(max(self.seed_depth, 1))
            self._tree.seed([[first, *(rng.choice(kinds) for _ in range(more))]])
        self._learn(prompt)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """Continuations of the pending token from the pool; the draft tree rides along."""
        ids = ctx.ids
        tree = TreeBuilder(ids[-1], min(budget.nodes, self.guess + 1), budget.depth)
        self._pool.fill(tree, ids[-2] if len(ids) > 1 else NOTHING)
        riders = Riders(tree)
        rows: list[int] = []
        parents = self._tree.row_parents(self.spine)
        for token, parent in zip(self._tree.tokens, parents, strict=True):
            rows.append(riders.add(0 if parent < 0 else rows[parent], token))
        self._rows, self._size = rows, len(riders)
        return riders.draft()

    def observe(self, round: Round) -> None:
        """Feed the pool, grow the draft tree."""
        size, self._size = self._size, 0
        if round.tree is not None and round.signals.topk_ids is not None:
            best = round.signals.topk_ids[:, 0].tolist()
            if self.feedback:
                self._feed_back(round, best)
            if len(best) == size:  # else the riding rows were left out of this pass
                self._grow(round, [best[row] for row in self._rows])
        self._learn(round.emitted)

    def _feed_back(self, round: Round, best: Sequence[int]) -> None:
        """The verified tree, with what the target put after each of its rows."""
        tree = round.tree
        assert tree is not None
        predictions = self._without_ends(best[: len(tree)])
        for node, token in zip(round.accepted, round.emitted, strict=True):
            predictions[node] = NOTHING if token in self.eos_ids else token
        before = self._tail[-2] if len(self._tail) > 1 else NOTHING
        previous = [before if p < 0 else tree.tokens[p] for p in tree.parents]
        self._pool.merge(tree.tokens, tree.parents, predictions, previous)

    def _grow(self, round: Round, predictions: Sequence[int]) -> None:
        """Harvest the draft tree once it is deep enough, then let it grow."""
        if not self.roots:
            return
        assert round.tree is not None
        tree, pending = self._tree, round.tree.tokens[0]
        if self.harvest and tree.depth >= self.depth:
            previous = [pending if p < 0 else tree.tokens[p] for p in tree.row_parents(self.spine)]
            self._pool.merge(tree.tokens, tree.parents, self._without_ends(predictions), previous)
        tree.advance(
            predictions,
            round.emitted[0],
            width=self.width,
            depth=self.depth,
            roots=self.roots,
            eos_ids=self.eos_ids,
        )

    def _without_ends(self, tokens: Sequence[int]) -> list[int]:
        return [NOTHING if token in self.eos_ids else token for token in tokens]

    def _learn(self, new: Sequence[int]) -> None:
        """Move on in the text."""
        self._tail = [*self._tail, *new[-2:]][-2:]
        if self.text:
            self._pool.extend(new)

    def end(self) -> None:
        """Drop tree and pool."""
        self._forget()
