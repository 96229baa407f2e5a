"""Arbitration as a verifier of the one loop: at a mismatch a rule may keep the draft's token.

Keeping it costs no pass: the rows below were computed after it, so verification goes on in the same
block. Taking the target's token ends the block, as ever, and what was drafted after it is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from hasten.arbitration.mismatch import Counts, Mismatch, Words
from hasten.arbitration.rules import Rule
from hasten.errors import DrafterError, OptionError
from hasten.judge import PassJudge
from hasten.types import Decision, DraftTree
from hasten.verify import Judge, Verdict, Wants, try_drawn

GATE, CONSECUTIVE = 1e-3, 8
"""Of the safety gate, unless said otherwise."""

_SLACK = 0.01
"""A law's sum may be so far from 1: half precision rounds."""


class Arbitration:
    """One request's verifier (`hasten.verify.Verifier`), over chains.

    Greedy: a mismatch is where the draft's token isn't the target's argmax. Sampled: where a
    lossless verifier refuses the draft's token (`hasten.verify.rejection`, with the same draws);
    the target's token is then what that verifier emits. A rule that `emits` gives the law that
    drafts are accepted against instead.

    rule         decides; words: what it may know of tokens
    length       K, the longest draft
    bonus        after a block whose tokens are all kept, one more of the target's own
    gate         the draft's token must have so much of the target's law; 0: none
    consecutive  overrides at so many mismatches in a row at most; 0: no limit
    layer        the target's number of layers: whose output is its last state

    A token that the request's options forbid (a ban, a grammar, a filter) is never kept, nor drawn
    from a rule's law. Raises OptionError for a rule whose word is no truth, or whose law is none.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        words: Words,
        length: int,
        layer: int,
        bonus: bool = True,
        gate: float = GATE,
        consecutive: int = CONSECUTIVE,
    ) -> None:
        self.rule, self.bonus, self.consecutive = rule, bonus, consecutive
        self.wants = Wants(taps=(layer,) if rule.needs_hidden else (), every=True)
        self._gate = math.log(gate) if gate > 0 else -math.inf
        self._words, self._length, self._layer = words, length, layer
        self._counts = Counts()

    def __call__(self, tree: DraftTree, q: Mapping[int, torch.Tensor], judge: Judge) -> Verdict:
        """The block's tokens, and what was decided on the way."""
        if not tree.is_chain:
            raise DrafterError("arbitration is for chains, and this draft branches")
        assert isinstance(judge, PassJudge)
        last = len(tree) - 1
        path: list[int] = []
        decisions: list[Decision] = []
        for node in range(last):
            token, goes_on = self._next(tree, q.get(node), judge, node, path, decisions)
            path.append(token)
            if not goes_on:
                return Verdict(tuple(range(node + 1)), tuple(path), tuple(decisions))
        if last and not self.bonus:
            last -= 1
        else:
            path.append(judge.choose(last, path))
        return Verdict(tuple(range(last + 1)), tuple(path), tuple(decisions))

    def _next(
        self,
        tree: DraftTree,
        drawn: torch.Tensor | None,
        judge: PassJudge,
        node: int,
        path: list[int],
        decisions: list[Decision],
    ) -> tuple[int, bool]:
        """The token after a node, and whether it is the draft's."""
        drafted = tree.tokens[node + 1]
        if drawn is None:
            target = judge.choose(node, path)
            agreed = target == drafted
        else:
            p = judge.probs(node, path)
            target, kid = try_drawn(tree, (node + 1,), p, drawn, judge, path)
            agreed = kid is not None
        emits = drawn is not None and self.rule.emits
        if agreed and not emits:
            return drafted, True
        m = self._mismatch(judge, node, path, drafted, target)
        kept = agreed
        if self._admits(m):
            if drawn is not None and emits:
                law = self._law(m)
                other, kid = try_drawn(tree, (node + 1,), law, drawn, judge, path)
                kept = kid is not None
                target = target if kept else other
            else:
                kept = self._word(m)
        if kept and agreed:
            return drafted, True
        self._counts = self._counts.after(kept)
        decisions.append(Decision(m.position, drafted, target, kept))
        return (drafted, True) if kept else (target, False)

    def _word(self, m: Mismatch) -> bool:
        """The rule's, which may be a user's own: nothing, or a text, is no answer."""
        word: object = self.rule.keep(m)
        if word is not None and not isinstance(word, str):
            with suppress(TypeError, ValueError, RuntimeError):  # arrays of several
                return bool(word)
        raise OptionError(
            "rule", f"{type(self.rule).__name__}.keep gave {word!r}, not True or False"
        )

    def _law(self, m: Mismatch) -> torch.Tensor:
        """The rule's, which may be a user's own, without what the request forbids (that share is
        given to none: drafts are accepted as ever); the target's where nothing is left."""
        law: object = self.rule.law(m)
        said = f"{type(self.rule).__name__}.law gave"
        wanted = f"probabilities of shape ({len(m.p)},)"
        if not isinstance(law, torch.Tensor) or law.shape != m.p.shape:
            shown = tuple(law.shape) if isinstance(law, torch.Tensor) else repr(law)
            raise OptionError("rule", f"{said} {shown}, not {wanted}")
        law = law.to(m.p.device, torch.float32)
        allowed = torch.where(m.p > 0, law, 0.0)
        total, least, left = torch.stack([law.sum(), law.min(), allowed.sum()]).tolist()
        if not (abs(total - 1) <= _SLACK and least >= 0):  # NaN compares as False
            raise OptionError(
                "rule", f"{said} numbers from {least:.3g}, of sum {total:.3g}, not {wanted}"
            )
        return allowed if left > 0 else m.p

    def _mismatch(
        self, judge: PassJudge, node: int, path: Sequence[int], drafted: int, target: int
    ) -> Mismatch:
        return Mismatch(
            judge,
            node,
            path,
            drafted,
            target,
            length=self._length,
            counts=self._counts,
            words=self._words,
            layer=self._layer,
        )

    def _admits(self, m: Mismatch) -> bool:
        """The gate: may a rule keep the draft's token at all?"""
        if self.consecutive and m.streak >= self.consecutive:
            return False
        chance = float(m.log_p[m.drafted])
        return chance > -math.inf and chance >= self._gate
