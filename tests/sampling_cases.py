"""What the tests of sampling share: a small vocabulary, rows, prefixes, transformers' way."""

from __future__ import annotations

import numpy as np
import torch

from hasten.sampling import Sampler
from hasten.types import SamplingParams

VOCAB = 600
EOS = frozenset({2, 7})


def sampler(prompt_len: int = 5, seed: int = 1, vocab: int = VOCAB, **options) -> Sampler:
    return Sampler(SamplingParams(**options), vocab, EOS, prompt_len, seed)


def rows(count: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, vocab, generator=generator) * scale


def prefixes(count: int, length: int, ids: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, ids, length).tolist() for _ in range(count)]


def apply(processors: list, prefix: list[int], row: torch.Tensor) -> torch.Tensor:
    ids, scores = torch.tensor([prefix]), row.float().unsqueeze(0)
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


# against transformers' own classes
