"""A method's drafters without hasten's loop: an engine verifies, and says what it kept.

An engine knows a request by its ids, sometimes by an id of its own. `prepare` turns a method's name
into a `Source`; `Source.open` gives one request's `Session`, which is told what the engine kept
(`commit`) and asked what to try next (`propose`). What the engine can't feed, hidden states above
all, a drafter can't have: such methods are refused by name, or replaced by their lexical form where
they have one. No model is ever run here, and nothing here changes what the engine says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

import torch

from hasten import methods
from hasten.drafters.base import DraftContext, Drafter
from hasten.drafters.ranks import prior
from hasten.drafts import check_draft, prune
from hasten.errors import CapabilityError, DrafterError
from hasten.methods import MethodContext, MethodSpec, RequestMaker
from hasten.policies.base import FixedPolicy, PlanContext, Policy
from hasten.policies.budget import AcceptanceBook, BudgetPolicy
from hasten.policies.cost_model import CostModel, CostTable
from hasten.targets.base import Capabilities, TargetInfo
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, Signals, Times

logger = logging.getLogger(__name__)

WINDOW = 32_768
"""Tokens of a prompt that are read at most, the last ones: about 50 ms and 12 MB."""

BRANCHES = 2
"""Candidates asked of a tree drafter for each token of the chain that is wanted."""

_NOTHING = RowSignals()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a plug-in's engine is and can feed.

    vocab_size     ids are below it
    context_limit  most tokens of a request
    eos_ids        nothing is drafted after these
    topk           it gives the largest logits of the rows it verified
    trees          it verifies trees; without, drafts are chains
    padded         it verifies as many rows whatever is drafted, maybe on several ranks that draft
                   each by itself: drafts are as large as may be, and never depend on a clock
    """

    name: str
    vocab_size: int
    context_limit: int
    eos_ids: frozenset[int] = frozenset()
    topk: bool = False
    trees: bool = False
    padded: bool = False


@dataclass(frozen=True, slots=True)
class _Stub:
    """The facts of a target whose model nobody may run from here; a `Target` to those who prepare
    methods."""

    info: TargetInfo
    capabilities: Capabilities

    @classmethod
    def of(cls, facts: EngineFacts) -> _Stub:
        info = TargetInfo(
            name=facts.name,
            architecture="",
            vocab_size=facts.vocab_size,
            eos_ids=facts.eos_ids,
            context_limit=facts.context_limit,
            num_layers=1,
            hidden_size=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            engine="plug-in",
        )
        return cls(info, Capabilities(fork=False))

    def __getattr__(self, name: str) -> Any:
        raise CapabilityError(
            f"{self.info.name}: a plug-in can't run the model ({name}). Choose a method that "
            "copies from the text: suffix, prompt-lookup or racer:retrieval"
        )


def even_costs(row_cost: float) -> CostTable:
    """A cost table where each row beyond the first costs the share `row_cost` of a plain pass."""
    rows = (1, 2, 4, 8, 16, 32, 64)
    line = tuple(10.0 * (1.0 + row_cost * (n - 1)) for n in rows)
    return CostTable("even", rows, (128,), (line,))


# -- preparing a method --------------------------------------------------------------------------


def prepare(
    method: str | MethodSpec,
    facts: EngineFacts,
    *,
    most: int,
    costs: CostModel,
    window: int = WINDOW,
) -> Source:
    """A method for an engine's requests; `most` tokens are drafted at a time, at most.

    costs   what passes cost there; the length of each draft is decided by it and by what was kept
    window  tokens of a prompt that are read at most

    Raises OptionError for an unknown method or option, CapabilityError when the engine can't feed
    the method.
    """
    spec = methods.parse(method)
    kind = methods.get(spec.name)
    if kind.lossless != "yes":
        _refuse(spec, facts, "has a verifier of its own, and here the engine verifies")
    there = {"rollback", *(["tree"] if facts.trees else [])}
    if _lexical(spec) is not None:
        there.add("taps")  # may turn out to be wanted, and is then done without
    if foreign := set(kind.requires) - there:
        wanted = ", ".join(_WORDS.get(each, each.replace("_", " ")) for each in sorted(foreign))
        _refuse(spec, facts, f"needs more of the model than a plug-in has ({wanted})")
    maker = _maker(spec, facts)
    missing = _missing(maker()[0].needs, facts)
    if missing and (other := _lexical(spec)) is not None:
        logger.info("%s gives no %s: %s instead of %s", facts.name, missing, other, spec)
        spec, maker = other, _maker(other, facts)
        missing = _missing(maker()[0].needs, facts)
    if missing:
        _refuse(spec, facts, f"needs {missing}, which a plug-in doesn't get there")
    return Source(spec, facts, maker, most=most, costs=costs, window=window)


_WORDS = {"taps": "hidden states"}
"""What a method requires, where its name doesn't say it."""


def _refuse(spec: MethodSpec, facts: EngineFacts, why: str) -> NoReturn:
    raise CapabilityError(
        f"method {str(spec)!r} can't draft for {facts.name}: it {why}. "
        "Choose suffix, prompt-lookup or racer:retrieval"
    )


def _maker(spec: MethodSpec, facts: EngineFacts) -> RequestMaker:
    def no_model(name: str) -> NoReturn:
        _refuse(spec, facts, f"needs a model of its own ({name}), which an engine runs itself")

    target: Any = _Stub.of(facts)
    context = MethodContext(target, None, no_model, costs=even_costs(0.1))
    return methods.prepare(spec, context)


def _missing(needs: Signals, facts: EngineFacts) -> str:
    """What a drafter wants and the engine hasn't, in words."""
    wants = {
        "top-k logits": needs.topk and not facts.topk,
        "hidden states": needs.hidden,
        "probabilities": needs.probs,
        "embeddings": needs.embeddings,
    }
    return ", ".join(name for name, missing in wants.items() if missing)


def _lexical(spec: MethodSpec) -> MethodSpec | None:
    """The form of a method that looks at ids alone; None when it has none."""
    options = dict(spec.options)
    if spec.name == "auto":
        return methods.configure("suffix", **{k: v for k, v in options.items() if k == "most"})
    lexical: dict[str, dict[str, Any]] = {
        "racer": {"breadth": 0, "retrieved": 1.0},
        "adapld": {"semantic": False, "branches": False, "rerank": "latest"},
    }
    if spec.name not in lexical or (spec.name == "racer" and spec.variant == "logits"):
        return None
    return methods.configure(spec.name, variant=spec.variant, **{**options, **lexical[spec.name]})


class Source:
    """A method prepared for an engine; made by `prepare`."""

    def __init__(
        self,
        spec: MethodSpec,
        facts: EngineFacts,
        maker: RequestMaker,
        *,
        most: int,
        costs: CostModel,
        window: int,
    ) -> None:
        self.spec, self.facts, self.most, self.window = spec, facts, most, window
        self.topk: int = maker()[0].needs.topk
        """Largest logits that the drafters read of every verified row; 0: none."""
        self._maker, self._costs, self._book = maker, costs, AcceptanceBook()

    def open(self) -> Session:
        """A session for one request."""
        return Session(self, *self.make())

    def make(self) -> tuple[Drafter, Policy]:
        """One request's drafter and policy."""
        drafter, policy = self._maker()
        rows = self.most + 1 if self.facts.trees else BRANCHES * self.most + 1
        if self.facts.padded and not isinstance(policy, FixedPolicy):
            policy = FixedPolicy(nodes=rows)
        elif isinstance(policy, BudgetPolicy) and not self.facts.trees:
            policy = ChainPolicy(self._costs, self._book, most=min(rows, policy.most))
        return drafter, policy


# -- from trees to chains ------------------------------------------------------------------------


def best_path(tree: DraftTree, chances: Sequence[float]) -> list[int]:
    """Nodes of the path from the root (left out) that is expected to give most tokens; `chances`
    are those of each node's whole path. Ties go to the earlier node."""
    expected = [0.0] * len(tree)
    for node in range(1, len(tree)):
        expected[node] = expected[tree.parents[node]] + chances[node]
    return tree.path(expected.index(max(expected)))[1:]


def prior_chances(draft: Draft) -> list[float]:
    """The chance of each node's path by its source, rank and depth alone."""
    tree, size = draft.tree, len(draft.tree)
    sources, ranks = draft.sources or ("",) * size, draft.ranks or (0,) * size
    chances = [1.0] * size
    for node in range(1, size):
        each = prior(sources[node], ranks[node], tree.depths[node])
        chances[node] = chances[tree.parents[node]] * each
    return chances


class ChainPolicy(BudgetPolicy):
    """The budget policy for engines that verify chains.

    A drafter is asked for a tree all the same: the best chain is taken from it, and what was kept
    is counted for all of its nodes.
    """

    def select(self, draft: Draft) -> Draft:
        """As much of the tree's best chain as is worth verifying."""
        chances = self.weigh(draft)
        chain = best_path(draft.tree, chances)
        count = self._best_count(chain, chances, 1, 0)
        return self.keep(draft, chain[:count], self._gain_ms)


def _alone(root: int) -> Draft:
    return Draft(DraftTree.chain(root))


# -- one request ---------------------------------------------------------------------------------


class Session:
    """One request: its drafter, its policy, and the ids they have seen.

    Life: `begin`, then `commit` and `propose` in turn, then `end`. `begin` may be called again at
    any time: the request starts anew.
    """

    def __init__(self, source: Source, drafter: Drafter, policy: Policy) -> None:
        self.source, self.drafter, self.policy = source, drafter, policy
        self.ids: list[int] = []
        """Ids read: the prompt's last ones (`WINDOW`) and all that was committed."""
        self.skipped = 0
        """Ids of the prompt before these."""
        self._draft: Draft | None = None
        self._draft_s = 0.0
        self._rounds = 0
        self._begun = False

    @property
    def length(self) -> int:
        """Tokens of the request so far."""
        return self.skipped + len(self.ids)

    def begin(self, prompt: Sequence[int], topk_ids: torch.Tensor | None = None) -> None:
        """Start on `prompt`; `topk_ids` ``(rows, k)`` int64 are those of its last rows."""
        self.end()
        self.skipped = max(len(prompt) - self.source.window, 0)
        self.ids = list(prompt[self.skipped :])
        self._begun = True
        self._call("begin", tuple(self.ids), RowSignals(topk_ids))

    def commit(
        self,
        tokens: Sequence[int],
        topk_ids: torch.Tensor | None = None,
        *,
        seconds: float = 0.0,
        waiting: int = 1,
    ) -> None:
        """The engine went on with `tokens`: what it kept of the last draft, and its own token.

        topk_ids  ``(rows, k)`` int64, best first, of the rows it ran: the pending token and what it
                  took of the draft, in the draft's order
        seconds   what the pass took, where that is known
        waiting   requests that wait while one of them drafts: an engine asks them in turn
        """
        if not tokens:
            return
        tree = None if self._draft is None else self._draft.tree
        if topk_ids is not None and self._rounds:
            tree = _taken(tree or DraftTree.chain(self.ids[-1]), len(topk_ids))
        accepted = None if tree is None else _kept(tree, tokens)
        if accepted is None:  # steps that nobody told us of
            tree, topk_ids = None, None
        emitted = tuple(tokens)
        signals = _NOTHING if tree is None else RowSignals(topk_ids)
        times = Times(draft=self._draft_s * waiting, target=seconds)
        self._draft, self._draft_s = None, 0.0
        self.ids.extend(emitted)
        self._rounds += 1
        self._call("observe", Round(self._rounds - 1, emitted, tree, accepted or (), (), signals))
        self.policy.learn(Round(self._rounds - 1, emitted, tree, accepted or (), times=times))

    def propose(self, most: int | None = None) -> Draft:
        """What to try next: `most` tokens after the pending one, or fewer, or none. The root is
        the last token committed. Raises DrafterError when the drafter fails."""
        started = perf_counter()
        most = self.source.most if most is None else min(most, self.source.most)
        # The engine adds a token of its own to whatever it keeps.
        remaining = self.source.facts.context_limit - self.length
        most = min(most, remaining - 1)
        draft = self._ask(most, remaining) if most > 0 else _alone(self.ids[-1])
        self._draft, self._draft_s = draft, perf_counter() - started
        return draft

    def _ask(self, most: int, remaining: int) -> Draft:
        facts = self.source.facts
        plan = self.policy.plan(PlanContext(self.length, remaining))
        budget = Budget(plan.nodes, min(plan.depth, most))
        if budget.nodes < 2 or budget.depth < 1:
            return _alone(self.ids[-1])
        draft = self._call("propose", self._context(), budget)
        try:
            check_draft(draft, self.ids[-1], budget, facts.vocab_size)
        except DrafterError as error:
            raise self._failure("propose", error) from error
        draft = self.policy.select(draft)
        if not facts.trees and not draft.tree.is_chain:  # of a fixed budget
            draft = prune(draft, best_path(draft.tree, prior_chances(draft)))
        return prune(draft, range(1, most + 1)) if len(draft.tree) > most + 1 else draft

    def fork(self) -> Session:
        """Another request that has the same ids so far, and goes on by itself."""
        other = self.source.open()
        other.begin(self.ids[:-1])
        other.skipped += self.skipped
        other.commit(self.ids[-1:])
        return other

    def end(self) -> None:
        """Free what the request held. Safe to call twice."""
        begun, self._begun = self._begun, False
        self.ids, self.skipped, self._draft, self._rounds = [], 0, None, 0
        if not begun:
            return
        try:
            self._call("end")
        finally:  # what the policy knows of the request goes with it
            self.drafter, self.policy = self.source.make()

    # -- helpers ---------------------------------------------------------------------------------

    def _context(self) -> DraftContext:
        return DraftContext(ids=self.ids, sample=_no_draws, warp=_no_draws, greedy=True)

    def _call(self, what: str, *args: Any) -> Any:
        call: Callable[..., Any] = getattr(self.drafter, what)
        try:
            return call(*args)
        except Exception as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: Exception) -> DrafterError:
        kind = "" if isinstance(error, DrafterError) else f"{type(error).__name__}: "
        return DrafterError(f"drafter {self.drafter.name!r} failed in {what}(): {kind}{error}")


def _no_draws(*_: Any) -> NoReturn:
    raise CapabilityError(
        "an engine's plug-in can't hand over drawn drafts. Choose a method that copies"
    )


def _taken(tree: DraftTree, rows: int) -> DraftTree | None:
    """The first `rows` nodes of the draft: what the engine ran of it. None: it ran other rows."""
    if rows > len(tree):
        return None
    return DraftTree.trusted(tree.tokens[:rows], tree.parents[:rows], tree.depths[:rows])


def _kept(tree: DraftTree, tokens: Sequence[int]) -> tuple[int, ...] | None:
    """Nodes kept when `tokens` were emitted: the path of all but the last. None: the tree has no
    such path, so the engine has gone on without us."""
    path = [0]
    children = tree.children()
    for token in tokens[:-1]:
        found = [kid for kid in children[path[-1]] if tree.tokens[kid] == token]
        if not found:
            return None
        path.append(found[0])
    return tuple(path)
