"""Running the server: the socket, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from hasten.errors import OptionError

_LAST_SECONDS = 5
"""After the grace time: for connections whose answers have ended."""


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address, not listening yet; port 0 takes a free one. Raises OptionError
    naming what can't be had."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would share a port with another server
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        option = "host" if isinstance(error, socket.gaierror) else "port"
        hint = "Choose another one; 0 takes any that is free" if option == "port" else ""
        raise OptionError(option, f"can't listen on {host}:{port}: {why}", hint) from error
    return bound


def address(bound: socket.socket) -> str:
    """The URL of the page."""
    host, port = bound.getsockname()[:2]
    shown = {"0.0.0.0": "localhost", "::": "localhost", "127.0.0.1": "localhost"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"


class Server(uvicorn.Server):
    """uvicorn, with an end in three steps: the first signal lets requests under way finish (new
    ones get 503); after the grace time, or at a second signal, they are cancelled and told; a third
    one ends the process.

    Run it in the main thread for signals; `stop` does the same as the first. `on_ending` is called
    with the number of requests under way at the first one.
    """

    def __init__(
        self,
        app: Any,
        *,
        grace: float = 30.0,
        on_ready: Callable[[], None] | None = None,
        on_ending: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )
        self._service, self._grace = app.state.service, grace
        self._on_ready, self._on_ending = on_ready, on_ending
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started and self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first ends in order, the second cancels, the third ends the process."""
        self._signals += 1
        if self._loop is None:  # nothing is served yet
            self.should_exit = True
        elif self._signals == 1:
            self.stop()
        elif self._signals == 2:
            self._service.hurry()
        else:  # the interpreter can't be taken down in order: a pass may be under way
            os._exit(128 + sig)

    def stop(self) -> None:
        """Begin the end, from any thread; harmless when it has ended already."""
        assert self._loop is not None, "the server hasn't started"
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._begin_draining)

    def _begin_draining(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if self._on_ending is not None:
            self._on_ending(len(self._service.jobs))
        try:
            await self._service.drain(self._grace)
        finally:
            self.should_exit = True
