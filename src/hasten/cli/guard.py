"""How commands end: faults as one line on stderr, Ctrl-C, closed pipes, exit codes.

    0  done                    130  stopped with Ctrl-C
    1  a claim did not hold    141  the reader of stdout went away
    2  a fault, named in one line starting with ``error:``

With ``HASTEN_DEBUG=1`` a fault is raised, so its traceback is seen.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from hasten.cli.screen import err
from hasten.errors import HastenError, OptionError

FAULT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


class Commands(TyperGroup):
    """The group of all commands, with hasten's way of ending them."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line and exit; never returns."""
        _prepare_streams()
        kwargs["standalone_mode"] = False
        parent = super().main
        sys.exit(_guarded(lambda: parent(*args, **kwargs)))

    def invoke(self, ctx: Any) -> Any:
        """Run the command. What typer would end in its own way is told in hasten's, in `main`."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt as error:
            raise _Ended(INTERRUPTED, "stopped") from error
        except BrokenPipeError as error:
            raise _Ended(BROKEN_PIPE) from error
        except OptionError as error:
            if _debugging():
                raise
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            raise _Ended(FAULT, "error: " + _with_flag(error, command)) from error


class _Ended(Exception):
    """The command is over: an exit code and a line for stderr."""

    def __init__(self, code: int, line: str = "") -> None:
        super().__init__(line)
        self.code, self.line = code, line


def _guarded(run: Callable[[], Any]) -> int:
    """Run, and turn however it ends into an exit code, with at most one line on stderr."""
    try:
        result = run()
        return result if isinstance(result, int) else 0
    except _Ended as end:
        if end.code == BROKEN_PIPE:
            _drop_stdout()
        return _told(end.line, end.code)
    except (KeyboardInterrupt, typer.Abort):
        return _told("stopped", INTERRUPTED)
    except Exception as error:
        if _debugging():
            raise
        if isinstance(error, HastenError):
            return _told(f"error: {error}", FAULT)
        if (usage := _usage(error)) is not None:
            return _told(f"error: {usage}", FAULT)
        return _told(
            f"error: {type(error).__name__}: {error} (unexpected: HASTEN_DEBUG=1 shows where)",
            FAULT,
        )


def _told(line: str, code: int) -> int:
    if line:
        head, colon, rest = " ".join(line.split()).partition(": ")
        text = Text(head + colon, style="bold red" if head == "error" else "") + Text(rest)
        err().print(text, soft_wrap=True)
    return code


def _usage(error: Exception) -> str | None:
    """The line of one of typer's own faults (an unknown option, a word for a number), else None.

    Told by shape: typer kept these classes in click, and now keeps them in a private module.
    """
    say = getattr(error, "format_message", None)
    if say is None:
        return None
    context = getattr(error, "ctx", None)
    where = f" (see `{context.command_path} --help`)" if context is not None else ""
    return f"{say().rstrip('.')}{where}"


def _with_flag(error: OptionError, command: Any) -> str:
    """The message with the option named as it is typed (``--max-new-tokens``)."""
    flag = "--" + error.option.replace("_", "-")
    flags = {name for p in getattr(command, "params", ()) for name in p.opts}
    message = str(error)
    if flag in flags and message.startswith(f"{error.option}:"):
        return flag + message[len(error.option) :]
    return message


def _debugging() -> bool:
    return os.environ.get("HASTEN_DEBUG", "") not in ("", "0")


def _prepare_streams() -> None:
    """Text that the terminal can't show becomes ``?`` instead of a fault; warnings go to stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    logger = logging.getLogger("hasten")
    if not any(isinstance(h, _Notes) for h in logger.handlers):
        logger.addHandler(_Notes(logging.WARNING))


class _Notes(logging.Handler):
    """The library's warnings as ``note:`` lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        err().print(Text("note: ", style="yellow") + Text(record.getMessage()), soft_wrap=True)


def _drop_stdout() -> None:
    """Nobody reads stdout any more: let the interpreter's last flush go nowhere."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
    except (OSError, ValueError):  # not a real file: nothing to flush
        return
