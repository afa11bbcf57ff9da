"""Sequence attention forward on a TPU: a flash attention that computes only what lies on or below the diagonal.

A step of the grid is a pair of blocks, of queries and of keys that aren't in their future. In a pair on the diagonal,
keys meet only the queries from the first of them on, and only there are scores compared with the diagonal. Each block
of queries starts with that pair, so that nothing has to be set to zero first.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sequence_attention.shapes import LANES, block_of, pairs_of
from pallas_kernels.tiles import generation

F32 = jnp.float32
KEYS = 512
"""Keys of a block that are taken at once: scores of more don't stay close to the matrix unit."""
UNSEEN = -0.7 * float(jnp.finfo(F32).max)
"""The logit of what isn't seen: finite, so that a row that has seen nothing has weights, of which nothing will stay."""
SUBLANES = 8


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Attention of heads that lie before positions.

    Args:
        q: [B, n, S, d], scaled.
        k, v: [B, kv, S, d].
        segment_ids: [B, S] int32.
        block: queries and keys of a block, a multiple of 128 that divides S.

    Returns:
        out [B, n, S, d]; the logarithms of the softmax's denominators, float32 [B, n, S].
    """
    batch, heads, length, size = q.shape
    target, group = generation(), heads // k.shape[1]
    rows, columns = (jnp.array(its, jnp.int32) for its in zip(*pairs_of(length, block), strict=True))
    queries = pl.BlockSpec((None, None, block, size), lambda b, h, p, rows, _: (b, h, rows[p], 0))
    keys = pl.BlockSpec((None, None, block, size), lambda b, h, p, _, columns: (b, h // group, columns[p], 0))
    out, logs = pl.pallas_call(
        functools.partial(_kernel, keys=block_of(block, KEYS)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, heads, len(rows)),
            in_specs=[
                queries,
                keys,
                keys,
                pl.BlockSpec((None, block, LANES), lambda b, h, p, rows, _: (b, rows[p], 0)),
                pl.BlockSpec((None, SUBLANES, block), lambda b, h, p, _, columns: (b, 0, columns[p])),
            ],
            out_specs=[queries, pl.BlockSpec((None, None, 1, block), lambda b, h, p, rows, _: (b, h, 0, rows[p]))],
            scratch_shapes=[*[pltpu.VMEM((block, LANES), F32)] * 2, pltpu.VMEM((block, size), F32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, length), F32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=target.vmem if target else None,
        ),
        interpret=target is None,
        name="sequence_attention_forward",
    )(
        rows,
        columns,
        q,
        k,
        v,
        jnp.broadcast_to(segment_ids[:, :, None], (batch, length, LANES)),
        jnp.broadcast_to(segment_ids[:, None], (batch, SUBLANES, length)),
    )
    return out, logs[:, :, 0]


def _kernel(rows_ref, columns_ref, *refs, keys):
    pair = pl.program_id(2)
    row, column = rows_ref[pair], columns_ref[pair]
    softmax = _Softmax(_Refs(*refs), keys)
    pl.when(row == column)(softmax.diagonal)
    pl.when(row != column)(softmax.below)
    pl.when(column == jnp.maximum(row - 1, 0))(softmax.finish)


class _Refs(NamedTuple):
    """References of the kernel: a pair of blocks, the results, scratch."""

    q: Any
    k: Any
    v: Any
    q_ids: Any
    k_ids: Any
    out: Any
    log: Any
    top: Any
    total: Any
    sum: Any


class _Softmax:
    """The steps of the kernel for one block of queries: a softmax over keys as they come, `keys` at once.

    In scratch: the largest logit so far, in all lanes; sums of weights, of every 128th key in each lane; of values.
    """

    def __init__(self, refs: _Refs, keys: int) -> None:
        self.refs, self.keys, self.block = refs, keys, refs.q.shape[0]

    def diagonal(self) -> None:
        """Of the keys of the queries' own block, which come first."""
        for start in range(0, self.block, self.keys):
            scores, seen = self._scores(start, start)
            place = [jax.lax.broadcasted_iota(jnp.int32, (self.keys, self.keys), n) for n in (0, 1)]
            parts = [jnp.where(seen[: self.keys] & (place[0] >= place[1]), scores[: self.keys], UNSEEN)]
            if start + self.keys < self.block:
                parts.append(jnp.where(seen[self.keys :], scores[self.keys :], UNSEEN))
            self._absorb(start, start, jnp.concatenate(parts), new=start == 0)

    def below(self) -> None:
        """Of the keys of an earlier block."""
        for start in range(0, self.block, self.keys):
            scores, seen = self._scores(0, start)
            self._absorb(0, start, jnp.where(seen, scores, UNSEEN))

    def _scores(self, first, start):
        """Of the queries from `first` on and the keys at `start`, and whether they are of one document."""
        refs, keys = self.refs, slice(start, start + self.keys)
        scores = jax.lax.dot_general(refs.q[first:], refs.k[keys], (((1,), (1,)), ((), ())), preferred_element_type=F32)
        return scores, _wide(refs.q_ids[first:], self.keys) == refs.k_ids[:1, keys]

    def _absorb(self, first, start, scores, new=False):
        refs, rows = self.refs, slice(first, None)
        top = jnp.broadcast_to(jnp.max(scores, axis=-1, keepdims=True), (scores.shape[0], LANES))
        shrink = None
        if not new:
            top, old = jnp.maximum(top, refs.top[rows]), refs.top[rows]
            shrink = jnp.exp(old - top)
        weights = jnp.exp(scores - _wide(top, self.keys))
        total = sum(weights[:, n : n + LANES] for n in range(0, self.keys, LANES))
        values = refs.v[start : start + self.keys]
        summed = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=F32)
        if shrink is not None:
            total += refs.total[rows] * shrink
            summed += refs.sum[rows] * _wide(shrink, summed.shape[1])
        refs.top[rows], refs.total[rows], refs.sum[rows] = top, total, summed

    def finish(self) -> None:
        """The result, and the logarithms of the denominators."""
        refs = self.refs
        total = jnp.sum(refs.total[...], axis=-1, keepdims=True)
        refs.out[...] = (refs.sum[...] * (1 / total)).astype(refs.out.dtype)
        logs = refs.top[...] + jnp.log(total)
        for n in range(0, self.block, LANES):
            refs.log[:, n : n + LANES] = jnp.transpose(logs[n : n + LANES])[:1]


def _wide(column: jax.Array, lanes: int) -> jax.Array:
    """[rows, 128], equal lanes -> [rows, lanes]."""
    return jnp.tile(column, (1, -(-lanes // LANES)))[:, :lanes]
