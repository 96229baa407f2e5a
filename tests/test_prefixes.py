from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hasten.prefixes import KNOWN, LEAST, Prefixes, _common
from tests.conformance.toy_target import ToyTarget

PROMPT = list(range(1, 25))
ANSWER = list(range(30, 45))


def kept(scope: str | None = None, tokens: int = 1000) -> tuple[ToyTarget, Prefixes]:
    target = ToyTarget(vocab=128, eos_ids=())
    prefixes = Prefixes(target, tokens)
    keep(target, prefixes, PROMPT, ANSWER, scope)
    return target, prefixes


def keep(
    target: ToyTarget, prefixes: Prefixes, prompt: list[int], answer: list[int], scope: str | None
) -> None:
    sequence = target.open()
    target.prefill(sequence, [*prompt, *answer[:-1]])
    prefixes.keep([*prompt, *answer], len(prompt), sequence, scope)


def taken(prefixes: Prefixes, ids: list[int], scope: str | None = None) -> int:
    length: int = prefixes.take(ids, scope).length
    return length


def test_whoever_goes_on_with_the_answer_gets_its_prefix() -> None:
    _, prefixes = kept()
    whole = [*PROMPT, *ANSWER]
    assert taken(prefixes, [*whole, 50, 51]) == len(whole) - 1
    # a client may cut the end of an answer, or write its tokens another way
    assert taken(prefixes, [*PROMPT, *ANSWER[:KNOWN], 50]) == len(PROMPT) + KNOWN


def test_whoever_only_knows_the_prompt_does_not() -> None:
    _, prefixes = kept()
    assert taken(prefixes, [*PROMPT, 50, 51]) == 0
    assert taken(prefixes, PROMPT) == 0
    assert taken(prefixes, [*PROMPT, *ANSWER[: KNOWN - 1], 50]) == 0


def test_the_last_token_of_a_prompt_is_always_left_to_run() -> None:
    _, prefixes = kept("a")
    ids = [*PROMPT, *ANSWER[:5]]
    assert taken(prefixes, ids, "a") == len(ids) - 1


def test_scopes_are_apart() -> None:
    _, prefixes = kept("a")
    ids = [*PROMPT, 50]
    assert taken(prefixes, ids, "a") == len(PROMPT)
    assert taken(prefixes, ids, "b") == 0
    assert taken(prefixes, [*PROMPT, *ANSWER, 50]) == 0, "nobody's isn't everybody's"
    assert taken(prefixes, [*PROMPT[: LEAST - 1], 50], "a") == 0


def test_a_later_turn_takes_the_place_of_the_earlier_one() -> None:
    target, prefixes = kept()
    keep(target, prefixes, [*PROMPT, *ANSWER, 50], ANSWER, None)
    assert prefixes.tokens == len(PROMPT) + 2 * len(ANSWER)
    assert len(target.live) == 1


def test_the_one_used_longest_ago_goes_first() -> None:
    target = ToyTarget(vocab=128, eos_ids=())
    prefixes = Prefixes(target, 80)
    first, second, third = ([i, *PROMPT] for i in (100, 101, 102))
    for prompt in (first, second):
        keep(target, prefixes, prompt, ANSWER, "a")
    assert taken(prefixes, [*first, 50], "a") > 0
    keep(target, prefixes, third, ANSWER, "a")
    assert prefixes.tokens <= 80
    assert [taken(prefixes, [*p, 50], "a") > 0 for p in (first, second, third)] == [
        True, False, True,
    ]  # fmt: skip


def test_what_is_not_kept_is_closed() -> None:
    target, prefixes = kept(tokens=10)
    assert prefixes.tokens == 0
    assert not target.live
    target, prefixes = kept()
    prefixes.clear()
    assert not target.live


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_the_common_prefix_is_what_counting_gives(a: list[int], b: list[int]) -> None:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    assert _common(a, b) == count
