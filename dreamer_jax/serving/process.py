"""A server as a process: its port, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dreamer_jax.errors import UserError
from dreamer_jax.serving.server import Server

LAST = 5
"""Seconds that connections get for what is left to send when all answers are finished."""


class _Protocol(H11Protocol):
    """Hands its transport to the application, which can end a connection with it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = self.app_state | {"transport": transport}


class _Uvicorn(uvicorn.Server):
    """Leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield


def open_port(host: str, port: int) -> socket.socket:
    """Take a port; nobody is answered there yet.

    Raises:
        UserError: it can't be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: {error.strerror}; name another one (--port 0 takes any)"
        ) from None
    return taken


def address(taken: socket.socket) -> str:
    """Where a port is, as a URL."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(taken: socket.socket) -> bool:
    """Whether only this machine reaches it."""
    return ipaddress.ip_address(taken.getsockname()[0]).is_loopback


def serve(server: Server, taken: socket.socket, grace: float, say: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM, then finish those that were admitted.

    Args:
        server: answers them.
        taken: the port.
        grace: seconds for what was admitted.
        say: gets a line when it begins and when it ends.
    Raises:
        KeyboardInterrupt: Ctrl-C, or a second SIGTERM.
    """
    asyncio.run(_serve(server, taken, grace, say))


async def _serve(server: Server, taken: socket.socket, grace: float, say: Callable[[str], None]) -> None:
    config: Any = uvicorn.Config(
        server,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.CRITICAL,  # the server has a log of its own; uvicorn's shows paths and messages of exceptions
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=LAST,
    )
    listening, loop, asked = _Uvicorn(config), asyncio.get_running_loop(), asyncio.Event()
    times = 0

    def on_term(number: int, frame: FrameType | None) -> None:
        nonlocal times
        times += 1
        if times > 1:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(asked.set)

    async def stop() -> None:
        await asked.wait()
        say(f"stopping: what was admitted is finished within {grace:g} s; Ctrl-C stops at once")
        server.stopping.set()
        closed = asyncio.Event()

        def close() -> None:
            server.engine.close(grace)
            with contextlib.suppress(RuntimeError):  # the event loop was interrupted
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=close, name="closing", daemon=True).start()
        await closed.wait()
        await asyncio.sleep(0)  # the last answers were put on their way before this
        listening.should_exit = True

    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, on_term)
    stopping = asyncio.create_task(stop())
    taken.listen(config.backlog)
    say(f"serving {server.served.name} at {address(taken)}")
    try:
        await listening.serve(sockets=[taken])
    finally:
        stopping.cancel()
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    say("stopped")
