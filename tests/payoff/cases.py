"""Predictors that say what they are told, and files of predictors for tiny models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hasten.drafters.suffix import SuffixQuery
from hasten.payoff.features import FEATURES, Floats, class_table, digest_of
from hasten.payoff.predictor import CacheOptions, Predictor, width_of


class Says:
    """A predictor that always says the same."""

    def __init__(self, value: float) -> None:
        self.value = value

    def predict(self, x: Floats) -> Floats:
        return np.full(x.shape[:-1], self.value, np.float32)


class Dice:
    """A predictor that knows nothing: from -2 to 14, drawn with a seed of its own."""

    def __init__(self, seed: int = 0) -> None:
        self._dice = np.random.default_rng(seed)

    def predict(self, x: Floats) -> Floats:
        return self._dice.uniform(-2, 14, x.shape[:-1]).astype(np.float32)


def query(tokens: int, score: float = 0.0, match: int = 4, first: float = 0.5) -> SuffixQuery:
    """A draft of the ids 1, 2, ..."""
    probs = tuple(first * 0.9**n for n in range(tokens))
    return SuffixQuery(score or sum(probs), match, probs, tuple(range(1, tokens + 1)))


def predictor(kind: str = "mlp", seed: int = 0, **facts: Any) -> Predictor:
    """Random weights, spread so that both sides of the usual threshold occur."""
    dice, width = np.random.default_rng(seed), len(FEATURES)

    def layer(size: int, out: int, scale: float = 1.0) -> tuple[Floats, Floats]:
        weight = scale * dice.standard_normal((size, out)) / size**0.5
        return weight.astype(np.float32), np.full(out, 0.1, np.float32)

    layers = (layer(width_of(kind), 1),)
    if kind == "mlp":
        layers = (layer(width, 8), layer(8, 8), layer(8, 1, 4.0))
    ones = np.ones(width, np.float32)
    return Predictor(kind, 0 * ones, ones, layers, CacheOptions(), facts)


def save_for(path: Path, llm: Any, **changes: Any) -> str:
    """A predictor's file that belongs to a loaded model; `changes` of its facts or its cache."""
    info = llm.target.info
    facts = {
        "target": info.fingerprint,
        "tokenizer": digest_of(class_table(llm.tokenizer, info.vocab_size)),
        "model": info.name,
    }
    cache = changes.pop("cache", CacheOptions())
    made = predictor(changes.pop("kind", "mlp"), changes.pop("seed", 0), **{**facts, **changes})
    replace(made, cache=cache).save(path)
    return str(path)
