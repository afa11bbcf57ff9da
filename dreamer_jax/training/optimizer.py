"""The recipe of the paper's Table 3: AdamW after a linear warm-up, clipped on the global norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dreamer_jax.config.sections import TrainingConfig


def learning_rate(config: TrainingConfig, step: jax.typing.ArrayLike) -> jax.Array:
    """Linear from 0 to the maximum over the warm-up steps, constant from there. The first update has step 1."""
    return config.learning_rate * jnp.minimum(1.0, jnp.asarray(step) / max(1, config.warmup_steps))


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW on float32 weights; decoupled decay on matrices only, never on norm scales.

    `update` takes the keyword `gradient_norm`: the true global norm, which a device that has a part of the gradient
    can't compute by itself.
    """
    return optax.chain(
        _clip(config.clip_norm),
        optax.adamw(
            lambda count: learning_rate(config, count + 1),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=_matrices,
        ),
    )


def _clip(largest: float) -> optax.GradientTransformationExtraArgs:
    def init(params: Any) -> Any:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params
        scale = jnp.minimum(1.0, largest / extra["gradient_norm"])
        return jax.tree.map(lambda gradient: gradient * scale, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _matrices(params):
    """True for everything but norm scales; in LA those are stacked over layers, so the rank doesn't tell."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)
