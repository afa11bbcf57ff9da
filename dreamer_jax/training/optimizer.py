"""AdamW as the paper's Table 3 has it, the schedules of its learning rate, and which parameters it trains."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dreamer_jax.blocks.parameters import DECAYED, Role
from dreamer_jax.config.sections import TrainingConfig
from dreamer_jax.errors import ConfigError

KEY = "training.trainable"


def learning_rate(config: TrainingConfig, step: jax.typing.ArrayLike) -> jax.Array:
    """Linear from 0 to the maximum over the warm-up steps, then by the schedule. The first update has step 1."""
    step = jnp.asarray(step)
    rate = config.learning_rate * jnp.minimum(1.0, step / max(1, config.warmup_steps))
    if config.schedule == "constant":
        return rate
    if config.schedule == "cosine":
        falls = max(1, config.steps - config.warmup_steps)
        fall = optax.cosine_decay_schedule(1.0, falls, alpha=config.learning_rate_floor)
        return rate * fall(jnp.maximum(step - config.warmup_steps, 0))
    starts = config.steps - config.cooldown_steps
    return rate * optax.linear_schedule(1.0, config.learning_rate_floor, max(1, config.cooldown_steps), starts)(step)


def next_learning_rate(config: TrainingConfig, state: Any) -> jax.Array:
    """The rate of the update that `make_optimizer`'s state would make next.

    Its own count decides, which stands still in a step that is skipped; the step of the run goes on.
    """

    def of_schedule(path: Any, _: Any) -> bool:
        return getattr(path[-1], "tuple_name", "") == "ScaleByScheduleState"  # Adam's moments have a count, too

    return learning_rate(config, optax.tree_utils.tree_get(state, "count", filtering=of_schedule) + 1)


def make_optimizer(config: TrainingConfig, roles: Any) -> optax.GradientTransformationExtraArgs:
    """AdamW on float32 weights; decoupled decay on the roles that it applies to, never on norm scales.

    `update` takes the keyword `gradient_norm`: the true global norm, which a device that has a part of the gradient
    can't compute by itself. What isn't trained has no moments, and its update is zero.

    Args:
        config: the recipe.
        roles: the tree of the parameters' roles.
    Raises:
        ConfigError: `training.trainable` names something that isn't there.
    """
    recipe = optax.chain(
        _clip(config.clip_norm),
        optax.adamw(
            lambda count: learning_rate(config, count + 1),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=lambda params: _decayed(params, roles),
        ),
    )
    if not config.trainable:
        return recipe
    labels = jax.tree.map(lambda trained: "trained" if trained else "frozen", trained_leaves(config, roles))
    return optax.partition({"trained": recipe, "frozen": optax.set_to_zero()}, labels)


def trained_leaves(config: TrainingConfig, roles: Any) -> Any:
    """The tree of booleans that `training.trainable` means.

    Args:
        config: the recipe.
        roles: the tree of the parameters' roles.
    Raises:
        ConfigError: a name is neither a role of this model nor a part of it.
    """
    wanted = [name.strip() for name in config.trainable.split(",") if name.strip()]
    places = jax.tree_util.tree_flatten_with_path(roles)[0]
    named = [(".".join(key.key for key in path), role) for path, role in places]

    def covers(name: str, path: str, role: Role) -> bool:
        return name == role or path == name or path.startswith(f"{name}.")

    for name in wanted:
        if not any(covers(name, path, role) for path, role in named):
            parts = sorted({path.partition(".")[0] for path, _ in named})
            raise ConfigError(
                f"{KEY}: '{name}' is neither a role ({', '.join(sorted({role for _, role in named}))}) nor a part "
                f"of this model ({', '.join(parts)}, or something in them, such as {named[-1][0]})",
                key=KEY,
            )
    flags = [not wanted or any(covers(name, path, role) for name in wanted) for path, role in named]
    return jax.tree.unflatten(jax.tree.structure(roles), flags)


def _decayed(params: Any, roles: Any) -> Any:
    """True where weight decay applies; what isn't trained is left out of the tree."""
    return jax.tree.map(
        lambda leaf, role: leaf if isinstance(leaf, optax.MaskedNode) else role in DECAYED,
        params,
        roles,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
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
