"""One run's TPU: asked for, waited for, installed, deleted. Nothing is made that the state file doesn't know of."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError
from dreamer_jax.launching.archive import pack
from dreamer_jax.launching.cloud import Answer, Cloud, CloudError, Kind, last_words
from dreamer_jax.launching.state import State, Store

LABEL = "dreamer-launch"
WORKER_SCRIPT = "launch/worker.sh"
INSTALL_SECONDS = 1800.0
TRIES = 5
"""Copying, installing and starting are tried so often while the machine is well."""
LOG_LINES = 2000
"""What worker.sh gives of a log at once, at most."""
DELETE_TRIES = 40
"""Looks at a resource that is being deleted, with growing pauses: about half an hour."""
COMING = ("STATE_UNSPECIFIED", "CREATING", "ACCEPTED", "PROVISIONING", "WAITING_FOR_RESOURCES")
LEAVING = ("SUSPENDING", "SUSPENDED")
NODE_LOST = ("PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDDEN", "HIDING")


class Preempted(Exception):
    """The cloud took the machine away, or it broke; `counts` when that happened before it was of use."""

    def __init__(self, message: str, counts: bool = False):
        super().__init__(message)
        self.counts = counts


class Asked(Exception):
    """Another launcher was asked to stop or delete this run."""


@dataclass(frozen=True)
class Report:
    """What one worker says of itself.

    Attributes:
        host: its host name, which ends in -w-NUMBER.
        attempt: the attempt it was last started for; 0 for none.
        state: running, exited, or lost (it ended without leaving an exit code: the machine restarted).
        code: exit code of `dreamer train`, or None.
        lines: lines of its log.
    """

    host: str
    attempt: int
    state: str
    code: int | None
    lines: int

    @property
    def worker(self) -> str:
        """Its number, as `--worker` takes it."""
        match = re.search(r"-w-(\d+)$", self.host)
        return match.group(1) if match else "0"


class Machine:
    """The TPU of one run, and its workers.

    Args:
        state: the run's entry, already saved.
        store: where it is saved.
        cloud: project and zone.
        root: the checkout.
        say: prints a line.
        poll_seconds: pause between two looks.
    """

    def __init__(
        self,
        state: State,
        store: Store,
        cloud: Cloud,
        root: Path,
        say: Callable[[str], None],
        poll_seconds: float = 20.0,
    ):
        self.state, self.store, self.cloud, self.root, self.say = state, store, cloud, root, say
        self.settings, self.name = state.settings, state.settings.name
        self.poll_seconds, self.pods = poll_seconds, state.settings.slice.hosts
        self._node: dict[str, Any] = {}
        self._misses, self._last_said = 0, ""

    # What the person wants, and what is saved.

    def save(self, **changes: Any) -> None:
        """Change fields of the run's entry.

        Raises:
            Asked: when the run has been deleted or stopped from elsewhere.
        """
        state = self.store.update(self.name, **changes)
        if state is None:
            raise Asked(f"{self.name} was deleted")
        self.state = state
        if state.wanted != "running":
            raise Asked(f"{self.name} is to be {state.wanted}")

    def pause(self, seconds: float | None = None) -> None:
        """Wait for the next look; raises Asked as `save` does."""
        self.cloud.sleep(self.poll_seconds if seconds is None else seconds)
        self.save()

    # Existence.

    def ensure(self) -> None:
        """Have the machine up: take the one that exists, or ask for one and wait for it.

        Raises:
            Preempted: when it went away while being made.
            UserError: when it can't be had; nothing is left behind that was asked for here.
        """
        if self.state.phase == "removing":
            self.remove()
        found = self.cloud.describe(self.name)
        if found is None and self.state.phase != "seen":
            self._create()
        elif found is not None and self.state.phase == "absent":
            raise self._not_ours()
        self._wait_until_ready()

    def look(self) -> bool:
        """Whether the machine is ready now; False while it is coming up or being repaired.

        Raises:
            Preempted: it is gone or going.
            UserError: its request failed for good, or someone else deleted it.
        """
        found = self.cloud.describe(self.name)
        state = ((found or {}).get("state") or {}).get("state", "MISSING")
        if found is not None and not self._ours(found):
            raise self._not_ours()
        if found is not None and self.state.phase == "asked":
            self.save(phase="seen")
        self._misses = 0 if found else self._misses
        if state in COMING:
            self._say_once(f"queued resource {self.name}: {state}")
            return False
        if state in LEAVING:
            raise Preempted(f"the queued resource is {state}")
        if state == "ACTIVE":
            return self._look_at_node()
        if state == "FAILED":
            raise self._request_failed((found or {}).get("state") or {})
        self._misses += 1
        if state == "MISSING" and self.state.phase == "asked" and self._misses <= 3:
            return False  # a request just made may not be readable yet
        if state == "MISSING" and self.cloud.describe_node(self.name) is None:
            self._forget_phase()
        raise UserError(
            f"the queued resource {self.name} is {state}: someone else deleted it, so this run ends here; its "
            f"checkpoints are in {self.settings.run_dir}, and starting it again goes on from them"
        )

    def remove(self) -> None:
        """Delete everything of this run in the cloud, and see that it is gone.

        Raises:
            CloudError: when it can't be deleted; the entry stays, and the message has the command for it.
        """
        looks = 4 if self.state.phase == "asked" else 1  # a request just made may not be readable yet
        with self.store.changing(self.name):
            self.store.update(self.name, phase="removing", installed="")
            self._say_once(f"deleting the queued resource {self.name}")
            self._delete_until_gone(looks)
            state = self.store.update(self.name, phase="absent")
        self.state = state or self.state
        self._say_once(f"the queued resource {self.name} is deleted")

    def _create(self) -> None:
        self._misses = 0
        with self.store.changing(self.name):
            self.save()  # is it still wanted?
            self.save(phase="asked", installed="")  # before the request: an answer may be lost
            self.say(f"asking for {self.settings.tpu} ({self._kind()}) in {self.settings.zone}: {self.name}")
            try:
                self.cloud.create(self.name, self._create_options())
            except CloudError as error:
                if error.kind is Kind.EXISTS:
                    found = self.cloud.describe(self.name)
                    if found is None or self._ours(found):
                        return  # an earlier try whose answer was lost
                    self._forget_phase()
                    raise self._not_ours() from None
                refused = error.kind in (Kind.PERMISSION, Kind.LOGIN, Kind.QUOTA, Kind.INVALID, Kind.MISSING)
                if refused or self.cloud.describe(self.name) is None:
                    self._forget_phase()
                raise

    def _create_options(self) -> list[str]:
        settings = self.settings
        options = [
            f"--accelerator-type={settings.slice.accelerator_type}",
            f"--runtime-version={settings.runtime_version or settings.slice.runtime_version}",
            f"--labels={LABEL}={self.state.token}",
            f"--valid-until-duration={settings.queue_hours}h",
            "--scopes=https://www.googleapis.com/auth/cloud-platform",  # the roles of the account decide
        ]
        if settings.spot:
            options.append("--spot")
        for flag in ("network", "subnetwork", "service_account"):
            if getattr(settings, flag):
                options.append(f"--{flag.replace('_', '-')}={getattr(settings, flag)}")
        return options

    def _kind(self) -> str:
        slice_ = self.settings.slice
        hosts = "1 machine" if slice_.hosts == 1 else f"{slice_.hosts} machines"
        return f"{slice_.chips} chips, topology {slice_.topology}, {hosts}{', spot' if self.settings.spot else ''}"

    def _wait_until_ready(self) -> None:
        while not self.look():
            self.pause()

    def _look_at_node(self) -> bool:
        node = self.cloud.describe_node(self.name)
        state = (node or {}).get("state", "MISSING")
        if node is None or state in NODE_LOST:
            raise Preempted(f"the TPU VM is {state}")
        if node.get("health") == "UNHEALTHY_MAINTENANCE":
            state = "under maintenance"
        if state != "READY":
            self._say_once(f"TPU VM {self.name}: {state}")
            return False
        self._node = node
        self.pods = len(node.get("networkEndpoints") or []) or self.settings.slice.hosts
        return True

    def _request_failed(self, state: dict[str, Any]) -> Exception:
        error = (state.get("failedData") or {}).get("error") or {}
        message = error.get("message") or "no reason given"
        if error.get("code") in (10, 13, 14):  # the service's own trouble, by gRPC's numbers
            return Preempted(f"the request failed: {message}", counts=True)
        self.remove()
        return UserError(
            f"the request for {self.settings.tpu} failed: {message}; another zone, another type, or quota may help. "
            "It was deleted, since a failed request still holds quota"
        )

    def _delete_until_gone(self, looks: int) -> None:
        pause, problem = 5.0, ""
        for _ in range(DELETE_TRIES):
            try:
                found = self.cloud.describe(self.name)
                if found is None and self.cloud.describe_node(self.name) is None:
                    looks -= 1
                    if looks <= 0:
                        return
                elif found is None:
                    self.cloud.delete_node(self.name)
                elif not self._ours(found):
                    return
                elif (found.get("state") or {}).get("state") != "DELETING":
                    self.cloud.delete(self.name)
            except CloudError as error:
                problem = f" ({error})"
                if error.kind in (Kind.PERMISSION, Kind.LOGIN):
                    break
            self.cloud.sleep(pause)
            pause = min(60.0, pause * 1.5)
        raise CloudError(
            Kind.OTHER,
            f"{self.name} in {self.settings.zone} could not be deleted{problem}; it may still cost money. "
            f"Try again with 'launch/tpu delete {self.name}', or: {self.cloud.delete_command(self.name)}",
        )

    def _ours(self, found: dict[str, Any]) -> bool:
        """Whether the resource has this run's label, or none."""
        specs = (found.get("tpu") or {}).get("nodeSpec") or [{}]
        labels = (specs[0].get("node") or {}).get("labels") or {}
        return labels.get(LABEL, self.state.token) == self.state.token

    def _not_ours(self) -> UserError:
        return UserError(
            f"a queued resource {self.name} exists in {self.settings.zone} that this launcher didn't make; it is left "
            "alone. Take another name, or delete it: " + self.cloud.delete_command(self.name)
        )

    def _forget_phase(self) -> None:
        self.state = self.store.update(self.name, phase="absent") or self.state

    def _say_once(self, line: str) -> None:
        if line != self._last_said:
            self.say(line)
            self._last_said = line

    # The workers.

    def install(self) -> None:
        """Bring the checkout to every worker and install it, unless that is done already.

        Raises:
            Preempted: the machine went away meanwhile.
            UserError: it doesn't succeed on a machine that is well.
        """
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "dreamer.tar.gz"
            stamp = pack(self.root, archive)[:16]
            machine = f"{self._node.get('id', '')} {self._node.get('createTime', '')}"
            done = f"{stamp} {machine} {self.settings.prepare}"
            if self.state.installed == done:
                return
            self.say(f"installing on {self.pods} worker{'s' if self.pods > 1 else ''}")
            files = [str(archive), str(self.root / WORKER_SCRIPT)]
            self._insist("copy the checkout", lambda: self.cloud.copy(self.name, files))
            command = f"bash worker.sh install {stamp} {shlex.quote(self.settings.prepare)}"
            self._insist("install", lambda: self.cloud.ssh(self.name, command, seconds=INSTALL_SECONDS))
        self.save(installed=done)

    def start(self) -> None:
        """Start `dreamer train` on every worker, as a new attempt."""
        words = self.settings.training_words()
        self.save(attempt=self.state.attempt + 1, words=tuple(words))
        self.say(f"starting the workers (attempt {self.state.attempt}): dreamer {shlex.join(words)}")
        command = f"bash worker.sh start {self.state.attempt} {shlex.join(words)}"
        self._insist("start the workers", lambda: self.cloud.ssh(self.name, command))

    def reports(self) -> list[Report]:
        """What the workers say now; those that can't be reached are missing."""
        answer = self.cloud.ssh(self.name, "bash worker.sh status")
        pattern = r"^dreamer-worker (\S+) attempt=(\d+) state=(\w+) code=(\d*) lines=(\d+)$"
        return [
            Report(host, int(attempt), state, int(code) if code else None, int(lines))
            for host, attempt, state, code, lines in re.findall(pattern, answer.out, re.MULTILINE)
        ]

    def log(self, first: int, worker: str = "0") -> list[str]:
        """Complete lines of a worker's log from number `first` (from 1) on; none when it can't be reached."""
        return self.read_log(first, worker)[0]

    def read_log(self, first: int, worker: str = "0") -> tuple[list[str], str]:
        """The same lines, and what was said when it couldn't be reached, or ""."""
        lines: list[str] = []
        while True:
            answer = self.cloud.ssh(self.name, f"bash worker.sh log {first + len(lines)}", worker)
            if answer.code != 0:
                return lines, last_words(answer)
            found = answer.out.split("\n")[:-1]
            lines += found
            if len(found) < LOG_LINES:
                return lines, ""

    def stop(self) -> Answer:
        """End the training processes as a preemption would: they save and exit, or are killed after two minutes."""
        return self.cloud.ssh(self.name, "bash worker.sh stop", seconds=600)

    def _insist(self, what: str, action: Callable[[], Answer]) -> None:
        """Repeat an action on all workers until it succeeds, as long as the machine is well."""
        for attempt in range(TRIES):
            answer = action()
            if answer.code == 0:
                return
            self.say(f"could not {what}: {last_words(answer)}")
            while not self.look():
                self.pause()
            if attempt < TRIES - 1:
                self.pause()
        raise UserError(f"could not {what} on {self.name} in {TRIES} tries; the last one said: {last_words(answer, 6)}")
