"""The forms a weight may take besides an array, in inference."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


class Stacked(flax.struct.PyTreeNode):
    """A weight that differs between depths, all of its rows, and which of them is meant.

    The depth scan takes the row out; decoding doesn't, because a copy of it would take longer than the product.

    Attributes:
        values: [N, ...], or a form of weight whose leaves are.
        row: int32, [] where all tokens are at one depth, else [T].
    """

    values: Any
    row: jax.Array


class OutputRows(flax.struct.PyTreeNode):
    """Matrices [.., a, b] transposed, each output a row: a CPU's form for decoding.

    XLA fuses looking up such a matrix into its product with a single row; of one that lies the other way it makes a
    copy first.

    Attributes:
        matrices: [.., b, a], float32; or uint16, the bits of bfloat16, which that backend converts all at once before
            it looks one up; or int8.
        scales: [.., b] float32, what the whole numbers of a row are to be multiplied by; None but for int8.
    """

    matrices: jax.Array
    scales: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[.., b, a]."""
        return self.matrices.shape

    @classmethod
    def of(cls, matrices: jax.Array) -> OutputRows:
        """Of [.., b, a] as they are."""
        if matrices.dtype == jnp.bfloat16:
            return cls(jax.lax.bitcast_convert_type(matrices, jnp.uint16))
        return cls(matrices)

    @classmethod
    def in_int8(cls, matrices: jax.Array) -> OutputRows:
        """Of [.., b, a] as whole numbers up to 127, the largest of a row: each is wrong by half of a 127th of that at
        most."""
        own = matrices.astype(jnp.float32)
        scales = jnp.max(jnp.abs(own), axis=-1) / 127
        numbers = jnp.round(own / jnp.where(scales > 0, scales, 1)[..., None])
        return cls(numbers.astype(jnp.int8), scales)

    def product(self, rows: jax.Array, index: jax.Array) -> jax.Array:
        """Rows [r, a] times one of matrices [N, b, a]: [r, b]."""
        matrix = at(self.matrices, index)
        if matrix.dtype == jnp.uint16:
            matrix = jax.lax.bitcast_convert_type(matrix.astype(jnp.uint32) << 16, jnp.float32)
        elif self.scales is not None:
            matrix = matrix.astype(jnp.float32)
        else:
            return rows @ matrix.T
        out = rows.astype(jnp.float32) @ matrix.T
        return (out if self.scales is None else out * at(self.scales, index)).astype(rows.dtype)


def own(weight: Any) -> jax.Array:
    """What a weight holds for each token: itself, or of a stacked one its row, [...], or every token's, [T, ...]."""
    if not isinstance(weight, Stacked):
        return weight
    if weight.row.ndim == 0:
        return jax.lax.dynamic_index_in_dim(weight.values, weight.row, 0, keepdims=False)
    return weight.values[weight.row]


def at(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[index], without a check of its bounds."""
    return jax.lax.dynamic_index_in_dim(rows, index, 0, keepdims=False, allow_negative_indices=False)
