"""The HTTP side of a served engine: OpenAI's paths, health, metrics, and the page. docs/serving.md describes them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dreamer_jax.serving.connections import Gone, break_off, event_stream, is_loopback, read_body, unless_gone
from dreamer_jax.serving.contract import Request, ServingEngine
from dreamer_jax.serving.keys import Keys
from dreamer_jax.serving.metrics import CONTENT_TYPE, Metrics, picture
from dreamer_jax.serving.prompts import Prompts
from dreamer_jax.serving.protocol import Asked, Refused, parse
from dreamer_jax.serving.shapes import Shapes
from dreamer_jax.serving.streaming import Answering, Broken, Slow, event

PICTURES = 0.2
"""Seconds between two pictures of the engine."""
AGAIN = {429: "1", 503: "5"}
"""Status -> Retry-After, in seconds."""
OPEN = ("/", "/health")
"""Paths that need no key."""
WATCHED = ("/health", "/metrics")
"""Paths that are asked all the time, so that the log has them only at its finest level."""
PAGE = Path(__file__).with_name("page.html")
LOG = logging.getLogger("dreamer_jax.serving")


@dataclass(frozen=True)
class Served:
    """What is served, and how.

    Attributes:
        name: of the model.
        prompts: from what clients send to tokens.
        context: tokens of a prompt and its answer together.
        keys: who may ask; None for everybody.
        loopback: whether only this machine reaches the server: then names of other machines are refused, so that
            no page of the web can reach it by a name that it lets point here.
        log_text: whether prompts and answers are logged.
    """

    name: str
    prompts: Prompts
    context: int
    keys: Keys | None = None
    loopback: bool = True
    log_text: bool = False


class Server:
    """An ASGI application.

    Args:
        engine: that answers.
        served: see there.

    Attributes:
        stopping: whether new requests are refused; set by whoever ends the server.
    """

    def __init__(self, engine: ServingEngine, served: Served):
        self.engine, self.served, self.metrics = engine, served, Metrics()
        self.stopping = asyncio.Event()
        self._created = int(time.time())
        self._routes: dict[str, tuple[str, ASGIApp]] = {
            "/": ("GET", _plain(self._page)),
            "/health": ("GET", _plain(self._health)),
            "/metrics": ("GET", _plain(self._metrics)),
            "/v1/models": ("GET", _plain(self._models)),
            "/v1/models/{name:path}": ("GET", _plain(self._model)),
            "/v1/engine": ("GET", self._pictures),
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
        }
        routes = [Route(path, _Asgi(its), methods=[method]) for path, (method, its) in self._routes.items()]
        handlers: Any = {Refused: _refused, HTTPException: _not_found, Exception: _defect}
        self._app = Starlette(routes=routes, exception_handlers=handlers)
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, count it and log a line; nothing of its text is in the line."""
        if scope["type"] != "http":
            return
        began, status = time.monotonic(), 0
        state = scope.setdefault("state", {})

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._admit(scope)
            except Refused as error:
                await refusal(error)(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
            if state.get("gone"):
                state["note"] = ", ".join([*filter(None, [state.get("note")]), "the client left"])
        except asyncio.CancelledError:  # the server ends at once
            LOG.info("%s %s cut off, the server stops at once", scope["method"], self._path(scope))
            break_off(scope, at_once=True)
            raise
        except Exception as error:  # a defect: answered with 500 by starlette where nothing was sent yet
            where = "".join(traceback.format_tb(error.__traceback__))
            LOG.error("%s in a request\n%s", type(error).__name__, where)  # its message might hold text
            break_off(scope, at_once=True)
        path = self._path(scope)
        self.metrics.responses[path, status] += 1
        note = f", {state['note']}" if "note" in state else ""
        level = logging.DEBUG if path in WATCHED else logging.INFO
        LOG.log(level, "%s %s %s %.3f s%s", scope["method"], path, status or "-", time.monotonic() - began, note)

    def _path(self, scope: Scope) -> str:
        """Of this server; nothing else that a client writes is logged."""
        path = scope["path"]
        return path if path in self._routes else "/v1/models/..." if path.startswith("/v1/models/") else "other"

    def _admit(self, scope: Scope) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self.served.loopback and not is_loopback(headers.get("host", "")):
            raise Refused(403, "this server answers to the names of this machine only; see --host", code="wrong_host")
        keys = self.served.keys if scope["path"] not in OPEN else None
        if keys is not None and not keys.open(headers.get("authorization")):
            raise Refused(
                401, "a key is needed, and none or a wrong one came: Authorization: Bearer KEY", code="invalid_api_key"
            )
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise Refused(415, "the body must be JSON: Content-Type: application/json")
            if self.stopping.is_set():
                raise Refused(503, "the server is stopping", code="not_ready")

    async def _page(self, _: HttpRequest) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"content-security-policy": f"{policy}; img-src data:; frame-ancestors 'none'; base-uri 'none'"}
        return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=headers)

    async def _health(self, _: HttpRequest) -> Response:
        if self.stopping.is_set() or not self.engine.ready:
            word = "failed" if self.engine.failed else "stopping" if self.stopping.is_set() else "starting"
            return JSONResponse({"status": word}, 503, {"retry-after": AGAIN[503]})
        return JSONResponse({"status": "ready"})

    async def _metrics(self, _: HttpRequest) -> Response:
        ready = self.engine.ready and not self.stopping.is_set()
        text = self.metrics.text(self.engine.view(), ready)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def _model(self, request: HttpRequest) -> Response:
        self._named(request.path_params["name"])
        return JSONResponse(self._description())

    def _description(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "dreamer-jax",
            "context": self.served.context,
            "depth": self.engine.view().depth,
            "samplers": list(self.engine.samplers),
        }

    def _named(self, name: str | None) -> None:
        if name not in (None, self.served.name):
            raise Refused(404, f"there is no such model; this server has '{self.served.name}'", "model",
                          "model_not_found")  # fmt: skip

    async def _pictures(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What the engine does, some times a second, until the client leaves."""

        async def write(put: Callable[[bytes], Awaitable[None]]) -> None:
            while not (self.stopping.is_set() or self.engine.failed):
                async with asyncio.timeout(30):
                    await put(event(picture(self.engine.view())))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), PICTURES)

        with contextlib.suppress(TimeoutError, Gone):
            async with event_stream(send) as put:
                if scope["method"] != "HEAD":  # that has no body to go on with
                    await unless_gone(write(put), receive)
            return
        break_off(scope, at_once=True)

    async def _completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, chat=False)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, chat=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, chat: bool) -> None:
        body = await read_body(scope, receive)
        asked, prompts = await asyncio.to_thread(self._read, body, chat)  # of a long text it takes a while
        del body
        shapes = Shapes(
            tokenizer=self.served.prompts.tokenizer,
            chat=chat,
            identity=f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self.served.name,
            logprobs=asked.logprobs is not None,
            include_usage=asked.include_usage,
        )
        answering = Answering(self.engine, shapes, asked.stop, asked.stream, self.metrics)
        answering.submit(self._requests(asked, prompts), len(prompts))
        try:
            if asked.stream:
                await self._stream(answering, scope, receive, send)
            else:
                whole = await unless_gone(answering.whole(), receive)
                await JSONResponse(whole)(scope, receive, send)
        except Gone:
            self.metrics.dropped["gone"] += 1
            raise
        except Broken as error:
            why = "the answer couldn't be finished"
            if str(error) == "failed" and not self.engine.failed:
                why += ": the model's logits are NaN or infinite"
            raise Refused(500 if not self.stopping.is_set() else 503, why) from None
        finally:
            answering.cancel()
            self._note(scope, asked, answering)

    async def _stream(self, answering: Answering, scope: Scope, receive: Receive, send: Send) -> None:
        """Send parts; an answer that breaks off, or that nobody reads, ends its connection as a broken one."""
        try:
            async with event_stream(send) as put:
                await unless_gone(answering.stream(put), receive, answering.slow)
        except Broken:
            break_off(scope, at_once=False)
        except Slow:
            self.metrics.dropped["slow"] += 1
            break_off(scope, at_once=True)

    def _read(self, body: bytes, chat: bool) -> tuple[Asked, list[tuple[int, ...]]]:
        asked = parse(body, chat, self.engine.samplers)
        self._named(asked.model)
        prompts = self.served.prompts
        if asked.messages is not None:
            return asked, [prompts.conversation(asked.messages)]
        return asked, [prompts.text(prompt) for prompt in asked.prompts]

    def _requests(self, asked: Asked, prompts: list[tuple[int, ...]]) -> list[Request]:
        stop_ids = self.served.prompts.ends(asked.messages is not None)
        return [
            Request(
                prompt,
                max(1, self.served.context - len(prompt)) if asked.max_tokens is None else asked.max_tokens,
                asked.sampling,
                asked.sampler,
                asked.depth,
                number,
                asked.logprobs,
                stop_ids,
                asked.echo,
            )
            for prompt in prompts
            for number in range(asked.number)
        ]

    def _note(self, scope: Scope, asked: Asked, answering: Answering) -> None:
        """What the log says of an answer."""
        counted = answering.usage()
        ends = ",".join(choice.finish or "cut off" for choice in answering.choices)
        note = f"{counted['prompt_tokens']} + {counted['completion_tokens']} tokens"
        note += f", depth {counted['mean_depth']}, {asked.sampler.name}, {ends}"
        if self.served.log_text:
            asks = [m.content for m in asked.messages] if asked.messages is not None else asked.prompts
            note += f", {json.dumps([asks, [choice.text for choice in answering.choices]], ensure_ascii=False)}"
        scope["state"]["note"] = note


class _Asgi:
    """A method that is called as an ASGI application."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Gone:  # starlette would answer it as a defect
            scope["state"]["gone"] = True


def _plain(answer: Callable[[HttpRequest], Awaitable[Response]]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await answer(HttpRequest(scope, receive)))(scope, receive, send)

    return app


def refusal(error: Refused) -> Response:
    """The response to a request that is refused."""
    headers = {"retry-after": AGAIN[error.status]} if error.status in AGAIN else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


async def _refused(_: HttpRequest, error: Refused) -> Response:
    return refusal(error)


async def _not_found(request: HttpRequest, error: HTTPException) -> Response:
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        response = refusal(Refused(405, f"this path takes {allowed}"))
        response.headers["allow"] = allowed
        return response
    return refusal(Refused(error.status_code, "there is no such path; docs/serving.md lists them", code="not_found"))


async def _defect(_: HttpRequest, error: Exception) -> Response:
    return refusal(Refused(500, "a defect of the server; its log says where"))
