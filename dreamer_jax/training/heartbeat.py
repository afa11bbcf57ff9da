"""A watchdog: a process whose training has come to a standstill ends itself, so that the job can be started again."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

from dreamer_jax.errors import RESTART_EXIT_CODE


class Heartbeat:
    """Ends the process with RESTART_EXIT_CODE when `beat` wasn't called for too long; a context manager.

    A host that hangs in a collective, in a read or in a lock can't raise an error. Before the end the stacks of all
    threads go to stderr.

    Args:
        seconds: the longest silence.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._last = time.monotonic()
        self._suspended = False
        self._closed = threading.Event()

    def __enter__(self) -> Heartbeat:
        self.beat()
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def beat(self) -> None:
        """Something was finished."""
        self._last = time.monotonic()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """For work whose length says nothing, such as compiling."""
        self._suspended = True
        try:
            yield
        finally:
            self.beat()
            self._suspended = False

    def _watch(self) -> None:
        interval, woke = min(5.0, self._seconds / 4), time.monotonic()
        while not self._closed.wait(interval):
            # A wait that took longer: this whole process stood still, as after Ctrl-Z. Nothing could be finished then.
            now = time.monotonic()
            self._last, woke = min(now, self._last + max(0.0, now - woke - interval)), now
            silent = now - self._last
            if silent > self._seconds and not self._suspended:
                print(
                    f"dreamer: error: nothing was finished for {silent:.0f} s (safety.stuck_seconds "
                    f"{self._seconds:g}); this process ends so that the job can be started again",
                    file=sys.stderr,
                )
                with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may not be a real file
                    faulthandler.dump_traceback(all_threads=True)
                sys.stderr.flush()
                os._exit(RESTART_EXIT_CODE)
