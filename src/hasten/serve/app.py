"""The server's routes: OpenAI's, health, metrics, and a page to chat on."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from hasten.methods import is_lossy
from hasten.serve.faults import ApiError
from hasten.serve.fields import read_json
from hasten.serve.gate import Gate
from hasten.serve.replies import Reply
from hasten.serve.requests import Request, read_chat, read_completion
from hasten.serve.service import Service
from hasten.serve.settings import ServerOptions

if TYPE_CHECKING:
    from hasten.api import LLM

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/")


def create_app(llm: LLM, options: ServerOptions | None = None) -> FastAPI:
    """The ASGI application that serves `llm`; ``app.state.service`` is its `Service`.

    Raises OptionError or CapabilityError for a method that can't be offered. Run one process of it:
    the model is held, and requests share passes, inside.
    """
    options = options or ServerOptions()
    service = Service(llm, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    # No generated documentation pages: they load scripts from elsewhere.
    app = FastAPI(
        title="hasten", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None
    )
    app.state.service = service
    routes = _Routes(service, options)
    app.add_route("/", routes.page, ["GET"])
    app.add_route("/health", routes.health, ["GET"])
    app.add_route("/metrics", routes.metrics, ["GET"])
    app.add_route("/v1/models", routes.models, ["GET"])
    app.add_route("/v1/models/{name:path}", routes.model, ["GET"])
    app.add_route("/v1/chat/completions", routes.answering(read_chat), ["POST"])
    app.add_route("/v1/completions", routes.answering(read_completion), ["POST"])
    app.add_exception_handler(HTTPException, _http_fault)
    app.add_middleware(Gate, service=service, options=options)
    if options.allow_origin:
        # Outside of the gate: a browser's question whether it may ask carries no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allow_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


class _Routes:
    def __init__(self, service: Service, options: ServerOptions) -> None:
        self._service, self._options = service, options
        self._since = int(time.time())
        self._page = files("hasten.serve").joinpath("page.html").read_bytes()
        self._page_headers = _page_headers(self._page)

    async def page(self, _: HttpRequest) -> Response:
        return Response(self._page, media_type="text/html", headers=self._page_headers)

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: HttpRequest) -> Response:
        text = await self._service.scrape()
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name != self._service.name:
            raise ApiError(404, "There is no such model here", code="model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.name,
            "object": "model",
            "created": self._since,
            "owned_by": "hasten",
            "max_model_len": service.llm.target.info.context_limit,
            "hasten": {
                "method": str(service.llm.method),
                "methods": [str(each) for each in service.methods],
                "lossy": [str(each) for each in service.methods if is_lossy(each)],
                "max_tokens": self._options.max_tokens,
            },
        }

    def answering(self, read: Callable[[dict[str, Any]], Request]) -> Callable[..., Any]:
        """A route that reads a body with `read` and answers it."""

        async def answer(request: HttpRequest) -> Response:
            body = await self._body(request)
            asked = await self._service.off_loop(lambda: read(read_json(body)))
            return Reply(self._service, asked)  # type: ignore[return-value]  # it's ASGI

        return answer

    async def _body(self, request: HttpRequest) -> bytes:
        """The request's JSON text. Raises ApiError when it's too long, too slow or no JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Any web page may send other kinds here without asking the browser first.
            raise ApiError(
                415, "Send JSON with the header Content-Type: application/json", code="not_json"
            )
        most = self._options.max_body
        too_big = ApiError(413, f"The body may have {most} bytes at most", code="body_too_large")
        if (length := request.headers.get("content-length", "")).isdigit() and int(length) > most:
            raise too_big
        body = bytearray()

        async def read() -> None:
            async for part in request.stream():
                body.extend(part)
                if len(body) > most:
                    raise too_big

        try:
            await asyncio.wait_for(read(), self._options.body_seconds)
        except asyncio.TimeoutError as error:
            raise ApiError(408, "The body took too long to come", code="body_timeout") from error
        except ClientDisconnect as error:
            raise ApiError(400, "The client went away") from error
        return bytes(body)


def _page_headers(page: bytes) -> dict[str, str]:
    """What a browser may do on the page: run its own script, and ask this server."""

    def own(tag: bytes) -> str:
        inside = page.partition(b"<" + tag + b">")[2].partition(b"</" + tag + b">")[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {own(b'script')}; style-src {own(b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


async def _http_fault(_: HttpRequest, error: Exception) -> Response:
    """Unknown paths and methods in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}. Paths here: {', '.join(_PATHS)}"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()
