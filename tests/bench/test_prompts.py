from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from hasten.bench.adversarial import random_ids
from hasten.bench.prompts import SUITES, SuiteRow, load_suite, mix, parse_rows, spread
from hasten.cli.bench import SuiteOption
from hasten.errors import OptionError

GROUPS = ("multi_turn", "translation", "summarization", "qa", "math", "rag")
REPEATING = {
    "editing": ("rewrite_code", "proofread", "fill_template", "convert"),
    "agent": ("extract_json", "continue_log", "multi_turn", "tool_calls"),
}
"""The suites whose answers repeat their prompts, and their groups."""


def lines(*rows: object) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def spans(row: SuiteRow, length: int = 8) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", " ".join(row.turns).lower())
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}


def rows_of(**sizes: int) -> list[SuiteRow]:
    return [SuiteRow(f"{g}{i}", g, ("?",)) for g, n in sizes.items() for i in range(n)]


# -- own suites ------------------------------------------------------------------------------------


def test_mini_holds_six_groups_of_eight_distinct_prompts() -> None:
    rows = load_suite("mini").rows
    assert Counter(row.category for row in rows) == dict.fromkeys(GROUPS, 8)
    assert len({row.id for row in rows}) == len({row.turns for row in rows}) == 48


def test_minis_conversations_go_on_and_its_other_prompts_do_not() -> None:
    turns = {row.category: set() for row in load_suite("mini").rows}
    for row in load_suite("mini").rows:
        turns[row.category].add(len(row.turns))
    assert turns.pop("multi_turn") == {2}
    assert all(counts == {1} for counts in turns.values())


def test_mixed_holds_minis_rows_and_changes_the_group_every_three() -> None:
    mixed, mini = load_suite("mixed").rows, load_suite("mini").rows
    assert sorted(r.id for r in mixed) == sorted(r.id for r in mini)
    groups = [row.category for row in mixed[:36]]
    assert all(len(set(groups[i : i + 3])) == 1 for i in range(0, 36, 3))
    assert all(groups[i] != groups[i + 1] for i in range(2, 35, 3))


def test_mixed_takes_the_same_rows_as_mini_under_a_limit() -> None:
    assert {r.id for r in load_suite("mixed", 20).rows} == {
        r.id for r in load_suite("mini", 20).rows
    }


def test_adversarial_is_the_same_each_time_with_eight_rows_a_group() -> None:
    first, second = load_suite("adversarial"), load_suite("adversarial")
    assert first == second
    assert Counter(r.category for r in first.rows) == dict.fromkeys(
        ("random_ids", "no_repeats", "decoys"), 8
    )
    assert len({r.turns for r in first.rows}) == 24


def test_decoys_repeat_pairs_of_ids_that_go_on_differently() -> None:
    for row in load_suite("adversarial").rows:
        if row.category == "decoys":
            ids = random_ids(row, 5000)
            assert len(set(ids)) == row.random_kinds == 9
            follow: dict[tuple[int, int], set[int]] = {}
            for first, second, third in zip(ids, ids[1:], ids[2:], strict=False):
                follow.setdefault((first, second), set()).add(third)
            assert len(follow) < 0.6 * len(ids)
            assert sum(len(f) > 1 for f in follow.values()) > 0.4 * len(follow)


def test_tasks_without_repeats_come_without_noise() -> None:
    rows = load_suite("adversarial").rows
    assert {r.category for r in rows if not r.random_tokens} == {"no_repeats"}


def test_random_ids_repeat_for_a_row_and_keep_out_special_tokens() -> None:
    row = next(r for r in load_suite("adversarial").rows if r.random_tokens >= 64)
    ids = random_ids(row, 50, {0, 7})
    assert ids == random_ids(row, 50, {0, 7})
    assert len(ids) == row.random_tokens
    assert set(ids) <= set(range(50)) - {0, 7}


def test_random_ids_differ_between_rows() -> None:
    rows = [r for r in load_suite("adversarial").rows if r.random_tokens and not r.random_kinds]
    assert len({tuple(random_ids(row, 50)[:16]) for row in rows}) == len(rows)


# -- suites whose answers repeat the prompt --------------------------------------------------------


def repeating_rows() -> list[SuiteRow]:
    return [row for name in REPEATING for row in load_suite(name).rows]


@pytest.mark.parametrize("name", REPEATING)
def test_editing_and_agent_hold_four_groups_of_ten_distinct_prompts(name: str) -> None:
    rows = load_suite(name).rows
    assert Counter(row.category for row in rows) == dict.fromkeys(REPEATING[name], 10)
    assert len({row.id for row in rows}) == len({row.turns for row in rows}) == 40


def test_no_id_stands_in_both_editing_and_agent() -> None:
    assert len({row.id for row in repeating_rows()}) == 80


def test_first_turns_alone_ask_all_of_editing_and_agent() -> None:
    """Also the conversations: the answer to return with a change is quoted in the prompt."""
    assert {len(row.turns) for row in repeating_rows()} == {1}


@pytest.mark.parametrize("name", REPEATING)
def test_a_limit_takes_as_many_of_each_group_of_editing_and_agent(name: str) -> None:
    taken = load_suite(name, 12).rows
    assert Counter(row.category for row in taken) == dict.fromkeys(REPEATING[name], 3)
    assert {row.id for row in taken} < {row.id for row in load_suite(name).rows}


def test_no_prompt_of_editing_and_agent_shares_eight_words_with_another_of_any_suite() -> None:
    ours: dict[tuple[str, ...], str] = {}
    for row in repeating_rows():
        for span in spans(row):
            assert ours.setdefault(span, row.id) == row.id
    for row in (*load_suite("mini").rows, *load_suite("adversarial").rows):
        assert not spans(row) & ours.keys(), row.id


def test_prompts_of_editing_and_agent_are_neither_short_nor_long() -> None:
    """In words and signs, which are near a tokenizer's counts: 60 to 400 tokens are asked for."""
    for row in repeating_rows():
        assert 40 <= len(re.findall(r"\w+|[^\w\s]", row.turns[0])) <= 300, row.id
        assert 120 <= len(row.turns[0]) <= 800, row.id


def test_texts_of_editing_and_agent_are_clean() -> None:
    for row in repeating_rows():
        text = row.turns[0]
        assert unicodedata.normalize("NFC", text) == text == text.strip(), row.id
        assert all(char == "\n" or char.isprintable() for char in text), row.id
        assert all(char.isalpha() for char in text if not char.isascii()), row.id
        assert not re.search(r" \n|\n{4}", text), row.id


def test_addresses_in_editing_and_agent_are_of_reserved_domains() -> None:
    for row in repeating_rows():
        for host in re.findall(r"(?:@|://)([\w-]+(?:\.[\w-]+)+)", row.turns[0]):
            assert re.search(r"(^|\.)example(\.(com|org|net))?$", host), (row.id, host)


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("editing", "4e9fb4b500470af80ec1356d3839def9fac74427ce9d8f23a0e1432a8647e8ea"),
        ("agent", "eaafe35d5809ade0a20a6b9c4eca8c25321f869239837b51577bae4a2cd2b4ac"),
    ],
)
def test_editing_and_agent_are_as_before_the_first_measurement(name: str, sha256: str) -> None:
    """A prompt that is changed later could be changed to please a figure; add a suite instead."""
    assert load_suite(name).sha256 == sha256


# -- limits and order ------------------------------------------------------------------------------


def test_a_limit_spreads_evenly_over_groups_and_within_them() -> None:
    taken = spread(rows_of(a=8, b=8, c=8), 7)
    assert [row.id for row in taken] == ["a0", "a2", "a5", "b0", "b4", "c0", "c4"]


def test_a_small_group_leaves_its_share_to_the_others() -> None:
    assert Counter(r.category for r in spread(rows_of(a=1, b=9), 6)) == {"a": 1, "b": 5}


def test_a_limit_smaller_than_the_number_of_groups_takes_the_first_groups() -> None:
    assert [r.category for r in spread(rows_of(a=2, b=2, c=2), 2)] == ["a", "b"]


def test_no_limit_or_a_large_one_takes_all_rows() -> None:
    rows = rows_of(a=2, b=3)
    assert spread(rows, None) == spread(rows, 99) == rows


def test_mixing_keeps_every_row_of_unequal_groups() -> None:
    rows = rows_of(a=7, b=1, c=4)
    assert sorted(r.id for r in mix(rows)) == sorted(r.id for r in rows)


# -- files -----------------------------------------------------------------------------------------


def test_questions_become_one_turn_in_a_group_named_after_the_file() -> None:
    rows = parse_rows(lines({"question": "1 + 1?", "answer": "2"}), "some/gsm8k.jsonl")
    assert rows == [SuiteRow("1", "gsm8k", ("1 + 1?",))]


def test_blank_lines_and_a_byte_order_mark_are_harmless() -> None:
    raw = b"\xef\xbb\xbf" + lines({"question": "a"}) + b"\n\n  \r\n" + lines({"question": "b"})
    assert [(r.id, r.turns) for r in parse_rows(raw, "f")] == [("1", ("a",)), ("4", ("b",))]


def test_mt_bench_categories_are_one_group_and_math_reasoning_is_not_in_it() -> None:
    names = (
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    )
    made = [
        {"question_id": 81 + 10 * i, "category": name, "turns": ["a", "b"]}
        for i, name in enumerate(names)
    ]
    made.append({"question_id": 401, "category": "math_reasoning", "turns": ["c"]})
    groups = [row.category for row in parse_rows(lines(*made), "f")]
    assert groups == ["multi_turn"] * 8 + ["math_reasoning"]


def test_mt_bench_rows_cut_to_one_turn_are_known_by_their_ids() -> None:
    rows = parse_rows(lines({"question_id": 111, "category": "math", "turns": ["a"]}), "f")
    assert rows[0].category == "multi_turn"


def test_another_sets_coding_rows_keep_their_category() -> None:
    made = [{"question_id": i, "category": "coding", "turns": ["a"]} for i in (0, 122, 130)]
    assert {row.category for row in parse_rows(lines(*made), "f")} == {"coding"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[1]", "not an object"),
        (b'{"prompt": "x"}', "neither turns nor question"),
        (b'{"turns": []}', "at least one text"),
        (b'{"turns": "x"}', "at least one text"),
        (b'{"turns": ["x", 3]}', "must be a text"),
        (b'{"turns": ["x", " "]}', "must be a text"),
        (b'{"question": null}', "must be a text"),
        (b'{"question": "\\ud800"}', "surrogate"),
        (b'{"question": "x", "category": 3}', "category must be a text"),
        (b'{"question": "x", "category": "overall"}', "category must be a text"),
    ],
)
def test_a_malformed_row_is_refused_with_its_line_number(line: bytes, problem: str) -> None:
    with pytest.raises(OptionError, match=rf"suite: set\.jsonl, line 2: .*{problem}"):
        parse_rows(lines({"question": "good"}) + b"\n" + line, "set.jsonl")


def test_a_file_without_rows_is_refused() -> None:
    with pytest.raises(OptionError, match="holds no rows"):
        parse_rows(b"\n\n", "f")


def test_an_unknown_suite_is_refused_naming_the_known_ones(tmp_path: Path) -> None:
    for name in ("help", str(tmp_path / "none.jsonl"), str(tmp_path), "", "a\0b"):
        with pytest.raises(OptionError, match="Known: mini, mixed, editing, agent, adversarial;"):
            load_suite(name)


def test_the_commands_help_names_every_suite() -> None:
    assert get_args(SuiteOption)[1].help.startswith(", ".join(SUITES))


def test_a_file_is_read_and_its_hash_recorded(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(lines({"question": "a"}, {"question": "b"}))
    suite = load_suite(path, 1)
    assert [row.turns for row in suite.rows] == [("a",)]
    assert len(suite.sha256) == 64
