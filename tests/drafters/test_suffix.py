"""Suffix decoding: what is drafted, what requests share, and what stays within bounds."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
from tests.conformance.harness import COSTS, load_other, prompt_of, run
from tests.conformance.toy_target import ToyTarget, ToyTokenizer

from hasten import methods
from hasten.builtin import common
from hasten.drafters.base import DraftContext
from hasten.drafters.ranks import prior
from hasten.drafters.suffix import GLOBAL, LOCAL, SharedAnswers, Suffix, SuffixQuery
from hasten.drafts import check_draft
from hasten.errors import OptionError
from hasten.methods import MethodContext, RequestMaker
from hasten.policies.base import FixedPolicy
from hasten.policies.budget import BudgetPolicy
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, SamplingParams

PUBLISHED = {"factor": 1.0, "least": 0.1}


@pytest.fixture(autouse=True)
def _no_global_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_GLOBAL", type(common._GLOBAL)())


def begun(prompt: Sequence[int], **options: object) -> Suffix:
    drafter = Suffix(**options)  # type: ignore[arg-type]
    drafter.begin(tuple(prompt), RowSignals())
    return drafter


def propose(drafter: Suffix, ids: Sequence[int], nodes: int = 32, depth: int = 1000) -> Draft:
    ctx = DraftContext(ids=ids, sample=None, warp=None, greedy=True)  # type: ignore[arg-type]
    draft = drafter.propose(ctx, Budget(nodes, depth))
    check_draft(draft, ids[-1], Budget(nodes, depth), 1_000_000)
    return draft


def emit(drafter: Suffix, tokens: Sequence[int]) -> None:
    drafter.observe(Round(1, tuple(tokens)))


def answer(shared: SharedAnswers, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """A whole request."""
    drafter = begun(prompt, shared=shared)
    emit(drafter, tokens)
    drafter.end()


def _text(seed: int, length: int, alphabet: int = 6) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(alphabet) for _ in range(length)]


# -- drafting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["blend", "path", "tree"])
def test_what_followed_is_copied(mode: str) -> None:
    text = [*range(20), 50, *range(10)]
    draft = propose(begun(text, mode=mode), text, 6)
    assert draft.tree == DraftTree.chain(9, [10, 11, 12, 13, 14])
    assert set(draft.sources[1:]) == {"suffix"}


@pytest.mark.parametrize("mode", ["blend", "path", "tree"])
def test_nothing_is_drafted_where_nothing_followed(mode: str) -> None:
    for text in ([5], [1, 2, 3], [1, 2, 9]):
        drafter = begun(text, mode=mode)
        assert propose(drafter, text).tree == DraftTree.chain(text[-1])
        assert drafter.last_query == SuffixQuery()


@pytest.mark.parametrize("mode", ["blend", "path", "tree"])
def test_drafts_keep_to_the_budget(mode: str) -> None:
    for seed in range(20):
        text = _text(seed, 60, 4)
        drafter = begun(text[:40], mode=mode)
        for end in range(40, 60):
            draft = propose(drafter, text[:end], nodes=1 + end % 9, depth=1 + end % 4)
            assert len(draft.tree) == len(draft.ranks) == len(draft.sources)
            emit(drafter, text[end : end + 1])


def test_the_published_draft_is_as_long_as_its_match() -> None:
    text = [*range(20), 50, 3, 4, 5]
    assert len(propose(begun(text, mode="path", **PUBLISHED), text).tree) == 4
    assert len(propose(begun(text, mode="path", **PUBLISHED, offset=2.0), text).tree) == 6
    assert len(propose(begun(text, mode="path", factor=2.0, least=0.1), text).tree) == 7
    assert len(propose(begun(text, mode="path", factor=0.0, least=0.1), text, 11).tree) == 11


def test_unlikely_paths_are_left_out() -> None:
    text = [t for i in range(9) for t in (7, 10 + i)] + [7]  # nine tokens followed 7, once each
    for least, found in ((0.11, 1), (0.1, 2)):  # 1 of 9, and the text's end
        assert len(propose(begun(text, mode="path", factor=1.0, least=least), text).tree) == found


def test_blend_hears_longer_matches_first_and_shorter_ones_too() -> None:
    # After 1 2: 3 once. After 2 alone: 4 three times.
    text = [1, 2, 3, 9, 2, 4, 8, 2, 4, 7, 2, 4, 1, 2]
    draft = propose(begun(text), text, depth=1)
    assert draft.tree.tokens == (2, 3, 4)
    assert propose(begun(text, mode="path", **PUBLISHED), text, depth=1).tree.tokens == (2, 4)


def test_a_better_match_has_a_better_rank() -> None:
    def expected(text: list[int]) -> float:
        draft = propose(begun(text), text, 2)
        return prior("suffix", draft.ranks[1], 1)

    base = list(range(20, 60))
    once = expected([*base, 1, *base[:1]])
    longer = expected([*base, 1, *base[:12]])
    often = expected([*base[:9], 1, *base[:9], 2, *base[:9], 3, *base[:3]])
    assert once < often
    assert once < longer


def test_the_query_is_kept_for_those_who_decide_by_it() -> None:
    text = [*range(20), 50, 3, 4, 5]
    drafter = begun(text, mode="path", **PUBLISHED)
    assert drafter.last_query is None
    propose(drafter, text)
    assert drafter.last_query == SuffixQuery(1.5, 3, (0.5, 0.5, 0.5), (6, 7, 8), LOCAL)
    drafter.end()
    assert drafter.last_query is None


def test_interleaved_requests_draft_as_if_alone() -> None:
    texts = [_text(1, 60), _text(2, 60)]

    def step(drafter: Suffix, text: list[int], end: int) -> Draft:
        draft = propose(drafter, text[:end])
        emit(drafter, text[end : end + 1])
        return draft

    alone = []
    for text in texts:
        drafter = begun(text[:20])
        alone.append([step(drafter, text, end) for end in range(20, 60)])
    pair = [begun(text[:20]) for text in texts]
    mixed: list[list[Draft]] = [[], []]
    for end in range(20, 60):
        for which in (0, 1):
            mixed[which].append(step(pair[which], texts[which], end))
    assert mixed == alone


def test_the_end_of_a_request_leaves_nothing() -> None:
    drafter = begun(_text(3, 40))
    drafter.end()
    assert len(drafter._tree) == 0
    drafter.begin((7,), RowSignals())
    assert propose(drafter, [7]).tree == DraftTree.chain(7)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(OptionError, match=r"suffix\.mode.*blend, path, tree"):
        Suffix(mode="bush")


# -- shared answers --------------------------------------------------------------------------------


def test_answers_are_shared_and_prompts_are_not() -> None:
    shared = SharedAnswers()
    answer(shared, [100, 101, 102], [1, 2, 3, 4, 5])
    for start, found in (([100, 101], ()), ([9, 1, 2], (3, 4, 5)), ([101, 102, 1, 2], (3, 4, 5))):
        drafter = begun(start, shared=shared, mode="path", least=0.1)
        assert propose(drafter, start).tree.tokens[1:] == found
        assert drafter.last_query is not None
        assert drafter.last_query.source == (GLOBAL if found else LOCAL)
        drafter.end()


def test_of_equal_guesses_the_requests_own_is_taken() -> None:
    shared = SharedAnswers()
    answer(shared, [0], [1, 2, 3, 4])
    text = [1, 2, 3, 9, 8, 1, 2]
    drafter = begun(text[:5], shared=shared, mode="path", **PUBLISHED)
    emit(drafter, text[5:])  # in the shared tree too: its end counts there as well
    assert propose(drafter, text).tree.tokens == (2, 3, 9)
    assert drafter.last_query is not None
    assert drafter.last_query.source == LOCAL
    assert drafter.last_query.score == 1.0
    for _ in range(4):
        answer(shared, [0], [1, 2, 5, 6])
    assert propose(drafter, text).tree.tokens[1] == 5
    assert drafter.last_query.source == GLOBAL
    assert drafter.last_query.probs[0] == 4 / 6  # six times 1 2: 3, 5 four times, and the end


def test_running_answers_are_read_by_others() -> None:
    shared = SharedAnswers()
    first, second = begun([1], shared=shared), begun([1], shared=shared)
    emit(first, [2, 3, 4])
    emit(second, [2, 3])
    assert propose(second, [1, 2, 3], depth=1).tree.tokens == (3, 4)
    emit(first, [5])  # after the other's node was split
    assert propose(second, [1, 2, 3], depth=2).tree.tokens == (3, 4, 5)


def test_after_a_reset_no_earlier_answer_is_drafted_and_running_ones_go_on() -> None:
    shared = SharedAnswers()
    answer(shared, [0], list(range(100, 140)))
    running = begun([0], shared=shared)
    emit(running, [100, 101])
    shared.reset()
    assert (len(shared), shared.texts) == (0, 0)
    other = begun([9, 100, 101], shared=shared)
    assert propose(other, [9, 100, 101]).tree == DraftTree.chain(101)
    emit(running, [7, 8])
    assert shared.texts == 1
    assert propose(begun([9, 7], shared=shared), [9, 7]).tree.tokens == (7, 8)
    assert propose(other, [9, 100, 101]).tree == DraftTree.chain(101)


def test_a_fork_and_its_origin_do_not_notice_each_other() -> None:
    shared = SharedAnswers()
    running = begun([0], shared=shared)
    emit(running, [1, 2])
    other = shared.fork()
    emit(running, [3])
    answer(other, [0], [2, 4])
    assert propose(begun([9, 2], shared=shared), [9, 2]).tree.tokens == (2, 3)
    assert propose(begun([9, 2], shared=other), [9, 2]).tree.tokens == (2, 4)
    assert (shared.texts, other.texts) == (1, 2)


def test_shared_memory_is_flat_and_the_oldest_answers_go_first() -> None:
    for bounds in ({"requests": 10}, {"nodes": 400}):
        shared = SharedAnswers(**bounds)
        for seed in range(200):
            answer(shared, [7], [1000 * seed + 500 + i for i in range(20)])
            assert shared.texts <= shared.requests
            assert len(shared) <= shared.nodes
            for age, kept in ((0, True), (4, True), (30, False)):
                if seed >= age:
                    start = 1000 * (seed - age) + 500
                    drafter = begun([7, start], shared=shared)
                    assert (len(propose(drafter, [7, start]).tree) > 1) == kept


def test_an_answer_longer_than_the_store_is_bounded_too() -> None:
    shared = SharedAnswers(nodes=256)
    running = begun([0], shared=shared)
    text = _text(5, 3000, 50)
    for at in range(0, 3000, 100):
        emit(running, text[at : at + 100])
        assert len(shared) <= 256
    emit(running, _text(6, 5000, 50))
    assert 0 < len(shared) <= 256


def test_threads_may_take_turns() -> None:
    shared = SharedAnswers(requests=6, nodes=600)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(10):
                text = _text(seed + turn, 60)
                drafter = begun(text[:10], shared=shared)
                for end in range(10, 60):
                    propose(drafter, text[:end])
                    emit(drafter, text[end : end + 1])
                drafter.end()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(shared) <= 600


# -- as registered ---------------------------------------------------------------------------------


def prepare(text: str, target: ToyTarget | None = None) -> RequestMaker:
    context = MethodContext(target or ToyTarget(), ToyTokenizer(), load_other, COSTS)
    return methods.prepare(methods.parse(text), context)


def ask(maker: RequestMaker, target: ToyTarget, seed: int) -> list[DraftTree | None]:
    """Run one request; its drafts."""
    drafter, policy = maker()
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    got = run(target, prompt_of(seed), params, drafter, policy=policy)
    assert got.tokens == target.plain(prompt_of(seed), params)
    return [r.tree for r in got.rounds]


def test_requests_are_strangers_by_default() -> None:
    target, maker = ToyTarget(), prepare("suffix,nodes=12")
    first = ask(maker, target, 1)
    ask(maker, target, 2)
    assert ask(maker, target, 1) == first
    assert maker.shares == ("counts",)


@pytest.mark.parametrize("scope", ["session", "global"])
def test_a_wider_scope_learns_and_forgets_without_a_trace(scope: str) -> None:
    target, text = ToyTarget(), f"suffix,nodes=12,scope={scope}"
    maker = prepare(text)
    first = ask(maker, target, 1)
    again = ask(maker, target, 1)
    assert len(again) < len(first)
    elsewhere = ask(prepare(text), target, 1)
    assert elsewhere == first if scope == "session" else len(elsewhere) < len(first)
    maker.reset("counts")
    assert ask(maker, target, 1) != first
    maker.reset(scope)
    assert ask(maker, target, 1) == first


def test_a_forked_method_goes_its_own_way() -> None:
    target, maker = ToyTarget(), prepare("suffix,nodes=12,scope=session")
    ask(maker, target, 1)
    one, two = maker.fork(), maker.fork()
    ask(one, target, 2)
    ask(one, target, 3)
    assert ask(two, target, 2) == ask(maker, target, 2)


def test_the_variants_are_the_published_settings() -> None:
    drafter, policy = prepare("suffix:paper")()
    assert isinstance(drafter, Suffix)
    assert isinstance(policy, FixedPolicy)
    assert (policy.nodes, drafter.mode, drafter.depth) == (65, "path", 64)
    assert drafter._knobs == (knobs := begun([1], **PUBLISHED)._knobs)
    assert drafter._shared is not None
    for name in ("path", "tree"):
        drafter, policy = prepare(f"suffix:{name}")()
        assert isinstance(drafter, Suffix)
        assert isinstance(policy, BudgetPolicy)
        assert (drafter.mode, drafter._knobs, drafter._shared) == (name, knobs, None)


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("nodes=-1", "nodes"),
        ("most=-1", "most"),
        ("mode=bush", "mode"),
        ("max_tree_depth=1", "max_tree_depth"),
        ("max_spec_factor=-1", "max_spec_factor"),
        ("max_spec_factor=nan", "max_spec_factor"),
        ("max_spec_offset=inf", "max_spec_offset"),
        ("min_token_prob=0", "min_token_prob"),
        ("min_token_prob=1.5", "min_token_prob"),
        ("cached=1", "cached"),
        ("capacity=10", "capacity"),
        ("scope=world", "scope"),
    ],
)
def test_bad_options_are_refused_by_name(text: str, option: str) -> None:
    with pytest.raises(OptionError, match=rf"suffix\.{option}"):
        prepare(f"suffix,{text}")
