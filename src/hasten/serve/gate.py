"""What every request passes before it reaches a route: host, key, and faults in OpenAI's shape."""

from __future__ import annotations

import hmac
import logging
from time import monotonic
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hasten.serve.faults import ApiError, as_api_error, shutting_down
from hasten.serve.service import Service
from hasten.serve.settings import ServerOptions

logger = logging.getLogger("hasten.serve")

_WITHOUT_KEY = ("/", "/health")
"""The page holds nothing of the model's; it asks for the key."""
_WHILE_DRAINING = ("/metrics",)


class Gate:
    """ASGI middleware. Logs method, path, status and time: never a text."""

    def __init__(self, app: ASGIApp, service: Service, options: ServerOptions) -> None:
        self._app, self._service, self._options = app, service, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, pass on, and tell a fault."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, since = 0, monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, noting)
        except Exception as error:
            fault = as_api_error(error)
            if not status:  # else it's too late: the connection is closed in the middle
                await fault.response()(scope, receive, noting)
        finally:
            logger.info(
                "%s %s %s %.0f ms",
                scope["method"],
                quote(scope["path"])[:100],  # what is in it must not look like a line of its own
                status or "-",
                1e3 * (monotonic() - since),
            )

    def _check(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        hosts = {name.lower() for name in self._options.allow_host}
        if hosts and _without_port(headers.get("host", "")) not in hosts:
            raise ApiError(
                421,
                "This server isn't known under that name. Its operator may allow it (--allow-host)",
                code="host_not_allowed",
            )
        key = self._options.api_key
        if key is not None and path not in _WITHOUT_KEY:
            kind, _, given = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode(), key.encode())
            if not same or kind.lower() != "bearer":
                raise ApiError(
                    401,
                    "Give the server's API key: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if self._service.draining and path not in _WHILE_DRAINING:
            raise shutting_down()


def _without_port(host: str) -> str:
    """The name of a Host header; an IPv6 address keeps its brackets."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()
