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


class Arranged(flax.struct.PyTreeNode):
    """Matrices [.., a, b] in a form for decoding.

    Attributes:
        matrices: as the form has them.
        scales: [.., b] float32, what the whole numbers of an output are to be multiplied by; None but for int8.
    """

    matrices: jax.Array
    scales: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of `matrices`."""
        return self.matrices.shape


class OutputColumns(Arranged):
    """Matrices [.., a, b] as they lie, in int8: a TPU's form."""

    @classmethod
    def in_int8(cls, matrices: jax.Array) -> OutputColumns:
        """See `OutputRows.in_int8`."""
        return cls(*_whole_numbers(matrices, -2))

    def as_array(self, dtype: Any) -> jax.Array:
        """What the whole numbers stand for, [.., a, b]."""
        assert self.scales is not None
        return (self.matrices.astype(jnp.float32) * self.scales[..., None, :]).astype(dtype)


class OutputRows(Arranged):
    """Matrices [.., b, a], transposed, each output a row: a CPU's form, and a TPU's in int8 for those that lie so.

    XLA's CPU backend fuses looking up such a matrix into its product with a single row; of one that lies the other way
    it makes a copy first. Its matrices are float32; or uint16, the bits of bfloat16, which that backend converts all at
    once before it looks one up; or int8.
    """

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
        return cls(*_whole_numbers(matrices, -1))

    def as_array(self, dtype: Any) -> jax.Array:
        """What int8's whole numbers stand for, [.., b, a]."""
        assert self.scales is not None
        return (self.matrices.astype(jnp.float32) * self.scales[..., None]).astype(dtype)

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


def _whole_numbers(matrices: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Of numbers along an axis up to 127, the largest; and what they are to be multiplied by, without that axis."""
    own = matrices.astype(jnp.float32)
    scales = jnp.max(jnp.abs(own), axis=axis) / 127
    numbers = jnp.round(own / jnp.expand_dims(jnp.where(scales > 0, scales, 1), axis))
    return numbers.astype(jnp.int8), scales


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
