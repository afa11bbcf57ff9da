"""A cloud that only prints: it stands for gcloud in a dry run, and everything succeeds at once."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence

from dreamer_jax.launching.cloud import Answer
from dreamer_jax.launching.settings import Settings

MISSING = Answer(1, "", "NOT_FOUND")


class Rehearsal:
    """Prints every command and answers as a cloud would that has a free machine and a very short run.

    Args:
        settings: of the run.
        exists: whether its machine is there already.
        show: prints a line.
    """

    def __init__(self, settings: Settings, exists: bool, show: Callable[[str], None]):
        self.settings, self.exists, self.show = settings, exists, show
        self.attempt = 0
        self.ended = False

    def __call__(self, words: Sequence[str], seconds: float) -> Answer:
        """Stands for `cloud.run_command`."""
        self.show(shlex.join(words))
        collection, verb = words[3:5]
        if verb == "create":
            self.exists = True
        elif verb == "delete":
            self.exists = False
        elif verb == "describe":
            return self._describe(collection)
        elif verb == "ssh":
            return self._ssh(next(w for w in words if w.startswith("--command=")).partition("=")[2])
        return Answer(0, "", "")

    def _describe(self, collection: str) -> Answer:
        if not self.exists:
            return MISSING
        node = {"state": "READY", "networkEndpoints": [{}] * self.settings.slice.hosts}
        return Answer(0, json.dumps({"state": {"state": "ACTIVE"}} if collection == "queued-resources" else node), "")

    def _ssh(self, command: str) -> Answer:
        verb, *rest = shlex.split(command)[2:]
        if verb == "start":
            self.attempt = int(rest[0])
        if verb != "status":
            return Answer(0, "", "")
        state = f"attempt={self.attempt} state={'exited code=0' if self.attempt else 'idle code='} lines=0"
        return Answer(0, "".join(f"dreamer-worker w-{i} {state}\n" for i in range(self.settings.slice.hosts)), "")
