"""Full-information logs: one pass of the target over its own text, and every exit at every row.

The target's greedy text doesn't depend on what drafts it. So what an exit says at a row, when the
last d tokens before it were drafted and right, can be computed for all rows and depths at once, and
a policy can be scored on it without the model. Modules that see higher layers see their own outputs
at drafted rows: depth d is their (d + 1)-th step (`hasten.train.exit_nets`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from hasten.exits.bank import LocalHead
from hasten.train.exit_nets import ExitNet
from hasten.train.features import run_batch
from hasten.train.lede.candidates import Candidates
from hasten.train.lede.logs import TOP, Doc, Tables

Stats = dict[str, npt.NDArray[Any]]


def depths_of(candidates: Candidates, most: int) -> tuple[int, ...]:
    """How many draft depths each exit's table has: `most` where the module's own outputs feed it,
    2 elsewhere."""
    return tuple(max(most, 2) if net.config.deep else 2 for net in candidates.nets)


@torch.inference_mode()
def compute(candidates: Candidates, docs: Sequence[Doc], depths: Sequence[int]) -> Tables:
    """The tables of some documents (of like length, best): one padded batch of the target."""
    texts = [[*doc.prompt, *doc.output] for doc in docs]
    states = run_batch(candidates.target, texts, candidates.taps)
    parts = [
        _document(
            candidates, doc, {layer: rows[i : i + 1] for layer, rows in states.items()}, depths
        )
        for i, doc in enumerate(docs)
    ]
    exits = tuple(
        {
            name: np.concatenate([exits[e][name] for _, exits in parts], _axis(name))
            for name in Tables.NAMES
        }
        for e in range(len(depths))
    )
    said = np.concatenate([said for said, _ in parts])
    return Tables(tuple(doc.id for doc in docs), said, exits)


def _axis(name: str) -> int:
    return 0 if name.startswith("top_") else 1


def _document(
    candidates: Candidates, doc: Doc, states: dict[int, torch.Tensor], depths: Sequence[int]
) -> tuple[npt.NDArray[np.int32], list[Stats]]:
    """The target's likeliest ids, and each exit's statistics, at the rows of one answer."""
    target, bank = candidates.target, candidates.bank
    length, start = len(doc.prompt) + len(doc.output), len(doc.prompt)
    states = {layer: rows[:, :length] for layer, rows in states.items()}
    rows = slice(start, length - 1)
    ends = target.ends()
    final = states[target.info.num_layers][0, rows]
    said_logits = F.linear(
        F.rms_norm(final, final.shape[-1:], ends.norm.to(final), ends.eps), ends.head
    )
    head = bank.head.local(doc.prompt)
    probs = torch.softmax(said_logits.float(), -1)[:, head.ids]
    ids = torch.tensor([[*doc.prompt, *doc.output]], device=final.device)
    found: list[Stats] = []
    below: torch.Tensor | None = None
    for module, net, count in zip(bank.modules, candidates.nets, depths, strict=True):
        layer = net.config.layer
        state = states[layer] if layer else bank.embeddings[ids]
        deep = [states[at] for at in net.config.deep]
        with torch.autocast(final.device.type, final.dtype, enabled=final.dtype != torch.float32):
            made = _outputs(net, state, deep, count)
        outputs = torch.stack([each[0, rows].to(final.dtype) for each in made])  # (depths, rows, h)
        logits = [head(bank.normed(module, each)) for each in outputs]
        found.append(_stats(outputs.float(), logits, head, probs, below))
        below = outputs[0].float()
    return said_logits.argmax(-1).int().cpu().numpy(), found


def _outputs(
    net: ExitNet, state: torch.Tensor, deep: Sequence[torch.Tensor], count: int
) -> list[torch.Tensor]:
    """The module's outputs ``(1, length, hidden)`` at `count` draft depths, before its norm."""
    state = state.float()
    if net.config.deep:
        feature = F.pad(net.fused([each.float() for each in deep]), (0, 0, 1, 0))[:, :-1]
        return net.steps(state, feature, count)
    if net.config.kind == "lens":
        return [state] * count
    if net.config.kind == "affine":
        return [net.affine(state)] * count
    return net.steps(state, None, 1) * count


def _stats(
    outputs: torch.Tensor,
    logits: Sequence[torch.Tensor],
    head: LocalHead,
    target_probs: torch.Tensor,
    below: torch.Tensor | None,
) -> Stats:
    """By `Tables.NAMES`. outputs float32 ``(depths, rows, hidden)``; logits of each depth ``(rows,
    ids)``; target_probs ``(rows, ids)``; below: the lower exit's output at depth 0."""
    each = [_said(rows, target_probs) for rows in logits]
    stats = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    stats["best"] = head.ids[stats["best"]].int()
    stats["norm"] = torch.linalg.vector_norm(outputs, dim=-1)
    stats["cosine"] = _cosines(outputs, below)
    top = torch.softmax(logits[0], -1).topk(min(TOP, logits[0].shape[-1]), -1)
    pad = (0, TOP - top.indices.shape[-1])
    stats["top_ids"] = F.pad(head.ids[top.indices].int(), pad, value=-1)
    stats["top_p"] = F.pad(top.values.half(), pad)
    return {name: value.cpu().numpy() for name, value in stats.items()}


def _said(logits: torch.Tensor, target_probs: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `hasten.policies.exits.Probe` reads off a row's logits, for all rows."""
    top = logits.topk(2, -1)
    total = torch.logsumexp(logits, -1)
    probs = torch.softmax(logits, -1)
    entropy = total - (probs * logits.clamp_min(-1e4)).sum(-1)
    return {
        "best": top.indices[:, 0],
        "p1": torch.exp(top.values[:, 0] - total),
        "p2": torch.exp(top.values[:, 1] - total),
        "entropy": entropy.clamp_min(0.0),
        "gap": top.values[:, 0] - top.values[:, 1],
        "alpha": torch.minimum(probs, target_probs).sum(-1),
    }


def _cosines(outputs: torch.Tensor, below: torch.Tensor | None) -> torch.Tensor:
    """See `Tables`: float32 ``(depths, rows)``."""
    cosine = torch.zeros(outputs.shape[:2], device=outputs.device)
    if below is not None:
        cosine[0] = F.cosine_similarity(outputs[0], below, -1)
    cosine[1:, 1:] = F.cosine_similarity(outputs[1:, 1:], outputs[:-1, :-1], -1)
    return cosine
