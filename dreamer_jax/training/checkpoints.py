"""Saving and restoring the train state with Orbax, in `checkpoints/` of the run directory."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dreamer_jax.config.errors import UserError
from dreamer_jax.config.schema import CheckpointConfig
from dreamer_jax.training.state import TrainState


class Checkpoints:
    """The checkpoints of a run: asynchronous, atomic, the newest `keep` of them.

    Each holds the state and the fingerprint of the data, so that resuming on other data is refused.
    """

    def __init__(self, directory: Path, config: CheckpointConfig, data_fingerprint: str):
        options = ocp.CheckpointManagerOptions(max_to_keep=config.keep)
        self._manager = ocp.CheckpointManager((directory / "checkpoints").absolute(), options=options)
        self._fingerprint = data_fingerprint

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
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave({"fingerprint": self._fingerprint})
            ),
        )

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint, in the shapes and shardings of `like`.

        Raises:
            UserError: if it was trained on other data.
        """
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(
            self.latest,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(target), data=ocp.args.JsonRestore()),
        )
        if restored["data"]["fingerprint"] != self._fingerprint:
            raise UserError(
                f"the data or the tokenizer changed since checkpoint {self.latest} was saved; resuming would train "
                "on other batches. Bring the old files back, or start a new run with another --run.dir"
            )
        return restored["state"]

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()
