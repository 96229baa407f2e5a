"""Prompt sources: what is found, passed over and refused, and that a seed fixes all of it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from hasten.errors import OptionError
from hasten.train import sources
from hasten.train.sources import Prompt, parse, prompts

DOC = "Adds two numbers, and says so at a length that counts.\n\n    More of it."


def function(name: str, doc: str = DOC) -> str:
    return f'def {name}(a, b):\n    """{doc}\n    """\n    total = a + b\n    return total\n'


def words(count: int, tag: str = "word") -> str:
    return " ".join(f"{tag}{at}" for at in range(count)) + "."


def catalogue(path: Path, messages: dict[str, str], charset: str = "utf-8") -> None:
    """Write a ``.mo`` file."""
    head = {"": f"Content-Type: text/plain; charset={charset}\n"}
    pairs = [(k.encode(), v.encode("utf-8")) for k, v in sorted({**head, **messages}.items())]
    at, tables, data = 28 + 16 * len(pairs), [], b""
    for column in (0, 1):
        for pair in pairs:
            tables.append(struct.pack("<II", len(pair[column]), at + len(data)))
            data += pair[column] + b"\0"
    header = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + b"".join(tables) + data)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Some packages, broken files among them."""
    root = tmp_path / "site-packages"
    for name in ("alpha", "beta", "hasten"):
        (root / name).mkdir(parents=True)
        code = "\n".join(function(f"{name}_{at}", f"{DOC} {name} {at}") for at in range(5))
        (root / name / "code.py").write_text(f'"""{words(90, name)}"""\n\n{code}')
    beta = root / "beta"
    (beta / "vendored.py").write_text((root / "alpha" / "code.py").read_text())
    (beta / "broken.py").write_text("def half(:\n")
    (beta / "null.py").write_bytes(b"x = 1\0")
    (beta / "deep.py").write_text("x = " + "(" * 5000 + ")" * 5000)
    (beta / "latin.py").write_bytes('"""Grüße"""'.encode("latin-1"))
    (beta / "bom.py").write_bytes(b"\xef\xbb\xbf" + function("marked", DOC + " bom").encode())
    (beta / "escape.py").write_text(function("escaped", DOC + " \\d"))
    (beta / "folder.py").mkdir()
    (beta / "huge.py").write_text("#" * 500_000 + "\n" + function("huge", DOC + " huge"))
    (beta / "README.md").write_text("\n\n".join(words(50, f"p{at}x") for at in range(20)))
    (beta / "LICENSE.txt").write_text(words(200, "licence"))
    return root


def texts(found: list[Prompt]) -> str:
    return "\n".join(prompt.text for prompt in found)


# -- folders ---------------------------------------------------------------------------------------


def test_code_asks_about_each_function_once(packages: Path) -> None:
    found = list(sources.code_prompts(packages, 0))
    assert {prompt.domain for prompt in found} == {"code"}
    assert {prompt.source for prompt in found} == {"alpha", "beta"}
    for name in [f"{p}_{at}" for p in ("alpha", "beta") for at in range(5)] + ["marked", "escaped"]:
        asked = [p for p in found if f"{name}(" in p.text or f"`{name}`" in p.text]
        assert len(asked) == 1, name
    assert "hasten" not in texts(found)
    assert "huge" not in texts(found)


def test_methods_are_shown_without_their_indent(tmp_path: Path) -> None:
    body = "".join(f"    {line}\n" for line in function("method").splitlines())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text(f"class Box:\n{body}")
    (found,) = sources._functions(tmp_path / "a" / "b.py")
    assert found["text"] == function("method").rstrip()
    assert found["head"].startswith("def method")
    assert found["head"].endswith('"""')


def test_every_file_has_its_turn_before_any_has_a_second(packages: Path) -> None:
    found = [prompt.text for prompt in sources.code_prompts(packages, 3)]
    firsts = [at for at, text in enumerate(found) if "marked" in text or "escaped" in text]
    assert max(firsts) < 8
    assert len(found) == 12


def test_passages_do_not_overlap_and_licences_are_passed_over(packages: Path) -> None:
    found = list(sources.summary_prompts(packages, 0))
    for tag in ("alpha0 ", "p0x0 "):
        assert sum(tag in prompt.text for prompt in found) == 1, tag
    for word in [f"p{a}x{b}" for a in range(20) for b in range(49)]:
        assert sum(f"{word} " in f"{p.text} ".replace("\n", " ") for p in found) <= 1, word
    assert "licence" not in texts(found)
    lengths = [len(prompt.text.split()) for prompt in found]
    assert 60 < min(lengths) <= max(lengths) < 345


def test_translation_reads_catalogues_of_known_languages(tmp_path: Path) -> None:
    english = "This is a message that is long enough to be translated by somebody."
    for language, foreign in (("de", "Dies ist eine Nachricht."), ("xx", "Blah blah blah.")):
        place = tmp_path / language / "LC_MESSAGES" / "tool.mo"
        catalogue(place, {english: foreign, "short": "kurz", english + " ": english + " "})
    catalogue(tmp_path / "fr" / "odd.mo", {english: "Ceci est un message."}, charset="no-such")
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "cut.mo").write_bytes(b"\xde\x12\x04\x95\0\0")
    (tmp_path / "it" / "empty.mo").write_bytes(b"")
    (tmp_path / "it" / "folder.mo").mkdir()
    (prompt,) = sources.translation_prompts([tmp_path], 0)
    assert (prompt.domain, prompt.source) == ("translation", "tool")
    assert "Dies ist eine Nachricht." in prompt.text or "German" in prompt.text


def test_a_seed_gives_the_same_prompts_and_another_one_others(packages: Path) -> None:
    for read in (sources.code_prompts, sources.summary_prompts):
        assert list(read(packages, 1)) == list(read([packages], 1))
        assert list(read(packages, 1)) != list(read(packages, 2))


def test_requests_are_worded_in_several_ways(packages: Path) -> None:
    seen = {
        way
        for seed in range(6)
        for prompt in sources.code_prompts(packages, seed)
        for way in sources._CODE_WAYS
        if prompt.text.startswith(way.split("{")[0])
    }
    assert len(seen) >= 6


def test_nothing_is_worded_as_in_a_measuring_set() -> None:
    ways = [*sources._CODE_WAYS, *sources._SUMMARY_WAYS]
    ways += [way for way, _ in sources._TRANSLATION_WAYS]
    taken = ("Summarize:", "Translate {language} to English", "Translate German", "Implement the")
    assert not [way for way in ways if way.startswith(taken)]


def test_no_broken_file_warns_or_stops_the_search(packages: Path) -> None:
    # pytest turns warnings into errors here, so the invalid escape of one file would be seen
    assert [p for p in sources.code_prompts(packages, 0) if "escaped" in p.text]


def test_an_empty_folder_has_no_prompts(tmp_path: Path) -> None:
    for domain in ("code", "summarisation", "translation"):
        assert list(prompts(parse(f"{domain}={tmp_path}"), 0)) == []


def test_installed_packages_are_the_default(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (sources.package_root() / "torch").is_dir()
    monkeypatch.setattr(sources, "package_root", lambda: packages)
    for domain in ("code", "summarisation"):
        assert list(prompts(parse(domain), 0)) == list(prompts(parse(f"{domain}={packages}"), 0))


# -- files of rows ---------------------------------------------------------------------------------


def rows_file(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_rows_have_turns_or_a_question(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "some.jsonl", {"turns": ["one", "more"]}, {"question": "zwö"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b'\n{"question": "  "}\n')
    want = [Prompt("chat", "some", "one"), Prompt("chat", "some", "zwö")]
    assert list(sources.read_rows(path, "chat")) == want


def test_a_files_rows_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "some.jsonl", *({"question": str(at)} for at in range(50)))
    once = [[p.text for p in prompts(parse(f"math={path}"), seed)] for seed in (0, 0, 1)]
    assert once[0] == once[1] != once[2]
    assert sorted(once[0]) == sorted(once[2]) == sorted(map(str, range(50)))


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", "{}", '{"turns": []}', '{"question": 3}', '{"question": "\\ud800"}', "\xff"],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"question": "fine"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(OptionError, match="source: ") as told:
        prompts(parse(f"chat={path}"), 0)
    assert "line 2" in str(told.value) or line == "\xff"
    assert "JSON lines" in str(told.value)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(OptionError, match="holds no prompts"):
        prompts(parse(f"chat={path}"), 0)


@pytest.mark.parametrize(
    "name",
    [
        "spec_bench_dev.jsonl",
        "human-eval.jsonl",
        "HumanEval.jsonl",
        "gsm8k_test_dev.jsonl",
        "mgsm_zh.jsonl",
        "math_dev.jsonl",
        "MT-Bench.jsonl",
        "spec_bench/question.jsonl",
    ],
)
def test_a_measuring_set_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    rows_file(path, {"question": "x"})
    for call in (lambda: parse(f"chat={path}"), lambda: list(sources.read_rows(path, "chat"))):
        with pytest.raises(OptionError, match="results are measured on"):
            call()


@pytest.mark.parametrize("name", ["gsm8k_train.jsonl", "arena_hard_train.jsonl"])
def test_a_training_set_is_not(tmp_path: Path, name: str) -> None:
    path = rows_file(tmp_path / name, {"question": "x"})
    assert parse(f"math={path}") == sources.Source("math", path)


# -- what is typed ---------------------------------------------------------------------------------


def test_a_source_reads_as_it_is_typed(tmp_path: Path) -> None:
    for text in ("code", "chat=self", f"summarisation={tmp_path}"):
        assert str(parse(text)) == text
    assert parse("chat=self").own
    assert all(str(parse(text)) == text for text in sources.DEFAULT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("poetry", "no such domain"),
        ("", "no such domain"),
        ("math", "Give math=PATH"),
        ("chat", "Give chat=PATH or chat=self"),
        ("math=", "math needs a file"),
        ("code=", "code needs a file"),
        ("math=self", "there is no self"),
        ("chat=/no/such/file.jsonl", "there is no /no/such/file.jsonl"),
        ("math=.", "is a folder"),
    ],
)
def test_a_bad_source_is_told(text: str, words: str) -> None:
    with pytest.raises(OptionError, match="source: ") as told:
        parse(text)
    assert words in str(told.value)


def test_what_the_model_samples_is_not_read() -> None:
    with pytest.raises(OptionError, match="the model makes them"):
        prompts(parse("chat=self"), 0)
