"""Attention over all repeats of a stack: a position sees earlier ones as they are at this repeat and were before.

At repeat r, position i attends to (r', j) for all r' <= r and j <= i, earlier copies of itself included, by one softmax
over all of them (CoTFormer: Mohtashami et al., 2023). A position that took fewer repeats has no keys at later ones.

In training the memory lives inside the depth scan. Its gradient is handed down on a tape, which here is simply the
gradient of all keys and values: every repeat adds what it makes of the earlier ones, and takes out what the later ones
have made of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, FLOAT32_BYTES, OnChip, Operation, Reach
from dreamer_jax.blocks.memory import Context, unseen_is_nothing
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.self_attention import SelfAttention
from pallas_kernels import pages
from pallas_kernels.kept import keep
from pallas_kernels.tape import Tape

LEAST = -1e30
"""Below every logit, and finite."""


class RepeatGradient(flax.struct.PyTreeNode, Tape):
    """The float32 gradient of one layer's keys and values, at all repeats.

    Attributes:
        keys, values: [R, T, kv, d].
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def empty(cls, repeats: int, tokens: int, kv_heads: int, size: int) -> RepeatGradient:
        """For T tokens."""
        return cls(*(jnp.zeros((repeats, tokens, kv_heads, size), jnp.float32) for _ in range(2)))


class Repeats(flax.struct.PyTreeNode):
    """Keys and values of a stack of layers at every repeat, of whole rows or of rows that grow.

    Attributes:
        keys, values: of each layer, [R, B, S, kv, d], compute dtype; or in pages.
        reached: [1, B, S] int32, repeats that each position has taken; it has no keys at later ones. Rows are the
            second axis, as of all slots.
        whole: whether rows are whole: then they may hold several documents, which don't see each other, and a place in
            a row isn't the position. In rows that grow a position's place is the position itself.
        table: which pages a row has, see `pallas_kernels.pages`; None where rows are rows.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    reached: jax.Array
    whole: bool = flax.struct.field(pytree_node=False)
    table: jax.Array | None = None

    @classmethod
    def empty(
        cls, layers: int, repeats: int, rows: int, length: int, kv_heads: int, size: int, dtype: str, whole: bool
    ) -> Repeats:
        """For B rows of at most S positions."""
        zeros = (jnp.zeros((repeats, rows, length, kv_heads, size), dtype),) * layers
        return cls(zeros, zeros, jnp.zeros((1, rows, length), jnp.int32), whole)

    def reaching(self, depth: Depth, active: jax.Array, context: Context) -> Repeats:
        """With those of the positions at hand that are `active` [B, P] seen at this repeat, as soon as their keys are
        there. A position at its first repeat forgets what stood in its place."""
        place = 0, *pages.place(self.table, self.reached, self.places(context))
        reached = jnp.where(active, depth.index + 1, self.reached[place])
        return self.replace(reached=self.reached.at[place].set(reached, mode="drop"))

    def places(self, context: Context) -> jax.Array:
        """[B, P], where the positions at hand are in their rows."""
        if not self.whole:
            return context.positions
        return jnp.broadcast_to(jnp.arange(self.reached.shape[2]), self.reached.shape[1:])

    def written(self, layer: int, k: jax.Array, v: jax.Array, depth: Depth, context: Context) -> Repeats:
        """With k and v [B, P, kv, d] of a layer at a repeat."""
        if not self.whole:
            k, v = unseen_is_nothing(k, v)

        def put(kept: tuple[jax.Array, ...], new: jax.Array) -> tuple[jax.Array, ...]:
            own, new = kept[layer], new.astype(kept[layer].dtype)
            if self.whole:
                own = jax.lax.dynamic_update_index_in_dim(own, new, depth.index, 0)
            else:
                place = pages.place(self.table, own, context.positions)
                own = own.at[depth.index, *place].set(new, mode="drop")
            return (*kept[:layer], own, *kept[layer + 1 :])

        return self.replace(keys=put(self.keys, k), values=put(self.values, v))

    def paged(self, table: jax.Array | None) -> Repeats:
        """The same memory, whose rows are pages of the rows of a table."""
        return self.replace(table=table)


@dataclasses.dataclass(frozen=True)
class LayerRepeats:
    """One layer's part of a memory, as its attention gets it.

    Attributes:
        repeats: of all layers.
        layer: which one.
        tape: in the backward pass of the depth scan, the layer's.
    """

    repeats: Repeats
    layer: int
    tape: RepeatGradient | None = None

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, depth: Depth, context: Context, operations: Operations
    ) -> tuple[jax.Array, LayerRepeats]:
        """Writes k and v; attention over the own row at this repeat and those before, [B, P, n, d]."""
        if self.tape is None:
            new = self.repeats.written(self.layer, k, v, depth, context)
            segments = context.segment_ids if new.whole else None
            reached, keys, values = (
                pages.rows_of(new.table, kept) for kept in (new.reached, new.keys[self.layer], new.values[self.layer])
            )
            visible = _visible(depth.index, reached, new.places(context), segments, len(keys))
            out = attend(q, keys, values, visible)
        else:  # the tape has the gradient of what is written
            without = jax.lax.stop_gradient((k, v))
            new = self.repeats.written(self.layer, *without, depth, context)
            keys, values = new.keys[self.layer], new.values[self.layer]
            out = _attend_taped(q, k, v, keys, values, depth.index, new.reached, context.segment_ids, self.tape)
        return out, dataclasses.replace(self, repeats=new)


def _visible(
    index: jax.Array, reached: jax.Array, places: jax.Array, segments: jax.Array | None, repeats: int
) -> jax.Array:
    """[B, P, R, S] bool: what queries at places [B, P] and repeats [] or [B, P] see of their rows.

    Args:
        index, places: of the queries.
        reached: [1, B, S], see `Repeats`.
        segments: [B, S], documents of whole rows; None where a row is one document.
        repeats: R.
    """
    number = jnp.arange(repeats)[:, None]  # [R, 1]
    before = jnp.arange(reached.shape[2]) <= places[..., None]  # [B, P, S]
    if segments is not None:
        before &= segments[:, :, None] == segments[:, None]
    there = number < reached[0][:, None, None]  # [B, 1, R, S]
    own = index.reshape(*index.shape, *[1] * (4 - index.ndim)) if index.ndim else index
    return before[:, :, None] & there & (number <= own)


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """One softmax, float32, over all repeats and places that are visible.

    Args:
        q: [B, P, n, d], position-encoded; head i attends with head i // (n // kv).
        keys, values: [R, B, S, kv, d].
        visible: [B, P, R, S] bool.
    """
    rows, places, _, size = q.shape
    grouped = (q * size**-0.5).reshape(rows, places, keys.shape[3], -1, size)
    logits = jnp.einsum("bpgqd,rbsgd->bgqprs", grouped, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], logits, LEAST), axis=(-2, -1))
    out = jnp.einsum("bgqprs,rbsgd->bpgqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


@jax.custom_vjp
def _attend_taped(q, k, v, keys, values, index, reached, segments, tape):
    """Of whole rows; k and v stand in the keys and values already, here they are what gets the gradient."""
    del k, v, tape
    return attend(q, keys, values, _visible_whole(index, reached, segments, len(keys)))


def _visible_whole(index, reached, segments, repeats):
    places = jnp.broadcast_to(jnp.arange(reached.shape[2]), reached.shape[1:])
    return _visible(index, reached, places, segments, repeats)


def _forward_taped(q, k, v, keys, values, index, reached, segments, tape):
    out = keep(_attend_taped(q, k, v, keys, values, index, reached, segments, tape))
    return out, (q, keys, values, index, reached, segments, tape)


def _backward_taped(residuals, d_out):
    """Scores are computed again: what is kept of a repeat doesn't grow with the square of the row."""
    q, keys, values, index, reached, segments, tape = residuals
    visible = _visible_whole(index, reached, segments, len(keys))
    d_q, *d_kept = jax.vjp(lambda q, k, v: attend(q, k, v, visible), q, keys, values)[1](d_out)
    before = (tape.keys, tape.values)
    totals = [total + d.reshape(total.shape).astype(jnp.float32) for total, d in zip(before, d_kept, strict=True)]
    d_k, d_v = (
        jax.lax.dynamic_index_in_dim(total, index, 0, keepdims=False).reshape(keys.shape[1:]).astype(q.dtype)
        for total in totals
    )
    return d_q, d_k, d_v, None, None, None, None, None, RepeatGradient(*totals)


_attend_taped.defvjp(_forward_taped, _backward_taped)


class RepeatAttention(SelfAttention):
    """Self-attention whose memory has the keys of earlier repeats too: it counts itself over them.

    Attributes:
        repeats: R, of the program that is counted.
    """

    repeats: int = 1

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Projections; scores and values over the sequence, at every repeat so far."""
        return 2 * (self._weights + 2 * self._keys_met(reach) * self.heads * self.head_size)

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Rotation of q and k; softmax."""
        return self._met + self._keys_met(reach) * self.heads

    @nn.nowrap
    def cache_read(self, reach: Reach) -> float:
        """Those of every repeat so far."""
        return self._keys_met(reach) * self.cache_elements()

    @nn.nowrap
    def gradient_cache_elements(self) -> int:
        """Keys and values."""
        return self.cache_elements()

    @nn.nowrap
    def score_elements(self, length: int) -> int:
        """Of every head over the row at all repeats."""
        return self.heads * length * self.repeats

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Projections as of `SelfAttention`; scores over all repeats, masked, go through HBM."""
        yield next(super().step_cost(on))
        passes, keys = 3 + on.again.products, on.length * self.repeats
        scores = on.tokens * keys * self.heads * FLOAT32_BYTES
        read = on.tokens * self.repeats * self.cache_elements() * BFLOAT16_BYTES
        flops = 4 * on.tokens * keys * self.heads * self.head_size * passes
        yield Operation("attention over all repeats: scores", flops, (4 * scores + read) * passes)

    @nn.nowrap
    def _keys_met(self, reach: Reach) -> float:
        return reach.context * reach.depths
