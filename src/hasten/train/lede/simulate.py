"""Rounds of early exits, many at a time, on a `World`: what a policy's choices come to.

A round goes as in the engine (`hasten.drafters.early_exit`): every candidate exit on the walk is
probed, a draft's rows are, but the last one. Costs are those of the table; a draft's last row
counts as run up to its exit by itself, as in `hasten.policies.exit_adaptive.round_cost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hasten.policies.lede_features import FEATURES, Bools, FeatureFacts, Floats, Ints, Running, Seen
from hasten.train.lede.world import P1, World

Decide = Callable[["Simulator", Floats], Bools]
"""Which lanes take their row's token, from the simulator and its features ``(20, lanes)``."""


@dataclass(slots=True)
class Moved:
    """What a decision has done, by lane ``(n,)``.

    took    a token was taken; right: it was the text's, and all before it
    gain    tokens emitted (with `expected`: as many as the exits' alphas promise); 0 before the end
    cost    time since the decision, in plain steps
    layers  layers that a row went up because its token wasn't taken, of all
    done    the round has ended; round_cost: all its time, then, the walk to the first exit included
    """

    took: Bools
    right: Bools
    gain: Floats
    cost: Floats
    layers: Floats
    done: Bools
    round_cost: Floats

    @classmethod
    def nothing(cls, took: Bools) -> Moved:
        """To be filled."""
        n = len(took)
        right, done = np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)
        gain, cost, layers, whole = (np.zeros(n, dtype=np.float32) for _ in range(4))
        return cls(took, right, gain, cost, layers, done, whole)


@dataclass(slots=True)
class Score:
    """What became of documents, by document ``(docs,)`` float64."""

    docs: Ints
    tokens: npt.NDArray[np.float64]
    time: npt.NDArray[np.float64]
    rounds: npt.NDArray[np.float64]
    drafted: npt.NDArray[np.float64]
    accepted: npt.NDArray[np.float64]
    drafts: npt.NDArray[np.float64]
    """Rounds that drafted."""
    layers: npt.NDArray[np.float64]
    """Sum of the exits drafted from."""

    NAMES = ("tokens", "time", "rounds", "drafted", "accepted", "drafts", "layers")

    @classmethod
    def empty(cls, docs: Ints) -> Score:
        """Nothing played yet."""
        return cls(docs, *(np.zeros(len(docs)) for _ in cls.NAMES))

    @property
    def rho(self) -> float:
        """Tokens per plain step's time: the speedup by the cost table."""
        return float(self.tokens.sum() / max(self.time.sum(), 1e-9))

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were kept."""
        return float(self.accepted.sum() / max(self.drafted.sum(), 1.0))

    @property
    def length(self) -> float:
        """Tokens drafted in a round that drafts."""
        return float(self.drafted.sum() / max(self.drafts.sum(), 1.0))

    @property
    def exit(self) -> float:
        """Mean layer drafted from."""
        return float(self.layers.sum() / max(self.drafts.sum(), 1.0))

    def pick(self, docs: Ints) -> Score:
        """Of some of the documents."""
        kept = np.isin(self.docs, docs)
        return Score(self.docs[kept], *(getattr(self, name)[kept] for name in self.NAMES))

    def spread(self, seed: int = 0, draws: int = 1000) -> tuple[float, float]:
        """95% bootstrap interval of `rho` over documents."""
        rng = np.random.default_rng(seed)
        at = rng.integers(0, len(self.docs), (draws, len(self.docs)))
        rhos = self.tokens[at].sum(1) / self.time[at].sum(1)
        low, high = np.quantile(rhos, [0.025, 0.975])
        return float(low), float(high)


class Simulator:
    """Lanes that answer documents, round after round.

    docs      those to answer; `endless`: again and again in a random order, else each once, in one
              lane each
    facts     for features and costs
    expected  drafts are kept with chance alpha, whatever the text says, and gains are its sums
    fixed     0, or a draft's length: the policy only chooses where to leave
    """

    def __init__(
        self,
        world: World,
        docs: Ints,
        facts: FeatureFacts,
        rng: np.random.Generator,
        *,
        lanes: int = 0,
        endless: bool = False,
        expected: bool = False,
        fixed: int = 0,
    ) -> None:
        self.world, self.facts, self.rng, self.expected = world, facts, rng, expected
        self.fixed, self._most = fixed, min(fixed or facts.steps, facts.steps)
        self.score = Score.empty(docs)
        self._docs, self._endless = docs, endless
        n = lanes if endless else len(docs)
        self._queue = self._order()
        self.running = Running(facts, n)
        self.live = np.ones(n, dtype=np.bool_)
        whole = [np.zeros(n, dtype=np.int64) for _ in range(8)]
        (
            self._slot,
            self.row,
            self.left,
            self.exit,
            self.drafted,
            self.kept,
            self.room,
            self._off,
        ) = whole
        self.walking, self.true = np.ones(n, dtype=np.bool_), np.ones(n, dtype=np.bool_)
        self._credit, self._spent = np.zeros(n, dtype=np.float32), np.zeros(n, dtype=np.float32)
        self._seen = np.zeros((n, world.stack.shape[-1]), dtype=np.float32)
        self.features = np.zeros((len(FEATURES), n), dtype=np.float32)
        costs, steps = facts.costs, facts.steps
        self._below, self._probe = facts.below, np.array(costs.probe, dtype=np.float32)
        rows = [
            [costs.resume(e, layer, j) if j else 0.0 for j in range(steps + 2)]
            for e, layer in enumerate(facts.at)
        ]
        self._resume = np.array(rows, dtype=np.float32)
        self._plain = costs.verify[1]
        self._next_doc(np.arange(n))
        self._begin(np.flatnonzero(self.live))

    def _order(self) -> Iterator[int]:
        while True:
            places = np.arange(len(self._docs))
            yield from (self.rng.permutation(places) if self._endless else places).tolist()
            if not self._endless:
                return

    # -- starting ---------------------------------------------------------------------------------

    def _next_doc(self, lanes: Ints) -> None:
        """These lanes begin another document, or are over."""
        for lane in lanes.tolist():
            slot = next(self._queue, None)
            if slot is None:
                self.live[lane] = False
                continue
            doc = self._docs[slot]
            self._slot[lane], self.row[lane] = slot, self.world.offsets[doc]
            self.left[lane] = self.world.offsets[doc + 1] - self.world.offsets[doc]
            if not self.left[lane]:
                self._next_doc(np.array([lane]))
        self.running.restart(lanes)

    def _begin(self, lanes: Ints) -> None:
        """A round begins in these lanes; where no room is left for a draft it is a plain step."""
        while len(lanes):
            closed = self.world.open[self._docs[self._slot[lanes]]]
            room = np.where(closed, np.minimum(self.left[lanes] - 1, self._most), self._most)
            plain = lanes[room < 1]
            self._count(plain, np.ones(len(plain)), np.full(len(plain), self._plain))
            lanes, room = lanes[room >= 1], room[room >= 1]
            self.room[lanes], self.exit[lanes], self.drafted[lanes], self.kept[lanes] = (
                room,
                0,
                0,
                0,
            )
            self.walking[lanes], self.true[lanes] = True, True
            self._credit[lanes], self._spent[lanes] = 0.0, self._below[0] + self._probe[0]
            self.running.begin(lanes)
            # a plain step for want of room is a document's last
            self._next_doc(plain)
            lanes = plain[self.live[plain]]

    def _count(self, lanes: Ints, tokens: npt.NDArray[Any], time: npt.NDArray[Any]) -> None:
        score, slots = self.score, self._slot[lanes]
        np.add.at(score.tokens, slots, tokens)
        np.add.at(score.time, slots, time)
        np.add.at(score.rounds, slots, 1.0)

    # -- deciding ---------------------------------------------------------------------------------

    def observe(self) -> Floats:
        """The features of all lanes' decisions, ``(20, lanes)``: valid until the next call."""
        world, exit = self.world, self.exit
        depth = np.minimum(self.drafted, world.stack.shape[1] - 1)
        row = np.minimum(self.row + self.drafted, len(world.token) - 1)
        seen, token = world.stack[exit, depth, row], world.token[row]
        off = ~self.true
        if off.any():
            seen[off], token[off] = world.off.stack[self._off[off]], world.off.token[self._off[off]]
        self._seen = seen
        context = self.world.context[self._docs[self._slot]]
        done = self.row - self.world.offsets[self._docs[self._slot]]
        p1, p2, entropy, gap, cosine, growth = seen.T
        self.running.encode(
            self.features,
            Seen(
                phase=1.0 - self.walking.astype(np.float32),
                exit=exit,
                drafted=self.drafted,
                p1=p1,
                p2=p2,
                entropy=entropy,
                gap=gap,
                agrees=np.where(self.walking, world.agrees[exit, row], np.float32(0.5)),
                cosine=cosine,
                growth=growth,
                token=token,
                context=np.log2(1.0 + context + done).astype(np.float32) / 16.0,
            ),
        )
        return self.features

    @property
    def p1(self) -> Floats:
        """Of the rows observed."""
        return self._seen[:, P1]

    def step(self, take: Bools) -> Moved:
        """Do it: `take` says in which lanes the observed row's token is taken."""
        world, take = self.world, take & self.live
        moved = Moved.nothing(take)
        walks = self.walking & ~take & self.live
        last = self.exit == len(world.at) - 1
        self._climb(np.flatnonzero(walks & ~last), moved)
        ended = self._draft(np.flatnonzero(take), moved)
        while self.fixed and (more := take & ~ended).any():
            self.observe()
            ended |= self._draft(np.flatnonzero(more), moved)
        over = ended | (walks & last) | (~self.walking & ~take & self.live)
        self._close(np.flatnonzero(over), moved)
        return moved

    def _climb(self, lanes: Ints, moved: Moved) -> None:
        """On the walk, to the next candidate."""
        exit = self.exit[lanes]
        cost = self._below[exit + 1] - self._below[exit] + self._probe[exit + 1]
        moved.cost[lanes] += cost
        moved.layers[lanes] = self.facts.depth[exit + 1] - self.facts.depth[exit]
        self._spent[lanes] += cost
        self.exit[lanes] += 1

    def _draft(self, lanes: Ints, moved: Moved) -> Bools:
        """A token is taken in these lanes; where the draft ends by itself with it."""
        world, ended = self.world, np.zeros(len(self.live), dtype=np.bool_)
        if not len(lanes):
            return ended
        exit, drafted, true = self.exit[lanes], self.drafted[lanes], self.true[lanes]
        place = (
            exit,
            np.minimum(drafted, world.stack.shape[1] - 1),
            np.minimum(self.row[lanes] + drafted, len(world.token) - 1),
        )
        if self.expected:  # alpha is the chance that a drawn draft is kept
            right = true & (self.rng.random(len(lanes)) < world.alpha[place])
        else:
            right = true & world.hit[place]
        ends = np.where(true, world.ends[place], world.off.ends[self._off[lanes]])
        p1 = self.p1[lanes]
        self._credit[lanes] += true * world.alpha[place]
        self.running.took(p1, lanes)
        self.kept[lanes] += right
        self.true[lanes], moved.right[lanes] = right, right
        self.drafted[lanes], self.walking[lanes] = drafted + 1, False
        stops = ends | (drafted + 1 >= self.room[lanes])
        cost = self._below[exit] + np.where(stops, np.float32(0.0), self._probe[exit])
        moved.cost[lanes] += cost
        self._spent[lanes] += cost
        ended[lanes] = stops
        strays = lanes[~right & ~stops]
        if len(strays):
            before = self.p1[strays]
            self._off[strays] = world.off.draw(
                self.rng, self.exit[strays], self.drafted[strays], before
            )
        return ended

    def _close(self, lanes: Ints, moved: Moved) -> None:
        """The rows of these lanes are verified; the next round begins."""
        if not len(lanes):
            return
        drafted, kept, left = self.drafted[lanes], self.kept[lanes], self.left[lanes]
        plain = self.walking[lanes]
        exit = np.where(plain, -1, self.exit[lanes])
        cost = self._resume[self.exit[lanes], drafted + 1]
        emitted = np.minimum(kept + 1, left)
        moved.cost[lanes] += cost
        self._spent[lanes] += cost
        moved.gain[lanes] = 1.0 + self._credit[lanes] if self.expected else emitted
        moved.layers[lanes] = np.where(
            moved.took[lanes], 0.0, 1.0 - self.facts.depth[self.exit[lanes]]
        )
        moved.done[lanes], moved.round_cost[lanes] = True, self._spent[lanes]
        score, slots = self.score, self._slot[lanes]
        self._count(lanes, emitted, self._spent[lanes])
        np.add.at(score.drafted, slots, drafted)
        np.add.at(score.accepted, slots, kept)
        np.add.at(score.drafts, slots, ~plain)
        np.add.at(score.layers, slots, np.where(plain, 0, np.array(self.facts.at)[exit]))
        self.running.learn(exit, drafted, kept, lanes)
        self.drafted[lanes] = 0
        self.row[lanes] += emitted
        self.left[lanes] -= emitted
        over = lanes[self.left[lanes] <= 0]
        self._next_doc(over)
        self._begin(lanes[self.live[lanes]])


def play(
    world: World, docs: Ints, facts: FeatureFacts, decide: Decide, *, seed: int = 0, fixed: int = 0
) -> Score:
    """Answer each document once."""
    simulator = Simulator(world, docs, facts, np.random.default_rng(seed), fixed=fixed)
    while simulator.live.any():
        simulator.step(decide(simulator, simulator.observe()))
    return simulator.score
