"""Noticing that a run is asked to stop: SIGTERM, Ctrl-C, and what a cloud's metadata server announces."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from dreamer_jax.errors import INTERRUPTED_EXIT_CODE, RESTART_EXIT_CODE

METADATA_SECONDS = 5.0
"""Between two looks at the metadata server."""


class StopRequest:
    """Whether the run shall end after this step; a context manager that listens while it is open.

    With several processes all of them get the same answer at the same step, whichever of them was asked.

    Attributes:
        exit_code: what the process should end with once `reached` has been True.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._asked = threading.Event()
        self._closed = threading.Event()
        self._steps = 0
        self._reached = False
        self._before: dict[int, object] = {}
        self._together = jax.distributed.is_initialized()
        self.exit_code = RESTART_EXIT_CODE

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            # With several processes jax listens to SIGTERM itself, and tells the others.
            signals = (signal.SIGINT,) if self._together else (signal.SIGTERM, signal.SIGINT)
            self._before = {number: signal.signal(number, self._on_signal) for number in signals}
        if jax.default_backend() == "tpu" or "GCE_METADATA_HOST" in os.environ:
            threading.Thread(target=self._watch_metadata, name="metadata", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def reached(self) -> bool:
        """To be asked once after every step, by every process."""
        self._steps += 1
        if self._together:  # jax says it at a single step, which the run may leave again by going back
            self._reached = multihost_utils.reached_preemption_sync_point(self._steps) or self._reached
            return self._reached
        return self._asked.is_set()

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGINT:
            if self._asked.is_set():
                raise KeyboardInterrupt  # the second Ctrl-C doesn't wait for the step
            self.exit_code = INTERRUPTED_EXIT_CODE
            os.write(2, b"stopping after this step and saving; Ctrl-C again stops at once\n")  # print may be under way
            if self._together:
                os.kill(os.getpid(), signal.SIGTERM)  # jax passes it on
        self._asked.set()

    def _watch_metadata(self) -> None:
        seen = self._notices()
        while seen is not None and not self._closed.wait(METADATA_SECONDS):
            now = self._notices() or seen
            # Only what is new: a notice that was there when the run started has stopped a run before this one.
            if new := sorted(now - seen):
                self._say(f"the machine is about to go away ({', '.join(new)})")
                if self._together:
                    os.kill(os.getpid(), signal.SIGTERM)  # jax passes it on
                else:
                    self._asked.set()
                return
            seen = now

    def _notices(self) -> set[str] | None:
        """What the metadata server announces; None where there is none."""
        found = set()
        try:
            if (event := _metadata("maintenance-event")) not in ("", "NONE"):
                found.add(f"maintenance-event {event}")
            if _metadata("preempted") == "TRUE":
                found.add("preempted")
            upcoming = _metadata("upcoming-maintenance")
            if upcoming.startswith("{") and json.loads(upcoming).get("maintenanceStatus") == "ONGOING":
                found.add("maintenance has begun")
        except (OSError, ValueError):
            return None
        return found


def _metadata(key: str) -> str:
    """A value of this instance; "" where the server doesn't know the key."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise
