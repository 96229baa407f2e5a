"""Incremental text: the same whatever the blocks, complete, cut before the first stop string."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hasten.errors import HastenError
from hasten.text import Detokenizer, StopHit, TextStream

SAMPLE = (
    "Hello world, hello again.\n\n  def f(x):\n    return x  # the end\n"
    "naïve café, ångström: e\u0301 o\u0308\u0323. 你好，世界。東京都 こんにちは 안녕하세요 "
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 😀😀😀 \U0001f9d1\u200d\U0001f4bb ½ → ∑ Ω ж ش"
    "\t\ttabs  \r\nend. END. the end."
)
STORY = SAMPLE * 2


def byte_level() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|im_start|>"],
        show_progress=False,
    )
    core.train_from_iterator([SAMPLE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama 2's: pieces with ▁ for a space, bytes for what no piece covers."""
    pieces = ["▁", "▁▁", "▁the", "▁hello", "▁Hello", "▁end", ".", ",", "e", "n", "d", "the", "END"]
    letters = [c for c in "abcdfghijklmoqprstuvwxyzHN():#東你好é" if c not in pieces]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *letters]
    core = Tokenizer(
        models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens([AddedToken(n, special=True) for n in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")


def metaspace() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator([SAMPLE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")


TOKENIZERS = {f.__name__: f() for f in (byte_level, sentencepiece_like, metaspace)}
every_tokenizer = pytest.mark.parametrize("name", list(TOKENIZERS))


def decode(tokenizer, ids: list[int], skip: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def blocks(ids: list[int], seed: int, most: int = 6) -> list[list[int]]:
    chance, out, at = random.Random(seed), [], 0
    while at < len(ids):
        size = chance.randint(0, most)
        out.append(ids[at : at + size])
        at += size
    return out


def random_ids(tokenizer, count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(len(tokenizer)) for _ in range(count)]


# Detokenizer


@every_tokenizer
@pytest.mark.parametrize("most", [1, 6])
def test_pieces_join_to_the_text_and_hold_no_broken_character(name, most):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(STORY, add_special_tokens=False)
    detokenizer, pieces = Detokenizer(tokenizer), []
    for block in blocks(ids, 1, most):
        pieces.append(detokenizer.push(block))
        assert decode(tokenizer, ids).startswith("".join(pieces))
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == decode(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    if name != "metaspace":  # whose vocabulary doesn't hold every character
        assert "".join(pieces).strip() == STORY.strip()


@every_tokenizer
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_random_ids_join_to_their_text(name, skip, seed):
    tokenizer = TOKENIZERS[name]
    ids = random_ids(tokenizer, 60, seed)
    if seed % 2:  # many special tokens
        ids = [tokenizer.eos_token_id if i % 3 == 0 else i for i in ids]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(block) for block in blocks(ids, seed)]
    assert "".join([*pieces, detokenizer.flush()]) == decode(tokenizer, ids, skip)


@every_tokenizer
def test_what_is_certain_does_not_depend_on_the_blocks(name):
    tokenizer = TOKENIZERS[name]
    for seed in range(10):
        ids = random_ids(tokenizer, 40, seed)
        single = Detokenizer(tokenizer)
        texts = [""]
        for token in ids:
            texts.append(texts[-1] + single.push([token]))
        detokenizer, text, count = Detokenizer(tokenizer), "", 0
        for block in blocks(ids, seed):
            text += detokenizer.push(block)
            count += len(block)
            assert text == texts[count]


@every_tokenizer
def test_text_comes_without_delay_after_complete_characters(name):
    tokenizer = TOKENIZERS[name]
    detokenizer, text = Detokenizer(tokenizer), ""
    ids = tokenizer.encode("the hello end. the", add_special_tokens=False)
    for count, token in enumerate(ids, 1):
        text += detokenizer.push([token])
        assert text == decode(tokenizer, ids[:count])


def test_text_before_an_incomplete_character_in_the_same_block_is_given():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("abж", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:-1]) == "ab"
    assert detokenizer.push(ids[-1:]) == "ж"


def test_an_answer_cut_inside_a_character_ends_as_decode_says():
    for name in ("byte_level", "sentencepiece_like"):
        tokenizer = TOKENIZERS[name]
        ids = tokenizer.encode("ok ж👍", add_special_tokens=False)[:-1]
        detokenizer = Detokenizer(tokenizer)
        head = detokenizer.push(ids)
        assert "\ufffd" not in head
        tail = detokenizer.flush()
        assert tail.endswith("\ufffd")
        assert head + tail == decode(tokenizer, ids)


def test_byte_tokens_that_read_as_complete_are_pending():
    tokenizer = TOKENIZERS["sentencepiece_like"]
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")
    broken = tokenizer.convert_tokens_to_ids("<0xF0>")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([newline]) == ""
    assert detokenizer.pending == "\n"
    assert detokenizer.push([broken]) == ""
    assert detokenizer.pending == "\n"
    assert detokenizer.flush() == decode(tokenizer, [newline, broken]) == "\ufffd\ufffd"


class Counting:
    """Counts the ids decoded."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids = tokenizer, 0

    def decode(self, token_ids, **options):
        self.ids += len(token_ids)
        return self.tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("kind", ["text", "broken bytes"])
def test_cost_is_linear(kind):
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(STORY, add_special_tokens=False)
    if kind != "text":
        ids = [tokenizer.convert_tokens_to_ids("Į"), *ids][:1] * 300  # one stray byte, repeated
        assert decode(tokenizer, ids[:2]) == "\ufffd\ufffd"
    costs = []
    for length in (len(ids) // 2, len(ids)):
        counting = Counting(tokenizer)
        detokenizer, pieces = Detokenizer(counting), []
        for token in ids[:length]:
            pieces.append(detokenizer.push([token]))
        costs.append(counting.ids)
        assert "".join([*pieces, detokenizer.flush()]) == decode(tokenizer, ids[:length])
    assert costs[1] < 2.5 * costs[0]


# TextStream


def run(stream: TextStream, given_blocks: list[list[int]]) -> tuple[StopHit | None, int, list[str]]:
    """Push blocks until a hit; the hit, the tokens kept in all, and the pieces."""
    kept, pieces = 0, []
    for block in given_blocks:
        hit = stream.push(block)
        pieces.append(stream.take())
        if hit is not None:
            pieces.append(stream.flush())
            return hit, kept + hit.kept, pieces
        kept += len(block)
    pieces.append(stream.flush())
    return None, kept, pieces


def reference(tokenizer, ids: list[int], stop: tuple[str, ...], least: int = 0):
    """The rules word by word: tokens kept, the string, the text."""
    before = 0
    for count in range(1, len(ids) + 1):
        # the text without an incomplete character, which spoils all bytes before it in Llama's way
        text = decode(tokenizer, ids[:count])
        if tokenizer is TOKENIZERS["sentencepiece_like"]:
            length = count
            while text.endswith("\ufffd"):
                length -= 1
                text = decode(tokenizer, ids[:length])
        text = text.rstrip("\ufffd")
        hits = [
            (start, order)
            for order, string in enumerate(stop)
            for start in range(len(text))
            if text.startswith(string, start) and start + len(string) > before
        ]
        if hits and count >= least:
            start, order = min(hits)
            return count, stop[order], text[:start]
        before = len(text)
    return len(ids), None, decode(tokenizer, ids)


STOPS = [
    ("world",),
    ("\n\n",),
    ("\n",),
    ("END.", "end."),
    ("你好，世",),
    ("👩‍👧",),
    ("o", "lo wo", "hello"),
    ("ell", "Hello", "l"),
    ("no such text",),
    ("the end.\u0000", "\u0301 o", "zzz"),
    ("😀😀😀 ",),
    ("aaaa", ". the end."),
]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like"])
@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("least", [0, 12, 90])
def test_stop_strings_cut_alike_whatever_the_blocks(name, stop, least):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(SAMPLE, add_special_tokens=False)
    kept, string, text = reference(tokenizer, ids, stop, least)
    splits = [[ids], [[i] for i in ids], *(blocks(ids, seed) for seed in range(6))]
    for split in splits:
        stream = TextStream(tokenizer, stop, least)
        hit, got, pieces = run(stream, split)
        assert got == kept
        assert (hit.string if hit else None) == string
        assert stream.text == text == "".join(pieces)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(range(6)), min_size=1, max_size=25),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3, unique=True),
    st.integers(0, 8),
    st.integers(0, 1000),
)
def test_any_text_any_stops_any_blocks(picks, stop, least, seed):
    # few letters, so that stop strings overlap, repeat and begin inside each other
    tokenizer = TOKENIZERS["byte_level"]
    letters = [tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", "Ċ", "Ð", "¶")]
    letters.append(tokenizer.eos_token_id)
    ids = [letters[p] for p in picks]
    kept, string, text = reference(tokenizer, ids, tuple(stop), least)
    for split in ([ids], [[i] for i in ids], blocks(ids, seed)):
        stream = TextStream(tokenizer, stop, least)
        hit, got, pieces = run(stream, split)
        assert (got, hit.string if hit else None) == (kept, string)
        assert stream.text == text == "".join(pieces)


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_told():
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, ("</s>", "<stop>"))
    shown = []
    for text in ("one <", "st", "range> two </", "s", " three <sto"):
        assert stream.push(tokenizer.encode(text, add_special_tokens=False)) is None
        shown.append(stream.take())
    assert shown == ["one ", "", "<strange> two ", "", "</s three "]
    assert stream.flush() == "<sto"
    assert stream.text == "one <strange> two </s three <sto"


def test_the_token_that_completes_first_wins_then_the_start_then_the_order():
    tokenizer = TOKENIZERS["byte_level"]
    ids = [tokenizer.convert_tokens_to_ids(c) for c in "xabcd"]
    assert TextStream(tokenizer, ("abcd", "bc")).push(ids) == StopHit(4, "bc")
    assert TextStream(tokenizer, ("bc", "abc")).push(ids) == StopHit(4, "abc")
    assert TextStream(tokenizer, ("c", "bc", "abc")).push(ids) == StopHit(4, "abc")
    assert TextStream(tokenizer, ("ab", "a")).push(ids) == StopHit(2, "a")


def test_a_newline_that_is_a_byte_token_stops_at_once():
    tokenizer = TOKENIZERS["sentencepiece_like"]
    ids = tokenizer.encode("the end\n the", add_special_tokens=False)
    newline = ids.index(tokenizer.convert_tokens_to_ids("<0x0A>"))
    stream = TextStream(tokenizer, ("\n",))
    assert stream.push(ids) == StopHit(newline + 1, "\n")
    assert stream.text.strip() == "the end"


def test_without_stop_strings_nothing_is_decoded_until_somebody_asks():
    counting = Counting(TOKENIZERS["byte_level"])
    ids = counting.tokenizer.encode(SAMPLE, add_special_tokens=False)
    stream = TextStream(counting)
    for block in blocks(ids, 3):
        stream.push(block)
    assert counting.ids == 0
    stream.close()
    assert stream.text == SAMPLE


def test_text_so_far_can_be_read_without_disturbing_the_pieces():
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer)
    stream.push(tokenizer.encode("one two", add_special_tokens=False))
    assert stream.text == "one two"
    assert stream.take() == "one two"
    assert stream.take() == ""
    stream.push(tokenizer.encode(" three", add_special_tokens=False))
    assert stream.text == "one two three"
    assert stream.flush() == " three"
    assert stream.flush() == ""


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("<|im_start|>hi<|end|>", add_special_tokens=False)
    for skip, text in ((True, "hi"), (False, "<|im_start|>hi<|end|>")):
        stream = TextStream(tokenizer, skip_special_tokens=skip)
        stream.push(ids)
        assert stream.flush() == text


def test_an_empty_answer_has_an_empty_text():
    stream = TextStream(TOKENIZERS["byte_level"], ("x",))
    assert stream.push([]) is None
    assert (stream.take(), stream.flush(), stream.text) == ("", "", "")


def test_a_closed_stream_takes_no_more_ids():
    stream = TextStream(TOKENIZERS["byte_level"])
    stream.close()
    with pytest.raises(HastenError, match="closed"):
        stream.push([1])
