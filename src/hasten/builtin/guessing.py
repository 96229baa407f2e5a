"""Progressive tree drafting and lookahead decoding: options and how each is put together.

Rows of theirs ride in every pass unverified; without them nothing is learned. So the budget is
fixed: a policy that skips drafts would starve them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hasten.builtin.common import need, opt
from hasten.drafters.lookahead import Lookahead
from hasten.drafters.ptd import PTD
from hasten.methods import MakeRequest, Method, MethodContext
from hasten.policies.base import FixedPolicy

MOST_RIDING = 1024
RIDING = f"{MOST_RIDING} rows may ride in a pass at most"

TEXT = "store the n-grams of prompt and answer too"


@dataclass(frozen=True, slots=True)
class PTDOptions:
    """Options of ``ptd``."""

    width: int = opt(2, "most children of a draft tree's node (the paper's w)")
    depth: int = opt(2, "edges at which a subtree slides (d)")
    roots: int = opt(1, "subtrees of the draft tree (R); 0 switches it off")
    guess: int = opt(8, "most guesses verified per pass, the root not counted")
    reach: int = opt(8, "longest guess (ours)")
    key: int = opt(2, "tokens that guesses are looked up by: 1, or 2 and then 1 (ours)")
    spine: bool = opt(True, "subtrees see the roots before them (the authors' code)")
    harvest: bool = opt(True, "use what the draft tree has grown; off for comparison only")
    feedback: bool = opt(True, "learn from verified rows")
    text: bool = opt(True, TEXT + " (ours)")
    max_nodes: int = opt(60, "most guesses kept for a key")
    seed_depth: int = opt(2, "longest of the chains (two at most) a draft tree starts with")


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """Options of ``lookahead``."""

    ngram: int = opt(3, "n-gram size, its first token included (the paper's N)")
    window: int = opt(1, "columns of the window (W); 0 switches it off")
    guesses: int = opt(4, "n-grams kept for a token and verified per pass (G)")
    text: bool = opt(True, TEXT + " (the code's POOL_FROM_PROMPT)")


def _largest(width: int, depth: int) -> int:
    """Most nodes of a subtree of `depth` edges that gets one new child per node and round."""
    sizes = [1]
    while len(sizes) <= depth and sizes[-1] <= MOST_RIDING:
        sizes.append(1 + sum(sizes[-width:]))
    return sizes[-1]


def _ptd(options: PTDOptions, context: MethodContext) -> MakeRequest:
    for name, least in (("width", 1), ("depth", 2), ("guess", 1), ("reach", 1)):
        value = getattr(options, name)
        need(f"ptd.{name}", value >= least, f"at least {least}", value)
    need("ptd.max_nodes", options.max_nodes >= 1, "at least 1", options.max_nodes)
    need("ptd.roots", options.roots >= 0, "at least 0", options.roots)
    need("ptd.key", options.key in (1, 2), "1 or 2", options.key)
    need("ptd.seed_depth", options.seed_depth >= 1, "at least 1", options.seed_depth)
    most = options.roots * _largest(options.width, options.depth - 1)
    need("ptd.roots", most <= MOST_RIDING, f"fewer, or width or depth smaller: {RIDING}", most)

    def make() -> tuple[PTD, FixedPolicy]:
        drafter = PTD(
            width=options.width,
            depth=options.depth,
            roots=options.roots,
            guess=options.guess,
            reach=options.reach,
            key=options.key,
            spine=options.spine,
            harvest=options.harvest,
            feedback=options.feedback,
            text=options.text,
            max_nodes=options.max_nodes,
            seed_depth=options.seed_depth,
            eos_ids=context.target.info.eos_ids,
        )
        return drafter, FixedPolicy(nodes=1 + options.guess)

    return make


def _lookahead(options: LookaheadOptions, context: MethodContext) -> MakeRequest:
    need("lookahead.ngram", options.ngram >= 2, "at least 2", options.ngram)
    need("lookahead.window", options.window >= 0, "at least 0", options.window)
    need("lookahead.guesses", options.guesses >= 1, "at least 1", options.guesses)
    most = (options.ngram - 1) * options.window
    need("lookahead.window", most <= MOST_RIDING, f"smaller, or ngram: {RIDING}", most)

    def make() -> tuple[Lookahead, FixedPolicy]:
        drafter = Lookahead(
            ngram=options.ngram,
            window=options.window,
            guesses=options.guesses,
            text=options.text,
            eos_ids=context.target.info.eos_ids,
        )
        return drafter, FixedPolicy(nodes=1 + options.guesses * (options.ngram - 1))

    return make


METHODS = (
    Method(
        name="ptd",
        summary="progressive tree drafting: the model grows a tree of guesses beside its answer",
        prepare=_ptd,
        options=PTDOptions,
        requires=("rollback", "tree"),
        needs="tree masks, rows to spare",
        variants={
            "paper": {
                "width": 4,
                "depth": 6,
                "roots": 4,
                "guess": 60,
                "reach": 12,
                "key": 1,
                "text": False,
            }
        },
    ),
    Method(
        name="lookahead",
        summary="lookahead decoding: n-grams from a window of parallel guesses",
        prepare=_lookahead,
        options=LookaheadOptions,
        requires=("rollback", "tree"),
        needs="tree masks, rows to spare",
        variants={"paper": {"ngram": 5, "window": 7, "guesses": 7, "text": False}},
    ),
)
