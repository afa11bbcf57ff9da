"""What training may ask beside the loss: that the last depth changes little, or is a gentle step; or like layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.parameters import is_box
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.config.sections import Config
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import Family, Pass
from dreamer_jax.families.nearby import step_near


def last_change(family: Family, passed: Pass) -> jax.Array:
    """[B, S] float32: |x_L - x_{L-1}|^2 / |x_L|^2 of the residual stream, the denominator without gradient; zero for a
    pass of one depth."""
    before, after = (family.stream(_state(passed, i)).astype(jnp.float32) for i in (-2, -1))
    moved = jnp.sum((after - before) ** 2, axis=-1)
    size = jnp.sum(jax.lax.stop_gradient(after) ** 2, axis=-1)
    return jnp.where(passed.depth > 1, moved / jnp.maximum(size, 1e-12), 0.0)


def jacobian(family: Family, params: Any, passed: Pass, keys: jax.Array) -> jax.Array:
    """[B, S] float32: |J^T v|^2 / h at each position, J being the last step's Jacobian and v ~ N(0, I) at all of a
    row's real positions; zero for a pass of one depth.

    Its expectation, summed over the positions, is |J|_F^2 / h (Hutchinson, 1990). That the state of the last loop is
    taken without gradient, and one vector a step, are of STARS (see docs/depth.md): weights learn to make the step
    gentle, not to lead states to where it is.

    Args:
        family: with operations that can be differentiated twice: no kernels.
        params: of the model.
        passed: with its last two states.
        keys: [B], one a row.
    """
    before = jax.lax.stop_gradient(_state(passed, -2))
    l = jnp.maximum(passed.depth - 1, 0)
    weights = family.cast_weights(family.weights(family.prepare(params, passed.context.state))).at(l)
    left = jax.lax.stop_gradient(passed.left)
    after, nothing = step_near(
        family, weights, before, jax.lax.stop_gradient(passed.inputs), Depth(l, passed.depth), left, passed.context
    )
    v = jax.vmap(lambda key: jax.random.normal(key, nothing.shape[1:]))(keys)
    real = (passed.context.segment_ids > 0).reshape(*nothing.shape[:2], *[1] * (nothing.ndim - 2))
    pulled = jax.vjp(after, nothing)[1](jnp.where(real, v, 0))[0]
    size = jnp.sum(pulled**2, axis=tuple(range(2, nothing.ndim))) / (
        nothing.size // (nothing.shape[0] * nothing.shape[1])
    )
    return jnp.where(passed.depth > 1, size, 0.0)


def check_likeness(config: Config, family: Family) -> None:
    """Refuse to ask for what a model, or a mesh, hasn't.

    Raises:
        ConfigError: with the key and what to do.
    """
    apart = config.training.looping_layers
    if not config.training.looping:
        return
    if not _layered(family):
        raise ConfigError(
            "training.looping: this model has no layers of their own that could be alike; leave it at 0",
            "training.looping",
        )
    if family.depth % apart or family.depth == apart:
        raise ConfigError(
            f"training.looping_layers: {apart} layers don't make {family.depth}, looped twice or more often",
            "training.looping_layers",
        )
    if config.mesh.expert > 1:
        raise ConfigError(
            "training.looping: devices that divide the experts don't see whole layers; use mesh.expert 1",
            "training.looping",
        )


def likeness(family: Family, params: Any, apart: int) -> jax.Array:
    """How alike layers are that lie so many apart, float32: the cosine between their matrices, the mean over pairs of
    neighbouring loops and over kinds of matrices (R_G(k) of Saunshi et al., 2025, "Reasoning with latent thoughts")."""
    found = []
    for path in _layered(family):
        leaf: Any = params
        for key in path:
            leaf = leaf[key.key]
        flat = leaf.reshape(leaf.shape[0], -1).astype(jnp.float32)  # [L, n]
        products = jnp.sum(flat[:-apart] * flat[apart:], axis=1)
        sizes = jnp.sqrt(jnp.sum(flat**2, axis=1) + 1e-30)
        found.append(jnp.mean(products / (sizes[:-apart] * sizes[apart:])))
    return jnp.mean(jnp.stack(found))


def _layered(family: Family) -> list[Any]:
    """Paths of the matrices of which every layer has its own."""
    boxes = jax.tree_util.tree_flatten_with_path(family.boxed, is_leaf=is_box)[0]
    return [path for path, box in boxes if box.axes[0] == "layer" and box.role == "matrix"]


def _state(passed: Pass, place: int) -> Any:
    return jax.tree.map(lambda states: states[place], passed.states)
