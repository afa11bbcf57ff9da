"""Ctrl-C ends a command with one line, wherever it meets it.

Python raises KeyboardInterrupt between any two instructions of the main thread. Three places can't bear that: an import
(an extension module that is interrupted fails in its own way, or crashes), callbacks from compiled code (which swallow
it), and long calls into compiled code, such as compiling (where it comes only after their end). `prepare` mends all
three.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

from dreamer_jax.errors import INTERRUPTED_EXIT_CODE

PATIENCE = 3.0
"""Seconds that a command gets after a second Ctrl-C behind one that it hasn't noticed; checkpoints bear the end."""
AGAIN = 0.05
"""Seconds after which an interrupt that was swallowed comes again."""

_unnoticed = 0
"""How often Ctrl-C was pressed since `_on_interrupt` has run; training has its own handler, which doesn't count."""
_reading = -1
"""The end of the pipe with a byte for every press that `_watch` hasn't counted."""
_counting = threading.RLock()
"""Held while presses are counted or forgotten: one that was noticed before it is counted must not count afterwards."""


def prepare() -> None:
    """For the process of a command, before it imports anything large. Does nothing where Ctrl-C is ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # a job in the background, or a program around this one has its own idea
    signal.signal(signal.SIGINT, _on_interrupt)
    before = sys.unraisablehook

    def swallowed(what: Any) -> None:
        if what.exc_type is KeyboardInterrupt:
            main = threading.main_thread().ident  # the signal has to wake that one up
            threading.Timer(AGAIN, signal.pthread_kill, [main, signal.SIGINT]).start()
        else:
            before(what)

    sys.unraisablehook = swallowed
    global _reading
    _reading, writing = os.pipe()
    os.set_blocking(_reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # written to at once, also during a long call
    threading.Thread(target=_watch, name="interrupts", daemon=True).start()


def leave() -> None:
    """End the process now, with one line."""
    os.write(2, b"dreamer: interrupted\n")
    os._exit(INTERRUPTED_EXIT_CODE)


def end(code: int = INTERRUPTED_EXIT_CODE) -> NoReturn:
    """End the process after a command that was interrupted, or whose threads go on: without Python's own end, which
    crashes in XLA's threads if they are still at work."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    global _unnoticed
    with _counting:
        _presses()
        _unnoticed = 0
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            leave()  # nothing has begun that would have to be cleaned up
        frame = frame.f_back
    raise KeyboardInterrupt


def _presses() -> int:
    """How often Ctrl-C was pressed since this was asked last."""
    try:
        return os.read(_reading, 64).count(signal.SIGINT)
    except BlockingIOError:  # not since then
        return 0


def _watch() -> None:
    """Ends the process some time after the second Ctrl-C that hasn't been noticed, and at once after the third."""
    global _unnoticed
    while True:
        select.select([_reading], [], [])
        with _counting:
            pressed = _presses()
            _unnoticed += pressed
            count = _unnoticed
        if pressed and count == 2:
            threading.Thread(target=_leave_later, daemon=True).start()
        elif count > 2:
            leave()


def _leave_later() -> None:
    time.sleep(PATIENCE)
    if _unnoticed > 1:
        leave()
