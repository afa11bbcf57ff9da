"""A model and its sequences on a mesh: rows over the data axes, experts over the `expert` axis.

Every device group along `expert` holds all experts between its members and works on the same rows; groups never talk
to each other. What isn't an expert is copied to every device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dreamer_jax.errors import UserError
from dreamer_jax.inference.folding import ExpertWeights, Weights
from dreamer_jax.inference.model import EXPERT, FoldedModel


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which part of what lies where.

    Attributes:
        mesh: any mesh; its axis `expert`, where there is one, shares the experts, and all others share the rows.
        model: of each weight, its PartitionSpec; a prefix of the placed model's tree.
    """

    mesh: Mesh
    model: FoldedModel

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
    def caches(self) -> PartitionSpec:
        """Of arrays [L, B, ...]."""
        return PartitionSpec(None, self.row_axes)


def place(model: FoldedModel, mesh: Mesh) -> tuple[FoldedModel, Placement]:
    """The model with its weights on the devices of the mesh.

    Raises:
        UserError: the mesh reaches over several processes.
    """
    if jax.process_count() > 1:
        raise UserError("generation runs in one process; start it on one host, with that host's devices")
    shards = mesh.shape.get(EXPERT, 1)
    if shards > 1:
        experts = model.weights.experts
        layers = model.config.depth if not model.config.recurrent else 1
        gate_up, down = (_by_shard(leaf, layers, shards) for leaf in (experts.gate_up, experts.down))
        experts = experts._replace(gate_up=gate_up, down=down)
        model = model.replace(weights=model.weights._replace(experts=experts), expert_shards=shards)
    specs = _specs(model, EXPERT in mesh.axis_names)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
    return jax.device_put(model, shardings), Placement(mesh, specs)


def _by_shard(leaf: jax.Array, layers: int, shards: int) -> jax.Array:
    """[M * E, ...] -> [shards * M * ceil(E / shards), ...]: to every shard a part of every layer, padded with zeros."""
    by_layer = leaf.reshape(layers, -1, *leaf.shape[1:])
    held = -(-by_layer.shape[1] // shards)
    padding = [(0, 0), (0, shards * held - by_layer.shape[1])] + [(0, 0)] * (leaf.ndim - 1)
    padded = jnp.pad(by_layer, padding).reshape(layers, shards, held, *leaf.shape[1:])
    return jnp.swapaxes(padded, 0, 1).reshape(-1, *leaf.shape[1:])


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _specs(model: FoldedModel, experts: bool) -> Any:
    everywhere: Any = PartitionSpec()
    shared: Any = PartitionSpec(EXPERT) if experts else everywhere
    weights = Weights(
        embedding=everywhere,
        head=everywhere,
        sequence=everywhere,
        depth=None if model.weights.depth is None else everywhere,
        experts=ExpertWeights(everywhere, shared, shared, everywhere),
        last_norm=everywhere,
    )
    return model.replace(weights=weights)
