"""The test drafters: four that know the answer, and one toy of each kind a draft can be.

Those that know it are given `truth`, prompt and plain answer as one list of ids; past its end they
propose nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.types import Budget, Draft, DraftTree, ExtraRows, Round, RowSignals, Signals


class TestDrafter(BaseDrafter):
    """Counts the calls and checks their order: begin, (propose, observe)*, end."""

    __test__ = False

    def __init__(self, truth: Sequence[int] = (), vocab: int = 24, seed: int = 0) -> None:
        self.truth, self.vocab = list(truth), vocab
        self.random = random.Random(seed)
        self.calls: list[str] = []
        self.accepted = 0

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        assert not self.calls
        self.calls.append("begin")
        self.ids = list(prompt)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        assert self.calls[-1] == "observe"
        self.calls.append("propose")
        assert list(ctx.ids) == self.ids
        assert budget.nodes > 1
        assert budget.depth > 0
        return self.draft(ctx, budget)

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The draft itself."""
        raise NotImplementedError

    def observe(self, round: Round) -> None:
        assert self.calls[-1] in ("begin", "propose", "observe")
        self.calls.append("observe")
        self.ids.extend(round.emitted)
        self.accepted += max(len(round.accepted) - 1, 0)

    def end(self) -> None:
        assert "end" not in self.calls, "end comes once"
        self.calls.append("end")

    def next_truth(self, count: int) -> list[int]:
        """The next `count` tokens of the plain answer, fewer at its end."""
        at = len(self.ids)
        return self.truth[at : at + max(count, 0)]

    def wrong(self, token: int) -> int:
        """Any other id."""
        return (token + 1 + self.random.randrange(self.vocab - 1)) % self.vocab


def _room(budget: Budget) -> int:
    return min(budget.nodes - 1, budget.depth)


class Oracle(TestDrafter):
    """The true continuation."""

    name = "oracle"

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        return Draft(DraftTree.chain(ctx.ids[-1], self.next_truth(_room(budget))))


class Adversarial(TestDrafter):
    """Tokens known to be wrong."""

    name = "adversarial"

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        return Draft(
            DraftTree.chain(ctx.ids[-1], [self.wrong(t) for t in self.next_truth(_room(budget))])
        )


class Flaky(TestDrafter):
    """Truth up to a random depth, then junk; of random length, 0 included."""

    name = "flaky"

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        return Draft(DraftTree.chain(ctx.ids[-1], self.guess(_room(budget))))

    def guess(self, room: int) -> list[int]:
        """At most `room` tokens."""
        length = self.random.randint(0, room)
        truth = self.next_truth(self.random.randint(0, length))
        return truth + [self.random.randrange(self.vocab) for _ in range(length - len(truth))]


class Wide(TestDrafter):
    """At each depth a wrong first child and the right second one: the kept path has gaps."""

    name = "wide"

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        tokens, parents, at = [ctx.ids[-1]], [-1], 0
        for right in self.next_truth(budget.depth):
            if len(tokens) + 2 > budget.nodes:
                break
            tokens += [self.wrong(right), right]
            parents += [at, at]
            at = len(tokens) - 1
        sources = ("root", *("wrong" if i % 2 else "right" for i in range(1, len(tokens))))
        return Draft(DraftTree(tuple(tokens), tuple(parents)), sources=sources)


class Riding(TestDrafter):
    """Extra rows: a guess rides under each end of the draft, and what it reads back is the next
    draft's first token when the guess comes true.

    Under plain greedy decoding that token is then always right (`hits` counts, `misses` must be 0).
    """

    name = "riding"
    needs = Signals(topk=3, hidden=(0, 2), prompt=True)

    def __init__(self, truth: Sequence[int] = (), vocab: int = 24, seed: int = 0) -> None:
        super().__init__(truth, vocab, seed)
        self.hits = self.misses = 0
        self.expected: int | None = None
        self.proposed: Draft | None = None

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        super().begin(prompt, signals)
        assert signals.topk_ids is not None
        assert signals.topk_logits is not None
        rows = signals.topk_ids.shape[0]
        assert 0 < rows <= len(prompt)
        assert signals.topk_ids.shape == signals.topk_logits.shape == (rows, 3)
        assert {k: len(v) for k, v in signals.hidden.items()} == {0: rows, 2: rows}

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        first = [] if self.expected is None else [self.expected]
        chain = (first + self.next_truth(budget.depth)[len(first) :])[: _room(budget)]
        if self.random.random() < 0.3:
            chain = chain[:1]
        tree = DraftTree.chain(ctx.ids[-1], chain)
        last = len(tree) - 1
        after = self.truth[len(self.ids) + last : len(self.ids) + last + 1]
        guesses = [*after, self.random.randrange(self.vocab), self.random.randrange(self.vocab)]
        parents = [*([last] * len(after)), 0, len(tree) + len(after)]
        self.proposed = Draft(tree, extra=ExtraRows(tuple(guesses), tuple(parents)))
        return self.proposed

    def observe(self, round: Round) -> None:
        super().observe(round)
        if self.expected is not None and round.drafted:
            if round.emitted[0] == self.expected:
                self.hits += 1
            else:
                self.misses += 1
        self.expected = None
        draft, self.proposed = self.proposed, None
        if draft is None or draft.extra is None:
            return
        rows = len(draft.tree) + len(draft.extra.tokens)
        ids = round.signals.topk_ids
        assert ids is not None
        if len(ids) == len(draft.tree):
            return  # the rows were left out: no tree mask, or no room in the context
        assert ids.shape == (rows, 3)
        assert round.signals.hidden[2].shape[0] == rows
        at_end = round.accepted[-1:] == (len(draft.tree) - 1,)
        if at_end and draft.extra.parents[0] == round.accepted[-1]:
            token = draft.extra.tokens[0]
            if round.emitted[-1] == token:
                self.expected = int(ids[len(draft.tree), 0])


class Resuming(Flaky):
    """Early exit: rows are run through lower layers first, to several frontiers, the earlier rows
    further than the later ones; then the pass resumes them where they stand."""

    name = "resuming"

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        tokens = [ctx.ids[-1], *self.guess(_room(budget))]
        if ctx.run_rows is None:
            return Draft(DraftTree.chain(tokens[0], tokens[1:]))
        parents = list(range(-1, len(tokens) - 1))
        frontiers = self._run(ctx, tokens, parents)
        return Draft(DraftTree.chain(tokens[0], tokens[1:]), frontiers=tuple(frontiers))

    def _run(self, ctx: DraftContext, tokens: list[int], parents: list[int]) -> list[int]:
        """Run some rows below layer 4: each new row to a random layer that the ones before it
        reach too, now and then all standing at one layer further."""
        assert ctx.run_rows is not None
        stand: list[int] = []
        for row in range(self.random.randint(0, len(tokens))):
            ctx.run_rows(tokens[row : row + 1], parents[row : row + 1], (0, 1))
            stand.append(1)
            while self.random.random() < 0.5:
                low = stand[-1]
                first = stand.index(low)
                above = stand[first - 1] if first else 3
                high = self.random.randint(low, above)
                if high == low:
                    break
                out = ctx.run_rows(tokens[first : row + 1], parents[first : row + 1], (low, high))
                assert len(out) == row + 1 - first
                stand[first:] = [high] * (row + 1 - first)
        return stand


class ResumingTree(Resuming):
    """The same over the tree of `Wide`."""

    name = "resuming-tree"

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        tree = Wide.draft(self, ctx, budget).tree  # type: ignore[arg-type]
        if ctx.run_rows is None:
            return Draft(tree)
        frontiers = self._run(ctx, list(tree.tokens), list(tree.parents))
        return Draft(tree, frontiers=tuple(frontiers))


class Drawn(TestDrafter):
    """A chain drawn from a q unlike p: a fixed table row of the last token, through the options."""

    name = "drawn"
    width = 1

    def __init__(self, truth: Sequence[int] = (), vocab: int = 24, seed: int = 0) -> None:
        super().__init__(truth, vocab, seed)
        gen = torch.Generator().manual_seed(99)
        self.table = torch.randn(vocab, vocab, generator=gen)

    def q(self, ctx: DraftContext, prefix: Sequence[int]) -> torch.Tensor:
        """What the token after `prefix` is drawn from."""
        return ctx.warp(prefix, self.table[prefix[-1]])

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        ids = list(ctx.ids)
        tokens, parents, q = [ids[-1]], [-1], {}
        paths: list[list[int]] = [[]]
        node = 0
        while node < len(tokens) and len(tokens) < budget.nodes:
            prefix = [*ids, *paths[node]]
            if len(paths[node]) < budget.depth:
                probs = self.q(ctx, prefix)
                count = min(self.width, budget.nodes - len(tokens))
                for token in ctx.sample(probs, len(prefix), count):
                    tokens.append(token)
                    parents.append(node)
                    paths.append([*paths[node], token])
                q[node] = probs
            node += 1
        return Draft(DraftTree(tuple(tokens), tuple(parents)), q=q)


class DrawnTree(Drawn):
    """A tree: up to three children, drawn without replacement, at every node the budget allows."""

    name = "drawn-tree"
    width = 3


class Mixed(Drawn):
    """Drawn children at the root, point-mass children below."""

    name = "mixed"
    width = 2

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        top = super().draft(ctx, Budget(min(budget.nodes, 3), 1))
        tokens, parents = list(top.tree.tokens), list(top.tree.parents)
        for child in range(1, len(top.tree)):
            for token in ((tokens[child] * 7 + 3) % self.vocab, (tokens[child] + 1) % self.vocab):
                if len(tokens) < budget.nodes and budget.depth > 1 and token not in tokens[-1:]:
                    tokens.append(token)
                    parents.append(child)
        return Draft(DraftTree(tuple(tokens), tuple(parents)), q=top.q)


KNOWING = (Oracle, Adversarial, Flaky, Wide)
KINDS = (Riding, Resuming, Drawn, DrawnTree, Mixed)
"""One of each kind of draft; `ResumingTree` is for targets that take trees."""
