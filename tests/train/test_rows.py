"""Rows on disk: splits that never change, reading, mending, and folders that don't fit."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import OptionError
from hasten.train.rows import META, ROWS, SPLITS, Known, Row, Store, read, read_meta, split_of

MODEL = {"model": "tiny", "fingerprint": "abc", "dtype": "float32"}


def row(at: int, domain: str = "code") -> Row:
    prompt = [1, 2, at]
    return Row(domain, "somewhere", split_of(prompt), 0.8, prompt, [7] * (at + 1))


def write(folder: Path, *rows: Row, **changes: Any) -> None:
    with Store(folder, {**MODEL, **changes}, Known()) as store:
        store.begin({"seed": 0, "options": {}})
        store.add(rows)


# -- splits ----------------------------------------------------------------------------------------


def test_a_prompts_split_is_a_matter_of_its_ids_alone() -> None:
    assert [split_of([1, 2, at]) for at in range(10)] == [split_of((1, 2, at)) for at in range(10)]
    # Written down: rows that exist must stay where they are.
    assert "".join(split_of([at])[0] for at in range(12)) == "tmmmmmtmmpmt"


def test_splits_hold_eight_one_and_one_tenths() -> None:
    found = Counter(split_of([at, 5, at % 7]) for at in range(5000))
    assert {split: round(found[split] / 5000, 1) for split in SPLITS} == {
        "modules": 0.8,
        "policy": 0.1,
        "test": 0.1,
    }


# -- reading ---------------------------------------------------------------------------------------


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    rows = [row(at, ("code", "math")[at % 2]) for at in range(40)]
    write(tmp_path, *rows)
    assert list(read(tmp_path)) == rows
    assert list(read(tmp_path / ROWS)) == rows
    assert list(read(str(tmp_path), domains=["math"])) == rows[1::2]
    parts = [list(read(tmp_path, split=split)) for split in SPLITS]
    assert sorted((each for part in parts for each in part), key=lambda each: each.prompt) == rows
    assert [{each.split for each in part} for part in parts] == [{split} for split in SPLITS]


def test_rows_are_plain_json_lines(tmp_path: Path) -> None:
    write(tmp_path, row(3))
    (line,) = (tmp_path / ROWS).read_text().splitlines()
    assert json.loads(line) == {
        "domain": "code",
        "source": "somewhere",
        "split": split_of([1, 2, 3]),
        "temperature": 0.8,
        "prompt": [1, 2, 3],
        "output": [7] * 4,
    }


def test_a_packed_file_without_domains_is_read_by_its_sources(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl.gz"
    common = {"temperature": 0, "prompt": [1, 2], "output": [3]}
    made = [
        {"source": "gsm8k_train", "split": "test", **common},
        {"source": "arena_hard_train", "split": "policy", **common},
        {"source": "self_sampled", **common},
    ]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, made)))
    found = list(read(path))
    assert [(each.domain, each.split) for each in found] == [
        ("math", "test"),
        ("chat", "policy"),
        ("chat", split_of([1, 2])),
    ]
    assert [each.source for each in read(path, split="policy")] == ["arena_hard_train"]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, row(1), row(2))
    whole = (tmp_path / ROWS).read_bytes()
    (tmp_path / ROWS).write_bytes(whole[:-5])
    assert list(read(tmp_path)) == [row(1)]
    (tmp_path / ROWS).write_bytes(whole[:-1])
    assert list(read(tmp_path)) == [row(1), row(2)]


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n",
        b"nonsense\n",
        b"\xff\n",
        b'{"source": "x", "temperature": 0, "prompt": [], "output": [1]}\n',
        b'{"source": "x", "temperature": 0, "prompt": ["a"], "output": [1]}\n',
        b'{"source": "x", "temperature": 0, "prompt": 3, "output": [1]}\n',
        b'{"source": "x", "domain": "poetry", "temperature": 0, "prompt": [1], "output": [1]}\n',
        b'{"source": "x", "split": "mine", "temperature": 0, "prompt": [1], "output": [1]}\n',
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, row(1))
    with (tmp_path / ROWS).open("ab") as file:
        file.write(line)
    with pytest.raises(OptionError, match=r"data: can't read .*rows\.jsonl, line 2"):
        list(read(tmp_path))


def test_a_cut_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}' * 1000)[:40])
    with pytest.raises(OptionError, match="data: can't read"):
        list(read(path))


def test_what_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="split: no such split"):
        read(tmp_path, split="train")
    with pytest.raises(OptionError, match="domains: no such domain"):
        read(tmp_path, domains=["poetry"])
    with pytest.raises(OptionError, match="data: there is no"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(OptionError, match=r"has no readable meta\.json"):
        read(tmp_path)


# -- writing ---------------------------------------------------------------------------------------


def test_a_folder_is_added_to_and_its_prompts_are_known(tmp_path: Path) -> None:
    write(tmp_path, row(1), row(2, "math"))
    known = Known()
    with Store(tmp_path, MODEL, known) as store:
        assert store.tokens == {"code": 2, "math": 3}
        assert store.rows == {"code": 1, "math": 1}
        assert not known.add([1, 2, 1])
        assert known.add([1, 2, 3])
        store.add([row(3)])
    assert list(read(tmp_path)) == [row(1), row(2, "math"), row(3)]


def test_a_torn_last_line_is_cut_off_and_nothing_else_is_lost(tmp_path: Path) -> None:
    write(tmp_path, row(1), row(2))
    whole = (tmp_path / ROWS).read_bytes()
    for cut in (1, 2, 20, len(whole.splitlines()[1])):
        (tmp_path / ROWS).write_bytes(whole[:-cut])
        write(tmp_path, row(3))
        kept = [row(1), row(2), row(3)] if cut == 1 else [row(1), row(3)]
        assert list(read(tmp_path)) == kept, cut
    (tmp_path / ROWS).write_bytes(b'{"dom')
    write(tmp_path, row(3))
    assert list(read(tmp_path)) == [row(3)]


def test_meta_says_of_which_model_and_by_which_runs(tmp_path: Path) -> None:
    with Store(tmp_path, MODEL, Known()) as store:
        store.begin({"seed": 5, "options": {"tokens": 10}})
        store.add([row(1), row(2)])
    with Store(tmp_path, {**MODEL, "model": "tiny, elsewhere"}, Known()) as store:
        store.begin({"seed": 6, "options": {}})
    made = read_meta(tmp_path)
    assert made == {
        "schema": 1,
        **MODEL,
        "runs": [
            {"seed": 5, "options": {"tokens": 10}, "rows_before": 0},
            {"seed": 6, "options": {}, "rows_before": 2},
        ],
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": "xyz"}, "fingerprint 'abc'"),
        ({"dtype": "bfloat16"}, "dtype 'float32'"),
    ],
)
def test_a_folder_of_another_model_is_refused(
    tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    write(tmp_path, row(1))
    before = (tmp_path / META).read_bytes()
    with pytest.raises(OptionError, match="out: ") as told:
        write(tmp_path, row(2), **changes)
    assert words in str(told.value)
    assert list(read(tmp_path)) == [row(1)]
    assert (tmp_path / META).read_bytes() == before


def test_without_a_fingerprint_the_name_counts(tmp_path: Path) -> None:
    write(tmp_path, row(1), fingerprint="")
    with pytest.raises(OptionError, match="model 'tiny'"):
        write(tmp_path, row(2), fingerprint="", model="small")


def test_a_folder_with_rows_of_nobody_is_refused(tmp_path: Path) -> None:
    (tmp_path / ROWS).write_text("something\n")
    with pytest.raises(OptionError, match=r"has rows, and no meta\.json"):
        write(tmp_path, row(1))


def test_a_newer_or_broken_meta_is_refused(tmp_path: Path) -> None:
    write(tmp_path, row(1))
    path = tmp_path / META
    made = json.loads(path.read_text())
    path.write_text(json.dumps({**made, "schema": 2}))
    with pytest.raises(OptionError, match="has schema 2"):
        write(tmp_path, row(2))
    for text in ("{", "[]", '{"schema": 1}', ""):
        path.write_text(text)
        with pytest.raises(OptionError, match=r"no readable meta\.json"):
            write(tmp_path, row(2))
    assert len((tmp_path / ROWS).read_bytes().splitlines()) == 1


def test_two_writers_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        Store(tmp_path, MODEL, Known()),
        pytest.raises(OptionError, match="another process is writing"),
    ):
        Store(tmp_path, MODEL, Known())
    write(tmp_path, row(1))


def test_a_refused_folder_is_not_kept_locked(tmp_path: Path) -> None:
    write(tmp_path, row(1))
    with pytest.raises(OptionError):
        write(tmp_path, row(2), fingerprint="xyz")
    write(tmp_path, row(2))
    assert len(list(read(tmp_path))) == 2


def test_a_place_that_can_not_be_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="out: can't write to"):
        write(tmp_path / "file" / "inside", row(1))
