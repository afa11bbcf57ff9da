"""A server with the fake engine on a port of its own: in a thread for tests, or as a process (`python served.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dreamer_jax.errors import UserError
from dreamer_jax.serving import process
from dreamer_jax.serving.keys import Keys
from dreamer_jax.serving.prompts import Prompts
from dreamer_jax.serving.server import Served, Server
from tests.serving.fake import TOKENIZER, FakeEngine

NAME = "fake"


def make(
    engine: FakeEngine,
    keys: Keys | None = None,
    log_text: bool = False,
    template: str = "{question}\n",
    name: str = NAME,
) -> Server:
    """A server of the fake engine."""
    prompts = Prompts(TOKENIZER, TOKENIZER.vocab_size, template)
    return Server(engine, Served(name, prompts, engine.context, keys, log_text=log_text))


@contextlib.contextmanager
def running(server: Server, port: int = 0) -> Iterator[str]:
    """Its address, while it runs in a thread."""
    taken = process.open_port("127.0.0.1", port)
    listening = threading.Event()
    ends: list[asyncio.Task[None]] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        ends.append(asyncio.create_task(process._serve(server, taken, 5, lambda line: listening.set())))
        with contextlib.suppress(asyncio.CancelledError):
            await ends[0]

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="server")
    thread.start()
    assert listening.wait(10)
    try:
        yield process.address(taken)
    finally:
        loops[0].call_soon_threadsafe(ends[0].cancel)
        thread.join(10)
        assert not thread.is_alive()
        taken.close()
        server.engine.close(0)


def main() -> None:
    """Serve until a signal, or until the engine fails: `python served.py PACE GRACE [TOKENS]`."""
    from dreamer_jax.cli import interrupts
    from dreamer_jax.cli.arguments import say

    interrupts.prepare()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    engine = FakeEngine(pace=float(sys.argv[1]), context=100_000, dies_at=next(map(int, sys.argv[3:]), None))
    try:
        process.serve(make(engine), process.open_port("127.0.0.1", 0), float(sys.argv[2]), say)
    except KeyboardInterrupt:
        print("dreamer: interrupted", file=sys.stderr)
        interrupts.end()
    except UserError as error:
        print(f"dreamer: error: {error}", file=sys.stderr)
        sys.exit(2)
    assert threading.active_count() <= 2, threading.enumerate()  # this one, and the one that watches for Ctrl-C


if __name__ == "__main__":
    main()
