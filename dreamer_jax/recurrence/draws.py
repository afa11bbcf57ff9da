"""Numbers of depths that training draws: the distributions, and curricula along which they grow."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

DEPTHS = 3
"""What the key of a step is folded with for these; see `training/train_step.py` for 1 and 2."""
LARGEST = 2**30
"""More than anybody draws; what is beyond it would wrap around in 32 bits."""
Curriculum = Literal["linear", "one_minus_sqrt"]


def poisson_lognormal(key: jax.Array, mean: Any, sigma: float, shape: tuple[int, ...] = ()) -> jax.Array:
    """1 + Poisson(rate) with a log-normal rate of that mean and spread (Geiping et al., 2025, section 3.3), int32."""
    rate_key, key = jax.random.split(key)
    rate = jnp.exp(jnp.log(mean) - sigma**2 / 2 + sigma * jax.random.normal(rate_key, shape))
    return 1 + jnp.minimum(jax.random.poisson(key, rate, shape, jnp.int32), LARGEST)


def keys_of_rows(key: jax.Array, rows: jax.Array) -> jax.Array:
    """[B], a key for what is drawn of each row's depths, by its number in the global batch: whichever device and
    microbatch a row is in, it goes as deep."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, DEPTHS), rows)


def exponential(key: jax.Array, mean: Any, shape: tuple[int, ...] = ()) -> jax.Array:
    """1 + an exponential's whole part, whose mean is about `mean` + 1/2, int32."""
    return 1 + jnp.floor(jnp.minimum(mean * jax.random.exponential(key, shape), LARGEST)).astype(jnp.int32)


def uniform(key: jax.Array, least: Any, most: Any, shape: tuple[int, ...] = ()) -> jax.Array:
    """Each of least .. most alike, int32."""
    return jax.random.randint(key, shape, least, jnp.asarray(most) + 1, jnp.int32)


def grown(curriculum: Curriculum, step: int | jax.Array, steps: int) -> jax.Array:
    """The share, from 0 to 1, that a curriculum of so many steps has come to at a step: t of them, linearly; or
    1 - sqrt(1 - t), which stays shallow for longer (McLeish et al., 2025)."""
    share = jnp.minimum(step / steps, 1)
    return share if curriculum == "linear" else 1 - jnp.sqrt(1 - share)
