"""The spectral radius of a step: whether another depth pulls states together, lets them be, or drives them apart.

Near a state x a step x -> f(x) multiplies a small error by its Jacobian J = df/dx. In the long run errors grow by the
largest magnitude of an eigenvalue of J, its spectral radius: below 1 they die out, above 1 they grow.

Power iteration finds it without ever making J: a random v is multiplied by J (here by its transpose, see `pulled_back`)
again and again, and how much longer it gets each time tends to the spectral radius. Where the dominant eigenvalues are
a complex pair, or two of opposite sign, the growth of single products never settles; it goes up and down around the
right mean. So the estimate is the geometric mean of the growths, with weights that rise and fall smoothly (a Hann
window), in which such a wave cancels, unless it takes longer than the window.

What comes out is rows of a batch, each an estimate of its own: rows don't see each other, so J has a block for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.families import Family, Pass, forward
from dreamer_jax.families.contract import Batch, Drawn
from dreamer_jax.families.nearby import step_near

ITERATIONS = 64
"""Products with the Jacobian at each depth. In language models a token's state depends on those of earlier tokens; such
a triangular J lets vectors grow faster at first than any eigenvalue says, and that takes dozens of products to fade."""
LEFT_OUT = 0.25
"""The share of the products, the first ones, that the mean leaves out: until then other eigenvalues take part."""
LEAST = 1e-30
"""A growth of less counts as so much, so that its logarithm exists; a mean near it is reported as 0."""

Product = Callable[[jax.Array], jax.Array]


def pulled_back(function: Product, at: jax.Array) -> Product:
    """u -> J^T u for the Jacobian of a function at a point. A matrix and its transpose have the same eigenvalues.

    It is not v -> J v (`jax.jvp`), which not all operations allow (see `step_near`); it costs the same.
    """
    pull = jax.vjp(function, at)[1]
    return lambda u: pull(u)[0]


def spectral_radius(product: Product, start: jax.Array, real: jax.Array, iterations: int = ITERATIONS) -> jax.Array:
    """The largest magnitude of an eigenvalue, of each row, [B] float32; 0 for a row without real positions.

    Args:
        product: v -> J^T v (or J v) on [B, P, ...] float32; linear, rows apart.
        start: such a v, random.
        real: [B, P] bool; the others are padding, whose states nobody reads, and stay 0.
        iterations: products.
    """
    axes = tuple(range(1, start.ndim))
    mask = real.reshape(*real.shape, *[1] * (start.ndim - 2))

    def normed(v: jax.Array) -> tuple[jax.Array, jax.Array]:
        v = jnp.where(mask, v, 0)
        length = jnp.sqrt(jnp.sum(v**2, axis=axes))
        return v / jnp.maximum(length, LEAST).reshape(-1, *[1] * (start.ndim - 1)), length

    def multiply(v: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return normed(product(v))

    _, growth = jax.lax.scan(multiply, normed(start)[0], None, length=iterations)  # [iterations, B]
    mean = jnp.exp(jnp.asarray(window(iterations)) @ jnp.log(jnp.maximum(growth, LEAST)))
    return jnp.where(mean > 1e3 * LEAST, mean, 0)


def window(iterations: int) -> np.ndarray:
    """[iterations] float32, the weight of each product in the mean: 0 at first, then a Hann window; their sum is 1."""
    first = int(LEFT_OUT * iterations)
    places = (np.arange(iterations) - first + 0.5) / (iterations - first)
    weights = np.where(places > 0, np.sin(np.pi * places) ** 2, 0)
    return (weights / weights.sum()).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="iterations")
def radii(
    family: Family,
    slots: int,
    params: Any,
    model_state: Any,
    batch: Batch,
    total: jax.Array,
    at: jax.Array,
    key: jax.Array,
    iterations: int = ITERATIONS,
) -> jax.Array:
    """The spectral radius of the step at one depth of a pass, of each row, [B] float32.

    The Jacobian is that of what the step carries on (`Family.carried`) with respect to the same before the step, with
    everything else as the pass has it: what shallower depths left in memories, the context, and what a state holds
    beside. Use a family that computes in float32: with 8 bits of mantissa every product would be off by a part in 500.

    Args:
        family: the model.
        slots: a bound on `total`, known when it is compiled; one program serves all passes and depths below it.
        params, model_state: of the model.
        batch: [B, S] each.
        total: L of the pass.
        at: l, from 0.
        key: of the vector that the iteration starts with.
        iterations: products.
    """
    rows = batch["tokens"].shape[0]

    def observe(step: Callable[..., Any]) -> Callable[..., Any]:
        def observed(weights, state, inputs, depth, memory, context, tape=None):
            # The pass ends at l, but its steps see the L of the whole one, as codes of what is left to go want it.
            depth = depth._replace(total=jnp.asarray(total, jnp.int32))

            def measured() -> jax.Array:
                after, nothing = step_near(family, weights, state, inputs, depth, memory, context)
                start, product = jax.random.normal(key, nothing.shape), pulled_back(after, nothing)
                return spectral_radius(product, start, context.segment_ids > 0, iterations)

            found = jax.lax.cond(depth.index == at, measured, lambda: jnp.zeros(rows))
            return step(weights, state, inputs, depth, memory, context, tape)._replace(outputs=(), counts=found)

        return observed

    passed: Pass = forward(
        family, family.cast(params), model_state, batch, Drawn(jnp.asarray(at, jnp.int32) + 1, slots), observe=observe
    )
    return jnp.sum(passed.counts, axis=0)
