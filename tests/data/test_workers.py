"""The processes of a preparation: what Ctrl-C does to them."""

import multiprocessing
import signal
import time
from pathlib import Path

import pytest

from dreamer_jax.data.workers import Pool


class Sleeper:
    """Works by doing nothing."""

    shared = None

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


def test_an_interrupt_waits_for_no_task():
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Pool(2, Sleeper, ()) as pool:
        for _ in pool.run("nap", [0, 600, 600]):
            begun = time.monotonic()
            raise KeyboardInterrupt
    assert time.monotonic() - begun < 60 and not multiprocessing.active_children()


def test_an_interrupt_is_the_parents_alone():
    """From their first moment on: while they import, it would end each with a traceback. The parent still hears it."""
    with Pool(2, Sleeper, ()) as pool:
        for _ in pool.run("nap", [0]):
            for process in multiprocessing.active_children():
                status = Path(f"/proc/{process.pid}/status")
                if not status.exists():
                    pytest.skip("needs Linux's /proc")
                blocked = next(line for line in status.read_text().splitlines() if line.startswith("SigBlk:"))
                assert int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
