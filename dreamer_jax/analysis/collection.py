"""One streaming pass over sequences: batches in, sums out, memory that doesn't grow with their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dreamer_jax.analysis.observation import Sums, observe_batch
from dreamer_jax.data.records import Batch
from dreamer_jax.errors import UserError
from dreamer_jax.parallel import batch_spec

ROWS = 8
"""Rows a device looks at at once."""


def make_observer(config: Any, mesh: jax.sharding.Mesh) -> Callable[[Any, Any, Any], Sums]:
    """The jitted (params, model state, batch) -> sums of `observe_batch`, over all devices of the mesh."""

    def observe(params, model_state, batch):
        return jax.lax.psum(observe_batch(config, params, model_state, batch), mesh.axis_names)

    sharded = jax.shard_map(observe, mesh=mesh, in_specs=(P(), P(), batch_spec(mesh)), out_specs=P(), check_vma=False)
    return jax.jit(sharded)


def add(total: Sums | None, part: Sums) -> Sums:
    """Sums over two sets of tokens, in float64 and int64 on the host, so that none is rounded away or overflows."""

    def widen(value):
        value = np.asarray(value)
        return value.astype(np.int64 if np.issubdtype(value.dtype, np.integer) else np.float64)

    part = jax.tree.map(widen, jax.device_get(part))
    return part if total is None else jax.tree.map(np.add, total, part)


def collect(config: Any, params: Any, model_state: Any, batches: Iterable[Batch], mesh: jax.sharding.Mesh) -> Sums:
    """The sums over all batches; their rows must divide over the mesh.

    Raises:
        UserError: there is no batch.
    """
    observer = make_observer(config, mesh)
    params, model_state = jax.device_put((params, model_state), NamedSharding(mesh, P()))
    total: Sums | None = None
    for batch in batches:
        total = add(total, observer(params, model_state, jax.device_put(batch, NamedSharding(mesh, batch_spec(mesh)))))
    if total is None:
        raise UserError("there is no held-out sequence to analyse; name some with --data")
    return total


def sample_sequences(batches: Callable[[], Iterable[Batch]], sequences: int, rows: int, seed: int) -> Iterator[Batch]:
    """A random choice of the documents of some batches, all of them if they are fewer, in batches of `rows` rows.

    Documents of a row don't see each other, so those that aren't chosen become padding. Goes over the batches
    twice, to count and to choose (Knuth's algorithm S), and holds one batch.

    Args:
        batches: makes the iterator, each time from the start.
        sequences: how many documents are wanted.
        rows: B of what is returned; the last batch is filled with padding.
        seed: of the choice.
    """
    remaining = sum(int(batch["segment_ids"].max(axis=1).sum()) for batch in batches())
    wanted = min(sequences, remaining)
    rng = np.random.default_rng(seed)
    kept: list[Batch] = []
    for batch in batches():
        for row in range(len(batch["tokens"])):
            documents = int(batch["segment_ids"][row].max())
            chosen = np.zeros(documents + 1, np.bool_)
            for document in range(1, documents + 1):
                chosen[document] = rng.random() * remaining < wanted
                wanted -= int(chosen[document])
                remaining -= 1
            if chosen.any():
                kept.append(_keep(batch, row, chosen))
            if len(kept) == rows:
                yield _stack(kept, rows)
                kept = []
    if kept:
        yield _stack(kept, rows)


def _keep(batch: Batch, row: int, chosen: np.ndarray) -> Batch:
    """One row in which only the chosen documents count."""
    real = chosen[batch["segment_ids"][row]]
    masked = ("segment_ids", "loss_mask", "answer_mask")
    return {name: values[row] * real if name in masked else values[row] for name, values in batch.items()}


def _stack(rows: list[Batch], count: int) -> Batch:
    empty = {name: np.zeros_like(values) for name, values in rows[0].items()}
    rows = rows + [empty] * (count - len(rows))
    return {name: np.stack([row[name] for row in rows]) for name in empty}
