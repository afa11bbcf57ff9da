"""A model and its sequences on a mesh: rows over the data axes, experts over the `expert` axis.

Every device group along `expert` holds all experts between its members; groups never talk to each other. What isn't an
expert is copied to every device. The members of a group work on the same rows, each on what its experts have to say;
or rows are divided over them too (`apart`), and visit all of them where they meet experts. The first divides the work
of few rows. The second divides keys and values, attention and the head as well, and is for many rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dreamer_jax import stack_frames
from dreamer_jax.config.values import experts_of
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.parallel.expert_parallel import SharedNeurons, SharedRows, parallel_operations
from dreamer_jax.parallel.mesh import EXPERT


@dataclasses.dataclass(frozen=True)
class ModelSharding:
    """How a model and its rows are divided.

    Attributes:
        mesh: any mesh; its axis `expert`, where there is one, shares the experts.
        specs, structure: of each weight, its PartitionSpec, and the tree they are leaves of, which is a prefix of the
            sharded model's; apart, because a sharding is a key of compiled programs.
        row_axes: axes over which rows are divided.
    """

    mesh: Mesh
    specs: tuple[PartitionSpec, ...]
    structure: Any
    row_axes: tuple[str, ...]

    @property
    def model(self) -> Any:
        """The tree of PartitionSpecs."""
        return jax.tree.unflatten(self.structure, self.specs)

    @property
    def row_shards(self) -> int:
        """Devices over which rows are divided; B must be a multiple."""
        return math.prod(self.mesh.shape[name] for name in self.row_axes)

    @property
    def rows(self) -> PartitionSpec:
        """Of arrays [B, ...]."""
        return PartitionSpec(self.row_axes)

    @property
    def slots(self) -> PartitionSpec:
        """Of arrays [L, B, ...]."""
        return PartitionSpec(None, self.row_axes)

    def named(self, specs: Any) -> Any:
        """A tree of PartitionSpecs as shardings of arrays."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)


def shard(model: FoldedModel, mesh: Mesh, apart: bool = False) -> tuple[FoldedModel, ModelSharding]:
    """The model with its weights on the devices of the mesh.

    Args:
        model: see `fold`.
        mesh: the devices.
        apart: whether rows are divided over the axis `expert`, too. Programs then have to see to it that its devices
            call the model equally often (`FoldedModel.anywhere`).

    Raises:
        UserError: it is no mesh, or reaches over several processes.
    """
    if jax.process_count() > 1:
        raise UserError("generation runs in one process; start it on one host, with that host's devices")
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh: {mesh!r} is none; make one, such as jax.make_mesh((2,), ('data',))")
    mesh = Mesh(mesh.devices, mesh.axis_names)  # jax.make_mesh makes axes explicit: types of arrays then name them
    model, sharding = divided(model, mesh, apart)
    return jax.device_put(model, sharding.named(sharding.model)), sharding


def by_rows(model: FoldedModel) -> FoldedModel:
    """The model with every matrix row after row on its device, as programs read it. Where rows fill no tile libtpu lays
    a matrix by columns if nothing is said, and then every program begins by copying all of it.

    For one device: on a mesh jax 0.10 gives all devices but the first wrong numbers when it changes a layout."""

    def placed(leaf: Any) -> Any:
        rows = Layout(major_to_minor=tuple(range(leaf.ndim)))
        own = leaf.format.layout
        if leaf.ndim < 2 or own is None or own.major_to_minor == rows.major_to_minor:
            return leaf
        return jax.device_put(leaf, Format(rows, leaf.sharding))

    return model.replace(params=jax.tree.map(placed, model.params))


def divided(model: FoldedModel, mesh: Mesh, apart: bool = False) -> tuple[FoldedModel, ModelSharding]:
    """The model that `shard` puts on the devices, where its weights are now."""
    # Without experts every device has everything, and computes the same.
    shards = mesh.shape.get(EXPERT, 1) if experts_of(model.config) else 1
    params, specs = _divided(model.params, model.family.boxed, shards)
    everywhere: Any = PartitionSpec()
    if shards > 1:
        operations = model.family.operations
        if apart:
            operations = parallel_operations(operations, "gather", shards)
        else:
            experts = SharedRows(operations.expert_mlp, EXPERT, shards)
            neurons = SharedNeurons(operations.feed_forward, EXPERT)
            operations = dataclasses.replace(operations, expert_mlp=experts, feed_forward=neurons)
        model = model.replace(family=build(model.config, operations), exchange=EXPERT if apart else None)
    model = model.replace(params=params)
    leaves, structure = jax.tree.flatten(model.replace(params=specs, state=everywhere), is_leaf=is_spec)
    axes = tuple(name for name in mesh.axis_names if apart or name != EXPERT)
    return model, ModelSharding(mesh, tuple(leaves), structure, axes)


def jitted(
    function: Callable[..., Any],
    sharding: ModelSharding | None,
    static: int,
    inputs: Sequence[Any],
    outputs: Any,
    donate: Sequence[int] = (),
) -> Any:
    """A program, which each device of a mesh runs with its share of the arrays.

    Args:
        function: of one device.
        sharding: None for one device.
        static: how many of the first arguments decide its code.
        inputs: PartitionSpecs of the other arguments, or trees of such, which may be prefixes of theirs. A number for
            all rows is the same everywhere.
        outputs: of what it returns.
        donate: arguments whose arrays it may write over.
    """

    def spread(*arguments: Any) -> Any:
        body, arrays = functools.partial(function, *arguments[:static]), arguments[static:]
        if sharding is None:
            return body(*arrays)

        def of(spec: PartitionSpec, part: Any) -> Any:
            return jax.tree.map(lambda leaf: spec if jnp.ndim(leaf) else PartitionSpec(), part)

        specs = jax.tree.map(of, tuple(inputs), arrays, is_leaf=is_spec)
        return jax.shard_map(body, mesh=sharding.mesh, in_specs=specs, out_specs=outputs, check_vma=False)(*arrays)

    spread.__name__ = function.__name__
    stack_frames.leave_out()
    return jax.jit(spread, static_argnums=range(static), donate_argnums=donate)


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
