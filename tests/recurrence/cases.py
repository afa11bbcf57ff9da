"""A step with everything that the depth scan takes, and the same recurrence as a plain loop."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.recurrence import DepthScan, Stepped, Weights
from pallas_kernels.kept import keep
from pallas_kernels.tape import Tape

TOKENS, SIZE, SLOTS = 5, 4, 6


class SlotsGradient(flax.struct.PyTreeNode, Tape):
    """The gradient of the memory: deeper depths add to the slots of the shallower."""

    total: jax.Array


@jax.custom_vjp
def look_back(query, new, memory, l, tape):
    """A softmax over what all depths so far have left; `new` is in slot l of the memory already."""
    return _look_back(query, memory, l)


def _look_back(query, memory, l):
    logits = jnp.einsum("th,lth->lt", query, memory)
    weights = jax.nn.softmax(jnp.where(jnp.arange(len(memory))[:, None] <= l, logits, -jnp.inf), axis=0)
    return jnp.einsum("lt,lth->th", weights, memory)


def _forward(query, new, memory, l, tape):
    return _look_back(query, memory, l), (query, memory, l, tape)


def _backward(residuals, d_out):
    query, memory, l, tape = residuals
    d_query, d_memory = jax.vjp(lambda q, m: _look_back(q, m, l), query, memory)[1](d_out)
    total = tape.total + d_memory
    return d_query, jax.lax.dynamic_index_in_dim(total, l, 0, keepdims=False), None, None, SlotsGradient(total)


look_back.defvjp(_forward, _backward)


def step(weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
    """Everything at once: a state of floats and integers, injected inputs, shared and stacked weights, a memory that is
    attended to along depth, outputs with gradients, and counts."""
    shared, own = weights.shared, weights.stacked
    x, halted, visits = state["x"], state["halted"], state["visits"]
    hidden = keep(jnp.tanh(x @ shared["mix"]["matrix"] + inputs["e"] @ own["adapter"]))
    new = hidden @ shared["key"]
    kept = new if tape is None else jax.lax.stop_gradient(new)
    memory = jax.lax.dynamic_update_index_in_dim(memory, kept, depth.index, 0)
    if tape is None:
        seen = _look_back(hidden, memory, depth.index)
    else:
        seen = look_back(hidden, new, memory, depth.index, tape["memory"])
    probability = jax.nn.sigmoid(jnp.sum(seen * shared["gate"], axis=-1) + 0.1 * depth.index)
    x = x * (1 - probability[:, None]) + seen * context["scale"]
    state = {"x": x, "halted": halted + probability, "visits": visits + (probability > 0.5)}
    outputs = {"probability": probability, "x": x}
    counts = {"open": jnp.sum(probability > 0.5), "depth": depth.index + 10 * depth.total}
    return Stepped(state, memory, outputs, counts)


def step_without_memory(weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
    """The same without anything to look back at."""
    hidden = jnp.tanh(state["x"] @ weights.shared["mix"]["matrix"] + inputs["e"] @ weights.stacked["adapter"])
    x = hidden @ weights.shared["key"] * context["scale"]
    return Stepped({**state, "x": x}, memory, {"x": x}, {"depth": depth.index})


def arrays(rows: int = SLOTS, seed: int = 0) -> dict[str, Any]:
    """Weights, state, inputs, memory and context; `rows` of stacked weights."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "weights": {
            "shared": {"mix": {"matrix": normal(SIZE, SIZE)}, "key": normal(SIZE, SIZE), "gate": normal(SIZE)},
            "stacked": {"adapter": normal(rows, SIZE, SIZE)},
        },
        "state": {"x": normal(TOKENS, SIZE), "halted": jnp.zeros(TOKENS), "visits": jnp.zeros(TOKENS, jnp.int32)},
        "inputs": {"e": normal(TOKENS, SIZE), "number": jnp.int32(3)},
        "memory": jnp.zeros((SLOTS, TOKENS, SIZE)),
        "context": {"scale": jnp.float32(0.7), "key": jax.random.key(1)},
    }


def scanned_loss(floats, given, depth, rows=None, **how):
    """A loss of everything that the scan returns; `floats` are (weights, x of depth 0, e)."""
    weights, x, e = floats
    weights = Weights(weights["shared"], weights["stacked"], rows)
    scan = DepthScan(step, SLOTS, start_tape=lambda: {"memory": SlotsGradient(jnp.zeros((SLOTS, TOKENS, SIZE)))}, **how)
    state, inputs = {**given["state"], "x": x}, {**given["inputs"], "e": e}
    found = scan(weights, state, inputs, given["memory"], given["context"], depth)
    return loss_of(found.state, found.outputs), found


def unrolled_loss(floats, given, depth, rows=None, first=0, last=None):
    """The same by a Python loop under plain autodiff; a stop_gradient on state and memory before depth `first`; outputs
    of the `last` depths only."""
    weights, x, e = floats
    rows = rows or tuple(range(SLOTS))
    state, inputs = {**given["state"], "x": x}, {**given["inputs"], "e": e}
    memory, outputs = given["memory"], []
    for l in range(depth):
        if l == first and first:
            state, memory = jax.lax.stop_gradient((state, memory))
        own = jax.tree.map(lambda leaf, l=l: leaf[rows[l]], weights["stacked"])
        blocked = jax.lax.stop_gradient((weights["shared"], own, inputs)) if l < first else None
        shared, own, seen = blocked or (weights["shared"], own, inputs)
        at = depth_of(l, depth)
        stepped = step(Weights(shared, own), state, seen, at, memory, given["context"])
        state, memory = stepped.state, stepped.memory
        outputs.append(stepped.outputs if l >= first else jax.lax.stop_gradient(stepped.outputs))
    length = SLOTS if last is None else last
    kept = outputs if last is None else [None] * (last - depth) + outputs[-last:]
    nothing = jax.tree.map(jnp.zeros_like, outputs[0])
    kept = [nothing if one is None else one for one in kept] + [nothing] * (length - len(kept))
    return loss_of(state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *kept))


def depth_of(l: int, depth: int):
    from dreamer_jax.blocks.positions import Depth

    return Depth(jnp.int32(l), jnp.int32(depth))


def loss_of(state, outputs):
    """Weighs every number differently."""
    total = jnp.sum(jnp.sin(state["x"])) + jnp.sum(state["halted"] ** 2)
    for leaf in jax.tree.leaves(outputs):
        total += jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape))
    return total
