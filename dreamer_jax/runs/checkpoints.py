"""Saving the train state with Orbax, and restoring it, in `checkpoints/` of the run directory; see docs/checkpoints.md.

A checkpoint has one item for each part of the state, so that a reader takes only what it needs: `params`,
`balancing`, `optimizer`, and `meta` (JSON: the fingerprints of data and tokenizer, the configuration, and where the
run is). It is good once its manifests are written (integrity.py), which happens last.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dreamer_jax.config import Config, load_config
from dreamer_jax.config.sections import CheckpointConfig
from dreamer_jax.errors import UserError
from dreamer_jax.model import initialise
from dreamer_jax.parallel.distributed import is_primary, largest
from dreamer_jax.runs.array_files import read_tree
from dreamer_jax.runs.folders import config_of_text, folder_of, place_of
from dreamer_jax.runs.integrity import problem_of, write_manifest
from dreamer_jax.runs.state import TrainState
from dreamer_jax.runs.step_folders import StepFolders

PARTS = ("params", "balancing", "optimizer")
FINGERPRINTS = ("data", "tokenizer")
CHUNK_BYTES = 1 << 24
"""Largest chunk of an array on disk: what a reader of a few rows has to read."""
SAVE_SECONDS = 600
"""A save that takes longer has failed; less than safety.stuck_seconds."""


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
        self.folders = StepFolders(place_of(directory))
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
        self.failed = False
        """Whether the last save failed."""

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
            self._probe()
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
        self.failed = bool(largest(self._error is not None))
        if self.failed:
            reason = _one_line(self._error) if self._error else "another process failed"
            self._say(f"checkpoint {self._step} was not saved: {reason}; training goes on and will try again")
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
        restored = {name: read_tree(self.folders[step] / name, getattr(like, name)) for name in PARTS}
        done = jax.device_put(jnp.asarray(step, jnp.int32), like.step.sharding)
        return TrainState(step=done, **restored)

    def close(self) -> None:
        """Wait until everything is on disk."""
        self.settle(wait=True)
        self._writer.close()

    def _probe(self) -> None:
        """Find out whether this process can write at all."""
        self.folders.path.mkdir(parents=True, exist_ok=True)
        probe = self.folders.path / f".probe-{jax.process_index()}"
        probe.write_bytes(bytes(4096))
        probe.unlink()

    def _start(self, state: TrainState, meta: dict[str, Any]) -> None:
        if jax.default_backend() == "cpu":  # host arrays would alias buffers that the next step overwrites
            state = jax.tree.map(jnp.copy, state)
        items: dict[str, Any] = {"meta": ocp.args.JsonSave(meta)}
        for name in PARTS:
            part = getattr(state, name)
            items[name] = ocp.args.StandardSave(part, save_args=jax.tree.map(_chunks, part))
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


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What a run has learned.

    Attributes:
        config: the run's configuration.
        step: optimizer steps done.
        params: float32 parameters, as `Dreamer.apply` takes them.
        balancing: router name -> balancing bias.
        meta: what the checkpoint says of its data: `tokenizer` and `data` fingerprints.
    """

    config: Config
    step: int
    params: Any
    balancing: dict[str, jax.Array]
    meta: dict[str, str]

    @property
    def variables(self) -> dict[str, Any]:
        """As `Dreamer.apply` takes them."""
        return {"params": self.params, "balancing": {"bias": self.balancing}}


def load_run(path: str | Path, step: int | None = None) -> TrainedModel:
    """The model of a run directory, or of one checkpoint step in it (`runs/name/checkpoints/500`).

    The optimizer's state is not read. Arrays lie on the default device.

    Raises:
        UserError: if there is no run, no good checkpoint, or not the step asked for.
    """
    directory, config, chosen = locate_run(path, step)
    params, balancing = jax.eval_shape(lambda: initialise(config.model, jax.random.key(0)))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    folders = StepFolders(place_of(directory))

    def read(item: str, shapes: Any) -> Any:
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)
        return read_tree(folders[chosen] / item, like)

    meta = fingerprints(folders.meta(chosen))
    return TrainedModel(config, chosen, read("params", params), read("balancing", balancing), meta)


def locate_run(path: str | Path, step: int | None = None) -> tuple[Path, Config, int]:
    """(run directory, its configuration, checkpoint step) of what `load_run` would load.

    The checkpoint has been verified. Where no step is named, a damaged one is passed over with a warning.

    Raises:
        UserError: if there is no run, no good checkpoint, or not the step asked for.
    """
    directory = str(path).rstrip("/")
    parent, _, name = directory.rpartition("/")
    if parent.rpartition("/")[2] == "checkpoints" and name.isdigit():
        directory, step = parent.rpartition("/")[0] or ".", int(name)
    local = folder_of(directory).local
    if not (local / "config.yaml").is_file():
        raise UserError(f"{directory} is not a run directory: it has no config.yaml. Train one with `dreamer train`")
    config = load_config(local / "config.yaml").config
    folders = StepFolders(place_of(directory))
    steps = folders.all()
    if not steps:
        raise UserError(f"{directory} has no checkpoint yet; it is saved every {config.checkpoint.every} steps")
    if step is not None and step not in steps:
        raise UserError(f"{directory} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    items = ("params", "balancing", "meta")
    if step is None:
        step = folders.newest_good(warn, items)
        if step is None:
            raise UserError(f"{directory} has no checkpoint that can be used; see `dreamer checkpoint verify`")
    elif problem := problem_of(folders[step], items):
        raise UserError(f"checkpoint {step} of {directory} can't be used: {problem}")
    if text := folders.meta(step).get("config"):  # a run whose depth was changed has steps of both
        config = dataclasses.replace(config, model=config_of_text(text).model)
    return (Path(directory) if "://" not in directory else place_of(directory)), config, step  # type: ignore[return-value]


def fingerprints(meta: Mapping[str, Any]) -> dict[str, str]:
    """What identifies data and tokenizer in a checkpoint's meta."""
    return {name: meta[name] for name in FINGERPRINTS}


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _chunks(leaf: jax.Array) -> ocp.SaveArgs:
    # Experts and layers, the leading axis of large arrays, are what readers take one by one.
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if leaf.ndim > 2 else ())
