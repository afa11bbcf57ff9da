"""The linear map of a selected expert where its matrix lies: for decoding, forward only."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.dispatch.in_place import by_expert
from pallas_kernels.weights import OutputRows, at


def linear(x: jax.Array, index: jax.Array, weight: Any) -> jax.Array:
    """x times the matrix of each row's expert, shared experts folded in.

    Args:
        x: [T, a].
        index: int32, [T], or [] for all rows.
        weight: [G, a, b], for one expert for all rows; or `OutputRows` of it.

    Returns:
        [T, b].
    """
    if not isinstance(weight, OutputRows):
        return x @ at(weight, index)
    if index.ndim == 0:
        return weight.product(x, index)
    count, size = weight.shape[:2]
    return by_expert(x, index[:, None], count, count, size, weight.product)[:, 0]
