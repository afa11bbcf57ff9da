"""The weights of a step: what all depths share, and what differs between them."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.weights import Arranged, Stacked

PyTree = Any


class Weights(flax.struct.PyTreeNode):
    """Weights of all depths; or, as a step gets them, those of its depth.

    Attributes:
        shared: the same at every depth.
        stacked: what differs, each leaf [N, ...]; for a step [...] or, in decoding, `Stacked`.
        rows: the row of `stacked` that each depth takes, so that several may share one; after the last of them the
            first comes again. None: row l at depth l.
    """

    shared: PyTree = flax.struct.field(default_factory=dict)
    stacked: PyTree = flax.struct.field(default_factory=dict)
    rows: tuple[int, ...] | None = flax.struct.field(pytree_node=False, default=None)

    def row(self, l: jax.Array) -> jax.Array:
        """The row of depth l."""
        return l if self.rows is None else jnp.asarray(self.rows, jnp.int32)[l % len(self.rows)]

    @property
    def repeats(self) -> bool:
        """Whether a row may serve more than one depth."""
        return self.rows is not None

    def at(self, l: jax.Array) -> Weights:
        """Those of depth l, taken out."""
        return self.replace(stacked=read(self.stacked, self.row(l)))

    def of(self, depth: jax.Array) -> Weights:
        """Those of a depth, [] or of each token [T], left where they lie."""
        row = self.row(depth)

        def stack(leaf: Any) -> Stacked:
            return Stacked(leaf, row)

        return self.replace(stacked=jax.tree.map(stack, self.stacked, is_leaf=lambda x: isinstance(x, Arranged)))


def read(tree: PyTree, l: jax.Array) -> PyTree:
    """Row l of every leaf."""
    return jax.tree.map(lambda rows: jax.lax.dynamic_index_in_dim(rows, l, 0, keepdims=False), tree)


def write(tree: PyTree, rows: PyTree, l: jax.Array) -> PyTree:
    """Every leaf with row l replaced, in the leaf's dtype."""

    def update(all_rows: jax.Array, row: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(all_rows, row.astype(all_rows.dtype), l, 0)

    return jax.tree.map(update, tree, rows)
