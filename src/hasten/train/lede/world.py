"""Experience as arrays that rounds can be played on, whatever the policy.

Rows are those of answers that are followed by a token, one document after another. On the way that
the text takes, an exit's word is read off its table. Beyond a wrong draft there is no text: rows
there are drawn from rollouts (`OffPrefix`), alike in exit, depth and how sure the row before was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hasten.errors import OptionError
from hasten.policies.exit_rules import STEPS
from hasten.policies.lede_features import Bools, Floats, Ints, Prior
from hasten.train.lede.logs import Doc, Experience, Rollout, Tables

CHANNELS = ("p1", "p2", "entropy", "gap", "cosine", "growth")
"""What is kept of a probe, by `lede_features.Seen`."""
P1 = CHANNELS.index("p1")

_DEPTHS = np.array([1, 2, 3, 5])
"""Off-prefix rows drafted between these numbers of tokens are alike."""
_SURE = np.array([0.2, 0.4, 0.6, 0.8])
"""And those whose predecessor's p1 lies between these."""


@dataclass(frozen=True, slots=True)
class OffPrefix:
    """Rows that follow a wrong draft.

    stack  float32 ``(n, 6)`` by `CHANNELS`; token: input ids; ends: the likeliest id ends answers
    first, count  ``(exits, depth groups, p1 groups)``: where each group lies in `order`
    """

    stack: Floats
    token: Ints
    ends: Bools
    order: Ints
    first: Ints
    count: Ints

    @classmethod
    def of(
        cls,
        exits: int,
        exit: Ints,
        depth: Ints,
        before: Floats,
        stack: Floats,
        token: Ints,
        ends: Bools,
    ) -> OffPrefix:
        """From rows ``(n,)``: their exit, drafted tokens, and p1 of the row before. An empty group
        takes all rows of its exit and depths, or of its exit, or all there are."""
        if not len(exit):
            raise OptionError("experience", "has no rows after a wrong draft", "Collect rollouts")
        groups = np.stack([exit, _depth_group(depth), np.searchsorted(_SURE, before)])
        order: list[Ints] = []
        size = (exits, len(_DEPTHS), len(_SURE) + 1)
        first, count = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        for place in np.ndindex(*size):
            same = groups == np.array(place)[:, None]
            chosen = same.all(0)
            for tried in (same[:2].all(0), same[0], np.ones(len(exit), dtype=np.bool_)):
                chosen = chosen if chosen.any() else tried
            rows = np.flatnonzero(chosen)
            first[place], count[place] = sum(map(len, order)), len(rows)
            order.append(rows)
        return cls(stack, token, ends, np.concatenate(order), first, count)

    def draw(self, rng: np.random.Generator, exit: Ints, depth: Ints, before: Floats) -> Ints:
        """A row for each of some drafted rows ``(n,)``."""
        group = (exit, _depth_group(depth), np.searchsorted(_SURE, before))
        at = self.first[group] + (rng.random(len(exit)) * self.count[group]).astype(np.int64)
        rows: Ints = self.order[at]
        return rows


def _depth_group(depth: Ints) -> Ints:
    return np.searchsorted(_DEPTHS, depth, side="right") - 1


@dataclass(frozen=True, slots=True)
class World:
    """Documents to play rounds on. Rows of all documents ``P``, exits ``m``, depths ``D``.

    offsets  ``(docs + 1,)`` of a document's rows; context: tokens before its second row
    open     the answer didn't end by itself: a draft may not be longer than what is left of it
    token    ``(P,)`` input ids; stack: float32 ``(m, D, P, 6)`` by `CHANNELS`
    hit      bool ``(m, D, P)``: the exit's likeliest id is the next token; ends: it ends answers
    alpha    float32 ``(m, D, P)``; agrees: float32 ``(m, P)``
    """

    at: tuple[int, ...]
    num_layers: int
    domains: tuple[str, ...]
    splits: tuple[str, ...]
    offsets: Ints
    context: Ints
    open: Bools
    token: Ints
    stack: Floats
    hit: Bools
    ends: Bools
    alpha: Floats
    agrees: Floats
    off: OffPrefix
    known: Ints
    steps: int = STEPS

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def docs(self, split: str | None = None, domains: Collection[str] | None = None) -> Ints:
        """Numbers of the documents of a split, of some domains."""
        chosen = [
            i
            for i in range(len(self))
            if split in (None, self.splits[i]) and (domains is None or self.domains[i] in domains)
        ]
        return np.array(chosen, dtype=np.int64)

    def rows(self, docs: Iterable[int]) -> Ints:
        """Rows of some documents."""
        parts = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in docs]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def among(self, layers: Sequence[int]) -> World:
        """The same with some of its exits, neighbours in the list of candidates. What the lowest
        was compared with is forgotten. Raises OptionError for others."""
        some = part_of(self.at, layers)
        stack, agrees = self.stack[some].copy(), self.agrees[some].copy()
        stack[0, 0, :, CHANNELS.index("cosine") :], agrees[0] = 0.0, 0.5
        off = replace(self.off, first=self.off.first[some], count=self.off.count[some])
        return replace(
            self,
            at=self.at[some],
            stack=stack,
            hit=self.hit[some],
            ends=self.ends[some],
            alpha=self.alpha[some],
            agrees=agrees,
            off=off,
        )

    def prior(self, docs: Ints, least: int = 8) -> Prior:
        """How often each exit is right after an input id on `docs`, by a Beta(2, 2) prior, for ids
        seen `least` times (few sightings would tell a learner the answers)."""
        rows = self.rows(docs)
        ids, place, seen = np.unique(self.token[rows], return_inverse=True, return_counts=True)
        hits = self.hit[:, 0, rows].astype(np.float64)
        sums = np.stack([np.bincount(place, weights=each, minlength=len(ids)) for each in hits], 1)
        values = ((sums + 2.0) / (seen[:, None] + 4.0)).astype(np.float32)
        kept = seen >= least
        mean = hits.mean(1) if len(rows) else np.full(len(self.at), 0.5)
        return Prior(ids[kept].astype(np.int64), values[kept], mean.astype(np.float32))


def part_of(at: Sequence[int], layers: Sequence[int]) -> slice:
    """Where these exits stand among the candidates `at`. Raises OptionError unless they are
    neighbours there, in order."""
    first = at.index(layers[0]) if layers and layers[0] in at else len(at)
    if not layers or tuple(at[first : first + len(layers)]) != tuple(layers):
        known = "+".join(map(str, at))
        raise OptionError("exits", f"must be neighbours among {known}, got {tuple(layers)}")
    return slice(first, first + len(layers))


def build(experience: Experience, steps: int = STEPS) -> World:
    """The world of a folder. Raises OptionError where no tables are there."""
    meta, eos = experience.meta, np.array(experience.meta.eos, dtype=np.int64)
    by_id = {doc.id: doc for doc in experience.docs}
    most = min(max(meta.depths), steps)
    parts: dict[str, list[Any]] = {}
    docs: list[Doc] = []
    for tables in experience.tables():
        some = [by_id[i] for i in tables.docs]
        docs += some
        for name, value in _arrays(tables, some, eos, most).items():
            parts.setdefault(name, []).append(value)
    if not docs:
        raise OptionError("experience", "holds no tables yet", "Finish `hasten train lede collect`")
    arrays = {
        name: np.concatenate(value, -2 if name == "stack" else -1) for name, value in parts.items()
    }
    return World(
        at=meta.layers,
        num_layers=meta.num_layers,
        domains=tuple(doc.domain for doc in docs),
        splits=tuple(doc.split for doc in docs),
        offsets=np.concatenate([[0], np.cumsum([doc.rows for doc in docs])]).astype(np.int64),
        context=np.array([len(doc.prompt) + 1 for doc in docs], dtype=np.int64),
        open=np.array([doc.output[-1] not in meta.eos for doc in docs], dtype=np.bool_),
        off=_off_prefix(experience, arrays),
        known=np.array([doc.known for doc in docs], dtype=np.int64),
        steps=steps,
        **arrays,
    )


def _arrays(tables: Tables, docs: Sequence[Doc], eos: Ints, most: int) -> dict[str, Any]:
    """A file's part of `World`'s arrays, all exits with `most` depths."""
    follows = np.concatenate([np.array(doc.output[1:], dtype=np.int64) for doc in docs])
    token = np.concatenate([np.array(doc.output[:-1], dtype=np.int64) for doc in docs])
    share = np.concatenate([np.full(doc.rows, np.log(max(doc.known, 2))) for doc in docs])
    channels: dict[str, list[npt.NDArray[Any]]] = {}
    below: Any = None
    for exit in tables.exits:
        deeper = np.minimum(np.arange(most), len(exit["p1"]) - 1)
        each = {
            name: exit[name][deeper]
            for name in ("best", "p1", "p2", "gap", "cosine", "norm", "alpha")
        }
        each["entropy"] = exit["entropy"][deeper] / share
        each["growth"] = _growth(each["norm"], None if below is None else below["norm"])
        each["hit"] = each["best"] == follows
        each["ends"] = np.isin(each["best"], eos)
        each["agrees"] = (
            np.full(len(token), 0.5) if below is None else each["best"][0] == below["best"][0]
        )
        below = each
        for name, value in each.items():
            channels.setdefault(name, []).append(value)
    stacked = {name: np.stack(value) for name, value in channels.items()}
    return {
        "token": token,
        "stack": np.stack([stacked[name] for name in CHANNELS], -1).astype(np.float32),
        "hit": stacked["hit"],
        "ends": stacked["ends"],
        "alpha": stacked["alpha"].astype(np.float32),
        "agrees": stacked["agrees"].astype(np.float32),
    }


def _growth(norm: npt.NDArray[Any], below: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Log ratios of the outputs' lengths: to the row before's, at depth 0 to the exit below's."""
    logs = np.log(np.maximum(norm, 1e-6))
    growth: npt.NDArray[Any] = np.zeros_like(logs)
    growth[1:, 1:] = logs[1:, 1:] - logs[:-1, :-1]
    if below is not None:
        growth[0] = logs[0] - np.log(np.maximum(below[0], 1e-6))
    return growth


def _off_prefix(experience: Experience, arrays: dict[str, Any]) -> OffPrefix:
    """Off-prefix rows of the rollouts; without any, rows of the text after a wrong first choice,
    which are surer of themselves."""
    exits, eos = len(experience.meta.layers), set(experience.meta.eos)
    found = [row for rollout in experience.rollouts() for row in _strayed(rollout, eos)]
    if found:
        columns = list(zip(*found, strict=True))
        return OffPrefix.of(
            exits,
            np.array(columns[0], dtype=np.int64),
            np.array(columns[1], dtype=np.int64),
            np.array(columns[2], dtype=np.float32),
            np.array(columns[5], dtype=np.float32),
            np.array(columns[3], dtype=np.int64),
            np.array(columns[4], dtype=np.bool_),
        )
    deep = min(1, arrays["hit"].shape[1] - 1)
    wrong, at = np.nonzero(~arrays["hit"][:, 0, :-1])
    return OffPrefix.of(
        exits,
        wrong,
        np.ones(len(at), dtype=np.int64),
        arrays["stack"][wrong, 0, at, P1],
        arrays["stack"][wrong, deep, at + 1],
        arrays["token"][at + 1],
        arrays["ends"][wrong, deep, at + 1],
    )


def _strayed(rollout: Rollout, eos: set[int]) -> Iterable[tuple[Any, ...]]:
    """Exit, drafted tokens, p1 before, input id, whether it ends, and channels of a rollout's rows
    that follow a wrong draft."""
    for made in rollout.rounds:
        for before, step in zip(made.steps, made.steps[1:], strict=False):
            if step.phase and step.drafted > made.accepted:
                channels = [getattr(step, name) for name in CHANNELS]
                ends = step.drew in eos
                yield step.exit, step.drafted, before.p1, step.token, ends, channels
