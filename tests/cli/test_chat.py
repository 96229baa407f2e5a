"""``hasten chat``: turns, commands, and what Ctrl-C and faults leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hasten
from hasten.cli.chat import Session, talk
from tests.cli.conftest import Hasten
from tests.cli.tiny import CONTEXT


@pytest.fixture
def session(llm: hasten.LLM) -> Iterator[Session]:
    yield Session(llm, None, {"params": hasten.SamplingParams(max_new_tokens=12)})
    llm.forget()


def lines(*texts: str) -> Any:
    """A reader of these lines, then the end."""
    left = iter(texts)
    return lambda: next(left, None)


def test_a_piped_conversation_is_the_library_s(
    run: Hasten, tiny_model: str, llm: hasten.LLM
) -> None:
    result = run(
        "chat", "--model", tiny_model, "-n", "12", "--system", "Be brief.", input="abc\n\nabcabc\n"
    )
    messages = [{"role": "user", "content": "abc"}]
    first = llm.chat(messages, system="Be brief.", max_new_tokens=12).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "abcabc"}]
    second = llm.chat(messages, system="Be brief.", max_new_tokens=12).text
    llm.forget()
    assert (result.exit_code, result.stdout) == (0, f"{first}\n{second}\n")


def test_a_turn_runs_only_what_is_new(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    target = session.llm.target
    runs: list[int] = []
    prefill = target.prefill

    def counted(sequence: Any, tokens: Any, **more: Any) -> Any:
        runs.append(len(tokens))
        return prefill(sequence, tokens, **more)

    monkeypatch.setattr(target, "prefill", counted)
    session.ask("abc" * 20)
    session.ask("abc")
    assert runs[0] > 60
    assert sum(runs[1:]) < 60


def test_commands_are_not_sent_to_the_model(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(session, lines("/help", "/stats", "/nothing", "/quit", "never read"))
    said = capsys.readouterr().out
    assert session.messages == []
    for words in ("/reset", "(no answer yet)", "no command /nothing"):
        assert words in said


def test_reset_forgets_the_conversation(session: Session) -> None:
    talk(session, lines("abc", "/reset"))
    assert session.messages == []
    session.ask("abc")
    again = session.messages[-1]["content"]
    assert again == session.llm.generate("abc", max_new_tokens=12).text


def test_stats_tell_the_last_answer_and_the_session(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(session, lines("abc", "abcabc"))
    capsys.readouterr()
    session.command("/stats")
    said = capsys.readouterr().out
    assert "mean accepted length" in said
    assert f"whole session: {session.total.new_tokens} tokens" in said


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    following = hasten.Stream.__next__
    pieces: list[str] = []

    def interrupted(stream: hasten.Stream) -> str:
        if len(pieces) == 2:
            raise KeyboardInterrupt
        pieces.append(following(stream))
        return pieces[-1]

    monkeypatch.setattr(hasten.Stream, "__next__", interrupted)
    session.ask("abc")
    monkeypatch.undo()
    assert session.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert "(stopped)" in capsys.readouterr().err
    session.ask("abc")
    assert len(session.messages) == 4


def test_ctrl_c_at_the_prompt_ends_nothing(session: Session) -> None:
    turns: Iterator[Any] = iter([KeyboardInterrupt, "abc", None])

    def read() -> str | None:
        turn = next(turns)
        if turn is KeyboardInterrupt:
            raise KeyboardInterrupt
        return turn

    talk(session, read)
    assert len(session.messages) == 2


def test_a_fault_is_told_and_leaves_the_conversation_as_it_was(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(session, lines("abc", "a" * CONTEXT, "abc"))
    assert "error: " in capsys.readouterr().err
    assert [m["content"] for m in session.messages[::2]] == ["abc", "abc"]


def test_a_long_paste_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.cli import chat

    pasted = iter(["x" * 10_000, "", "second part"])
    waiting = iter([True, True, False])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(pasted))
    monkeypatch.setattr(chat, "_more_waits", lambda: next(waiting))
    assert chat._terminal_message() == "x" * 10_000 + "\n\nsecond part"


def test_ctrl_d_ends_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.cli import chat

    def ended(prompt: str = "") -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    assert chat._terminal_message() is None
