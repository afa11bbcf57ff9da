"""Parameters to the devices that compute with them, once a step, and their gradients back. Inside a shard_map."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dreamer_jax.parallel.layout import Layout
from dreamer_jax.parallel.mesh import RING, SLICE

SCATTER = "gradient_scatter"
"""What the names of the operations that scatter begin with, in a compiled program."""


def gather(params: Any, layouts: Any, cast: Callable[[Any], Any]) -> Any:
    """The device's share of the stored parameters -> what it computes with.

    Parameters are cast before they travel; what doesn't travel keeps its type, and the model casts it.

    Args:
        params: float32, each leaf this device's part by `Layout.spec`.
        layouts: of `parameter_layouts`.
        cast: parameters -> their compute copy (`Family.cast`).

    Returns:
        Every parameter in the model's shape; expert matrices with padding, and only the device's own under expert
        parallelism.
    """
    return jax.tree.map(_gather, params, cast(params), layouts)


def _gather(stored: jax.Array, cast: jax.Array, layout: Layout) -> jax.Array:
    travels = any(part.stored is not None for part in layout.parts)
    x = cast if travels else stored
    if any(part.moved for part in layout.parts):
        x = _to_experts(x, layout)
    for part in reversed(layout.parts):
        if part.computed is not None:
            x = _gather_along(x, part.axes, part.size, part.computed)
            x = _cut(x, part.computed, part.kept) if part.moved else x
    return x


def scatter(gradients: Any, layouts: Any, mesh: Mesh, dtype: str = "float32") -> Any:
    """Gradients of what `gather` returned, each device's own -> their sum over all devices, divided as the parameters.

    With `dtype` bfloat16, what travels along an axis is rounded once before it does, and summed in float32 on arrival:
    an all-to-all in the place of a reduce-scatter. Half the bytes, where no link carries them further than in a ring of
    four; along longer axes float32 it stays.

    Args:
        gradients: float32, of the shapes that `gather` returned.
        layouts: of `parameter_layouts`.
        mesh: the shard_map's.
        dtype: that gradients travel in.
    """

    def one(gradient: jax.Array, layout: Layout) -> jax.Array:
        x = gradient
        for part in layout.parts:
            if part.computed is not None:
                x = _pad(x, part.computed, part.padded) if part.moved else x
                narrow = dtype == "bfloat16" and all(mesh.shape[axis] <= RING for axis in part.axes)
                x = (_scatter_narrow if narrow else _scatter_along)(x, part.axes, part.size, part.computed)
        if any(part.moved for part in layout.parts):
            x = _from_experts(x, layout)
        everywhere = [axis for part in layout.parts if part.stored is None and not part.moved for axis in part.axes]
        everywhere += [SLICE] if mesh.shape[SLICE] > 1 else []
        return jax.lax.psum(x, tuple(everywhere)) if everywhere else x

    with jax.named_scope(SCATTER):
        return jax.tree.map(one, gradients, layouts)


def squared_norm(gradients: Any, layouts: Any, mesh: Mesh) -> jax.Array:
    """Sum of the squares of a divided tree, each number counted once: scalar float32."""
    squares = jax.tree.map(lambda part, layout: jnp.sum(jnp.square(part)) / _copies(layout, mesh), gradients, layouts)
    return sum_over(mesh, jnp.sum(jnp.stack(jax.tree.leaves(squares))))


def means(tree: Any, layouts: Any, mesh: Mesh) -> Any:
    """The mean of every array of a divided tree: scalars float32. Where the tree has no array, it stays as it is."""

    def share(layout: Layout, part: Any) -> Any:
        return jax.tree.map(lambda x: jnp.sum(x) / (_copies(layout, mesh) * math.prod(layout.shape)), part)

    return sum_over(mesh, jax.tree.map(share, layouts, tree))


def _copies(layout: Layout, mesh: Mesh) -> int:
    """Devices that store the same part."""
    return math.prod(part.size for part in layout.parts if part.stored is None) * mesh.shape[SLICE]


def sum_over(mesh: Mesh, values: Any, axes: Sequence[str] | None = None) -> Any:
    """Sums over the devices of a mesh, along all its axes or the named ones."""
    names = tuple(name for name in (axes or mesh.axis_names) if mesh.shape[name] > 1)
    return jax.lax.psum(values, names) if names else values


def _gather_along(x: jax.Array, axes: tuple[str, ...], size: int, dim: int) -> jax.Array:
    if dim == 0:
        return jax.lax.all_gather(x, axes, tiled=True)
    # A TPU gathers along the first dimension only; so the pieces are brought there, and then into place. Rows are
    # merged, or the compiler would take the exchange of dimensions for another layout of the same.
    pieces = jax.lax.all_gather(x.reshape(-1, x.shape[-1]), axes).reshape(size, *x.shape)
    whole = (*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])
    return jnp.moveaxis(pieces, 0, dim).reshape(whole)


def _scatter_along(x: jax.Array, axes: tuple[str, ...], size: int, dim: int) -> jax.Array:
    if dim == 0:
        return jax.lax.psum_scatter(x, axes, tiled=True)
    kept = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    pieces = jnp.moveaxis(x.reshape(*kept[:dim], size, *kept[dim:]), dim, 0)
    return jax.lax.psum_scatter(pieces.reshape(size, -1, kept[-1]), axes).reshape(kept)


def _scatter_narrow(x: jax.Array, axes: tuple[str, ...], size: int, dim: int) -> jax.Array:
    """`_scatter_along`, whose parts travel rounded to bfloat16, each once, and are summed in float32 where they arrive,
    in the order of the devices."""
    kept = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    pieces = jnp.moveaxis(x.astype(jnp.bfloat16).reshape(*kept[:dim], size, *kept[dim:]), dim, 0)
    arrived = jax.lax.all_to_all(pieces.reshape(size, -1, kept[-1]), axes, split_axis=0, concat_axis=0, tiled=True)
    return jnp.sum(arrived, axis=0, dtype=jnp.float32).reshape(kept)


def _to_experts(x: jax.Array, layout: Layout) -> jax.Array:
    """Expert matrices divided over other dimensions -> whole experts, with empty ones where they don't divide."""
    dim = layout.expert_dim
    assert dim is not None
    for part in layout.parts:
        if not part.moved:
            continue
        x = _pad(x, dim, part.padded)
        if part.stored is None:
            size = x.shape[dim] // part.size
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(part.axes) * size, size, dim)
        else:
            x = jax.lax.all_to_all(x, part.axes, split_axis=dim, concat_axis=part.stored, tiled=True)
    return x


def _from_experts(x: jax.Array, layout: Layout) -> jax.Array:
    dim = layout.expert_dim
    assert dim is not None
    moved = [part for part in layout.parts if part.moved]
    held = [layout.shape[dim], *(part.padded // part.size for part in moved)]  # experts, before each axis divides them
    for part, experts in reversed(list(zip(moved, held[:-1], strict=True))):
        if part.stored is None:
            x = jax.lax.all_gather(x, part.axes, axis=dim, tiled=True)
        else:
            x = jax.lax.all_to_all(x, part.axes, split_axis=part.stored, concat_axis=dim, tiled=True)
        x = _cut(x, dim, experts)
    return x


def _pad(x: jax.Array, dim: int, length: int) -> jax.Array:
    """With zeros at the end of a dimension."""
    return jnp.pad(x, [(0, length - x.shape[dim] if d == dim else 0) for d in range(x.ndim)])


def _cut(x: jax.Array, dim: int, length: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, 0, length, axis=dim)
