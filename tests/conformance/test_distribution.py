"""Sampled answers have the target's distribution, measured: chi-square over the next two tokens.

The exact joint distribution is enumerated; rules known to be biased must fail the same test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from scipy.stats import chi2

from hasten.decode import decode
from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.judge import PassJudge
from hasten.sampling import Sampler
from hasten.types import Budget, Draft, DraftTree, SamplingParams
from hasten.verify import Judge, Verdict, Verifier, rejection, walk
from tests.conformance.drafters import Drawn, DrawnTree, Mixed
from tests.conformance.harness import TREE_DRAFTERS, prompt_of, request
from tests.conformance.toy_target import ToyTarget

VOCAB = 6
IDS = [2, 4, 3]
FLAT = SamplingParams(max_new_tokens=3, temperature=1.0, ignore_eos=True)
CUT = SamplingParams(max_new_tokens=3, temperature=0.8, top_k=5, top_p=0.95, ignore_eos=True)
RUNS = 1200
FAIR, BIASED = 1e-3, 1e-5
"""p-values: a fair rule's lies above the first (seeds are fixed), a biased one's below both."""

TARGET = ToyTarget(vocab=VOCAB, scale=1.0, seed=5)
NOISE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))


def unlike(prefix: Sequence[int]) -> torch.Tensor:
    """A drafter's logits that have nothing to do with the target's."""
    return NOISE[prefix[-1]]


def contrary(prefix: Sequence[int]) -> torch.Tensor:
    """A drafter that likes what the target doesn't: its siblings are refused one by one."""
    return 0.5 * NOISE[prefix[-1]] - 0.6 * TARGET.logits_after(prefix)


Drafting = Callable[[Sampler, Sequence[int]], tuple[DraftTree, dict[int, torch.Tensor]]]


# -- what is measured ------------------------------------------------------------------------------


def exact(params: SamplingParams, ids: Sequence[int], count: int) -> dict[tuple[int, ...], float]:
    """The distribution of the next `count` tokens."""
    sampler = Sampler(params, VOCAB, frozenset(), len(IDS), 0)
    out: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        out = {
            (*head, token): mass * p
            for head, mass in out.items()
            for token, p in enumerate(
                sampler.probs([*ids, *head], TARGET.logits_after([*ids, *head])).tolist()
            )
        }
    return out


def p_value(counts: Mapping[tuple[int, ...], int], mass: Mapping[tuple[int, ...], float]) -> float:
    """Pearson's chi-square test; cells expected fewer than five times are taken together."""
    total = sum(counts.values())
    impossible = [c for c in counts if mass.get(c, 0.0) == 0]
    if impossible:
        return 0.0
    rare = [c for c, m in mass.items() if m * total < 5]
    cells = [(counts.get(c, 0), m * total) for c, m in mass.items() if m * total >= 5]
    rest = sum(mass[c] for c in rare) * total
    if rest >= 1:
        cells.append((sum(counts.get(c, 0) for c in rare), rest))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def two_tokens(
    verifier: Verifier, drafting: Drafting, params: SamplingParams, seeds: Iterable[int]
) -> Counter[tuple[int, ...]]:
    """The first two tokens that come of one verified draft, and of plain choices after it."""
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in seeds:
        sampler = Sampler(params, VOCAB, frozenset(), len(IDS), seed)
        tree, q = drafting(sampler, IDS)
        paths = [[tree.tokens[n] for n in tree.path(node)[1:]] for node in range(len(tree))]
        logits = torch.stack([TARGET.logits_after([*IDS, *path]) for path in paths])
        tokens = list(verifier(tree, q, PassJudge(sampler, IDS, logits, None)).tokens[:2])
        while len(tokens) < 2:
            prefix = [*IDS, *tokens]
            tokens.append(sampler.choose(prefix, TARGET.logits_after(prefix)))
        counts[tuple(tokens)] += 1
    return counts


# -- drafts ----------------------------------------------------------------------------------------


def drawn(
    widths: Sequence[int], guess: Callable[[Sequence[int]], torch.Tensor] = unlike
) -> Drafting:
    """Every node at depth d has ``widths[d]`` children drawn from q without replacement."""

    def make(sampler: Sampler, ids: Sequence[int]) -> tuple[DraftTree, dict[int, torch.Tensor]]:
        tokens, parents, q = [ids[-1]], [-1], {}
        paths: list[list[int]] = [[]]
        node = 0
        while node < len(tokens):
            prefix = [*ids, *paths[node]]
            if len(paths[node]) < len(widths):
                q[node] = sampler.probs(prefix, guess(prefix))
                for token in sampler.draw(q[node], len(prefix), widths[len(paths[node])]):
                    tokens.append(token)
                    parents.append(node)
                    paths.append([*paths[node], token])
            node += 1
        return DraftTree(tuple(tokens), tuple(parents)), q

    return make


def fixed(sampler: Sampler, ids: Sequence[int]) -> tuple[DraftTree, dict[int, torch.Tensor]]:
    """A point-mass tree: two children, two grandchildren each."""
    return DraftTree((ids[-1], 5, 0, 1, 4, 2, 3), (-1, 0, 0, 1, 1, 2, 2)), {}


def half_drawn(sampler: Sampler, ids: Sequence[int]) -> tuple[DraftTree, dict[int, torch.Tensor]]:
    """Drawn children, point-mass grandchildren."""
    tree, q = drawn((2,))(sampler, ids)
    return DraftTree((*tree.tokens, 3, 4), (*tree.parents, 1, 1)), q


DRAFTS: dict[str, Drafting] = {
    "drawn chain": drawn((1, 1)),
    "drawn tree": drawn((3, 2)),
    "drawn children of all ids": drawn((VOCAB,), contrary),
    "point-mass tree": fixed,
    "half drawn": half_drawn,
}


@pytest.mark.parametrize("options", [FLAT, CUT], ids=["flat", "cut"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_rejection_keeps_the_targets_distribution(draft: str, options: SamplingParams) -> None:
    counts = two_tokens(rejection, DRAFTS[draft], options, range(RUNS))
    assert p_value(counts, exact(options, IDS, 2)) > FAIR


@pytest.mark.parametrize("draft", ["drawn tree", "point-mass tree"])
def test_match_keeps_the_targets_distribution(draft: str) -> None:
    counts = two_tokens(walk, DRAFTS[draft], CUT, range(10_000, 10_000 + RUNS))
    assert p_value(counts, exact(CUT, IDS, 2)) > FAIR


def test_rejection_keeps_more_of_a_drawn_draft_than_match() -> None:
    kept = {}
    for name, verifier in (("match", walk), ("rejection", rejection)):
        kept[name] = 0
        for seed in range(400):
            sampler = Sampler(FLAT, VOCAB, frozenset(), len(IDS), seed)
            tree, q = drawn((3,))(sampler, IDS)
            rows = [[tree.tokens[n] for n in tree.path(i)[1:]] for i in range(len(tree))]
            logits = torch.stack([TARGET.logits_after([*IDS, *path]) for path in rows])
            verdict = verifier(tree, q, PassJudge(sampler, IDS, logits, None))
            kept[name] += len(verdict.nodes) - 1
    assert kept["rejection"] > 1.1 * kept["match"]


# -- the whole loop --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Drawn, DrawnTree, Mixed], ids=lambda k: k.name)
@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
def test_the_loop_keeps_the_targets_distribution_under_rejection(
    kind: type[Drawn], tree: bool
) -> None:
    target = ToyTarget(vocab=VOCAB, scale=1.0, seed=5, tree=tree, eos_ids=())
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(RUNS):
        drafter = kind([], VOCAB)
        asked = request(target, IDS, CUT, drafter, nodes=7, verifier=rejection, seed=seed)
        counts[tuple(t for _, r in decode([asked]) for t in r.emitted)] += 1
    assert p_value(counts, exact(CUT, IDS, 3)) > FAIR


class Remembering(BaseDrafter):
    """Goes on only where its last draft was long; how long that was depends on its second token.

    After a refusal of the first, the next round draws at the second's position. Were that draw the
    same as before, going on would amount to having looked at it.
    """

    name = "remembering"

    def __init__(self) -> None:
        self._last = 0

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        prefix, tokens, q = list(ctx.ids), [], {}
        first, even = len(prefix) == len(IDS) + 1, torch.full((VOCAB,), 1 / VOCAB)
        if first or self._last == 3:
            unlikely = torch.softmax(-TARGET.logits_after(prefix), -1)
            for guess in (unlikely, even) if first else (even,):
                q[len(tokens)] = guess
                tokens += ctx.sample(guess, len(prefix) + len(tokens), 1)
        long = first and tokens[1] % 2 == 1
        self._last = 3 if long else len(tokens)
        return Draft(DraftTree.chain(prefix[-1], [*tokens, 0] if long else tokens), q=q)


def test_rejection_stays_exact_when_a_draft_remembers_how_long_the_last_one_was() -> None:
    target = ToyTarget(vocab=VOCAB, scale=1.0, seed=5, eos_ids=())
    longer = replace(FLAT, max_new_tokens=5)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(RUNS):
        asked = request(target, IDS, longer, Remembering(), nodes=7, verifier=rejection, seed=seed)
        counts[tuple(t for _, r in decode([asked]) for t in r.emitted)[:3]] += 1
    assert p_value(counts, exact(FLAT, IDS, 3)) > FAIR


# -- biased rules must fail ------------------------------------------------------------------------


def accept_top_two(tree: DraftTree, q: Mapping[int, torch.Tensor], judge: Judge) -> Verdict:
    """Keeps a child that is one of the target's two likeliest ids ("typical acceptance")."""
    nodes, tokens = [0], []
    while True:
        likeliest = judge.probs(nodes[-1], tokens).topk(2).indices.tolist()
        kids = [n for n, p in enumerate(tree.parents) if p == nodes[-1]]
        kept = next((k for k in kids if tree.tokens[k] in likeliest), None)
        if kept is None:
            return Verdict(tuple(nodes), (*tokens, judge.choose(nodes[-1], tokens)))
        nodes.append(kept)
        tokens.append(tree.tokens[kept])


def _one_node(residual: str, shrinks: bool) -> Verifier:
    """`rejection` for the root's children, with a fault in what follows a refusal."""

    def rule(tree: DraftTree, q: Mapping[int, torch.Tensor], judge: Judge) -> Verdict:
        p, guess = judge.probs(0, ()).clone(), q[0].clone()
        for index, kid in enumerate(n for n, up in enumerate(tree.parents) if up == 0):
            token = tree.tokens[kid]
            if judge.uniform((), index) * float(guess[token]) < float(p[token]):
                return Verdict((0, kid), (token, judge.choose(kid, (token,))))
            left = (p - guess).clamp_(min=0)
            if residual != "p" and float(left.sum()) > 0:
                p = left / left.sum() if residual == "normalised" else left
            if shrinks:
                guess[token] = 0
                guess = guess / guess.sum()
        return Verdict((0,), (judge.draw(p, ()),))

    return rule


def drops_after_looking(
    sampler: Sampler, ids: Sequence[int]
) -> tuple[DraftTree, dict[int, torch.Tensor]]:
    """Draws a token and keeps quiet when it is an odd one: what is drafted isn't drawn from q."""
    tree, q = drawn((1,))(sampler, ids)
    return (tree, q) if tree.tokens[1] % 2 == 0 else (DraftTree.chain(ids[-1]), {})


def says_another_q(
    sampler: Sampler, ids: Sequence[int]
) -> tuple[DraftTree, dict[int, torch.Tensor]]:
    """Draws from one distribution and names a sharper one."""
    tree, q = drawn((1,))(sampler, ids)
    return tree, {0: q[0].square() / q[0].square().sum()}


UNFAIR: dict[str, tuple[Verifier, Drafting]] = {
    "top two are accepted": (accept_top_two, drawn((1, 1))),
    "p stands after a refusal": (_one_node("p", True), drawn((1,))),
    "the residual isn't normalised": (_one_node("raw", True), drawn((3,))),
    "q keeps a refused token": (_one_node("normalised", False), drawn((5,), contrary)),
    "the drafter drops what it has drawn": (rejection, drops_after_looking),
    "the drafter names another q": (rejection, says_another_q),
}


@pytest.mark.parametrize("fault", UNFAIR)
def test_a_biased_rule_fails(fault: str) -> None:
    verifier, drafting = UNFAIR[fault]
    counts = two_tokens(verifier, drafting, FLAT, range(RUNS))
    assert p_value(counts, exact(FLAT, IDS, 2)) < BIASED


def test_the_one_node_rule_without_a_fault_passes() -> None:
    counts = two_tokens(_one_node("normalised", True), drawn((5,), contrary), FLAT, range(RUNS))
    assert p_value(counts, exact(FLAT, IDS, 2)) > FAIR


def _draws(sampler: Sampler, probs: torch.Tensor, position: int, count: int) -> list[int]:
    return sampler.draw(probs, position, count, "draft")


def test_match_accepts_more_when_drafts_are_drawn_with_the_targets_noise() -> None:
    """The near model's own draws, with the target's noise and with noise of its own."""
    lengths = {}
    for purpose in ("token", "draft"):
        passes = tokens = 0
        for seed in range(12):
            params = SamplingParams(max_new_tokens=30, temperature=1.0, ignore_eos=True)
            target = ToyTarget()
            drafter = TREE_DRAFTERS["draft-model,model=near"](target, [], seed)
            asked = request(target, prompt_of(seed), params, drafter, nodes=5, seed=seed)
            if purpose == "draft":
                asked._context.sample = partial(_draws, asked.sampler)
            made = [each for _, each in decode([asked])]
            passes += len(made) - 1
            tokens += sum(len(each.emitted) for each in made[1:])
        lengths[purpose] = tokens / passes
    assert lengths["token"] > 1.3 * lengths["draft"]
