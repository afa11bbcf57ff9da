"""Saving the train state with Orbax, and restoring it, in `checkpoints/` of the run directory; see docs/checkpoints.md.

A checkpoint has one item for each part of the state, so that a reader takes only what it needs: `params`, one for each
collection of the model's own state (such as `balancing`), `optimizer`, and `meta` (JSON: the fingerprints of data and
tokenizer, the configuration, and where the run is). It is good once its manifests are written (integrity.py), which
happens last.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dreamer_jax.config.sections import CheckpointConfig
from dreamer_jax.errors import UserError
from dreamer_jax.parallel.distributed import is_primary, largest
from dreamer_jax.runs.array_files import read_tree
from dreamer_jax.runs.folders import path_of
from dreamer_jax.runs.integrity import write_manifest
from dreamer_jax.runs.state import TrainState
from dreamer_jax.runs.step_folders import StepFolders

FINGERPRINTS = ("data", "tokenizer")
CHUNK_BYTES = 1 << 24
"""Largest chunk of an array on disk: what a reader of a few rows has to read."""
SMALL_FILES = 1 << 20
"""Bytes of what stands beside the arrays of a checkpoint, at most."""
SAVE_SECONDS = 600
"""A save that takes longer has failed; less than safety.stuck_seconds."""
SECONDS_TO_ABANDON = 30.0
"""What a save may still take when its process can't go on."""


def warn(text: str) -> None:
    """A line on stderr."""
    print(f"dreamer: warning: {text}", file=sys.stderr)


class Checkpoints:
    """The checkpoints of a run: asynchronous, atomic, verified before they are used.

    With several processes, all of them call every method at the same point.

    Args:
        directory: the run directory; also on a bucket.
        config: how many are kept.
        meta: saved with each step; a run whose fingerprints differ is not resumed.
        say: gets a line for every failure, and for what follows from it.
    """

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig,
        meta: Mapping[str, Any],
        say: Callable[[str], None] = warn,
    ):
        self.folders = StepFolders(path_of(directory))
        self._config, self._meta, self._say = config, dict(meta), say
        # Orbax's threads would wait for a folder that can't be made until the time is over, also at exit.
        options = ocp.options.AsyncOptions(timeout_secs=SAVE_SECONDS, create_directories_asynchronously=False)
        self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._step = 0
        complete = self.folders.complete()
        self.saved: int | None = complete[-1] if complete else None
        """The newest step that is known to be on disk; see `settle`."""
        self.failed = ""
        """Why the last save failed; empty where it didn't."""

    def newest_good(self, usable: Callable[[int], bool] = lambda _: True) -> int | None:
        """The newest step that is as it was written, or None; says which newer ones aren't."""
        self.saved = self.folders.newest_good(self._say, usable=usable)
        return self.saved

    def save(self, state: TrainState, notes: Mapping[str, Any] | None = None) -> None:
        """Save in the background; the state may be donated as soon as this returns. Failure is not an error.

        Args:
            state: its step names the checkpoint; a step that is on disk already isn't saved again.
            notes: goes into `meta` as `run`.
        """
        self.settle(wait=True)
        self._step = int(state.step)
        if self._step == self.saved:
            return
        try:
            self._probe(_bytes_of(state))
        except Exception as error:  # whatever a disk or a bucket raises
            self._error = error
        if largest(self._error is not None):  # Orbax's processes wait for each other: all of them start, or none
            self._error = self._error or OSError("another process can't write")
        else:
            self._start(state, {**self._meta, "run": dict(notes or {})})
        self._thread = threading.Thread(target=self._finish, args=(self._step,), name="checkpoint")
        self._thread.start()

    def settle(self, wait: bool = False) -> None:
        """Learn how the save in the background went, if it has ended; afterwards `saved` and `failed` tell.

        Args:
            wait: until it has ended.
        """
        if self._thread is None:
            return
        if wait:
            self._thread.join()
        if largest(self._thread.is_alive()):
            return
        self._thread = None
        self.failed = ""
        if largest(self._error is not None):
            self.failed = _one_line(self._error) if self._error else "another process failed"
            self._say(f"checkpoint {self._step} was not saved: {self.failed}; training goes on and will try again")
            self._error = None
        else:
            self.saved = self._step
        if is_primary():
            self._tidy()

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """A checkpoint, in the shapes and shardings of `like`, whatever mesh and processes have saved it.

        Args:
            like: arrays, or shapes with shardings (`abstract_state`).
            step: one that is good; the newest good one by default.
        Raises:
            UserError: if it was trained on other data or with another tokenizer.
        """
        step = self.newest_good() if step is None else step
        if step is None:
            raise UserError(f"{self.folders.path} has no checkpoint that can be used")
        meta = self.folders.meta(step)
        if any(meta[name] != self._meta[name] for name in FINGERPRINTS):
            raise UserError(
                f"the data or the tokenizer changed since checkpoint {step} was saved; resuming would train on "
                "other batches. Bring the old files back, or start a new run with another --run.dir"
            )
        found = {name: read_tree(self.folders[step] / name, item) for name, item in items_of(like).items()}
        done = jax.device_put(jnp.asarray(step, jnp.int32), like.step.sharding)
        own = {name: found[name] for name in like.model_state}
        return TrainState(done, found["params"], found["optimizer"], own)

    def abandon(self) -> None:
        """As `close`, after an error that other processes may not have had: they train on, and aren't waited for."""
        if jax.process_count() == 1:
            return self.close()
        if self._thread is not None:
            self._thread.join(SECONDS_TO_ABANDON)

    def close(self) -> None:
        """Wait until everything is on disk."""
        self.settle(wait=True)
        self._writer.close()

    def _probe(self, needed: int) -> None:
        """Find out whether this process can write so many bytes: Orbax's threads, when they can't, print pages."""
        self.folders.path.mkdir(parents=True, exist_ok=True)
        local = "://" not in str(self.folders.path)
        if local and (free := shutil.disk_usage(self.folders.path).free) < needed:
            raise OSError(f"it takes up to {needed / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free on the disk")
        probe = self.folders.path / f".probe-{jax.process_index()}"
        probe.write_bytes(bytes(4096))
        probe.unlink()

    def _start(self, state: TrainState, meta: dict[str, Any]) -> None:
        if jax.default_backend() == "cpu":  # host arrays would alias buffers that the next step overwrites
            state = jax.tree.map(jnp.copy, state)
        items: dict[str, Any] = {"meta": ocp.args.JsonSave(meta)}
        for name, item in items_of(state).items():
            items[name] = ocp.args.StandardSave(item, save_args=jax.tree.map(_chunks, item))
        try:  # force: what lies there is damaged, or was never finished
            self._writer.save(self.folders[self._step], args=ocp.args.Composite(**items), force=True)
        except jax.errors.JaxRuntimeError:
            raise  # the device or another process, not the disk
        except Exception as error:
            self._error = error

    def _finish(self, step: int) -> None:
        """In the background: wait for Orbax, then describe this process's share of what it wrote."""
        if self._error:
            return
        try:
            self._writer.wait_until_finished()
            write_manifest(self.folders[step], jax.process_index(), jax.process_count())
        except Exception as error:
            self._error = error

    def _tidy(self) -> None:
        """Remove what needn't be kept, and what a failed save has left; no save is running."""
        try:
            self.folders.remove_unfinished()
            if not self.failed:
                self.folders.prune(self._config.keep, self._config.keep_every)
        except Exception as error:  # more on disk than wanted is no reason to stop
            self._say(f"old checkpoints can't be removed: {_one_line(error)}")


def items_of(state: TrainState) -> dict[str, Any]:
    """Item of a checkpoint -> the part of the state that it holds."""
    return {"params": state.params, **state.model_state, "optimizer": state.optimizer}


def _bytes_of(state: TrainState) -> int:
    """What this process writes for a state, before it is compressed."""
    pieces = [piece for leaf in jax.tree.leaves(state) for piece in leaf.addressable_shards if piece.replica_id == 0]
    return SMALL_FILES + sum(piece.data.size * piece.data.dtype.itemsize for piece in pieces)


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _chunks(leaf: jax.Array) -> ocp.SaveArgs:
    # Experts and layers, the leading axis of large arrays, are what readers take one by one.
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if leaf.ndim > 2 else ())
