"""A linear judge for comparison: does the draft's token leave the answer as it is?

After AutoJudge: a logistic regression on the target's last state at the drafted token, with labels
from answers generated both ways. It asks about the *target's* answer; the arbiter asks which one is
correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from hasten.arbitration.rules import LinearJudge
from hasten.targets.base import Target
from hasten.train.arbiter.labels import Pair

L2, STEPS = 1e-2, 60
FILE = "judge.safetensors"


def states(target: Target, prompts: Sequence[Sequence[int]], pairs: Sequence[Pair]) -> torch.Tensor:
    """The target's last states at the pairs' drafted tokens, float32 ``(pairs, hidden)``; `prompts`
    by problem."""
    top = target.info.num_layers
    found: dict[int, torch.Tensor] = {}
    for problem in sorted({pair.problem for pair in pairs}):
        base = target.open()
        try:
            target.prefill(base, prompts[problem])
            for at, pair in enumerate(pairs):
                if pair.problem == problem:
                    found[at] = _last_state(target, base, (*pair.before, pair.point.draft), top)
        finally:
            target.close(base)
    return torch.stack([found[at] for at in range(len(pairs))])


def _last_state(target: Target, base: Any, tokens: Sequence[int], top: int) -> torch.Tensor:
    """The last token's state after a sequence that stays as it is."""
    fork = target.open(base)
    try:
        passed = target.prefill(fork, tokens, taps=(top,))
        return passed.hidden[top][-1].float().cpu()
    finally:
        target.close(fork)


def fit_judge(hidden: torch.Tensor, same: torch.Tensor) -> LinearJudge:
    """Logistic regression on standardised states; `same` are the labels, ``(pairs,)``."""
    mean, std = hidden.mean(0), hidden.std(0, correction=0).clamp_min(1e-6)
    x, y = (hidden - mean) / std, same.float()
    w = torch.zeros(x.shape[1], requires_grad=True)
    b = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([w, b], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(x @ w + b, y) + L2 * w.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    scaled = w.detach() / std
    return LinearJudge(scaled, float(b.detach() - scaled @ mean))


def train_judge(
    target: Target, prompts: Sequence[Sequence[int]], pairs: Sequence[Pair], folder: Path
) -> LinearJudge:
    """Fit one on branches of target-only answers and write it to `folder`."""
    same = torch.tensor([pair.same for pair in pairs])
    judge = fit_judge(states(target, prompts, pairs), same)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"w": judge.w.contiguous(), "b": torch.tensor(judge.b)}
    meta = {"target": target.info.fingerprint, "pairs": str(len(pairs))}
    save_file(tensors, folder / FILE, metadata=meta)
    return judge
