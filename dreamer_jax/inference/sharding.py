"""A model and its sequences on a mesh: rows over the data axes, experts over the `expert` axis.

Every device group along `expert` holds all experts between its members and works on the same rows; groups never talk
to each other. What isn't an expert is copied to every device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dreamer_jax.config.values import experts_of
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.parallel.expert_parallel import SharedNeurons, SharedRows
from dreamer_jax.parallel.mesh import EXPERT


@dataclasses.dataclass(frozen=True)
class ModelSharding:
    """How a model and its rows are divided.

    Attributes:
        mesh: any mesh; its axis `expert`, where there is one, shares the experts, and all others share the rows.
        specs, structure: of each weight, its PartitionSpec, and the tree they are leaves of, which is a prefix of the
            sharded model's; apart, because a sharding is a key of compiled programs.
    """

    mesh: Mesh
    specs: tuple[PartitionSpec, ...]
    structure: Any

    @property
    def model(self) -> Any:
        """The tree of PartitionSpecs."""
        return jax.tree.unflatten(self.structure, self.specs)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Axes over which rows are divided."""
        return tuple(name for name in self.mesh.axis_names if name != EXPERT)

    @property
    def row_shards(self) -> int:
        """Devices over which rows are divided; B must be a multiple."""
        return self.mesh.size // self.mesh.shape.get(EXPERT, 1)

    @property
    def rows(self) -> PartitionSpec:
        """Of arrays [B, ...]."""
        return PartitionSpec(self.row_axes)

    @property
    def slots(self) -> PartitionSpec:
        """Of arrays [L, B, ...]."""
        return PartitionSpec(None, self.row_axes)


def shard(model: FoldedModel, mesh: Mesh) -> tuple[FoldedModel, ModelSharding]:
    """The model with its weights on the devices of the mesh.

    Raises:
        UserError: the mesh reaches over several processes.
    """
    if jax.process_count() > 1:
        raise UserError("generation runs in one process; start it on one host, with that host's devices")
    # Without experts every device has everything, and computes the same.
    shards = mesh.shape.get(EXPERT, 1) if experts_of(model.config) else 1
    params, specs = _divided(model.params, model.family.boxed, shards)
    everywhere: Any = PartitionSpec()
    if shards > 1:
        operations = model.family.operations
        experts = SharedRows(operations.expert_mlp, EXPERT, shards)
        neurons = SharedNeurons(operations.feed_forward, EXPERT)
        family = build(model.config, dataclasses.replace(operations, expert_mlp=experts, feed_forward=neurons))
        model = model.replace(family=family)
    model = model.replace(params=params)
    leaves, structure = jax.tree.flatten(model.replace(params=specs, state=everywhere), is_leaf=is_spec)
    shardings = structure.unflatten([NamedSharding(mesh, spec) for spec in leaves])
    return jax.device_put(model, shardings), ModelSharding(mesh, tuple(leaves), structure)


def _divided(params: Any, boxed: Any, shards: int) -> tuple[Any, Any]:
    """Folded parameters with their experts padded to a multiple of `shards`, and the tree of their PartitionSpecs."""
    if isinstance(params, Mapping):
        both = {name: _divided(part, boxed[name], shards) for name, part in params.items()}
        return {name: part for name, (part, _) in both.items()}, {name: spec for name, (_, spec) in both.items()}
    if "expert" not in boxed.axes or shards == 1:
        return params, PartitionSpec()
    dim = boxed.axes.index("expert")

    def padded(leaf: jax.Array) -> jax.Array:
        missing = -leaf.shape[dim] % shards
        return jnp.pad(leaf, [(0, missing if axis == dim else 0) for axis in range(leaf.ndim)])

    return jax.tree.map(padded, params), PartitionSpec(*[None] * dim, EXPERT)


def is_spec(leaf: Any) -> bool:
    """Whether a leaf of a tree is a PartitionSpec."""
    return isinstance(leaf, PartitionSpec)
