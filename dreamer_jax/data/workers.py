"""Processes that run the tasks of a preparation, or none at all for one worker."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from dreamer_jax.errors import UserError

_worker: Any = None
_shared_version = -1


class Pool:
    """Runs methods of a worker object: in this process for one worker, else in `workers` processes with one each.

    Args:
        workers: number of processes.
        make: makes the worker object; picklable, as are `arguments`.
        arguments: for `make`.
    """

    def __init__(self, workers: int, make: Callable[..., Any], arguments: tuple[Any, ...]):
        self._shared: Any = None
        self._version = 0
        self._own: Any = None
        self._executor: ProcessPoolExecutor | None = None
        if workers == 1:
            self._own = make(*arguments)
        else:
            # Spawned, because a forked copy of a process with threads may hang.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(workers, context, _start, (os.getpid(), make, arguments))
        self._workers = workers

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._executor is None:
            return
        if kind is KeyboardInterrupt:  # a unit takes minutes; what they are at has left no file and begins anew
            for process in multiprocessing.active_children():
                process.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def share(self, value: Any) -> None:
        """Set `shared` of every worker object for the tasks to come."""
        self._shared, self._version = value, self._version + 1

    def run(self, name: str, tasks: Sequence[Any]) -> Iterator[None]:
        """Run the method `name` on every task; yields once for each that is done.

        Raises:
            UserError: a task raised one, or a process died.
        """
        if self._executor is None:
            self._own.shared = self._shared
            for task in tasks:
                getattr(self._own, name)(task)
                yield
            return
        # A few at a time: a task that fails is known before many more have begun.
        remaining, running = iter(tasks), set[Future[None]]()
        try:
            while True:
                for task in remaining:
                    with _without_interrupts():
                        running.add(self._executor.submit(_run, name, task, self._shared, self._version))
                    if len(running) >= 2 * self._workers:
                        break
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                    yield
        except BrokenProcessPool:
            raise UserError(
                "a process was killed, perhaps for want of memory; start again with fewer --workers, it goes on "
                "where it stopped"
            ) from None


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C waits meanwhile. Processes that are started never get it: it reaches the parent as well, which decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(parent: int, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _worker
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _worker = make(*arguments)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: killed, it can't say so."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _run(name: str, task: Any, shared: Any, version: int) -> None:
    global _shared_version
    if version != _shared_version:
        _worker.shared, _shared_version = shared, version
    getattr(_worker, name)(task)
