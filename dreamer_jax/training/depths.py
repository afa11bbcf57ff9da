"""How deep a train step goes, and after which depths its loss is taken: the section `recurrence` of a configuration."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.config.recurrence import RecurrenceConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import Family
from dreamer_jax.families.contract import Batch, Drawn, Pass
from dreamer_jax.recurrence.draws import exponential, grown, keys_of_rows, poisson_lognormal, uniform
from dreamer_jax.training.penalties import jacobian, last_change

LONG_TAIL = 4
"""Times the mean: the deepest that is drawn of distributions without an end, unless `most` says otherwise."""


def check(config: RecurrenceConfig, family: Family) -> None:
    """Refuse what a family can't do.

    Raises:
        ConfigError: with the key and what to do.
    """
    if config.draw == "model":
        return
    slots = deepest(config, family)
    if slots > family.depth and not family.flags.recurrent:
        raise ConfigError(f"recurrence.most: {slots} is more than the model's {family.depth} layers", "recurrence.most")
    family.check_depth(slots)
    if config.least > slots:
        raise ConfigError(f"recurrence.least: {config.least} is more than the most, {slots}", "recurrence.least")
    mean = config.mean or family.depth
    if config.draw != "uniform" and config.least > mean:  # one of the two would count for nothing
        problem = f"{config.least} is more than the mean, {mean}; lower it, or raise recurrence.mean"
        raise ConfigError(f"recurrence.least: {problem}", "recurrence.least")
    if config.steps and config.depths_per_step > slots:  # the loss of the steps would be of none
        problem = f"{config.depths_per_step} is more than the deepest pass has, {slots}"
        raise ConfigError(f"recurrence.depths_per_step: {problem}", "recurrence.depths_per_step")
    name, flags = family.config.family, family.flags
    key, value = _asks_for_states(config) or ("", "")
    if key and flags.weighs_depths:
        raise ConfigError(
            f"recurrence.{key}: the loss of family {name} weighs its depths itself; leave it at {value}",
            f"recurrence.{key}",
        )
    if config.by == "step":
        return
    if flags.weighs_depths:
        raise ConfigError(
            f"recurrence.by: rows of family {name} can't have depths of their own, because its loss weighs all of "
            "a step's depths; use step",
            "recurrence.by",
        )
    if key:
        raise ConfigError(
            f"recurrence.{key}: rows with depths of their own keep their last state only; leave it at {value}",
            f"recurrence.{key}",
        )
    if config.differentiated and flags.counts_depths:
        raise ConfigError(
            f"recurrence.differentiated: family {name} counts its depths, so rows with depths of their own begin "
            "together and end apart; leave it at 0, or use recurrence.by step",
            "recurrence.differentiated",
        )


def deepest(config: RecurrenceConfig, family: Family) -> int:
    """The most depths that a train step has, for which memory is needed."""
    if config.draw in ("poisson_lognormal", "exponential"):
        return config.most or LONG_TAIL * (config.mean or family.depth)
    return config.most or config.mean or family.depth


def draw(config: RecurrenceConfig, family: Family, key: jax.Array, step: jax.Array, rows: jax.Array) -> Drawn:
    """How deep a train step goes: a pure function of seed and step; of rows with depths of their own, of their numbers.

    Args:
        config: says how it is drawn.
        family: what is trained.
        key: of the step.
        step: int32, from 0.
        rows: [B] that a device computes at once, their numbers in the global batch.
    """
    if config.draw == "model":
        return family.draw(key, step, rows)
    most = deepest(config, family)
    end = most if config.draw == "uniform" else config.mean or family.depth
    if config.draw == "fixed":
        end = min(end, most)
    if config.curriculum_steps:
        share = grown(config.curriculum, step, config.curriculum_steps)
        end = jnp.maximum(jnp.ceil(share * (end - config.least)).astype(jnp.int32) + config.least, config.least)
    differentiated = config.differentiated or None
    if config.draw == "fixed":
        return Drawn(end, most, differentiated)

    def one(key: jax.Array) -> jax.Array:
        if config.draw == "uniform":
            return uniform(key, config.least, end)
        around = poisson_lognormal(key, end, config.sigma) if config.draw == "poisson_lognormal" else None
        return jnp.clip(exponential(key, end) if around is None else around, config.least, most)

    if config.by == "step":
        return Drawn(one(key), most, differentiated)
    return Drawn(jax.vmap(one)(keys_of_rows(key, rows)), most, differentiated, min(config.groups, len(rows)))


def as_deep_together(drawn: Drawn, axis: str) -> Drawn:
    """The same where devices along an axis of the mesh compute every depth together: groups of rows go as deep as the
    deepest of theirs on any of them."""
    if jnp.ndim(drawn.depth) == 0 or jnp.shape(drawn.depth)[0] % drawn.groups:  # the pass refuses such groups
        return drawn
    deepest = jnp.max(jnp.sort(drawn.depth).reshape(drawn.groups, -1), axis=1)
    return drawn._replace(group_depths=jax.lax.pmax(deepest, axis))


def kept_states(config: RecurrenceConfig, family: Family) -> int:
    """Depths, the last ones, whose states the loss wants to see; 0 if the last alone."""
    if config.steps:
        return max(config.scored, deepest(config, family))
    return max(config.scored, 2) if _asks_for_states(config) else 0


def _asks_for_states(config: RecurrenceConfig) -> tuple[str, str] | None:
    """The first setting, and its value that doesn't, for which the loss wants to see more than the last state."""
    asking = {
        "scored": ("1", config.scored > 1),
        "settling": ("0", config.settling),
        "steps": ("0", config.steps),
        "jacobian": ("0", config.jacobian),
    }
    return next(((key, value) for key, (value, asks) in asking.items() if asks), None)


def loss(
    config: RecurrenceConfig,
    family: Family,
    params: Any,
    passed: Pass,
    batch: Batch,
    keys: jax.Array | None = None,
    smooth: Family | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`family.loss` after the last depth; of the scored depths before it the mean, times `scored_weight`; the last
    depth's relative change, times `settling`; of the results of a problem's steps, times `steps`; and the size of the
    last depth's Jacobian, times `jacobian`.

    What is logged is the last depth's, `depth` as it was drawn, and, where there is more to the loss, `last_loss`,
    `last_change`, `steps_loss` and `last_jacobian`.

    Args:
        config: says what there is to the loss.
        family: what is trained.
        params: of the model.
        passed: with the last `kept_states`.
        batch: its rows.
        keys: [B], one a row, for what the size of a Jacobian is estimated with; needed for that alone, as is
        smooth: the same model with operations that can be differentiated twice.
    """
    last, logged = family.loss(params, passed, batch)
    total = last
    if config.draw == "model":
        return total, logged
    logged = {**logged, "depth": jnp.sum(passed.depth.reshape(-1, 1) * batch["loss_mask"])}
    if config.scored > 1:
        total = total + config.scored_weight * _earlier(config.scored, family, params, passed, batch)
    if config.settling:
        change = jnp.sum(last_change(family, passed) * batch["loss_mask"])
        total, logged = total + config.settling * change, {**logged, "last_change": change}
    if config.steps:
        found = _of_steps(config.depths_per_step, family, params, passed, batch)
        total, logged = total + config.steps * found, {**logged, "steps_loss": found}
    if config.jacobian and keys is not None:
        size = jnp.sum(jacobian(smooth or family, params, passed, keys) * batch["loss_mask"])
        total, logged = total + config.jacobian * size, {**logged, "last_jacobian": size}
    return total, logged if total is last else {"last_loss": last, **logged}


def _earlier(scored: int, family: Family, params: Any, passed: Pass, batch: Batch) -> jax.Array:
    """The mean of the losses after the scored depths before the last, as far as there are any."""

    # One after the other, so that logits of one depth are held at a time.
    @jax.checkpoint
    def at(carry: jax.Array, its: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
        there, state = its
        found, _ = family.loss(params, passed._replace(state=state), batch)
        return carry + jnp.where(there, found, 0.0), None

    earlier = jax.tree.map(lambda states: states[-scored:-1], passed.states)
    there = jnp.arange(scored, 1, -1) <= passed.depth  # of a shallow step fewer depths than are scored
    summed, _ = jax.lax.scan(at, jnp.float32(0), (there, earlier))
    return summed / jnp.maximum(jnp.sum(there), 1)


def _of_steps(each: int, family: Family, params: Any, passed: Pass, batch: Batch) -> jax.Array:
    """RELAY's loss of the iterations (Yu et al., 2025, L_iter): of step n's results after n `each` depths the sum over
    the places that are asked for them, mean over the steps for which the pass is deep enough."""
    kept = len(jax.tree.leaves(passed.states)[0])
    steps = batch["step_targets"].shape[-1]

    @jax.checkpoint
    def at(carry: jax.Array, its: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        number, targets = its  # from 1; [B, S]
        place = kept - passed.depth + number * each - 1  # states of the last depths are kept, the last one last
        state = jax.tree.map(lambda states: states[jnp.clip(place, 0, kept - 1)], passed.states)
        asked = targets >= 0
        wanted = {**batch, "targets": jnp.where(asked, targets, 0), "loss_mask": asked}
        found, _ = family.loss(params, passed._replace(state=state), wanted)
        return carry + jnp.where(number * each <= passed.depth, found, 0.0), None

    numbers = jnp.arange(1, steps + 1)
    summed, _ = jax.lax.scan(at, jnp.float32(0), (numbers, jnp.moveaxis(batch["step_targets"], -1, 0)))
    return summed / jnp.clip(passed.depth // each, 1, steps)
