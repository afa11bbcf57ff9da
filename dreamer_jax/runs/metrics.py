"""The numbers of a run on disk: metrics.jsonl and TensorBoard's events get the same ones."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError
from dreamer_jax.json_files import read_lines
from dreamer_jax.runs.folders import write_atomically


class MetricsWriter:
    """Appends records to metrics.jsonl and to TensorBoard's events. A disk that is full never stops it.

    What can't be written to metrics.jsonl waits in memory for the next attempt; TensorBoard's copy is lost.

    Args:
        directory: the run directory.
        resumed_step: records of later steps, left by a run that was stopped after its last checkpoint, are removed.
        say: gets a line when writing fails, and when it works again.
    """

    def __init__(self, directory: Path, resumed_step: int, say: Callable[[str], None] = lambda _: None):
        self._directory, self._say = directory, say
        self._path = directory / "metrics.jsonl"
        self._waiting: list[str] = []
        self._events: _Events | None = None
        self.rewind(resumed_step)

    def rewind(self, step: int) -> None:
        """Remove the records of all steps after this one; those steps come again."""
        kept = [json.dumps(record) + "\n" for record in read_metrics(self._directory) if record["step"] <= step]
        kept += [line for line in self._waiting if json.loads(line)["step"] <= step]
        self._waiting = []
        try:
            write_atomically(self._path, "".join(kept))
        except OSError as error:
            raise UserError(f"{self._path} can't be written: {error.strerror or error}") from error
        self._length = self._path.stat().st_size
        if self._events is not None:
            self._events.close()
        self._events = _Events(self._directory, step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One record: `step` and the values; those that aren't finite are left out."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._waiting.append(json.dumps({"step": step, **finite}) + "\n")
        self.flush()
        assert self._events is not None
        self._events.write(step, finite)

    def flush(self) -> None:
        """Hand everything to the operating system, so that a kill loses none of it."""
        if self._events is not None:
            self._events.flush()
        if not self._waiting:
            return
        try:
            if not self._path.exists():
                self._begin_anew()
            with self._path.open("r+b", buffering=0) as file:
                file.truncate(self._length)  # half a line, if an earlier attempt failed
                file.seek(self._length)
                text = "".join(self._waiting).encode()
                written = file.write(text)
                if written != len(text):
                    raise OSError("the disk is full")
        except OSError as error:
            if len(self._waiting) == 1:
                self._say(f"{self._path} can't be written ({error.strerror or error}); records wait in memory")
            return
        if len(self._waiting) > 1:
            self._say(f"{self._path} can be written again; {len(self._waiting)} records are caught up")
        self._length += len(text)
        self._waiting = []

    def _begin_anew(self) -> None:
        """Somebody has removed the file, or renamed the folder it was in: what comes from now on is kept."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        self._length = 0
        self._say(f"{self._path} is gone, and with it the records so far; a new one begins with those of this step")

    def close(self) -> None:
        """Flush everything to disk."""
        self.flush()
        if self._waiting:
            self._say(f"{len(self._waiting)} records are lost, because {self._path} can't be written")
        if self._events is not None:
            self._events.close()


class _Events:
    """A TensorBoard event file. Written directly: SummaryWriter's queue blocks for good once its thread has failed.

    Args:
        directory: the run directory.
        purge_step: TensorBoard forgets what older files say of this step and later ones.
    """

    _number = itertools.count()

    def __init__(self, directory: Path, purge_step: int):
        self._directory = directory
        self._writer = None
        self._attempt(self._open, purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The values of a step."""
        self._attempt(self._write, step, values)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        if self._writer is not None:
            self._attempt(self._writer.flush)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._attempt(self._writer.close)
        self._writer = None

    def _open(self, purge_step: int | None) -> None:
        with _without_torch():
            from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]

        name = f".{os.getpid()}.{next(self._number)}"
        self._writer = EventsWriter(str(self._directory / "events"), name)
        if purge_step is not None:
            log = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(wall_time=time.time(), step=purge_step, session_log=log))

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        if self._writer is None:
            self._open(None)
        assert self._writer is not None
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        try:
            action(*arguments)
        except OSError:  # metrics.jsonl has the numbers and says so; a half-written file can't be added to
            self._writer = None


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """As if torch weren't installed: tensorboardX imports it for its tensors, a quarter of a training's start."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python is told that there is no such module
    try:
        yield
    finally:
        del sys.modules["torch"]


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """The records of a run's metrics.jsonl, in order; a line cut short by a kill is left out, and what no run writes:
    without a step, or with what isn't a number."""

    def whole(record: Mapping[str, Any]) -> bool:
        return type(record.get("step")) is int and all(type(value) in (int, float) for value in record.values())

    return [record for record in read_lines(directory / "metrics.jsonl") if whole(record)]


def newest_values(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The newest value of each name. What an evaluation measured comes from one record: a perplexity that wasn't
    finite, which records leave out, isn't that of an evaluation before."""
    newest: dict[str, float] = {}
    for record in records:
        measured = {_evaluation(name) for name in record} - {None}
        newest = {name: value for name, value in newest.items() if _evaluation(name) not in measured} | dict(record)
    return newest


def _evaluation(name: str) -> str | None:
    kind = name.partition("/")[0]
    return kind if kind in ("heldout", "harder", "eval") else None
