"""Verifiers: which nodes of a draft tree are kept, and which tokens are emitted.

`greedy` and `match` emit the target's own choice at every position (argmax, or its keyed draw), so
the answer is token for token that of plain decoding. `rejection` emits tokens equal in distribution
and accepts more of a *drawn* draft: at a node with children drawn from q without replacement, child
after child is accepted with probability min(1, p/q); after each refusal p becomes the normalised
positive part of p - q and q loses the refused token (speculative sampling, Leviathan et al. 2023,
section 2.3, applied recursively to siblings as in SpecInfer, Miao et al. 2024). Point-mass children
(chosen without randomness) need no test: the target draws, and a child with that token is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hasten.errors import OptionError
from hasten.types import Decision, DraftTree


class Judge(Protocol):
    """The target's word on the nodes of one pass.

    `node` is an index into the verified tree, `path` the tokens emitted in this round so far (those
    on the way from the root to the node, the root's excluded), so the prefix is the request's ids +
    path.
    """

    def choose(self, node: int, path: Sequence[int]) -> int:
        """The target's token after `node`: argmax, or its draw keyed by (seed, position)."""
        ...

    def probs(self, node: int, path: Sequence[int]) -> torch.Tensor:
        """The target's distribution after `node` with all sampling options, float32
        ``(vocab,)``."""
        ...

    def uniform(self, path: Sequence[int], index: int) -> float:
        """A uniform in (0, 1) keyed by (seed, position after `path`, index)."""
        ...

    def draw(self, probs: torch.Tensor, path: Sequence[int]) -> int:
        """One id from `probs`, keyed by (seed, position after `path`), apart from `choose`'s
        draw."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """`nodes`: the kept path, the root first. `tokens`: what is emitted; ``tokens[i]`` follows
    ``nodes[i]``, so both have the same length. `decisions`: see `hasten.types.Decision`."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    decisions: tuple[Decision, ...] = ()


Verifier = Callable[[DraftTree, Mapping[int, torch.Tensor], Judge], Verdict]


@dataclass(frozen=True, slots=True)
class Wants:
    """What a verifier asks of the loop; one that has such an attribute `wants` gets it.

    taps   layers whose outputs the judge shows (`hasten.judge.PassJudge.hidden`)
    every  every token of an answer may be a draft's: the first one too (the prompt's last token is
           the first root), and the last one that the answer's length allows
    """

    taps: tuple[int, ...] = ()
    every: bool = False


def wanted_by(verifier: Verifier) -> Wants:
    """What `verifier` wants; most want nothing."""
    wants = getattr(verifier, "wants", None)
    return wants if isinstance(wants, Wants) else Wants()


def walk(tree: DraftTree, q: Mapping[int, torch.Tensor], judge: Judge) -> Verdict:
    """Follow the target's own choices through the tree (`greedy` and `match`); q plays no part."""
    child = {(p, t): n for n, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    nodes, tokens = [0], [judge.choose(0, ())]
    while (node := child.get((nodes[-1], tokens[-1]))) is not None:
        nodes.append(node)
        tokens.append(judge.choose(node, tokens))
    return Verdict(tuple(nodes), tuple(tokens))


def rejection(tree: DraftTree, q: Mapping[int, torch.Tensor], judge: Judge) -> Verdict:
    """Speculative sampling over a tree with drawn or point-mass children; equal in distribution."""
    children = tree.children()
    nodes: list[int] = [0]
    tokens: list[int] = []
    while True:
        node = nodes[-1]
        if node in q and children[node]:
            p = judge.probs(node, tokens)
            token, kept = try_drawn(tree, children[node], p, q[node], judge, tokens)
        else:
            token = judge.choose(node, tokens)
            kept = next((c for c in children[node] if tree.tokens[c] == token), None)
        tokens.append(token)
        if kept is None:
            return Verdict(tuple(nodes), tuple(tokens))
        nodes.append(kept)


def try_drawn(
    tree: DraftTree,
    kids: Sequence[int],
    p: torch.Tensor,
    q: torch.Tensor,
    judge: Judge,
    path: Sequence[int],
) -> tuple[int, int | None]:
    """Accept one of `kids` (drawn from q without replacement) or draw from what is left of p; the
    token, and the kid it is (None: a draw)."""
    q = q.to(device=p.device, dtype=torch.float32).clone()
    for index, kid in enumerate(kids):
        token = tree.tokens[kid]
        # u < p/q without the division: q[token] > 0 because the token was drawn from it.
        if judge.uniform(path, index) * float(q[token]) < float(p[token]):
            return token, kid
        residual = (p - q).clamp_(min=0)
        mass = float(residual.sum())
        # p == q up to rounding leaves nothing; a refusal then has probability ~0 and p stands.
        p = residual / mass if mass > 0 else p
        q[token] = 0
        left = float(q.sum())
        if left <= 0:
            break
        q /= left
    return judge.draw(p, path), None


VERIFIERS: dict[str, Verifier] = {"greedy": walk, "match": walk, "rejection": rejection}
"""Lossless verifiers by name."""


def pick_verifier(name: str | None, *, greedy: bool) -> tuple[str, Verifier]:
    """The verifier called `name`, or the default: `greedy` at temperature 0, else `match`."""
    if name is None:
        name = "greedy" if greedy else "match"
    if not isinstance(name, str) or name not in VERIFIERS:
        raise OptionError(
            "verify", f"unknown verifier {name!r}", f"Choose one of {', '.join(VERIFIERS)}"
        )
    if name == "greedy" and not greedy:
        raise OptionError(
            "verify",
            "'greedy' contradicts temperature > 0",
            "Use 'match' or 'rejection', or temperature 0",
        )
    return name, VERIFIERS[name]
