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
        matrices: [.., b, a].
    """

    matrices: jax.Array


def own(weight: Any) -> jax.Array:
    """What a weight holds for each token: itself, or of a stacked one its row, [...], or every token's, [T, ...]."""
    if not isinstance(weight, Stacked):
        return weight
    if weight.row.ndim == 0:
        return jax.lax.dynamic_index_in_dim(weight.values, weight.row, 0, keepdims=False)
    return weight.values[weight.row]


def transposed(matrices: jax.Array) -> OutputRows:
    """Matrices [.., a, b] as `OutputRows`."""
    return OutputRows(jnp.swapaxes(matrices, -1, -2))
