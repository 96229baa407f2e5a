"""The data every part of hasten passes around: frozen, slotted, with no behaviour beyond checks.

Words (docs/structure.md): a *draft tree*'s node 0 is the *root*, the pending token: already chosen,
not yet run through the target. A chain is a tree. A *round* is draft, one target pass, verify, cut,
commit, observe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from hasten.errors import DrafterError
from hasten.params import LogitsProcessor as LogitsProcessor
from hasten.params import SamplingParams as SamplingParams


class FinishReason(str, Enum):
    """Why a request ended (OpenAI's two values)."""

    STOP = "stop"
    """An end-of-sequence id or a stop string."""
    LENGTH = "length"
    """``max_new_tokens`` or the target's context limit."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guessed continuations as a tree; node 0 is the root (the pending token).

    ``tokens[i]`` is node i's id, ``parents[i] < i`` its parent (``parents[0] == -1``). No two
    children of one node carry the same token. ``depths[i]`` counts edges from the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not self.tokens:
            raise DrafterError(
                "a tree needs a root and as many parents as tokens: got "
                f"{len(self.tokens)} tokens, {len(self.parents)} parents"
            )
        if self.parents[0] != -1:
            raise DrafterError("node 0 is the root: its parent must be -1")
        depths = [0]
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            if not 0 <= parent < node:
                raise DrafterError(
                    f"node {node}: parent {parent} must come before it (0..{node - 1})"
                )
            depths.append(depths[parent] + 1)
        object.__setattr__(self, "depths", tuple(depths))

    @classmethod
    def chain(cls, root: int, draft: Sequence[int] = ()) -> DraftTree:
        """The tree root -> draft[0] -> draft[1] -> ..."""
        return cls((root, *draft), tuple(range(-1, len(draft))))

    @classmethod
    def trusted(
        cls, tokens: Sequence[int], parents: Sequence[int], depths: Sequence[int]
    ) -> DraftTree:
        """A tree whose maker already knows the depths and answers for all three: no check."""
        tree = object.__new__(cls)
        object.__setattr__(tree, "tokens", tuple(tokens))
        object.__setattr__(tree, "parents", tuple(parents))
        object.__setattr__(tree, "depths", tuple(depths))
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True when every node's parent is the node before it."""
        return self.depths[-1] == len(self.tokens) - 1

    def children(self) -> list[list[int]]:
        """For each node the list of its children, in index order."""
        out: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            out[self.parents[node]].append(node)
        return out

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        out = [node]
        while out[-1] > 0:
            out.append(self.parents[out[-1]])
        return out[::-1]


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """Rows that ride in the pass unverified: their KV is dropped, their signals are read back.

    ``parents`` index the combined rows (tree nodes first, then these), -1 is not allowed: a row
    follows the root or something below it. Used by progressive tree drafting and lookahead.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """What a drafter says comes after a node, before the request's options.

    logits  ``(n,)`` in any float dtype: of all ids, or of the drafter's own
    spread  turns them into logits of all ids ``(vocab,)``, -inf where it has none; None: they are
    hidden  the drafter's state that they come from ``(size,)``; None: not asked for
    """

    logits: torch.Tensor
    spread: Callable[[torch.Tensor], torch.Tensor] | None = None
    hidden: torch.Tensor | None = None

    def wide(self) -> torch.Tensor:
        """Logits of all ids, float32 ``(vocab,)``."""
        logits = self.logits.to(torch.float32)
        return logits if self.spread is None else self.spread(logits)


@dataclass(frozen=True, slots=True)
class Decision:
    """A place where the draft's token wasn't the target's, and whose was kept (``cospec``).

    position         index into the answer
    drafted, target  the two tokens
    kept             True: the draft's, against the target; False: the target's
    """

    position: int
    drafted: int
    target: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one round.

    q            for a node whose children were *drawn*: the distribution, float32 ``(vocab,)``,
                 they were drawn from, without replacement, in index order. A node without an entry
                 has point-mass children (chosen without randomness).
    extra        rows that ride in the pass unverified. They are left out (and the round's signals
                 hold the tree's rows only) on a target without tree masks, and when one of them
                 would stand past the context.
    frontiers    early exit: ``frontiers[i]`` layers of node i have already run (through
                 ``ctx.run_rows``, in
                 node order, never increasing along the list); nodes beyond the list have run none.
    """

    tree: DraftTree
    q: Mapping[int, torch.Tensor] = field(default_factory=dict)
    extra: ExtraRows | None = None
    frontiers: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    """Where each node came from (``"retrieval"``, ``"logits"``, ...), for statistics; may be
    empty."""
    ranks: tuple[int, ...] = ()
    """How good each node is within its source (0 is best, or a match length): with the source and
    the depth it is what a budget policy predicts acceptance from; may be empty."""
    laws: Mapping[int, DraftLaw] = field(default_factory=dict)
    """What the drafter says after a node, whether or not its children were drawn; from drafters
    made with ``laws=True`` only."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a drafter may propose: at most `nodes` rows *with the root*, none deeper than
    `depth`."""

    nodes: int
    depth: int


@dataclass(frozen=True, slots=True)
class Signals:
    """What a drafter wants read back from the target's passes; the loop asks for exactly this.

    topk       ids and logits of the k largest logits of every row.
    hidden     outputs of these layers (0 = embeddings, i = after layer i), every row.
    probs      the sampler's distribution at every row (float32, vocab wide).
    embeddings input embeddings on request (``ctx.embed``).
    prompt     the same signals for the prompt's rows too, handed to ``begin``.
    prompt_topk  False: the prompt's rows come without top-k, which costs a quarter of reading them.
    sparse     rounds of a shared pass in which nothing was drafted may come without top-k.
    late       nothing outlives the request, so that beside others prompt and rounds may be told
               when the next draft is wanted, or never.
    """

    topk: int = 0
    hidden: tuple[int, ...] = ()
    probs: bool = False
    embeddings: bool = False
    prompt: bool = False
    prompt_topk: bool = True
    sparse: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class RowSignals:
    """Signals of some rows, in row order; a field not asked for is None (or empty).

    topk_ids ``(rows, k)`` int64 and topk_logits ``(rows, k)`` float32 on the CPU; hidden[i]
    ``(rows, hidden_size)`` in the target's dtype on its device; probs ``(rows, vocab)`` float32.
    """

    topk_ids: torch.Tensor | None = None
    topk_logits: torch.Tensor | None = None
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    probs: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to run for one sequence.

    ``parents[i]`` is the index of row i's parent among *all* pending rows of the sequence (rows run
    earlier count), or -1 for the last committed token. Row i sits at position ``length + depth``
    where depth counts its pending ancestors.
    """

    sequence: Any
    tokens: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(slots=True)
class Pass:
    """What came out of a pass over R rows of one sequence, in row order.

    logits ``(R, vocab)`` in the target's dtype on its device, or None when not asked for (a pass
    that stops below the last layer, or a prefill, which gives the last row only: ``(1, vocab)``).
    hidden[i] ``(R, hidden_size)``: output of layer i (0 = embeddings, num_layers = last layer
    before the final norm), for the layers asked for.
    """

    logits: torch.Tensor | None
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of an emitted token under the target's *raw* logits (before
    options)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The n likeliest (id, logprob), best first, when asked for."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one round; `host` is what is left of `total` after all model passes and top-k
    selection."""

    total: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    topk: float = 0.0
    draft_model: float = 0.0
    """Part of `draft` spent in passes of a drafter's own model (not host work)."""

    @property
    def host(self) -> float:
        """Everything that is neither a model pass nor top-k selection."""
        return max(self.total - self.target - self.topk - self.draft_model, 0.0)


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of the loop. Round 0 is the prefill: it emits the first token and drafts nothing
    (no token where the first one is drafted too, `hasten.verify.Wants.every`).

    tree      what was verified; None for the prefill.
    accepted  indices of the kept nodes, the root first; () for the prefill.
    emitted   new tokens, in order; ``len(emitted) == len(accepted)`` unless cut by a stop.
    signals   of every row of the pass (tree nodes, then extra rows), as the drafter asked.
    layer_rows  rows x layers of the target run for this round, drafting included; 0 for the
              prefill.
    """

    index: int
    emitted: tuple[int, ...]
    tree: DraftTree | None = None
    accepted: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    signals: RowSignals = RowSignals()
    logprobs: tuple[TokenLogprob, ...] = ()
    times: Times = Times()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    """The end-of-sequence id or the stop string that ended the request; None for a length."""
    layer_rows: int = 0
    decisions: tuple[Decision, ...] = ()
    """Of ``cospec``: where the draft's token wasn't the target's."""

    @property
    def drafted(self) -> int:
        """Draft tokens verified in this round (the root isn't one)."""
        return len(self.tree) - 1 if self.tree is not None else 0


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one prompt.

    tokens        new ids, the one that ended the request included
    text          their text without special tokens and without the stop string
    metrics       see `hasten.metrics.Summary`
    population    of ``smc``: the weighted answers it was picked from (`hasten.smc.info.SMCInfo`)
    overrides     of ``cospec``: where the draft's token was kept against the target's, in order
    seed          the seed actually used
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    seed: int
    method: str
    logprobs: tuple[TokenLogprob, ...] | None
    metrics: Any
    rounds: tuple[Round, ...] = ()
    population: Any = None
    overrides: tuple[Decision, ...] = ()
