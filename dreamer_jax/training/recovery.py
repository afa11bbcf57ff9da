"""Where a run is, and how it gets back there: resuming, saving with retries, and going back from diverged steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from dreamer_jax.config import Config, LoadedConfig, to_yaml
from dreamer_jax.config.loading import load_text
from dreamer_jax.data import Data
from dreamer_jax.errors import DIVERGED, UserError
from dreamer_jax.families import build
from dreamer_jax.parallel.distributed import is_primary, wait_for_all
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.runs.folders import refuse_untrained
from dreamer_jax.runs.integrity import manifests, problem_of
from dreamer_jax.runs.state import TrainState
from dreamer_jax.runs.step_folders import StepFolders
from dreamer_jax.training.state import abstract_state, create_state, draw_state

SECONDS_BETWEEN_TRIES = (1.0, 5.0, 15.0, 30.0)
"""Between attempts to save at the end of a run."""


@dataclasses.dataclass(frozen=True)
class RunCounters:
    """Where a run is, beside its step and its arrays.

    Attributes:
        offset: step s (from 0) trains on batch s + offset of the data order: how many batches were left out when the
            run went back, because it had diverged on them.
        skipped: steps so far whose loss or gradient wasn't finite; they changed nothing.
        streak: how many of the last steps were such.
        rollbacks: how often the run has gone back.
    """

    offset: int = 0
    skipped: int = 0
    streak: int = 0
    rollbacks: int = 0


class Recovery:
    """Resumes, saves and goes back. With several processes all of them call every method at the same point.

    Args:
        loaded: the run's configuration.
        data: of the run; its fingerprint goes into every checkpoint.
        mesh: the devices that the state is restored to.
        say: gets a line for everything out of the ordinary.
    """

    def __init__(self, loaded: LoadedConfig, data: Data, mesh: Mesh, say: Callable[[str], None]):
        self._config, self._mesh, self._say = loaded.config, mesh, say
        meta = {"data": data.fingerprint, "tokenizer": data.tokenizer.fingerprint, "config": to_yaml(loaded.config)}
        self.checkpoints = Checkpoints(loaded.config.run.dir, loaded.config.checkpoint, meta, say)
        if is_primary():
            self.checkpoints.folders.remove_unfinished()
        wait_for_all("unfinished checkpoints")
        self._every = loaded.config.checkpoint.every
        self._retry_at: int | None = None
        self._retry_after = 0

    def resume(self) -> tuple[TrainState, RunCounters]:
        """The state of the newest good checkpoint, or a fresh one if none was ever saved to its end.

        Raises:
            UserError: there are checkpoints, and all of them are damaged; or the layers of the one that is good can't
                become as many as the configuration says.
        """
        step = self.checkpoints.newest_good()
        folders = self.checkpoints.folders
        if step is None:
            self._refuse_damaged(folders.all())
            return create_state(self._config, self._mesh), RunCounters()
        wait_for_all("chosen")
        if is_primary():  # else a damaged step would count as one that is kept
            for damaged in folders.all():
                if damaged > step:
                    folders.disqualify(damaged)
        text = folders.meta(step).get("config")
        if step >= self._config.training.steps and text:
            refuse_untrained(folders.path.parent, load_text(text).config, self._config)
        state = self._restore(step)
        self._say(f"resumed from checkpoint {step}")
        return state, self._counters_at(step)

    def is_due(self, done: int) -> bool:
        """Whether a checkpoint should be started after this step: it is time, or the last one failed a while ago."""
        if self.checkpoints.failed and self._retry_at is None:
            self._retry_after = min(self._every, max(1, self._every // 10, 2 * self._retry_after))
            self._retry_at = done + self._retry_after
        return done % self._every == 0 or (self._retry_at is not None and done >= self._retry_at)

    def save(self, state: TrainState, done: int, counters: RunCounters) -> None:
        """Save in the background. A failure is said and tried again some steps later."""
        self._retry_at = None
        if not self.checkpoints.failed:
            self._retry_after = 0
        self.checkpoints.save(state, self._notes(done, counters))

    def save_now(
        self,
        state: TrainState,
        done: int,
        counters: RunCounters,
        tries: int,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Save and wait. Who is asked to stop meanwhile has no time to try again and again.

        Raises:
            UserError: no attempt succeeded.
        """
        for number in range(tries):
            self.checkpoints.save(state, self._notes(done, counters))
            self.checkpoints.settle(wait=True)
            if self.checkpoints.saved == done:
                return
            if asked_to_stop():
                tries = number + 1
                break
            if number + 1 < tries:
                time.sleep(SECONDS_BETWEEN_TRIES[number])
        before = f"step {self.checkpoints.saved}" if self.checkpoints.saved else "the start"
        raise UserError(
            f"step {done} could not be saved in {tries} attempts; make {self.checkpoints.folders.path} writable, or "
            f"room there, and run the same command again, which repeats everything after {before}"
        )

    def roll_back(self, failed: int, counters: RunCounters) -> tuple[TrainState, RunCounters]:
        """The last good state; it goes on with the batches after those it has diverged on.

        Args:
            failed: the step at which too many in a row had been skipped.
            counters: where the run was then.
        Raises:
            UserError: it has gone back often enough; or every checkpoint to go back to is damaged.
        """
        in_a_row = self._config.safety.skipped_in_a_row
        what = f"{in_a_row} steps in a row, up to step {failed}, had no finite loss and gradient"
        if counters.rollbacks >= self._config.safety.rollbacks:
            raise UserError(
                f"{what}, and the run had gone back {counters.rollbacks} times already: {DIVERGED}; start "
                "again with a lower --training.learning_rate and another --run.dir"
            )
        self.checkpoints.settle(wait=True)
        whole: list[int] = []  # of which some may have been saved when the run was asked to stop meanwhile

        def before_it(step: int) -> bool:
            whole.append(step)
            return self._counters_at(step).streak == 0

        step = self.checkpoints.newest_good(before_it)
        if step is None:
            self._refuse_damaged(set(self.checkpoints.folders.all()) - set(whole))
        state = create_state(self._config, self._mesh) if step is None else self._restore(step)
        step = step or 0
        if is_primary():  # else a restart before the next checkpoint would resume from one of them
            self.checkpoints.folders.remove_after(step)
        wait_for_all("later checkpoints")
        offset = counters.offset + failed - step
        self._say(f"{what}: going back to step {step}, which goes on with batch {step + offset} of the data")
        return state, dataclasses.replace(counters, offset=offset, streak=0, rollbacks=counters.rollbacks + 1)

    def _refuse_damaged(self, steps: Iterable[int]) -> None:
        """Don't start from step 0 where one of these was saved to its end and can't be used."""
        folders = self.checkpoints.folders
        if any(manifests(folders[step]) for step in steps):
            raise UserError(
                f"all checkpoints in {folders.path} are damaged. Bring them back from a copy, or remove that "
                "folder to start from step 0"
            )

    def _notes(self, done: int, counters: RunCounters) -> dict[str, Any]:
        # All randomness is a function of the seed, the step and the position in the data.
        notes = dataclasses.asdict(counters) | {"position": done + counters.offset, "seed": self._config.run.seed}
        del notes["offset"]
        return notes

    def _counters_at(self, step: int) -> RunCounters:
        notes = self.checkpoints.folders.meta(step).get("run", {})
        kept = {name: notes[name] for name in ("skipped", "streak", "rollbacks") if name in notes}
        return RunCounters(offset=notes.get("position", step) - step, **kept)

    def _restore(self, step: int) -> TrainState:
        like = abstract_state(self._config, self._mesh)
        text = self.checkpoints.folders.meta(step).get("config")
        saved = load_text(text).config if text else self._config
        before, now = build(saved.model), build(self._config.model)
        old_depth, new_depth = (getattr(model, "depth", None) for model in (saved.model, self._config.model))
        if old_depth == new_depth:
            return self.checkpoints.restore(like, step)
        layers = not now.flags.recurrent and before.depth != now.depth
        if layers and not before.depth < now.depth <= 2 * before.depth:
            # config.yaml may name another depth, which no checkpoint has come to
            raise UserError(
                f"model.depth: {self.checkpoints.folders[step]} holds a model of {before.depth} layers of their own. "
                f"They can become up to {2 * before.depth}, the middle ones repeated, but not {now.depth}"
            )
        model = dataclasses.replace(self._config.model, depth=old_depth)
        old = self.checkpoints.restore(abstract_state(dataclasses.replace(self._config, model=model), self._mesh), step)
        self._say(f"depth {old_depth} of checkpoint {step} becomes {new_depth}")
        fresh = draw_state(self._config, self._mesh)  # what the run began from has the old depth, and may be gone
        return with_more_layers(old, fresh) if layers else with_other_depth(old, fresh)


def with_other_depth(old: TrainState, fresh: TrainState) -> TrainState:
    """The state of a depth-recurrent model at another depth.

    Depth decides how long some axes are (Dreamer's attention MoEs have an expert a depth, a recursive model's layers a
    relaxation a loop), and nothing else. What both have keeps what it learned; the rest comes from `fresh`, with empty
    moments.

    Args:
        old: at its own depth.
        fresh: of the same model at the new depth.
    """

    def fit(ours: jax.Array, new: jax.Array) -> jax.Array:
        if ours.shape == new.shape:
            return ours
        both = tuple(slice(min(sizes)) for sizes in zip(ours.shape, new.shape, strict=True))
        put = jax.jit(lambda ours, new: new.at[both].set(ours[both]), out_shardings=new.sharding)
        return put(ours, new)

    return jax.tree.map(fit, old, fresh)


def with_more_layers(old: TrainState, fresh: TrainState) -> TrainState:
    """The state of a model with layers of their own, the middle ones repeated (stacking: MIDAS, Saunshi et al., 2024).

    Args:
        old: with its own number of layers, the first axis of all that they differ in.
        fresh: of the same model with more layers, at most twice as many.
    """

    def fit(ours: jax.Array, new: jax.Array) -> jax.Array:
        if ours.shape == new.shape:
            return ours
        places = jnp.asarray(stacking(len(ours), len(new)))
        return jax.jit(lambda ours: ours[places], out_shardings=new.sharding)(ours)

    return jax.tree.map(fit, old, fresh)


def stacking(before: int, now: int) -> list[int]:
    """Which of the layers before each layer now starts as: all of them, the middle ones, as many as are missing, twice
    in a row as one block."""
    added = now - before
    start = (before - added) // 2
    return [*range(start + added), *range(start, before)]


def recorded_config(place: epath.Path) -> Config | None:
    """The configuration in a run's newest complete checkpoint, or None: for a run whose config.yaml is gone."""
    folders = StepFolders(place)
    for step in reversed(folders.complete()):
        if problem_of(folders[step], ("meta",)) is None and (text := folders.meta(step).get("config")):
            return load_text(text).config
    return None
