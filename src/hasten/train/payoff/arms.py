"""What a model's drafter would have kept at every token of an answer, and not only where its own
rounds begin: for who knows best which arm should have drafted.

The answer is decoded plainly; at each token the drafter is asked, and nothing of its draft is
verified. What it would have kept is known at the end, since a lossless method's text doesn't depend
on its drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.base import BaseDrafter, DraftContext, Drafter
from hasten.methods import RequestMaker
from hasten.policies.base import PlanContext, Policy
from hasten.stopping import Stopper
from hasten.targets.base import Target
from hasten.train.lede_arms import kept
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, SamplingParams
from hasten.verify import walk


class _Noting(BaseDrafter):
    """Another drafter, whose drafts are kept by the length of the text before them."""

    name = "noting"

    def __init__(self, inner: Drafter) -> None:
        self._inner, self.needs = inner, inner.needs
        self.drafts: dict[int, DraftTree] = {}

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        self._inner.begin(prompt, signals)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The other's draft."""
        draft = self._inner.propose(ctx, budget)
        self.drafts[len(ctx.ids)] = draft.tree
        return draft

    def observe(self, round: Round) -> None:
        self._inner.observe(round)

    def end(self) -> None:
        self._inner.end()


class _Silent:
    """Another policy's budget; nothing is verified, and it learns nothing, so that it never
    pauses."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner

    def plan(self, context: PlanContext) -> Budget:
        """As the other says."""
        return self._inner.plan(context)

    def select(self, draft: Draft) -> Draft:
        """A plain round."""
        return Draft(DraftTree.chain(draft.tree.tokens[0]))

    def learn(self, round: Round) -> None:
        """Nothing."""


def kept_everywhere(
    target: Target, maker: RequestMaker, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[int], list[int]]:
    """The greedy answer to `prompt`, and for each of its tokens how many of the candidates that
    `maker`'s drafter has after it the text goes on with: of all of them, verified or not."""
    drafter, policy = maker()
    noting = _Noting(drafter)
    info = target.info
    request = Decoding(
        target,
        prompt,
        params,
        drafter=noting,
        policy=_Silent(policy),
        verifier=walk,
        stopper=Stopper(params, info.eos_ids, len(prompt), info.context_limit, None),
    )
    for _ in decode([request]):
        pass
    ids, count = request.ids, len(prompt)
    return ids[count:], [
        kept(tree.tokens, tree.parents, ids[place:]) if tree is not None else 0
        for place in range(count + 1, len(ids) + 1)
        for tree in (noting.drafts.get(place),)
    ]
