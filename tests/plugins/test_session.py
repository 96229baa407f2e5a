"""A session drafts what an engine can verify, from what it can feed: ids, maybe logits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from tests.plugins.fake_texts import VOCAB, plain, register, repeating, unforeseeable
from tests.plugins.session_cases import FREE, PROMPT, run, source, verified

from hasten import methods
from hasten.drafters.base import BaseDrafter
from hasten.errors import CapabilityError, OptionError
from hasten.plugins import session
from hasten.plugins.session import best_path
from hasten.types import Draft, DraftTree, Signals


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting takes no time: how long drafts are doesn't depend on how busy the machine is."""
    monkeypatch.setattr(session, "perf_counter", lambda: 0.0)


# -- what can be used ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["prompt-lookup", "suffix", "suffix:paper", "racer:retrieval", "adapld:pld", "auto", "racer"],
)
def test_methods_that_copy_draft_from_ids_alone(method: str) -> None:
    answer, passes = run(source(method).open(), 200, repeating)
    assert answer[:200] == plain(PROMPT, 200, repeating)
    assert passes < 120


@pytest.mark.parametrize(
    ("method", "used"),
    [
        ("auto", "suffix"),
        ("auto,most=6", "suffix,most=6"),
        ("racer,nodes=9", "racer,nodes=9,breadth=0,retrieved=1.0"),
        ("adapld", "adapld,semantic=off,branches=off,rerank=latest"),
        ("suffix", "suffix"),
    ],
)
def test_what_an_engine_cannot_feed_is_left_out_and_said(
    method: str, used: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="hasten"):
        assert str(source(method).spec) == used
    assert (f"{used} instead of {method}" in caplog.text) == (used != method)


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("recycling", "top-k logits"),
        ("racer:logits", "top-k logits"),
        ("early-exit", "layer ranges"),
        ("del", "layer ranges"),
        ("dflash", "hidden states"),
        ("ptd", "tree"),
        ("lookahead", "tree"),
        ("draft-model,model=other", "model of its own"),
    ],
)
def test_a_method_that_cannot_draft_here_is_refused_by_name(method: str, why: str) -> None:
    with pytest.raises(CapabilityError, match=why) as refusal:
        source(method)
    assert methods.parse(method).name in str(refusal.value)


@pytest.mark.parametrize("method", ["nonsense", "suffix,depth", "suffix,mode=zigzag"])
def test_a_bad_method_is_refused_before_the_first_request(method: str) -> None:
    with pytest.raises(OptionError):
        source(method)


def test_a_method_with_a_verifier_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = register(monkeypatch, BaseDrafter, lossless="no (by design)")
    with pytest.raises(CapabilityError, match="verifier of its own"):
        source(name)


class WantsStates(BaseDrafter):
    needs = Signals(hidden=(3,), embeddings=True)


def test_a_plug_ins_needs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = register(monkeypatch, WantsStates)
    with pytest.raises(CapabilityError, match="hidden states, embeddings"):
        source(name)


# -- how it drafts ---------------------------------------------------------------------------------


def test_drafts_are_chains_within_the_limit_unless_the_engine_takes_trees() -> None:
    for trees in (False, True):
        session = source("suffix", most=5, trees=trees, padded=trees).open()
        session.begin((1, 2, 3, 4, 1, 2, 5, 4, 1, 2, 3, 6, 1))
        session.commit([2])
        tree = session.propose().tree
        assert 1 < len(tree) <= 6
        assert tree.is_chain != trees


@pytest.mark.parametrize("method", ["suffix", "suffix:paper", "prompt-lookup,nodes=40"])
def test_the_context_limit_leaves_room_for_the_engines_own_token(method: str) -> None:
    limit = len(PROMPT) + 30
    session = source(method, most=6, context_limit=limit).open()
    session.begin(PROMPT)
    ids = [*PROMPT, repeating(PROMPT)]
    session.commit(ids[-1:])
    lengths = []
    while len(ids) < limit:
        draft = session.propose()
        lengths.append(len(draft.tree) - 1)
        assert len(ids) + len(draft.tree) <= limit
        ids += verified(ids, draft, repeating)
        session.commit(ids[session.length :])
    assert max(lengths) > 1
    assert len(ids) == limit


def test_fewer_tokens_than_the_method_would_draft_may_be_asked_for() -> None:
    session = source("prompt-lookup,nodes=20", most=12).open()
    session.begin((1, 2, 3, 4, 5, 6, 7, 1))
    session.commit([2])
    assert len(session.propose().tree) == 13
    for most in (3, 1, 0, -1):
        assert len(session.propose(most).tree) == max(most, 0) + 1


def test_text_that_is_never_foretold_is_hardly_drafted_for() -> None:
    made = source("suffix", row_cost=0.2)
    drafted = []
    for start in range(4):
        session = made.open()
        ids = [start, *PROMPT]
        session.begin(ids)
        session.commit([unforeseeable(ids)])
        ids.append(unforeseeable(ids))
        for _ in range(60):
            draft = session.propose()
            drafted.append(len(draft.tree) - 1)
            new = verified(ids, draft, unforeseeable)
            session.commit(new)
            ids += new
    assert sum(drafted[120:]) <= 12


def test_dear_rows_shorten_drafts() -> None:
    drafted = {}
    for cost in (FREE, 0.3, 50.0):
        session = source("suffix", row_cost=cost).open()
        session.begin((1, 2, 3, 4, 1, 2, 5, 4, 1, 2, 3, 6, 1))
        session.commit([2])
        drafted[cost] = len(session.propose().tree) - 1
    assert drafted[FREE] > drafted[0.3] >= drafted[50.0] == 0


def test_the_length_of_a_draft_never_depends_on_its_tokens() -> None:
    """The same text in other ids: the same lengths, or the choice would have seen the tokens."""
    lengths = []
    for shift in (0, 17):
        session = source("suffix", row_cost=0.05).open()
        ids = [(token + shift) % VOCAB for token in PROMPT]
        session.begin(ids)
        new, of_this = [(repeating(PROMPT) + shift) % VOCAB], []
        for _ in range(12):
            session.commit(new)
            ids += new
            draft = session.propose()
            of_this.append(len(draft.tree))
            own = [(token - shift) % VOCAB for token in ids]
            back = Draft(
                DraftTree.chain(*_shifted(draft.tree.tokens, -shift)),
            )
            new = [(t + shift) % VOCAB for t in verified(own, back, repeating)]
        lengths.append(of_this)
    assert lengths[0] == lengths[1]


def _shifted(tokens: Sequence[int], by: int) -> tuple[int, list[int]]:
    moved = [(token + by) % VOCAB for token in tokens]
    return moved[0], moved[1:]


def test_the_path_taken_of_a_tree_is_the_one_that_promises_most() -> None:
    tree = DraftTree((0, 1, 2, 3, 4), (-1, 0, 0, 2, 3))
    assert best_path(tree, [1.0, 0.5, 0.4, 0.3, 0.2]) == [2, 3, 4]
    assert best_path(tree, [1.0, 0.9, 0.4, 0.04, 0.01]) == [1]
    assert best_path(DraftTree.chain(7), [1.0]) == []


def test_logits_that_an_engine_gives_are_drafted_from() -> None:
    """A text whose words never come twice in a row, but each always before the same one."""
    successor = {token: (token * 29 + 11) % VOCAB for token in range(VOCAB)}

    def chained(ids: Sequence[int]) -> int:
        return successor[ids[-1]]

    blind, _ = run(source("suffix").open(), 30, chained, (1,))
    seeing = source("recycling", topk=True)
    assert seeing.topk == 8
    answer, passes = run(seeing.open(), 200, chained, (1,), topk=8)
    assert answer[:30] == blind[:30] == plain((1,), 30, chained)
    assert passes < 120


@pytest.mark.parametrize("module", ["vllm", "sglang", "llama_cpp"])
def test_importing_a_plug_in_imports_nothing_heavy(module: str) -> None:
    heavy = ("torch", "transformers", "vllm", "sglang", "llama_cpp")
    code = f"import sys, hasten.plugins.{module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
