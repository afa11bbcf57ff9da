"""What a sampler did with each position: a text generated with a model that writes its steps down.

A sampler reaches the model by the calls of `FoldedModel` alone. So a model of another class that writes them down shows
every sampler, and those know nothing of it: programs without a trace are the same as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.memory import NOWHERE
from dreamer_jax.errors import UserError
from dreamer_jax.inference.batches import Finished, Generated, RowBatch
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.programs import programs_for
from dreamer_jax.inference.samplers.contract import DECODE_BLOCK
from dreamer_jax.inference.sampling import Sampling

if TYPE_CHECKING:
    from dreamer_jax.inference.engine import Engine


class Cell(NamedTuple):
    """One position in one depth step.

    Attributes:
        step: number of the step, from 0; positions with the same number went together.
        position: in the row, prompt included.
        depth: depths that the position has gone through after this step.
        entry: which entry of a token into the model the position goes back to, from 0; a later one at the same
            position takes its place.
        token: what entered.
        predicted: the likeliest next token, if the position were read off after this step.
    """

    step: int
    position: int
    depth: int
    entry: int
    token: int
    predicted: int


@dataclass(frozen=True)
class Trace:
    """A generated text, and how its sampler came to it.

    Attributes:
        prompt: tokens before the text.
        row: the text, as the engine generates it without a trace.
        cells: in the order of time. Steps of the prompt are among them only where it doesn't go ahead of the text.
    """

    prompt: list[int]
    row: Generated
    cells: list[Cell]

    @property
    def tokens(self) -> list[int]:
        """Of prompt and text, by position."""
        return [*self.prompt, *self.row.tokens]


@dataclass(eq=False)
class Recorder:
    """Gets the calls of a `RecordedModel` in their order, of a batch of one row."""

    cells: list[Cell] = field(default_factory=list)
    _entries: dict[int, tuple[int, int]] = field(default_factory=dict)
    _steps: int = 0
    _count: int = 0

    def entered(self, tokens: np.ndarray, positions: np.ndarray) -> None:
        """Tokens [1, P] at positions [1, P]."""
        for token, position in zip(tokens[0].tolist(), positions[0].tolist(), strict=True):
            if position < NOWHERE:
                self._entries[position] = self._count, token
                self._count += 1

    def stepped(self, positions: np.ndarray, depths: np.ndarray, predicted: np.ndarray) -> None:
        """Positions, the depths they were at, and what each would be read off as, [1, P]."""
        for position, depth, token in zip(*(each[0].tolist() for each in (positions, depths, predicted)), strict=True):
            if position < NOWHERE:
                self.cells.append(Cell(self._steps, position, depth + 1, *self._entries[position], token))
        self._steps += 1


class RecordedModel(FoldedModel):
    """A model that tells its recorder of every entry and step, and reads every position off after each."""

    recorder: Recorder = flax.struct.field(pytree_node=False)

    def enter(self, tokens, positions, slots, *others):
        """As of `FoldedModel`."""
        jax.debug.callback(self.recorder.entered, tokens, positions, ordered=True)
        return super().enter(tokens, positions, slots, *others)

    def step(self, flight, positions, depths, slots, total=None):
        """As of `FoldedModel`; what a coda leaves in the slots for reading off early is dropped."""
        flight, slots = super().step(flight, positions, depths, slots, total)
        predicted = jnp.argmax(self.logits(self.leave(flight, positions, slots)[0]), axis=-1)
        depths = jnp.broadcast_to(depths, positions.shape)
        jax.debug.callback(self.recorder.stepped, positions, depths, predicted, ordered=True)
        return flight, slots


def trace(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    finished: Finished | None = None,
) -> Trace:
    """Continue a prompt and write down how; the arguments are those of `Engine.generate`.

    The steps take longer, and programs are compiled for this call alone.

    Raises:
        UserError: the engine has a mesh.
    """
    if engine.mesh is not None:
        raise UserError("a trace is of one device; leave the mesh out")
    model, sampling = engine.model, sampling or Sampling()
    settings = max_tokens, sampling, stop_ids, engine.sampler
    batch = RowBatch(model, programs_for(None), [prompt], [0], 1, *settings)
    batch.begin()
    recorder = Recorder()
    batch.decode_with(RecordedModel(model.params, model.state, model.family, model.total_depth, recorder))
    while True:
        if finished is not None:
            batch.end(finished, 0)
        if batch.done:
            break
        batch.advance(DECODE_BLOCK)
    jax.effects_barrier()
    return Trace(list(prompt), batch.rows[0], recorder.cells)
