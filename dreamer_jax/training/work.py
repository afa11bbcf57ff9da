"""What a run's train steps do, for whoever counts it: depths that are drawn or truncated, losses of more than one."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.budget.analytic import Work, whole
from dreamer_jax.config.recurrence import RecurrenceConfig
from dreamer_jax.config.sections import Config
from dreamer_jax.config.values import ModelConfig
from dreamer_jax.families import Family, build
from dreamer_jax.training import depths

DRAWS = 1 << 16
"""Steps that are drawn, spread over the run: a mean depth is off by less than a hundredth of it."""
OF_JACOBIAN = 2
"""Products of a depth, each as large as its forward pass, that the size of a Jacobian takes: the step, and a vector by
it. Scores of attention take half as many again, which isn't counted."""


def work_of(config: Config, steps: int | None = None) -> tuple[Work, ...]:
    """What the train steps of a run do, or its first `steps`: each depth that they go to, with its share and work."""
    results = config.data.difficulty if config.recurrence.steps else 0
    return _work(config.recurrence, config.model, steps or config.training.steps, results)


def deepest_of(config: Config) -> Work:
    """The deepest step, for whose activations there must be memory."""
    recurrence, family = config.recurrence, build(config.model)
    if recurrence.draw == "model":
        if type(family).draw is Family.draw:
            return whole(family)[0]
        depth = family.draw(jax.random.key(0), jnp.int32(0), jnp.zeros(1, jnp.int32)).slots
    else:
        depth = depths.deepest(recurrence, family)
    return Work(1.0, depth, _differentiated(recurrence, family, depth))


def _differentiated(recurrence: RecurrenceConfig, family: Family, depth: int) -> int:
    """Of the depths of a step, those with a backward pass."""
    if recurrence.draw == "model" or not family.differentiated:  # a model that is frozen has none in any step
        return min(family.differentiated, depth)
    return min(recurrence.differentiated or depth, depth)


@functools.lru_cache(maxsize=64)
def _work(recurrence: RecurrenceConfig, model: ModelConfig, steps: int, results: int) -> tuple[Work, ...]:
    family = build(model)
    depths.check(recurrence, family)
    drawn = Counter(_drawn(recurrence, family, steps))

    def work(depth: int, most: int, count: int) -> Work:
        losses = min(recurrence.scored, depth)
        if results:
            losses += min(results, depth // recurrence.depths_per_step)
        beside = OF_JACOBIAN if recurrence.jacobian and depth > 1 else 0
        differentiated = min(_differentiated(recurrence, family, depth), most)
        return Work(count / drawn.total(), depth, differentiated, losses, beside)

    return tuple(work(*depths, count) for depths, count in sorted(drawn.items()))


def _drawn(recurrence: RecurrenceConfig, family: Family, steps: int) -> list[tuple[int, int]]:
    """Depths of so many steps, or of a row of each, and the most of them that are differentiated."""

    if recurrence.draw == "model" and type(family).draw is Family.draw:
        return [(family.depth, family.depth)]
    if recurrence.draw == "fixed" and not recurrence.curriculum_steps:
        depth = min(recurrence.mean or family.depth, depths.deepest(recurrence, family))
        return [(depth, depth)]

    def one(key: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = depths.draw(recurrence, family, key, step, jnp.zeros(1, jnp.int32))
        depth = jnp.asarray(drawn.depth).reshape(())
        return depth, depth if drawn.differentiated is None else drawn.differentiated

    numbers = jnp.arange(DRAWS, dtype=jnp.float32) * (steps / DRAWS)
    keys = jax.random.split(jax.random.key(0), DRAWS)
    found = jax.jit(jax.vmap(one))(keys, numbers.astype(jnp.int32))
    return list(zip(*(np.asarray(each).tolist() for each in found), strict=True))
