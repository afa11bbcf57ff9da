"""Saving and restoring the train state with Orbax, in `checkpoints/` of the run directory.

A checkpoint has one item for each part of the state, so that a reader takes only what it needs: `params`,
`balancing`, `optimizer`, and `meta` (JSON: the fingerprint of the data and of the tokenizer).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dreamer_jax.config import Config, load_config
from dreamer_jax.config.errors import UserError
from dreamer_jax.config.schema import CheckpointConfig
from dreamer_jax.model import initialise
from dreamer_jax.training.state import TrainState

PARTS = ("params", "balancing", "optimizer")
CHUNK_BYTES = 1 << 26
"""Largest chunk of an array on disk: what a reader of a few rows has to read."""


class Checkpoints:
    """The checkpoints of a run: asynchronous, atomic, the newest `keep` of them.

    Args:
        directory: the run directory.
        config: when and how many.
        meta: saved with each step; a run whose `meta` differs is not resumed.
    """

    def __init__(self, directory: Path, config: CheckpointConfig, meta: dict[str, str]):
        self._manager = _manager(directory, max_to_keep=config.keep)
        self._meta = meta

    @property
    def latest(self) -> int | None:
        """The newest step, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Save in the background; the state may be donated as soon as this returns."""
        step = int(state.step)
        if step == self.latest:
            return
        if jax.default_backend() == "cpu":  # host arrays would alias buffers that the next step overwrites
            state = jax.tree.map(jnp.copy, state)
        items: dict[str, Any] = {}
        for name in PARTS:
            part = getattr(state, name)
            items[name] = ocp.args.StandardSave(part, save_args=jax.tree.map(_chunks, part))
        self._manager.save(step, args=ocp.args.Composite(meta=ocp.args.JsonSave(self._meta), **items))

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint, in the shapes and shardings of `like`.

        Raises:
            UserError: if it was trained on other data or with another tokenizer.
        """
        step = self.latest
        parts: dict[str, Any] = {name: _restore_like(getattr(like, name)) for name in PARTS}
        restored = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore(), **parts))
        if restored["meta"] != self._meta:
            raise UserError(
                f"the data or the tokenizer changed since checkpoint {step} was saved; resuming would train on "
                "other batches. Bring the old files back, or start a new run with another --run.dir"
            )
        done = jax.device_put(jnp.asarray(step, jnp.int32), like.step.sharding)
        return TrainState(step=done, **{name: restored[name] for name in PARTS})

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


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
        UserError: if there is no run, no checkpoint, or not the step asked for.
    """
    directory, config, chosen = locate_run(path, step)
    params, balancing = jax.eval_shape(lambda: initialise(config.model, jax.random.key(0)))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    items = {"params": _restore_like(params, device), "balancing": _restore_like(balancing, device)}
    manager = _manager(directory)
    try:
        restored = manager.restore(chosen, args=ocp.args.Composite(meta=ocp.args.JsonRestore(), **items))
    finally:
        manager.close()
    return TrainedModel(config, chosen, restored["params"], restored["balancing"], restored["meta"])


def locate_run(path: str | Path, step: int | None = None) -> tuple[Path, Config, int]:
    """(run directory, its configuration, checkpoint step) of what `load_run` would load.

    Raises:
        UserError: if there is no run, no checkpoint, or not the step asked for.
    """
    directory = Path(path)
    if directory.parent.name == "checkpoints" and directory.name.isdigit():
        directory, step = directory.parent.parent, int(directory.name)
    if not (directory / "config.yaml").is_file():
        raise UserError(f"{directory} is not a run directory: it has no config.yaml. Train one with `dreamer train`")
    config = load_config(directory / "config.yaml").config
    manager = _manager(directory)
    try:
        steps = sorted(manager.all_steps())
    finally:
        manager.close()
    if not steps:
        raise UserError(f"{directory} has no checkpoint yet; it is saved every {config.checkpoint.every} steps")
    if step is not None and step not in steps:
        raise UserError(f"{directory} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return directory, config, steps[-1] if step is None else step


def _manager(directory: Path, **options: Any) -> ocp.CheckpointManager:
    # Read-only users must not create anything beside a run.
    settings = ocp.CheckpointManagerOptions(create=bool(options), read_only=not options, **options)
    names = (*PARTS, "meta")
    return ocp.CheckpointManager((directory / "checkpoints").absolute(), options=settings, item_names=names)


def _chunks(leaf: jax.Array) -> ocp.SaveArgs:
    # Experts and layers, the leading axis of large arrays, are what readers take one by one.
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if leaf.ndim > 2 else ())


def _restore_like(tree: Any, sharding: jax.sharding.Sharding | None = None) -> ocp.args.StandardRestore:
    def describe(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding)

    return ocp.args.StandardRestore(jax.tree.map(describe, tree))
