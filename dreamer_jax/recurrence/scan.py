"""The depth scan: one step applied at every depth, with memory linear in depth.

A step is a pure function:

    step(weights, state, inputs, depth, memory, context, tape) -> Stepped(state, memory, outputs, counts)

    weights   see `Weights`: shared by all depths, or the row of this depth
    state     any pytree; what a depth hands to the next
    inputs    the same at every depth, such as an embedded input that is injected; their gradient is summed over depths
    depth     `Depth`: l and L
    memory    what is attended to along depth, filled by the step at l; this module never looks inside
    context   the same at every depth, without gradient
    outputs   of every depth, with gradient, returned stacked: halting probabilities, states for a loss at every depth
    counts    small integers or observations of every depth, returned stacked, without gradient

    for l in 0 .. L-1:
        kept[l] = state
        state, memory, outputs[l], counts[l] = step(weights.at(l), state, inputs, Depth(l, L), memory, context)

Plain reverse mode through that loop would save the whole memory at every depth: O(L^2). The backward pass here keeps
the states and the final memory only, and hands a *tape* down the depths: what the deeper ones leave for the shallower,
which is all that the memory's gradient is needed for.

    for l in L-1 .. 0:
        vjp of (weights, state, inputs, tape) -> step(weights.at(l), kept[l], inputs, Depth(l, L), final memory,
        context, tape), pulled back from d_state and d_outputs[l]; gradients of weights and inputs are summed in float32

Given a tape, the step finds slots 0 .. l of the final memory as it would have left them and needn't write. Values leave
a reverse pass only as gradients, so an operation that takes a part of the tape returns, in the place of that part's
gradient, its new value. What is on a tape is the operation's own business: gradients to be added to, in float32, or
queries from which shallower keys pull theirs (pallas_kernels/depth_attention). Gradients of shared weights may be on
the tape too: then the step returns none for them, no array of their size is written and added up at every depth, and
what they need may be kept for several depths before it is added (`make_room`, see pallas_kernels/dispatch/aside.py).

What is kept of a depth for this (`Remat`): "full" keeps the state alone and computes the step again. The others run the
step under jax.vjp on the way down already, with an empty tape, and keep what its reverse pass asks for: everything
("none"), or what is named KEPT, from which the rest is quickly computed again ("attention"). Whatever of that is an
input of the step or the memory it returns isn't kept but put in its place on the way back: the weights are not stored
once a depth, nor is the memory, whose final value serves every depth.

With `gradient_depths` = k only the last k depths are differentiated, and only they keep anything: the gradient is that
of a stop_gradient on state and memory before depth L - k (truncated backpropagation); inputs and weights still get
theirs from those k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.positions import Depth
from dreamer_jax.config.values import Remat
from dreamer_jax.recurrence import tape as tapes
from dreamer_jax.recurrence.keeping import Recompute, Record, floats_of
from dreamer_jax.recurrence.weights import Weights, read, write

PyTree = Any


class Stepped(NamedTuple):
    """What a step returns; see the module's docstring."""

    state: PyTree
    memory: PyTree
    outputs: PyTree = ()
    counts: PyTree = ()


class Scanned(NamedTuple):
    """What the scan returns.

    Attributes:
        state: after the last depth.
        outputs: of every depth, or of the last `output_depths`, stacked [slots, ...] or [output_depths, ...]; zero
            where no depth was.
        counts: of every depth, [slots, ...], zero from `depth` on.
        memory: filled by all depths; no gradient comes back through it.
    """

    state: PyTree
    outputs: PyTree
    counts: PyTree
    memory: PyTree


@dataclass(frozen=True)
class DepthScan:
    """How a step is scanned over depth; called with the arrays.

    Attributes:
        step: see the module's docstring.
        slots: static bound on the depth.
        remat: what is kept for the backward pass.
        cast: float32 weights -> the copy that the step computes with, made once before the loop.
        start_tape: () -> the empty tape, a tree as of tape.py.
        gradient_depths: differentiate so many depths, the last ones; None for all.
        output_depths: return outputs of so many depths, the last ones; None for all.
    """

    step: Callable[..., Stepped]
    slots: int
    remat: Remat = "full"
    cast: Callable[[Weights], Weights] = lambda weights: weights
    start_tape: Callable[[], PyTree] = dict
    gradient_depths: int | None = None
    output_depths: int | None = None

    def __call__(
        self,
        weights: Weights,
        state: PyTree,
        inputs: PyTree,
        memory: PyTree,
        context: PyTree,
        depth: int | jax.Array,
        differentiated: jax.Array | None = None,
    ) -> Scanned:
        """Apply the step at depths 0 .. depth - 1.

        Args:
            weights: float32; their gradients are summed over depths in float32.
            state: of depth 0, compute dtype. Integers in it get no gradient.
            inputs: see the module's docstring.
            memory: empty, of `slots` depths; its gradient is the tape's business.
            context: see the module's docstring.
            depth: L. A traced scalar, at most `slots`, makes it a run-time number.
            differentiated: where `gradient_depths` is set, a traced scalar that counts too: the lesser of both.
        """
        run = _Run(self, depth if isinstance(depth, int) else None)

        @jax.custom_vjp
        def scan(weights, state, inputs, memory, context, ends):
            return run.forward(weights, state, inputs, memory, context, *ends, keep=False)[0]

        def forward(weights, state, inputs, memory, context, ends):
            return run.forward(weights, state, inputs, memory, context, *ends, keep=True)

        def backward(residuals, cotangents):
            return run.backward(residuals, cotangents)

        scan.defvjp(forward, backward)
        return scan(weights, state, inputs, memory, context, (jnp.asarray(depth, jnp.int32), differentiated))


@dataclass
class _Run:
    """One scan while it is traced.

    Attributes:
        how: see `DepthScan`.
        static: the depth, if it is known now.
        keeping: what is kept of a depth, and how it is differentiated from that.
    """

    how: DepthScan
    static: int | None
    keeping: Recompute | Record = field(init=False)

    def __post_init__(self) -> None:
        kind = Recompute if self.how.remat == "full" else Record
        self.keeping = kind(self.how.step, self.how.remat)

    def depth(self, depth: jax.Array) -> Any:
        """L, as a number where that is known."""
        return depth if self.static is None else self.static

    def first(self, depth: Any, differentiated: jax.Array | None) -> Any:
        """The first depth that is differentiated."""
        k: Any = self.how.gradient_depths
        if k is None:
            return 0
        if differentiated is not None:
            return jnp.maximum(depth - jnp.minimum(k, differentiated), 0)
        return max(depth - k, 0) if isinstance(depth, int) else jnp.maximum(depth - k, 0)

    def output_place(self, l: Any, depth: Any) -> Any:
        """Where the outputs of depth l stand; below 0 where they aren't returned."""
        last = self.how.output_depths
        return l if last is None else l - (depth - last)

    def forward(self, weights, state, inputs, memory, context, depth, differentiated, keep):
        """What the scan returns and, with `keep`, the residuals."""
        how, total = self.how, jnp.asarray(depth, jnp.int32)
        depth = self.depth(depth)
        copy = how.cast(weights)
        fixed = (copy, inputs, context)

        def step(state, memory, l):
            return how.step(copy.at(l), state, inputs, Depth(l, total), memory, context)

        def plain(l, carry):
            state, memory, stacks = carry
            return self._store(step(state, memory, l), stacks, l, depth)

        shapes = jax.eval_shape(step, state, memory, jnp.int32(0))
        outputs = _zeros(shapes.outputs, how.slots if how.output_depths is None else how.output_depths)
        carry = (state, memory, (outputs, _zeros(shapes.counts, how.slots)))

        if not keep:
            state, memory, stacks = jax.lax.fori_loop(0, depth, plain, carry)
            return Scanned(state, stacks[0], stacks[1], memory), None
        first = self.first(depth, differentiated)
        if how.gradient_depths is not None:
            carry = jax.lax.fori_loop(0, first, plain, carry)
        tape = how.start_tape()

        # Everything that the step sees is carried, so that it can be told from what the step makes.
        def keep_step(fixed, state, memory, l):
            weights, inputs, context = fixed
            return self.keeping.run(weights.at(l), tape, state, inputs, Depth(l, total), memory, context)

        def keeping(l, carry):
            (state, memory, stacks), fixed, kept = carry
            stepped, new = keep_step(fixed, state, memory, l)
            return self._store(stepped, stacks, l, depth), fixed, write(kept, new, l - first)

        room = how.slots if how.gradient_depths is None else min(how.gradient_depths, how.slots)
        kept = _zeros(jax.eval_shape(keep_step, fixed, state, memory, jnp.int32(0))[1], room)
        (state, memory, stacks), _, kept = jax.lax.fori_loop(first, depth, keeping, (carry, fixed, kept))
        residuals = weights, kept, inputs, memory, context, total, differentiated
        return Scanned(state, stacks[0], stacks[1], memory), residuals

    def _store(self, stepped, stacks, l, depth):
        """The carry after depth l."""
        # The first of the depths whose outputs are wanted is the last to be written to place 0.
        place = jnp.maximum(self.output_place(l, depth), 0)
        stacks = write(stacks[0], stepped.outputs, place), write(stacks[1], stepped.counts, l)
        return stepped.state, stepped.memory, stacks

    def backward(self, residuals, cotangents):
        """Cotangents of weights, state, inputs, memory, context and the numbers of depths."""
        weights, kept, inputs, memory, context, total, differentiated = residuals
        depth = self.depth(total)
        first, tape = self.first(depth, differentiated), self.how.start_tape()
        copy = self.how.cast(weights)
        on_tape = tapes.gradients(tape)
        taped = tapes.part_of(copy.shared, on_tape)
        rest = copy.replace(shared=tapes.without(copy.shared, taped))
        sums = weights.replace(shared=tapes.without(weights.shared, taped))
        d_outputs = floats_of(cotangents.outputs)
        wide_inputs = [jnp.zeros(x.shape, jnp.float32) for x in floats_of(inputs)]

        def body(step, carry):
            d_state, tape, sums, d_inputs = carry
            l, tape = depth - 1 - step, tapes.make_room(tape)
            pull = self.keeping.pullback(
                rest.at(l), taped, read(kept, l - first), inputs, Depth(l, total), memory, context, tape
            )
            d_own, d_state, d_new, tape = pull(d_state, self._cotangent(d_outputs, l, depth))
            d_inputs = [sum_ + d.astype(jnp.float32) for sum_, d in zip(d_inputs, d_new, strict=True)]
            return d_state, tape, _added(sums, d_own, rest.row(l)), d_inputs

        carry = (floats_of(cotangents.state), tape, jax.tree.map(jnp.zeros_like, sums), wide_inputs)
        d_state, tape, sums, d_inputs = jax.lax.fori_loop(0, depth - first, body, carry)
        tape = tapes.settle(tape)
        # As the parameters came, in whatever kind of dictionaries: their leaves have one order.
        found = sums.replace(shared=tapes.merged(sums.shared, tapes.gradients(tape)))
        d_weights = jax.tree.unflatten(jax.tree.structure(weights), jax.tree.leaves(found))
        if self.how.gradient_depths is not None:
            d_state = [jnp.where(first > 0, 0, d) for d in d_state]
        d_state = _with_nothing(cotangents.state, d_state)
        d_inputs = [d.astype(x.dtype) for d, x in zip(d_inputs, floats_of(inputs), strict=True)]
        return d_weights, d_state, _with_nothing(inputs, d_inputs), None, None, None

    def _cotangent(self, d_outputs, l, depth):
        place = self.output_place(l, depth)
        rows = read(d_outputs, jnp.maximum(place, 0))
        if self.how.output_depths is None:
            return rows
        return [jnp.where(place >= 0, row, 0) for row in rows]


def _added(sums: Weights, d_own: Weights, row: jax.Array) -> Weights:
    """Sums of the gradients of all depths, float32, with those of one depth."""
    shared = jax.tree.map(lambda total, d: total + d.astype(jnp.float32), sums.shared, d_own.shared)
    if sums.repeats:
        before = read(sums.stacked, row)
        d_own = d_own.replace(stacked=jax.tree.map(lambda b, d: b + d.astype(jnp.float32), before, d_own.stacked))
    return sums.replace(shared=shared, stacked=write(sums.stacked, d_own.stacked, row))


def _zeros(shapes: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)


def _with_nothing(tree: PyTree, floats: list[jax.Array]) -> PyTree:
    """A tree of cotangents: those of its floating leaves, in order, and None for the others."""
    given = iter(floats)
    return jax.tree.map(lambda leaf: next(given) if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, tree)
