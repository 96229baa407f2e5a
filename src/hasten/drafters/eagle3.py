"""EAGLE-3: a small network drafts token after token, fed with its own output (arXiv 2503.01840).

It reads the target's states of three layers for every committed token, and its own output where a
token is only drafted. A chain, or EAGLE-2's dynamic tree (arXiv 2406.16858). What it drafts is a
function of the text alone, unless a chain is drawn from its distribution, whose q is then exact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.eagle3.bank import Eagle3Bank
from hasten.eagle3.pairs import Pairs
from hasten.eagle3.tree import Pool, grow
from hasten.errors import ModelError, OptionError
from hasten.selection import argmax_rows
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, Signals

SOURCE = "eagle3"


class Eagle3(BaseDrafter):
    """A chain, or a tree.

    bank         the network, its ids, the embeddings
    length       tokens of a chain at most
    top_k        0: a chain; else children of a node, and nodes of a level that get children
    depth        of a tree's deepest node
    sample       draw a chain's tokens in a sampled request; off: take the likeliest
    temperature  of the drafter's logits, before the request's own options
    eos_ids      nothing is drafted after these

    `observe` must see every round, also those whose tree somebody else has drafted: `pairs` then
    stands where the text does, and `propose` may be called in any round. Nothing is run for such
    rounds until then; `catch_up` does it earlier.
    """

    name = "eagle3"

    def __init__(
        self,
        bank: Eagle3Bank,
        *,
        length: int = 4,
        top_k: int = 0,
        depth: int = 4,
        sample: bool = False,
        temperature: float = 1.0,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        if not 0 < temperature < float("inf"):
            raise OptionError("eagle3.draft_temperature", f"must be above 0, got {temperature}")
        for name, value, least in (("length", length, 1), ("top_k", top_k, 0), ("depth", depth, 1)):
            if value < least:
                raise OptionError(f"eagle3.{name}", f"must be at least {least}, got {value}")
        if top_k and sample:
            raise OptionError("eagle3.sample", "a tree isn't drawn", "Use a chain")
        self.bank, self.length, self.top_k, self.depth = bank, length, top_k, depth
        self.sample, self.temperature = sample, temperature
        self._eos_ids = eos_ids
        self._ends = {bank.places[each] for each in eos_ids if each in bank.places}
        """Places of the ids after which nothing is drafted."""
        self.needs = Signals(hidden=tuple(sorted(set(bank.config.taps))), prompt=True)
        self.pairs = Pairs(bank)

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Read the prompt's states. Rows of an earlier turn that weren't run again are left out."""
        self.pairs = Pairs(self.bank)
        features = torch.empty(0, device=self.bank.device)
        if signals.hidden:
            features = self._features(signals)
        self.pairs.begin(prompt, features)

    @torch.inference_mode()
    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """A chain or a tree behind the pending token, within the budget."""
        root, room = ctx.ids[-1], min(budget.nodes - 1, budget.depth)
        if room < 1 or root in self._eos_ids:
            return Draft(DraftTree.chain(root))
        started = time.perf_counter()
        self.pairs.check(len(ctx.ids) - 1)
        self.pairs.catch_up()
        if self.pairs.last is None:  # no row of the prompt was shown
            draft = Draft(DraftTree.chain(root))
        elif self.top_k:
            draft = self._tree(root, self.pairs.last, budget)
        else:
            draft = self._chain(ctx, self.pairs.last, min(self.length, room))
        self.pairs.check(len(ctx.ids) - 1)
        ctx.model_seconds += time.perf_counter() - started
        return draft

    @torch.inference_mode()
    def observe(self, round: Round) -> None:
        """Keep the states of the rows that were kept, whoever drafted them."""
        if round.tree is None:
            self.pairs.first(round.emitted)
            return
        # Each kept row is followed by a token; a stop may have cut the last ones off.
        places = round.accepted[: len(round.emitted)]
        kept = torch.tensor(places, dtype=torch.int64, device=self.bank.device)
        self.pairs.follow(self._features(round.signals)[kept], round.emitted)

    def end(self) -> None:
        """Keep nothing of the request."""
        self.pairs = Pairs(self.bank)

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Run the pairs that wait now, so that the next draft needn't."""
        self.pairs.catch_up()

    def _features(self, signals: RowSignals) -> torch.Tensor:
        """States of the tapped layers side by side: a copy."""
        return torch.cat([signals.hidden[layer] for layer in self.bank.config.taps], -1)

    # -- a chain ---------------------------------------------------------------------------------

    def _chain(self, ctx: DraftContext, state: torch.Tensor, count: int) -> Draft:
        tokens: list[int] = []
        q: dict[int, torch.Tensor] = {}
        with self.pairs.branch() as branch:
            while True:
                logits = self.bank.net.logits(state[0])
                if self.sample and not ctx.greedy:
                    token, probs = self._drawn(ctx, [*ctx.ids, *tokens], logits[0])
                    if probs is not None:
                        q[len(tokens)] = probs
                else:
                    token = self._likeliest(logits)
                if token is None:
                    break
                tokens.append(token)
                if len(tokens) == count or token in self._eos_ids:
                    break
                state = branch.step([token], state)
        sources = ("", *[SOURCE] * len(tokens))
        return Draft(DraftTree.chain(ctx.ids[-1], tokens), q=q, sources=sources)

    def _likeliest(self, logits: torch.Tensor) -> int | None:
        """The likeliest id; None where the network says nothing (NaN)."""
        place = argmax_rows(logits)[0]
        return None if place < 0 else self.bank.numbers[place]

    def _drawn(
        self, ctx: DraftContext, prefix: Sequence[int], logits: torch.Tensor
    ) -> tuple[int | None, torch.Tensor | None]:
        """A token drawn, and the distribution it was drawn from."""
        try:
            probs = ctx.warp(prefix, self.bank.spread(logits / self.temperature))
        except (OptionError, ModelError):  # the options leave nothing that the head knows
            return None, None
        return ctx.sample(probs, len(prefix), 1)[0], probs

    # -- a tree ----------------------------------------------------------------------------------

    def _tree(self, root: int, state: torch.Tensor, budget: Budget) -> Draft:
        """The dynamic tree; its nodes are point masses, whatever the verifier draws."""
        logits = self.bank.net.logits(state[0, 0])
        # What the last level's rows see of the branch; before the first there is the root alone.
        seen = torch.ones(1, 0, dtype=torch.bool, device=logits.device)
        with self.pairs.branch() as branch:

            def expand(places: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
                nonlocal state, seen
                rows = torch.tensor(parents, device=state.device)
                tokens = [self.bank.numbers[place] for place in places]
                above = seen[rows]
                state = branch.step(tokens, state[:, rows], above)
                own = torch.eye(len(places), dtype=torch.bool, device=state.device)
                seen = torch.cat([above, own], 1)
                return self.bank.net.logits(state[0])

            pool, kept = grow(
                logits,
                expand,
                top_k=self.top_k,
                depth=min(self.depth, budget.depth),
                count=budget.nodes - 1,
                last=self._ends,
            )
        return self._draft(root, pool, kept)

    def _draft(self, root: int, pool: Pool, kept: Sequence[int]) -> Draft:
        node = {-1: 0, **{each: at for at, each in enumerate(kept, start=1)}}
        tree = DraftTree.trusted(
            [root, *(self.bank.numbers[pool.places[each]] for each in kept)],
            [-1, *(node[pool.parents[each]] for each in kept)],
            [0, *(pool.depths[each] for each in kept)],
        )
        ranks = (0, *(pool.ranks[each] for each in kept))
        return Draft(tree, sources=("", *[SOURCE] * len(kept)), ranks=ranks)
