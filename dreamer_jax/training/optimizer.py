"""AdamW as the paper's Table 3 has it, Huginn's variant, schedules of the learning rate, and what is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from dreamer_jax.blocks.parameters import DECAYED, Role
from dreamer_jax.config.sections import TrainingConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import Family

KEY = "training.trainable"
ROUTER: Role = "router_key"


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
    fall = optax.linear_schedule(1.0, config.learning_rate_floor, max(1, config.cooldown_steps), starts)
    return rate * jnp.maximum(fall(step), 0.0)  # which rounding would miss by 1e-7


def next_learning_rate(config: TrainingConfig, state: Any) -> jax.Array:
    """The rate of the update that `make_optimizer`'s state would make next.

    Its own count decides, which stands still in a step that is skipped; the step of the run goes on.
    """

    def of_schedule(path: Any, _: Any) -> bool:
        return getattr(path[-1], "tuple_name", "") == "ScaleByScheduleState"  # Adam's moments have a count, too

    return learning_rate(config, optax.tree_utils.tree_get(state, "count", filtering=of_schedule) + 1)


def local_means(tree: Any) -> Any:
    """The mean of every array, of which this device has the whole."""
    return jax.tree.map(jnp.mean, tree)


def make_optimizer(
    config: TrainingConfig, roles: Any, means: Callable[[Any], Any] = local_means
) -> optax.GradientTransformationExtraArgs:
    """Adam on float32 weights; decoupled decay on the roles that it applies to, never on norm scales.

    `update` takes the keyword `gradient_norm`: the true global norm, which a device that has a part of the gradient
    can't compute by itself. What isn't trained has no moments, and its update is zero.

    Args:
        config: the recipe.
        roles: the tree of the parameters' roles.
        means: a tree like the parameters -> the mean of every whole array, of which a device may have a part.
    Raises:
        ConfigError: `training.trainable` names something that isn't there.
    """

    def decayed(params: Any) -> Any:
        return _decayed(params, roles)

    def rate(count: Any) -> jax.Array:
        return learning_rate(config, count + 1)

    if config.optimizer == "adamw":
        adam = optax.adamw(
            rate, config.beta1, config.beta2, config.epsilon, weight_decay=config.weight_decay, mask=decayed
        )
    else:
        adam = optax.chain(
            scale_by_adam_atan2(config.beta1, config.beta2, means),
            optax.add_decayed_weights(config.weight_decay, decayed),
            optax.scale_by_learning_rate(rate),
        )
    recipe = optax.chain(_clip(config.clip_norm), adam)
    if not config.trainable:
        return recipe
    labels = jax.tree.map(lambda trained: "trained" if trained else "frozen", trained_leaves(config, roles))
    return optax.partition({"trained": recipe, "frozen": optax.set_to_zero()}, labels)


def scale_by_adam_atan2(
    beta1: float, beta2: float, means: Callable[[Any], Any] = local_means
) -> optax.GradientTransformation:
    """Adam without an epsilon, and with clipped updates: how Huginn was trained (Geiping et al., 2025, section 4).

    u = atan2(m, sqrt(v)) / max(1, RMS(g / sqrt(v))), with m and v the moments corrected for their bias: the arctangent
    of Everett et al. (2024), which is between -pi/2 and pi/2 and the same for a gradient of any scale, and the clipping
    of Wortsman et al. (2023), where an array whose gradient is larger than its history takes a smaller step. That
    is the paper's text; the published code differs in three ways. It starts the moments at the first gradient and still
    corrects them; it corrects the first moment after the arctangent, not before; after the warm-up both come to the
    same. And its clipping leaves v at 1e-12 at least, so that what has gradients far below 1e-6 hardly moves there.
    "Any scale" is down to 1e-19, whose squares are still numbers of float32: below, v is 0 and the arctangent pi/2.

    Args:
        beta1, beta2: decay of the moments.
        means: see `make_optimizer`.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(
            jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, beta2, 2)
        first, second = optax.tree.bias_correction(mu, beta1, count), optax.tree.bias_correction(nu, beta2, count)
        # Where a parameter has never had a gradient, both are zero.
        ratios = jax.tree.map(lambda g, v: jnp.square(g) / jnp.where(v > 0, v, 1), updates, second)
        turned = jax.tree.map(
            lambda m, v, square: jnp.arctan2(m, jnp.sqrt(v)) / jnp.maximum(1, jnp.sqrt(square)),
            *(first, second, means(ratios)),
        )
        return turned, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


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


def routing_rests(trained: Any, roles: Any) -> bool:
    """Whether a model has routers and none of their keys is trained: then what balances them stays, too.

    Args:
        trained: the tree of `trained_leaves`.
        roles: the tree of the parameters' roles.
    """
    keys = [flag for flag, role in zip(jax.tree.leaves(trained), jax.tree.leaves(roles), strict=True) if role == ROUTER]
    return bool(keys) and not any(keys)


def trained_parameters(config: TrainingConfig, family: Family) -> int | None:
    """How many parameters of a model `training.trainable` leaves to train: those that have moments. None for all.

    Raises:
        ConfigError: as `trained_leaves` does.
    """
    if not config.trainable:
        return None  # without tracing the model, which takes a second
    flags = trained_leaves(config, family.roles)
    sizes = jax.tree.map(lambda leaf, trained: leaf.size if trained else 0, nn.meta.unbox(family.shapes[0]), flags)
    return sum(jax.tree.leaves(sizes))


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
