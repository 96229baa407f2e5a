"""Where an answer ends: token by token, so the same whatever blocks the tokens come in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import OptionError
from hasten.stopping import Cut, Stopper
from hasten.text import TextStream
from hasten.types import FinishReason, SamplingParams

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = 0


class Letters:
    """A tokenizer whose id n is the n-th letter; 0 is a special end-of-sequence token."""

    def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        special = "" if skip_special_tokens else "<eos>"
        return "".join(chr(96 + i) if i else special for i in token_ids)


def ids(text: str) -> list[int]:
    return [0 if c == "." else ord(c) - 96 for c in text]


def stopper(prompt_len: int = 3, context: int = 1000, **options) -> tuple[Stopper, TextStream]:
    params = SamplingParams(**options)
    text = TextStream(Letters(), params.stop, params.min_new_tokens)
    return Stopper(params, frozenset({EOS}), prompt_len, context, text), text


def test_a_block_without_an_end_is_kept():
    ends, text = stopper()
    assert ends.push(ids("abc")) == Cut(3)
    assert ends.push([]) == Cut(0)
    assert text.take() == "abc"
    assert ends.remaining == 253


def test_eos_inside_a_block_cuts_it_and_stays_out_of_the_text():
    ends, text = stopper()
    assert ends.push(ids("ab.cd")) == Cut(3, STOP, EOS)
    assert text.text == "ab"


def test_ignored_eos_goes_on():
    ends, text = stopper(ignore_eos=True)
    assert ends.push(ids("ab.cd")) == Cut(5)
    assert text.flush() == "abcd"


def test_stop_token_ids_end_the_answer_also_when_eos_is_ignored():
    ends, text = stopper(ignore_eos=True, stop_token_ids=ids("d"))
    assert ends.push(ids("ab.cde")) == Cut(5, STOP, 4)
    assert text.text == "abc"


def test_a_stop_string_keeps_the_token_that_completes_it_and_cuts_the_text_before():
    ends, text = stopper(stop="cd")
    assert ends.push(ids("abc")) == Cut(3)
    assert text.take() == "ab"
    assert ends.push(ids("de")) == Cut(1, STOP, "cd")
    assert text.text == "ab"
    assert text.flush() == ""


def test_exactly_max_new_tokens_are_kept():
    ends, text = stopper(max_new_tokens=4)
    assert ends.push(ids("abc")) == Cut(3)
    assert ends.push(ids("def")) == Cut(1, LENGTH)
    assert text.text == "abcd"


def test_the_last_token_of_a_full_block_ends_it_by_length():
    ends, _ = stopper(max_new_tokens=3)
    assert ends.push(ids("abc")) == Cut(3, LENGTH)


def test_the_context_limit_counts_prompt_and_answer():
    ends, _ = stopper(prompt_len=7, context=10)
    assert ends.remaining == 3
    assert ends.push(ids("abcdef")) == Cut(3, LENGTH)


@pytest.mark.parametrize(
    ("block", "options", "reason"),
    [
        ("ab.", {}, EOS),
        ("abc", {"stop": "bc"}, "bc"),
        ("abc", {"stop_token_ids": (3,)}, 3),
    ],
)
def test_a_stop_beats_the_length_on_the_same_token(block, options, reason):
    ends, _ = stopper(max_new_tokens=3, **options)
    assert ends.push(ids(block)) == Cut(3, STOP, reason)


def test_a_stop_past_the_length_does_not_count():
    for block, options in (("abc.", {}), ("abcd", {"stop": "cd"})):
        ends, text = stopper(max_new_tokens=3, **options)
        assert ends.push(ids(block)) == Cut(3, LENGTH)
        assert text.text == "abc"


def test_the_earlier_of_stop_string_and_eos_wins():
    assert stopper(stop="bc")[0].push(ids("abc.")) == Cut(3, STOP, "bc")
    assert stopper(stop="bc")[0].push(ids("ab.c")) == Cut(3, STOP, EOS)


def test_text_held_back_for_a_stop_string_is_given_at_the_end():
    ends, text = stopper(stop="cdx", max_new_tokens=4)
    assert ends.push(ids("abc")) == Cut(3)
    assert text.take() == "ab"
    assert ends.push(ids("de")) == Cut(1, LENGTH)
    assert text.take() == "cd"
    assert text.text == "abcd"


def test_stop_strings_do_not_count_before_min_new_tokens():
    ends, text = stopper(stop="ab", min_new_tokens=3)
    assert ends.push(ids("abcab")) == Cut(5, STOP, "ab")
    assert text.text == "abc"
    ends, text = stopper(stop="ab", min_new_tokens=3)
    assert ends.push(ids("cabx")) == Cut(3, STOP, "ab")  # completed by the third token


def test_after_the_end_nothing_is_kept_and_the_reason_stays():
    ends, _ = stopper()
    ends.push(ids("a."))
    assert ends.push(ids("bc")) == Cut(0, STOP, EOS)


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(OptionError, match=r"^stop: "):
        Stopper(SamplingParams(stop="x"), frozenset(), 1, 10, None)


def test_without_text_ids_and_length_still_end_the_answer():
    ends = Stopper(SamplingParams(max_new_tokens=5), frozenset({EOS}), 1, 100, None)
    assert ends.push(ids("abc")) == Cut(3)
    assert ends.push(ids("d.e")) == Cut(2, STOP, EOS)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=20),
    stop=st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3, unique=True),
    final=st.lists(st.integers(0, 4), max_size=1),
    most=st.integers(1, 20),
    least=st.integers(0, 5),
    context=st.integers(5, 25),
    ignore=st.booleans(),
    cuts=st.lists(st.integers(0, 20)),
)
def test_the_outcome_does_not_depend_on_the_blocks(
    tokens, stop, final, most, least, context, ignore, cuts
):
    def outcome(borders):
        ends, text = stopper(
            context=context,
            stop=tuple(stop),
            stop_token_ids=tuple(final),
            max_new_tokens=most,
            min_new_tokens=min(least, most),
            ignore_eos=ignore,
        )
        kept, pieces, cut = [], [], Cut(0)
        borders = sorted({0, len(tokens), *(b for b in borders if b <= len(tokens))})
        for low, high in pairwise(borders):
            cut = ends.push(tokens[low:high])
            kept += tokens[low:high][: cut.kept]
            pieces.append(text.take())
            if cut.finish:
                break
        pieces.append(text.flush())
        assert "".join(pieces) == text.text
        assert len(kept) <= min(most, context - 3)
        return kept, text.text, cut.finish, cut.stop_reason

    single = outcome(range(len(tokens)))
    assert outcome([]) == single
    assert outcome(cuts) == single
