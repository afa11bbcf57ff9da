"""What ASGI leaves to an application: bodies that may be too large, clients that leave, connections that break off."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from dreamer_jax.serving.protocol import Refused
from dreamer_jax.serving.streaming import Slow

LARGEST_BODY = 4 << 20
"""Bytes of a request; a context of 100,000 tokens is a tenth of it."""


class Gone(Exception):
    """The client has left."""


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.strip("[]").lower()
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """The body of a request, of which no more is read than is allowed."""
    too_large = Refused(413, f"the body has more than {LARGEST_BODY} bytes", code="body_too_large")
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > LARGEST_BODY:
        raise too_large
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST_BODY:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)


@contextlib.asynccontextmanager
async def event_stream(send: Send) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Server-sent events; the response is only completed where nothing goes wrong."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, (b"x-accel-buffering", b"no")]})

    async def put(text: bytes) -> None:
        await send({"type": "http.response.body", "body": text, "more_body": True})

    yield put
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(work: Coroutine[Any, Any, Any], receive: Receive, slow: asyncio.Event | None = None) -> Any:
    """The result of some work, which ends when the client leaves or is too slow.

    Raises:
        Gone, Slow: it did.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    if slow is not None:
        tasks.append(asyncio.ensure_future(slow.wait()))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] in done:
            return tasks[0].result()
        raise Gone if tasks[1] in done else Slow
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def break_off(scope: Scope, at_once: bool) -> None:
    """End the connection without the end of the response, so that nobody takes the answer for a whole one.

    Args:
        at_once: whether what is still on its way to the client is dropped.
    """
    transport = scope["state"].get("transport")
    if transport is not None:
        transport.abort() if at_once else transport.close()
