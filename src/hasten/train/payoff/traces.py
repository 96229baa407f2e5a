"""What the cache would have drafted at every token of a text, and what of it would have been kept.

A lossless method's text doesn't depend on its drafts, so no pass of the target is needed: the text
is appended token by token, the cache is asked, and its draft is compared with what follows. Nothing
after the pending token is in the cache when it is asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hasten.drafters.suffix import SuffixQuery
from hasten.payoff.features import STATIC, Classes, Floats, History, static_features
from hasten.payoff.predictor import CacheOptions
from hasten.train.rows import Row
from hasten.types import Round, RowSignals

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """A text and the states in which the cache had a draft.

    group    what the text is, for figures
    tokens   of the answer
    at       int64 ``(n,)``: places of the pending token in the answer, increasing
    x        float32 ``(n, STATIC)``: columns that don't depend on rounds
    kept     int64 ``(n,)``: tokens of the draft that the text goes on with (the label)
    drafted  int64 ``(n,)``; score: float32 ``(n,)``, the cache's
    """

    group: str
    tokens: int
    at: Counts
    x: Floats
    kept: Counts
    drafted: Counts
    score: Floats

    def __len__(self) -> int:
        return len(self.at)


def common(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for one, other in zip(draft, text, strict=False):
        if one != other:
            break
        count += 1
    return count


def asked(
    prompt: Sequence[int], output: Sequence[int], options: CacheOptions, eos_ids: Collection[int]
) -> Iterator[tuple[int, SuffixQuery]]:
    """The cache's drafts, of a token at least, with the place of the pending token in the answer.
    The answer's last token, after which nothing comes, isn't asked about."""
    cache = options.cache(frozenset(eos_ids))
    cache.begin(prompt, RowSignals())
    for place, token in enumerate(output[:-1]):
        cache.observe(Round(place, (token,)))
        cache.guess(options.longest, options.longest)
        query = cache.last_query
        if query is not None and query.tokens:
            yield place, query


def trace_of(
    prompt: Sequence[int],
    output: Sequence[int],
    options: CacheOptions,
    table: Classes,
    *,
    eos_ids: Collection[int] = (),
    group: str = "",
) -> Trace:
    """Every state of an answer. Where it was cut off and a draft agrees with all that is known,
    how much would have been kept isn't known, and the state is left out."""
    whole = bool(output) and output[-1] in eos_ids
    places: list[int] = []
    x: list[Floats] = []
    labels: list[tuple[int, int, float]] = []
    for place, query in asked(prompt, output, options, eos_ids):
        kept, length = common(query.tokens, output[place + 1 :]), len(query.tokens)
        if not whole and kept < length and place + 1 + kept == len(output):
            continue
        places.append(place)
        x.append(static_features(query, len(prompt), place + 1, table))
        labels.append((kept, length, query.score))
    columns = np.array(labels, np.float64).reshape(-1, 3)
    return Trace(
        group,
        len(output),
        np.array(places, np.int64),
        np.array(x, np.float32).reshape(-1, STATIC),
        columns[:, 0].astype(np.int64),
        columns[:, 1].astype(np.int64),
        columns[:, 2].astype(np.float32),
    )


def group_of(row: Row) -> str:
    """A row's domain; of the prompts of `hasten.train.payoff.prompts` their kind."""
    kind, slash, _ = row.source.partition("/")
    return kind if slash else row.domain


# -- rounds ----------------------------------------------------------------------------------------

Routes = Callable[[Trace, int, Sequence[float]], bool]
"""``(trace, state, history columns)``: whether the cache drafts."""


def by_score(least: float) -> Routes:
    """The frequency rule."""
    return lambda trace, state, history: bool(trace.score[state] >= least)


def always(trace: Trace, state: int, history: Sequence[float]) -> bool:
    """The cache whenever it has a draft."""
    return True


def never(trace: Trace, state: int, history: Sequence[float]) -> bool:
    """Never the cache."""
    return False


@dataclass(frozen=True, slots=True)
class Played:
    """A text's rounds under a rule.

    history   float32 ``(n, H)``: what was known of earlier rounds in each state, those inside a
              round's own tokens too
    starts    bool ``(n,)``: a round began here; routed: and the cache drafted it
    rounds, cached   rounds in all, and of the cache
    """

    history: Floats
    starts: npt.NDArray[np.bool_]
    routed: npt.NDArray[np.bool_]
    rounds: int
    cached: int


def play(trace: Trace, routes: Routes, model: Callable[[int], int]) -> Played:
    """Rounds from the answer's first token to its last; ``model(place)`` says how many tokens the
    model arm's draft would have kept there."""
    history = History()
    states = {int(place): state for state, place in enumerate(trace.at)}
    columns = np.zeros((len(trace), len(history.columns())), np.float32)
    starts, routed = np.zeros(len(trace), np.bool_), np.zeros(len(trace), np.bool_)
    place = rounds = cached = 0
    while place < trace.tokens - 1:
        known = history.columns()
        state = states.get(place)
        if state is not None and routes(trace, state, known):
            kept, drafted = int(trace.kept[state]), int(trace.drafted[state])
            starts[state] = routed[state] = True
            cached += 1
            history.add(True, drafted, kept)
        else:
            if state is not None:
                starts[state] = True
            kept = min(model(place), trace.tokens - 2 - place)
            history.add(False, kept, kept)
        for inside in range(place, place + kept + 1):
            if (each := states.get(inside)) is not None:
                columns[each] = known
        place += kept + 1
        rounds += 1
    return Played(columns, starts, routed, rounds, cached)


def guessed_model(mean: float, seed: str) -> Callable[[int], int]:
    """A model arm that keeps so many tokens in the mean: a geometric law, drawn by place, so that
    all rules meet the same one."""
    again = mean / (1.0 + mean)

    def kept(place: int) -> int:
        dice = random.Random(f"{seed}-{place}")
        count = 0
        while count < 64 and dice.random() < again:
            count += 1
        return count

    return kept


def stacked(traces: Iterable[Trace], played: Iterable[Played]) -> tuple[Floats, Floats]:
    """All states as rows: features ``(n, F)`` and labels ``(n,)``, float32."""
    x = [np.concatenate([t.x, p.history], axis=1) for t, p in zip(traces, played, strict=True)]
    y = [t.kept.astype(np.float32) for t in traces]
    return np.concatenate(x), np.concatenate(y)
