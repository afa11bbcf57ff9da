"""What a served model's step costs by the clock, and what lies outside of the depths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.memory import in_pages
from dreamer_jax.inference.model import Flight, FoldedModel
from dreamer_jax.serving.programs import programs_for

REPEATS = 15


def step_costs(model: FoldedModel, rows: int, context: int, page: int = 16) -> tuple[float, float]:
    """F0 and Fr, seconds of a token: what a step of so many rows takes outside of the depths (prelude, coda, head) and
    in one of them, divided by the rows. Memories are in pages, rows of half the context; medians.

    Args:
        model: at the depth that is served.
        rows: of a step.
        context: most positions of a row.
        page: positions of a page.
    """
    each = -(-context // page)
    table = jnp.arange(rows * each, dtype=jnp.int32).reshape(rows, each)
    tokens = jnp.arange(rows, dtype=jnp.int32)[:, None] % model.config.vocab_size
    positions = jnp.full((rows, 1), context // 2, jnp.int32)
    depths = jnp.arange(rows, dtype=jnp.int32)[:, None] % model.total_depth

    def outside(model: FoldedModel, flight: Flight, pool: Any) -> tuple[Flight, Any, jax.Array]:
        entered, slots = model.enter(tokens, positions, in_pages(pool, table))
        hidden, slots = model.leave(flight, positions, slots)
        newest = jnp.argmax(model.logits(hidden)[:, 0], axis=-1)
        return entered._replace(depths=flight.depths), in_pages(slots, None), newest

    def deeper(model: FoldedModel, flight: Flight, pool: Any) -> tuple[Flight, Any, jax.Array]:
        total = jnp.full_like(depths, model.total_depth)
        flight, slots = model.step(flight, positions, depths, in_pages(pool, table), total)
        return flight, in_pages(slots, None), jnp.zeros(())

    pool = programs_for(None).pool(rows * each, page, model)
    flight, _ = jax.jit(FoldedModel.enter)(model, tokens, positions, in_pages(pool, table))
    jitted = [jax.jit(each, donate_argnums=(1, 2)) for each in (outside, deeper)]
    seconds: list[list[float]] = [[], []]
    for _ in range(REPEATS + 1):
        for its, taken in zip(jitted, seconds, strict=True):
            flight, pool, own = _timed(its, model, flight, pool)
            taken.append(own)
    found = [statistics.median(taken[1:]) / rows for taken in seconds]  # the first one compiles
    return found[0], found[1]


def _timed(program: Callable[..., Any], model: FoldedModel, flight: Flight, pool: Any) -> tuple[Flight, Any, float]:
    begin = time.perf_counter()
    flight, pool, _ = jax.block_until_ready(program(model, flight, pool))
    return flight, pool, time.perf_counter() - begin
