"""The model as samplers see it: tokens enter, a set of positions goes one depth further with `step`, logits are read
off.

    flight, slots = model.enter(tokens, positions, slots)             # [B, P] tokens -> P positions a row in flight
    flight, slots = model.step(flight, positions, depths, slots)      # one depth further, each at its own depth
    hidden, slots = model.leave(flight, positions, slots)             # [B, P, h], of positions that went deep enough
    logits = model.logits(hidden)                                     # [B, P, V]

It is the family's own step, given memories that grow. A step writes the keys and values of its positions before it
attends, so a position sees itself and whatever earlier positions have left at the same depth. Which positions to step
when is the business of a sampler (`samplers/`): one token after another, or several at depths of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.memory import Context, Memory
from dreamer_jax.blocks.operations import in_int8
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.config import Config
from dreamer_jax.errors import UserError
from dreamer_jax.families import KNOWLEDGE, Family, build
from pallas_kernels.backend import on_cpu

PyTree = Any


class Flight(NamedTuple):
    """P positions of each row between two depths.

    Attributes:
        state: [B, P, ...], the family's.
        inputs: [B, P, ...], what every step gets; () where nothing is injected.
        depths: what the positions keep of their own shallower depths; None without depth attention. The next tokens
            start with a new flight, so this doesn't grow with the sequence.
    """

    state: PyTree
    inputs: PyTree
    depths: PyTree


class FoldedModel(flax.struct.PyTreeNode):
    """A trained model ready for inference, at a depth; a pytree whose leaves are the weights.

    Attributes:
        params: folded and cast once, see `Family.fold`.
        state: the model's own, such as balancing biases.
        family: the model.
        total_depth: L of this model's passes, which may differ from the trained one.
        exchange: the mesh axis whose devices have rows of their own and exchange them inside of the model, so that
            they have to go through it together; None where each device computes for itself.
    """

    params: PyTree
    state: dict[str, PyTree]
    family: Family = flax.struct.field(pytree_node=False)
    total_depth: int = flax.struct.field(pytree_node=False)
    exchange: str | None = flax.struct.field(pytree_node=False, default=None, kw_only=True)

    @property
    def config(self) -> Any:
        """Sizes and compute precision: the section `model`."""
        return self.family.config

    def empty_slots(self, rows: int, capacity: int) -> PyTree:
        """What is kept of B = `rows` sequences of at most S = `capacity` tokens.

        On a CPU numbers of bfloat16 are kept as float32: XLA's backend writes and looks up nothing in bfloat16, and
        would convert all that is kept, there and back, at every depth.
        """
        slots = self.family.slots(rows, capacity, self.total_depth)
        return jax.tree.map(_widened, slots) if on_cpu() else slots

    def enter(
        self, tokens: jax.Array, positions: jax.Array, slots: PyTree, scale: float | jax.Array = 1.0
    ) -> tuple[Flight, PyTree]:
        """Tokens [B, P] int32 at these places before the first depth, and the slots with what a prelude left there; a
        random state is multiplied by `scale`."""
        family = self.family
        memory = Memory(slots, family.flight(tokens.shape[0], tokens.shape[1], self.total_depth))
        context = self._context(positions)
        entered, memory = family.enter(self.params, {"tokens": tokens}, memory, context)
        return Flight(family.start(entered, context, scale), family.inputs(entered), memory.depths), memory.sequence

    def random_state(self, inputs: PyTree, positions: jax.Array, keys: jax.Array, scale: jax.Array) -> PyTree:
        """States [B, P, ...] like those that positions start from, drawn with a key of each [B, P] and multiplied by
        `scale`; of a family that gets its inputs in every step."""
        batch, size = positions.shape
        apart = jax.tree.map(lambda leaf: leaf.reshape(batch * size, 1, *leaf.shape[2:]), inputs)
        context = self._context(positions.reshape(-1, 1))._replace(keys=keys.reshape(-1))
        state = self.family.start(apart, context, scale)
        return jax.tree.map(lambda leaf: leaf.reshape(batch, size, *leaf.shape[2:]), state)

    def step(
        self,
        flight: Flight,
        positions: jax.Array,
        depths: jax.Array | int,
        slots: PyTree,
        total: jax.Array | None = None,
    ) -> tuple[Flight, PyTree]:
        """One depth step of a set of positions.

        Args:
            flight: P positions of each row, at `depths`.
            positions: [B, P] int32, their places in their rows, all different within a row; a position outside the
                slots is computed but leaves nothing there.
            depths: l of each position, [B, P] int32, or one number for all, which is faster.
            slots: hold what earlier positions have left at these depths.
            total: L of each position's pass, like `depths`, at most the model's; None for the model's.

        Returns:
            The flight at depths + 1, and the slots with these positions at `depths`.
        """
        depth = Depth(jnp.asarray(depths, jnp.int32), jnp.int32(self.total_depth) if total is None else total)
        weights = self.family.weights(self.params).of(depth.flat().index)
        memory, context = Memory(slots, flight.depths), self._context(positions)
        stepped = self.family.step(weights, flight.state, flight.inputs, depth, memory, context)
        return Flight(stepped.state, flight.inputs, stepped.memory.depths), stepped.memory.sequence

    def leave(self, flight: Flight, positions: jax.Array, slots: PyTree) -> tuple[jax.Array, PyTree]:
        """What the head is applied to, [B, P, h], and the slots with what a coda left there."""
        memory, context = Memory(slots, flight.depths), self._context(positions)
        hidden, memory = self.family.readout(self.params, flight.state, memory, context)
        return hidden, memory.sequence

    def largest(self, number: jax.Array) -> jax.Array:
        """Of a number of each device that this one exchanges rows with, the largest."""
        return number if self.exchange is None else jax.lax.pmax(number, self.exchange)

    def anywhere(self, flags: jax.Array) -> jax.Array:
        """Whether a flag of any row is true, on any device that this one exchanges rows with.

        What decides whether the model is called has to be decided in this way: a device that left the call out would
        keep the others waiting for its part of an exchange.
        """
        return self.largest(jnp.any(flags).astype(jnp.int32)) > 0

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., h] -> logits [..., V] float32 of the token after each position."""
        return self.family.logits(self.params, hidden)

    def _context(self, positions: jax.Array) -> Context:
        return Context(jnp.ones_like(positions), positions, self.state)


def through_depths(
    model: FoldedModel, tokens: jax.Array, positions: jax.Array, slots: PyTree, depths: jax.Array | None = None
) -> tuple[jax.Array, PyTree]:
    """Tokens [B, P] at these positions through every depth, or through the first `depths`: what the head is applied to
    [B, P, h], and the slots."""

    def body(l, carry):
        return model.step(carry[0], positions, l, carry[1])

    flight, slots = jax.lax.fori_loop(
        0, model.total_depth if depths is None else depths, body, model.enter(tokens, positions, slots)
    )
    return model.leave(flight, positions, slots)


def check_generates(config: Config) -> None:
    """Refuse a run that was trained in a way that nothing here, and no exported folder, generates by.

    Raises:
        UserError: it was.
    """
    if config.data.copies > 1:
        raise UserError(
            f"the run was trained with data.copies {config.data.copies}: such models are evaluated by their loss "
            "(dreamer depth) and don't generate or score text"
        )


def fold(
    config: Any,
    params: PyTree,
    state: dict[str, PyTree],
    depth: int | None = None,
    dtype: str | None = None,
    int8: bool = False,
) -> FoldedModel:
    """A trained model ready for inference.

    Args:
        config: of training, the section `model`.
        params: as trained.
        state: the model's own, by collection.
        depth: L of the passes; None for the trained one. A recurrent model takes any, another one at most the layers it
            has.
        dtype: compute precision, "bfloat16" or "float32"; None for `config.dtype`.
        int8: whether the experts' matrices are kept as whole numbers of eight bits (`OutputRows`): on a CPU, and where
            a kernel takes them on an NVIDIA GPU and a TPU from v5 on.

    Raises:
        UserError: the depth is impossible, the model doesn't generate, or nothing can be kept in eight bits.
    """
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    family = build(config)
    if not family.flags.generates:
        raise UserError(f"a model of the family {config.family} doesn't generate text")
    depth = family.depth if depth is None else family.check_depth(depth)
    kept = {name: its for name, its in state.items() if name != KNOWLEDGE}  # all that is needed of it is in the weights
    folding = build(config, in_int8(family.operations)) if int8 else family
    folded = _folded(folding, params, state)
    if int8 and not any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(folded)):
        elsewhere = "that is for CPUs, and where a kernel takes the experts for NVIDIA GPUs and TPUs from v5 on"
        raise UserError(f"int8: {'the model has no experts' if on_cpu() else elsewhere}")
    return FoldedModel(folded, kept, family, depth)


def _widened(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf


@functools.partial(jax.jit, static_argnums=0)
def _folded(family: Family, params: PyTree, state: dict[str, PyTree]) -> PyTree:
    return family.fold(family.prepare(params, state))
