"""Randomness as a function: the same (seed, position, purpose, id) gives the same number anywhere.

Nothing here reads or moves a generator, so a draw depends neither on what was drawn before nor on
how many tokens a pass held: that is what makes sampled output equal with and without drafts.

The numbers come from the SplitMix64 finaliser over a 64-bit key plus a Weyl sequence of the ids;
integers wrap around alike in Python and on every device, and the step to float64 is exact.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # odd, near 2**64 / golden ratio: consecutive ids land far apart
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
_BITS = 52  # (z + 1/2) / 2**52 is exact in float64 and never 0 or 1
_BLOCK = 256


def uniform(seed: int, position: int, purpose: str, index: int = 0) -> float:
    """The number in (0, 1) that `uniforms` gives for this id, without tensors."""
    z = _mix((_key(seed, position, purpose) + index * _STEP) & _MASK)
    return float(((z >> (64 - _BITS)) + 0.5) * 2.0**-_BITS)


def uniforms(
    seed: int,
    position: int,
    purpose: str,
    ids: torch.Tensor | int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Independent uniform numbers, float64 in (0, 1), one an id.

    `ids` is an int64 tensor of any shape, or n for ids 0..n-1 on `device`. `seed` may be any int.
    On a device without float64 (MPS) the result lies on the CPU.
    """
    if isinstance(ids, int):
        steps = _steps(ids, _home(torch.device(device or "cpu")))
    else:
        steps = ids.to(_home(ids.device)) * _signed(_STEP)
    x = steps + _signed(_key(seed, position, purpose))
    _fold(x, 30).mul_(_signed(_MUL_1))
    _fold(x, 27).mul_(_signed(_MUL_2))
    _fold(x, 31)
    top = (x >> (64 - _BITS)).bitwise_and_((1 << _BITS) - 1)
    return top.to(torch.float64).add_(0.5).mul_(2.0**-_BITS)


def gumbels(
    seed: int,
    position: int,
    purpose: str,
    ids: torch.Tensor | int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Independent standard Gumbel numbers, float64; arguments as for `uniforms`."""
    return uniforms(seed, position, purpose, ids, device).log_().neg_().log_().neg_()


def race(scores: torch.Tensor, ids: torch.Tensor, seed: int, position: int, purpose: str) -> int:
    """One of `ids`, drawn with probability ``softmax(scores)``; both ``(n,)``, int64 and float.

    Gumbel-max rather than the inverse of a cumulated sum: every id keeps its own noise, so a
    numeric difference of size e in the scores changes the drawn id with probability of order e
    only. With a cumulated sum it would shift the border of every later id.
    """
    noise = gumbels(seed, position, purpose, ids)
    winner = int((scores.to(noise.device).to(torch.float64) + noise).argmax())
    return int(ids[winner])


def draw(weights: torch.Tensor, count: int, seed: int, position: int, purpose: str) -> list[int]:
    """Up to `count` distinct ids drawn one after another with probability ``~ weights``.

    `weights` ``(vocab,)`` float, >= 0; they needn't sum to 1. An id of weight 0 is never drawn, so
    fewer come back when the support is smaller. The first i ids don't depend on `count`.

    Each draw is two Gumbel-max races, over blocks of ids and then inside the winning block: the
    same distribution and the same robustness as one race over all ids (see `race`) at a hundredth
    of the hashing.
    """
    size = weights.numel()
    weights = weights.to(_home(weights.device))
    blocks = torch.nn.functional.pad(weights, (0, -size % _BLOCK)).view(-1, _BLOCK)
    if count > 1:
        blocks = blocks.clone()
    sums = blocks.sum(1, dtype=torch.float64)
    drawn: list[int] = []
    for turn in range(count):
        key = f"{purpose}/{turn}" if turn else purpose
        noise = gumbels(seed, position, key + "#block", sums.numel(), sums.device)
        block = int((sums.log() + noise).argmax())
        if not sums[block] > 0:
            break
        ids = torch.arange(block * _BLOCK, (block + 1) * _BLOCK, device=sums.device)
        drawn.append(race(blocks[block].log(), ids, seed, position, key))
        if turn + 1 < count:
            blocks[block, drawn[-1] % _BLOCK] = 0
            # summed anew: subtracting would leave dust where nothing is left
            sums[block] = blocks[block].sum(dtype=torch.float64)
    return drawn


def _key(seed: int, position: int, purpose: str) -> int:
    key = _mix((_fold_seed(seed) + _STEP) & _MASK)
    key = _mix((key ^ _purpose_code(purpose)) + _STEP & _MASK)
    return _mix((key + (position + 1) * _STEP) & _MASK)


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _MUL_1 & _MASK
    z = (z ^ (z >> 27)) * _MUL_2 & _MASK
    return z ^ (z >> 31)


def _fold_seed(seed: int) -> int:
    if 0 <= seed <= _MASK:
        return seed
    # In hexadecimal where Python refuses to write so long a number in decimal.
    return _digest(b"seed:%d" % seed if seed.bit_length() < 8192 else b"seed:%x" % seed)


@lru_cache(maxsize=1024)
def _purpose_code(purpose: str) -> int:
    return _digest(b"purpose:" + purpose.encode())


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fold(x: torch.Tensor, shift: int) -> torch.Tensor:
    """In place ``x ^= x >>> shift``; the mask makes torch's signed shift a logical one."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


@lru_cache(maxsize=8)
def _steps(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device).mul_(_signed(_STEP))


def _home(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device
