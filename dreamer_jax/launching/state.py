"""What the launcher remembers between its starts: one JSON file a run, written before anything is made in the cloud."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dreamer_jax.errors import UserError
from dreamer_jax.launching.settings import Settings, settings_from

Wanted = Literal["running", "stopped", "deleted"]
Phase = Literal["absent", "asked", "seen", "removing"]


@dataclass(frozen=True)
class State:
    """One run's entry.

    Attributes:
        settings: as it was created.
        token: label of what this launcher made, so that another's resource of the same name is never touched.
        phase: what exists. absent: nothing; asked: perhaps, a request was or is about to be sent; seen: it does;
            removing: it does, or did.
        wanted: what the person asked for last; a supervisor in another terminal obeys.
        installed: machine and archive of the last complete installation.
        attempt: number of the last start of the workers.
        words: what they were started with.
    """

    settings: Settings
    token: str
    phase: Phase = "absent"
    wanted: Wanted = "running"
    installed: str = ""
    attempt: int = 0
    words: tuple[str, ...] = ()


class Store:
    """The folder of the state files (`DREAMER_LAUNCH_DIR`, else ~/.dreamer/launch)."""

    def __init__(self, directory: Path | None = None):
        default = os.environ.get("DREAMER_LAUNCH_DIR") or Path.home() / ".dreamer" / "launch"
        self.directory = Path(directory or default)

    def names(self) -> list[str]:
        """Runs with something in the cloud, or perhaps something."""
        return sorted(path.stem for path in self.directory.glob("*.json"))

    def read(self, name: str) -> State | None:
        """The entry of `name`, or None.

        Raises:
            UserError: for a file that is no entry.
        """
        path = self._path(name)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values |= {"settings": settings_from(values["settings"], str(path)), "words": tuple(values["words"])}
            return State(**values)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"can't read {path} ({error}), which tells what exists in the cloud for {name}; look with: "
                f"gcloud compute tpus queued-resources list --zone=-"
            ) from None

    def write(self, state: State) -> None:
        """Save an entry; complete or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._path(state.settings.name)
        half = path.with_suffix(".half")
        with open(half, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(state), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)

    def update(self, name: str, **changes: Any) -> State | None:
        """Change fields of an entry, and only those: another launcher may change others at the same time.

        Returns:
            The whole entry as it now is, or None when it has been removed, which it then stays.
        """
        with self._locked(f"{name}.entry", wait=True):
            state = self.read(name)
            if state is None:
                return None
            state = dataclasses.replace(state, **changes)
            self.write(state)
            return state

    def forget(self, name: str) -> None:
        """Remove the entry, once nothing of the run is left in the cloud."""
        self._path(name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Hold the right to create or delete resources of `name`; waits for another launcher that holds it."""
        with self._locked(f"{name}.lock", wait=True):
            yield

    @contextlib.contextmanager
    def supervising(self, name: str) -> Iterator[None]:
        """Hold the right to supervise `name`.

        Raises:
            UserError: when another launcher on this machine does.
        """
        with self._locked(f"{name}.supervisor", wait=False):
            yield

    @contextlib.contextmanager
    def _locked(self, file_name: str, wait: bool) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.directory / file_name, "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                name = file_name.rpartition(".")[0]
                raise UserError(
                    f"another launcher on this machine already runs {name}; follow it with: launch/tpu logs {name}"
                ) from None
            yield

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"
