"""``hasten chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hasten.cli import options as opt
from hasten.cli.screen import err, load_model, out, stats_table, tell_lossy, write
from hasten.errors import HastenError

if TYPE_CHECKING:
    from hasten.api import LLM
    from hasten.metrics import Summary

HELP = """\
/help    this list
/reset   forget the conversation
/stats   figures of the last answer and of the session
/quit    end (so does Ctrl-D)
Ctrl-C stops the answer being given; what was said so far is kept."""


@opt.loads
def chat(
    system: opt.System = None,
    model: opt.Model = None,
    method: opt.MethodOption = None,
    max_new_tokens: opt.MaxNewTokens = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    stop: opt.Stop = None,
    seed: opt.Seed = None,
    verify: opt.Verify = None,
    stats: opt.Stats = False,
    *,
    loading: opt.Loading,
) -> None:
    """Talk with the model; a turn runs only what is new since the last one."""
    params = opt.sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        seed=seed,
    )
    opt.check_method(method, params, verify)
    llm = load_model(model, method, **loading)
    tell_lossy(llm.method)
    session = Session(llm, system, {"params": params, "verify": verify}, show_stats=stats)
    talk(session, _terminal_lines() if sys.stdin.isatty() else _piped_line)


class Session:
    """A conversation: its messages, and the figures of its answers."""

    def __init__(
        self, llm: LLM, system: str | None, request: dict[str, Any], *, show_stats: bool = False
    ) -> None:
        from hasten.metrics import Summary

        self.llm, self.system, self.request, self.show_stats = llm, system, request, show_stats
        self.messages: list[dict[str, str]] = []
        self.last: Summary | None = None
        self.total = Summary()
        self.method = ""

    def ask(self, text: str) -> None:
        """Print the answer to `text` as it comes. Ctrl-C keeps what was said until then.

        Raises HastenError, with the conversation as it was before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        stream = self.llm.chat_stream(messages, system=self.system, **self.request)
        said: list[str] = []
        try:
            with stream:
                for piece in stream:
                    said.append(piece)
                    write(piece)
            write("\n")
        except KeyboardInterrupt:
            write("\n")
            err().print("(stopped)", style="dim")
        result = stream.result
        if said:
            self.messages = [*messages, {"role": "assistant", "content": "".join(said)}]
        self._count(result.metrics, result.method)

    def _count(self, metrics: Summary, method: str) -> None:
        self.last, self.method = metrics, method
        self.total.merge(metrics)
        if self.show_stats:
            self.stats(total=False)

    def command(self, line: str) -> bool:
        """Do what a ``/`` line says; False to end."""
        name = line.split()[0]
        if name in ("/quit", "/exit"):
            return False
        if name == "/help":
            out().print(HELP)
        elif name == "/reset":
            self.messages = []
            self.llm.forget()
            out().print("(the conversation is forgotten)", style="dim")
        elif name == "/stats":
            self.stats()
        else:
            out().print(
                f"no command {name}: /help lists them. A space before it sends it as text.",
                style="dim",
            )
        return True

    def stats(self, *, total: bool = True) -> None:
        """Print the figures of the last answer, and of all so far when there are several."""
        console = out() if total else err()
        if self.last is None:
            console.print("(no answer yet)", style="dim")
            return
        console.print(stats_table(self.last, self.method))
        if total and self.total.new_tokens > self.last.new_tokens:
            so_far = self.total
            console.print(
                f"whole session: {so_far.new_tokens} tokens, {so_far.tokens_per_s:.1f} tokens/s, "
                f"mean accepted length {so_far.mean_accepted_length:.2f}"
            )


def talk(session: Session, read: Callable[[], str | None]) -> None:
    """Answer line after line until `read` gives None or a command ends it."""
    if sys.stdin.isatty():
        err().print(
            f"{session.llm.target.info.name}, {session.llm.method}. /help for help.", style="dim"
        )
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            write("\n")
            err().print("(Ctrl-D or /quit ends)", style="dim")
            continue
        if line is None:
            return
        if line.startswith("/"):
            if not session.command(line):
                return
        elif line.strip():
            try:
                session.ask(line)
            except HastenError as error:
                err().print(f"error: {error} (/reset starts over)", soft_wrap=True)


def _piped_line() -> str | None:
    """The next line of stdin that isn't a terminal; None at its end."""
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _terminal_lines() -> Callable[[], str | None]:
    """A reader with editing, history, and pasted lines taken as one message."""
    # Once it is loaded, input() edits lines and isn't cut at 4,096 bytes. Windows has none.
    with suppress(ImportError):
        import readline  # noqa: F401
    return _terminal_message


def _terminal_message() -> str | None:
    """One message: a line, with the lines that were pasted together with it; None at Ctrl-D."""
    lines: list[str] = []
    try:
        lines.append(input("> "))
        while _more_waits():
            lines.append(input())
    except EOFError:
        if not lines:
            write("\n")
            return None
    return "\n".join(lines)


def _more_waits() -> bool:
    """True when a line is there already: it was pasted, for nobody types in 50 ms."""
    import select

    try:
        return bool(select.select([sys.stdin], [], [], 0.05)[0])
    except (OSError, ValueError):  # Windows can't wait for a console
        return False
