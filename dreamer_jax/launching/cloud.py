"""Commands of gcloud: how they are written, run and understood."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dreamer_jax.errors import UserError

API_SECONDS = 900.0
"""Longest wait for one call of the API: creating and deleting wait for their operation."""
RETRIES = 6
"""Calls of the API that failed for a passing reason are repeated so often, with growing pauses (a minute in all)."""


@dataclass(frozen=True)
class Answer:
    """What a command answered: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


Runner = Callable[[Sequence[str], float], Answer]
"""Runs a command with a time limit in seconds."""


class Kind(enum.Enum):
    """Why a command failed, as far as the launcher treats it differently."""

    MISSING = "not found"
    EXISTS = "exists already"
    QUOTA = "quota or capacity"
    PERMISSION = "permission"
    LOGIN = "not logged in"
    INVALID = "invalid request"
    UNUSABLE = "machine preempted or stopped"
    SSH = "ssh"
    PASSING = "passing"
    OTHER = "other"


_ALONE = r"(?<!\S)%s(?!\S*\w)"
"""A word of a sentence: not within quotation marks, brackets or paths, where the names of runs and projects stand."""
_PATTERNS = (
    (Kind.UNUSABLE, r"This TPU has (terminal )?state"),
    (Kind.LOGIN, r"active account selected|refreshing your current auth tokens|UNAUTHENTICATED|gcloud auth login"),
    (Kind.MISSING, r"NOT_FOUND|was not found|notFound"),
    (Kind.EXISTS, r"ALREADY_EXISTS|already exists"),
    (Kind.QUOTA, r"RESOURCE_EXHAUSTED|Quota|QUOTA|quotaExceeded|no more capacity|" + _ALONE % "quotas?"),
    (Kind.PERMISSION, r"PERMISSION_DENIED|SERVICE_DISABLED|has not been used in project"),
    (Kind.SSH, r"exited with return code \[255\]|Permission denied \(publickey|ssh: |Connection (closed|refused) by"),
    (Kind.INVALID, r"INVALID_ARGUMENT|Invalid value|argument --|unrecognized arguments|Invalid choice"),
    (
        Kind.PASSING,
        r"UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED|ABORTED|FAILED_PRECONDITION|gcloud crashed|"
        r"Connection reset|Connection aborted|Unable to find the server|Max retries exceeded|timed out|TimeoutError|"
        r"SSLError|HTTPError 5\d\d|HTTPError 429|rateLimitExceeded|" + _ALONE % "network",
    ),
)


def classify(err: str) -> Kind:
    """The kind of failure that gcloud's standard error tells of; the first pattern that matches counts."""
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, err)), Kind.OTHER)


class CloudError(UserError):
    """A command of gcloud that failed for good.

    Attributes:
        kind: what the launcher makes of it.
    """

    def __init__(self, kind: Kind, message: str):
        super().__init__(message)
        self.kind = kind


FIXES = {
    Kind.LOGIN: "log in: gcloud auth login",
    Kind.PERMISSION: "the account needs the role 'TPU Admin' in this project, with the Cloud TPU API enabled: "
    "gcloud services enable tpu.googleapis.com",
    Kind.QUOTA: "ask for quota of this type in this zone (spot has a quota of its own), delete queued resources that "
    "hold it, or take another zone",
    Kind.INVALID: "check type, zone and runtime version: gcloud compute tpus accelerator-types list --zone ZONE",
}
"""What a person can do."""


def run_command(words: Sequence[str], seconds: float) -> Answer:
    """Run a command without standard input; one that exceeds its time is ended with all its children.

    Raises:
        UserError: when the program isn't installed.
    """
    try:
        process = subprocess.Popen(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # its ssh children must not outlive it
        )
    except FileNotFoundError:
        raise UserError(
            f"{words[0]} is not installed, or not on PATH; it comes with the Google Cloud SDK (cloud.google.com/sdk)"
        ) from None
    try:
        out, err = process.communicate(timeout=seconds)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return Answer(124, "", f"timed out after {seconds:.0f} s")
        raise
    # Not read as text, where a progress bar's carriage return would end a line that it doesn't end in a worker's log.
    return Answer(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


class Cloud:
    """Queued resources and TPU VMs of one project and zone.

    Args:
        project: project id; empty: gcloud's own.
        zone: zone of every resource.
        runner: runs commands; another one stands for the cloud in tests and in a dry run.
        sleep: waits for some seconds.
    """

    def __init__(
        self, project: str, zone: str, runner: Runner = run_command, sleep: Callable[[float], None] = time.sleep
    ):
        self.place = [f"--zone={zone}", *([f"--project={project}"] if project else []), "--quiet"]
        self.runner, self.sleep = runner, sleep

    def describe(self, name: str) -> dict[str, Any] | None:
        """The queued resource of this name as the API gives it, or None when there is none."""
        return self._read("queued-resources", name)

    def describe_node(self, name: str) -> dict[str, Any] | None:
        """The TPU VM (all hosts of a slice are one) of this name as the API gives it, or None."""
        return self._read("tpu-vm", name)

    def create(self, name: str, options: Sequence[str]) -> None:
        """Ask for a queued resource `name` with one node of the same name.

        Raises:
            CloudError: EXISTS also when an earlier try whose answer was lost had succeeded.
        """
        self._change(["queued-resources", "create", name, f"--node-id={name}", *options])

    def delete(self, name: str) -> None:
        """Delete a queued resource and its node; none to delete is fine."""
        self._change(["queued-resources", "delete", name, "--force"], fine=Kind.MISSING)

    def delete_node(self, name: str) -> None:
        """Delete a TPU VM that its queued resource left behind; none to delete is fine."""
        self._change(["tpu-vm", "delete", name], fine=Kind.MISSING)

    def delete_command(self, name: str) -> str:
        """The command with which a person deletes the queued resource without this launcher."""
        return shlex.join(self._words(["queued-resources", "delete", name, "--force"]))

    def ssh_words(self, name: str, command: str, worker: str) -> list[str]:
        """The command that runs `command` on worker `worker` (a number or "all")."""
        return self._words(["tpu-vm", "ssh", name, f"--worker={worker}", f"--command={command}"])

    def ssh(self, name: str, command: str, worker: str = "all", seconds: float = 300) -> Answer:
        """Run a command on one or all workers, once."""
        return self.runner(self.ssh_words(name, command, worker), seconds)

    def copy(self, name: str, files: Sequence[str], seconds: float = 900) -> Answer:
        """Copy files into the home directory of every worker, once."""
        return self.runner(self._words(["tpu-vm", "scp", *files, f"{name}:", "--worker=all"]), seconds)

    def _words(self, words: Sequence[str]) -> list[str]:
        return ["gcloud", "compute", "tpus", *words, *self.place]

    def _read(self, collection: str, name: str) -> dict[str, Any] | None:
        answer = self._call([collection, "describe", name, "--format=json"])
        if answer.code == 0:
            try:
                return json.loads(answer.out)
            except ValueError:
                raise CloudError(
                    Kind.PASSING, f"gcloud could not describe {name}: its answer was cut off: {answer.out[-80:]!r}"
                ) from None
        if classify(answer.err) is Kind.MISSING:
            return None
        raise _failure(f"describe {name}", answer)

    def _change(self, words: Sequence[str], fine: Kind | None = None) -> None:
        answer = self._call(words)
        if answer.code != 0 and classify(answer.err) is not fine:
            raise _failure(" ".join(words[1:3]), answer)

    def _call(self, words: Sequence[str]) -> Answer:
        """One call of the API, repeated while it fails for a passing reason."""
        pause = 2.0
        for attempt in range(RETRIES):
            answer = self.runner(self._words(words), API_SECONDS)
            passing = answer.code == 124 or classify(answer.err) is Kind.PASSING
            if answer.code == 0 or not passing or attempt == RETRIES - 1:
                return answer
            self.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")


def last_words(answer: Answer, lines: int = 3) -> str:
    """The last lines that a failed command said, on one line."""
    said = [line.strip() for line in (answer.err or answer.out).splitlines() if line.strip()]
    return " | ".join(said[-lines:]) or f"exit code {answer.code}"


def _failure(what: str, answer: Answer) -> CloudError:
    kind = classify(answer.err)
    fix = f"; {FIXES[kind]}" if kind in FIXES else ""
    return CloudError(kind, f"gcloud could not {what}: {last_words(answer)}{fix}")
