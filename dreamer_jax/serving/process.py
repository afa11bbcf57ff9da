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
from typing import Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dreamer_jax.errors import UserError
from dreamer_jax.serving.server import Server

LOOK = 0.2
"""Seconds between two looks at whether the engine has failed."""
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
    """Take a port; whoever comes before `serve` waits.

    Raises:
        UserError: it can't be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen()  # only then it is taken: others could bind to it, too
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
    """Answer requests until SIGTERM, then finish those that were admitted; or until the engine fails.

    Args:
        server: answers them.
        taken: the port.
        grace: seconds for what was admitted.
        say: gets a line when it begins and when it ends.
    Raises:
        KeyboardInterrupt: Ctrl-C, or a second SIGTERM.
        UserError: the engine has failed; who was waiting has been told.
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
    listening = _Uvicorn(config)
    taken.listen(config.backlog)
    with _signals() as signals:
        say(f"serving {server.served.name} at {address(taken)}")
        tasks = [
            asyncio.create_task(listening.serve(sockets=[taken])),
            asyncio.create_task(_stop(server, listening, signals, grace, say)),
            asyncio.create_task(signals.at_once.wait()),
            asyncio.create_task(_end_with_engine(server, listening)),
        ]
        try:
            await asyncio.wait((tasks[0], tasks[2]), return_when=asyncio.FIRST_COMPLETED)
            if signals.at_once.is_set():
                server.stopping.set()  # who asks while the rest is cut off is refused; asyncio takes no work any more
                raise KeyboardInterrupt
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
    if server.engine.failed:
        raise UserError("the engine has failed; the log above has why. Smaller --rows or --context take less memory")
    say("stopped")


class _Signals(NamedTuple):
    """What was asked for."""

    stop: asyncio.Event
    at_once: asyncio.Event


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    """SIGTERM and Ctrl-C as events, while they are waited for.

    An exception that is raised wherever the main thread is would be swallowed, now and then, by whoever runs there:
    uvicorn takes any in a request for one of the request's own.
    """
    loop, found = asyncio.get_running_loop(), _Signals(asyncio.Event(), asyncio.Event())
    asked: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        first = asked == [signal.SIGTERM]
        loop.call_soon_threadsafe((found.stop if first else found.at_once).set)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job in the background
                before[number] = signal.signal(number, take)
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _stop(
    server: Server, listening: uvicorn.Server, signals: _Signals, grace: float, say: Callable[[str], None]
) -> None:
    """When it is asked for: finish what was admitted, then end."""
    await signals.stop.wait()
    say(f"stopping: what was admitted is finished within {grace:g} s; Ctrl-C stops at once")
    server.stopping.set()
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def close() -> None:
        server.engine.close(grace)
        with contextlib.suppress(RuntimeError):  # the event loop was interrupted
            loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=close, name="closing", daemon=True).start()
    await closed.wait()
    await asyncio.sleep(0)  # the last answers were put on their way before this
    listening.should_exit = True


async def _end_with_engine(server: Server, listening: uvicorn.Server) -> None:
    """When the engine has failed: end, as there is nobody left who answers."""
    while not server.engine.failed:
        await asyncio.sleep(LOOK)
    listening.should_exit = True
