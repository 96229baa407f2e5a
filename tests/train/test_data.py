"""Training text made with a tiny model: what the rows are, when it stops, and that it goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.api import LLM
from hasten.errors import CapabilityError, OptionError
from hasten.train import data
from hasten.train.batched import BatchDecoder
from hasten.train.data import Options, Progress, make, read
from hasten.train.rows import ROWS, read_meta, split_of
from tests.tiny_llm import make_model, make_tokenizer
from tests.train.cases import EOS, make_llm, prompt_file


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., Options]:
    listed = [f"{name}={prompt_file(tmp_path, name, 40)}" for name in ("math", "chat", "code")]

    def call(**changes: Any) -> Options:
        usual = {"sources": listed, "tokens": 400, "max_new_tokens": 16, "batch": 8}
        return Options(**{**usual, **changes})

    return call


def test_rows_are_the_models_answers_to_the_prompts(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    done = make(llm, tmp_path / "out", options())
    rows = list(read(tmp_path / "out"))
    assert done.total == sum(len(row.output) for row in rows) >= 400
    assert done.tokens.keys() == {"math", "chat", "code"}
    assert done.rows == Counter(row.domain for row in rows)
    assert len({tuple(row.prompt) for row in rows}) == len(rows)
    for row in rows:
        assert row.split == split_of(row.prompt)
        assert row.source == row.domain
        assert row.temperature in (0.0, 0.8)
        ended = row.output[-1] in EOS
        assert len(row.output) <= 16
        assert ended or len(row.output) == 16
        assert not set(row.output[:-1]).intersection(EOS)
        if row.temperature == 0:
            plain = llm.generate(row.prompt, max_new_tokens=16, temperature=0.0)
            assert list(plain.tokens) == row.output


def test_the_parts_asked_for_are_greedy_and_of_each_domain(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    done = make(llm, tmp_path / "a", options(greedy_share=1.0, shares={"math": 3}, tokens=500))
    assert {row.temperature for row in read(tmp_path / "a")} == {0.0}
    assert done.tokens["math"] / done.total == pytest.approx(0.6, abs=0.1)
    make(llm, tmp_path / "b", options(greedy_share=0.0, temperature=0.5))
    assert {row.temperature for row in read(tmp_path / "b")} == {0.5}


def test_little_more_is_made_than_was_asked(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    for tokens in (1, 100, 333):
        done = make(llm, tmp_path / str(tokens), options(tokens=tokens))
        assert tokens <= done.total <= tokens + 8 * 16


def test_a_seed_gives_the_same_rows(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(llm, tmp_path / name, options(seed=seed, sources=[*options().sources, "chat=self"]))
    made = [(tmp_path / name / ROWS).read_bytes() for name in "abc"]
    assert made[0] == made[1] != made[2]


def test_a_second_run_goes_on_and_asks_nothing_again(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    make(llm, tmp_path / "out", options())
    first = (tmp_path / "out" / ROWS).read_bytes()
    more = make(llm, tmp_path / "out", options(tokens=700))
    assert (tmp_path / "out" / ROWS).read_bytes().startswith(first)
    rows = list(read(tmp_path / "out"))
    assert len({tuple(row.prompt) for row in rows}) == len(rows)
    assert more.made == more.total - sum(len(r.output) for r in rows[: first.count(b"\n")]) > 0
    again = make(llm, tmp_path / "out", options(tokens=700))
    assert (again.made, again.total) == (0, more.total)
    assert [run["rows_before"] for run in read_meta(tmp_path / "out")["runs"]] == [
        0,
        first.count(b"\n"),
    ]


@pytest.mark.parametrize("wave", [0, 3])
def test_a_stop_within_a_wave_loses_that_wave_only(
    llm: LLM,
    options: Callable[..., Options],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wave: int,
) -> None:
    out, counts = tmp_path / "out", []

    def stop(at: Progress) -> None:
        if not at.running:
            counts.append(at.total)
        elif len(counts) == wave:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(llm, out, options(), stop)
    kept = list(read(out))
    assert sum(len(row.output) for row in kept) == (counts[-1] if counts else 0)
    assert bool(kept) == (wave > 0)
    make(llm, out, options())
    rows = list(read(out))
    assert rows[: len(kept)] == kept
    assert len({tuple(row.prompt) for row in rows}) == len(rows)


def test_a_killed_writers_last_line_is_mended(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    make(llm, tmp_path / "out", options(tokens=200))
    before = list(read(tmp_path / "out"))
    path = tmp_path / "out" / ROWS
    path.write_bytes(path.read_bytes() + b'{"domain":"math","sou')
    make(llm, tmp_path / "out", options())
    assert list(read(tmp_path / "out"))[: len(before)] == before


def test_time_stops_it_after_the_wave(
    llm: LLM, options: Callable[..., Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(data.time, "monotonic", lambda: clock[0])

    def tick(at: Progress) -> None:
        clock[0] += 1.0

    done = make(llm, tmp_path / "out", options(tokens=10**6, minutes=0.1), tick)
    assert sum(done.rows.values()) == 8
    assert done.rows == Counter(row.domain for row in read(tmp_path / "out"))


def test_it_stops_when_the_sources_have_ended(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    notes: list[str] = []
    done = make(
        llm,
        tmp_path / "out",
        options(tokens=10**6),
        lambda at: notes.append(at.note) if at.note else None,
    )
    assert sum(done.rows.values()) == 120
    assert len(notes) == 3
    assert all(note.endswith("has no more prompts") for note in notes)


def test_user_turns_are_sampled_from_the_model(llm: LLM, tmp_path: Path) -> None:
    options = Options(sources=["chat=self"], tokens=150, max_new_tokens=12, batch=16)
    make(llm, tmp_path / "out", options)
    rows = list(read(tmp_path / "out"))
    assert {(row.domain, row.source) for row in rows} == {("chat", "self")}
    assert len({tuple(row.prompt) for row in rows}) == len(rows) > 5
    for row in rows:
        text = llm.tokenizer.decode(row.prompt)
        assert text.startswith("<|im_start|>user\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    more = make(llm, tmp_path / "out", Options(**{**fields(options), "tokens": 300}))
    assert more.made > 0


def fields(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in Options.__slots__}


def test_a_model_that_ends_no_turns_ends_the_run(tmp_path: Path) -> None:
    endless = hasten.load((make_model(eos_token_id=None), make_tokenizer()), method="ar")
    notes: list[str] = []
    options = Options(sources=["chat=self"], tokens=50, max_new_tokens=4, batch=128)
    done = make(endless, tmp_path / "out", options, lambda at: notes.append(at.note))
    assert (done.total, notes.pop()) == (
        0,
        "chat=self is of no use: this model doesn't end user turns by itself",
    )


def test_excluded_prompts_are_not_asked(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    make(llm, tmp_path / "old", options(tokens=10**6, sources=options().sources[:2]))
    make(llm, tmp_path / "new", options(tokens=10**6, exclude=[tmp_path / "old"]))
    assert {row.domain for row in read(tmp_path / "new")} == {"code"}


def test_waves_are_of_like_length_and_bounded(
    llm: LLM, options: Callable[..., Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_WAVE_SLOTS", 60)
    waves: list[list[int]] = []
    run = BatchDecoder.run

    def noting(self: BatchDecoder, jobs: Any) -> Any:
        jobs = list(jobs)
        waves.append([len(job.prompt) for job in jobs])
        return run(self, jobs)

    monkeypatch.setattr(BatchDecoder, "run", noting)
    make(llm, tmp_path / "out", options(tokens=2000))
    waves = [lengths for lengths in waves if lengths]
    assert len(waves) > 5
    assert all(len(lengths) <= 8 for lengths in waves)
    assert all(len(lengths) * (max(lengths) + 16) <= 8 * 60 for lengths in waves)
    assert max(max(lengths) - min(lengths) for lengths in waves) <= 7


def test_what_a_run_was_is_written_down(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    make(llm, tmp_path / "out", options(seed=7, greedy_share=0.5))
    made = read_meta(tmp_path / "out")
    assert (made["dtype"], made["model"]) == ("float32", llm.target.info.name)
    assert made["fingerprint"] == llm.target.info.fingerprint
    (run,) = made["runs"]
    assert run["seed"] == 7
    assert run["options"]["greedy_share"] == 0.5
    assert run["options"]["batch"] == 8
    assert run["options"]["sources"] == list(options().sources)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 0}, "tokens: "),
        ({"minutes": 0.0}, "minutes: "),
        ({"minutes": float("nan")}, "minutes: "),
        ({"max_new_tokens": 0}, "max_new_tokens: "),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens: "),
        ({"batch": 0}, "batch: "),
        ({"greedy_share": 1.5}, "greedy_share: "),
        ({"temperature": 0.0}, "temperature: "),
        ({"temperature": float("nan")}, "temperature: "),
        ({"sources": []}, "source: names nothing"),
        ({"sources": ["poetry"]}, "source: no such domain"),
        ({"shares": {"math": 1.0}}, "domain_share: 'math' has no source"),
        ({"shares": {"code": 0.0}}, "domain_share: of code"),
        ({"shares": {"code": float("inf")}}, "domain_share: of code"),
    ],
)
def test_a_bad_option_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as told:
        Options(**changes)
    assert str(told.value).startswith(words)


def test_answers_that_fill_the_context_are_refused(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="max_new_tokens: 500 fill the context"):
        make(llm, tmp_path / "out", options(max_new_tokens=500))
    assert not (tmp_path / "out").exists()


def test_prompts_that_leave_no_room_are_passed_over(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    room = llm.target.info.context_limit - 155
    done = make(llm, tmp_path / "out", options(max_new_tokens=155, tokens=10**6))
    assert all(len(row.prompt) <= room for row in read(tmp_path / "out"))
    assert 0 < sum(done.rows.values()) < 120


def test_a_folder_of_another_model_is_refused(
    llm: LLM, options: Callable[..., Options], tmp_path: Path
) -> None:
    make(llm, tmp_path / "out", options())
    before = (tmp_path / "out" / ROWS).read_bytes()
    half = hasten.load((make_model(eos_token_id=EOS).bfloat16(), make_tokenizer()), method="ar")
    with pytest.raises(OptionError, match="dtype 'float32'"):
        make(half, tmp_path / "out", options())
    assert (tmp_path / "out" / ROWS).read_bytes() == before


def test_a_model_that_is_not_fused_is_refused(
    options: Callable[..., Options], tmp_path: Path
) -> None:
    other = hasten.load((make_model(), make_tokenizer()), method="ar", engine="transformers")
    with pytest.raises(CapabilityError, match="can't make training text"):
        make(other, tmp_path / "out", options())
    assert not (tmp_path / "out").exists()
