"""Where every parameter lives between steps, and which way it takes to the devices that compute with it.

Between steps a parameter has the model's shape and is divided over all devices of a slice. For a step it is gathered
along one torus axis after the other, along two rings of 4 at once; its gradient is scattered the same way back. On a
TPU a gather or scatter is genuine (not a full all-reduce, no copy of the whole array) when the last gather and the
first scatter run along the array's first dimension, and the others along dimensions that are cut at tiles. The rules
below see to that.

The number of experts rarely divides anything (1097 is a prime). Expert matrices are then stored divided over their
other dimensions, and inside the step exchanged by small all-to-alls into whole experts. Each axis that divides them
pads what it divides with empty experts, and the gather along it drops them again: only the padding of the outermost
axes remains (1104 experts on 4 x 4 x 4 chips, not the 1152 that all 64 divide). Neither checkpoints nor the router
ever see any.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from dreamer_jax.blocks.parameters import Parameter, is_box
from dreamer_jax.parallel.mesh import EXPERT, collective_axes

ROWS = 8
"""Of a TPU tile: the last dimension but one should be cut at a multiple of it."""
WHOLE = (EXPERT,)
"""The axis whose devices have different experts."""
MOST_PADDING = 1.5
"""Expert matrices are padded to at most this many times their experts; further axes divide other dimensions."""

Axes = dict[tuple[str, ...], int]
"""Names of axes that go together -> devices."""


@dataclass(frozen=True)
class AxisLayout:
    """What one mesh axis, or two that go together, have of a parameter.

    Attributes:
        axes: their names.
        size: devices along them; more than one.
        stored: the dimension it divides between steps; None: every device along it has the same.
        computed: the dimension it is gathered along; None: it isn't stored divided, or its devices compute with
            different experts.
        moved: whether `stored` differs from the dimension of the experts, which this axis divides inside the step.
        padded: the experts that a moved axis divides, with padding.
        kept: those of them that a gather along it keeps; the last ones are padding.
    """

    axes: tuple[str, ...]
    size: int
    stored: int | None
    computed: int | None
    moved: bool = False
    padded: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Layout:
    """The way of one parameter.

    Attributes:
        shape: the model's shape.
        parts: from the outermost axis to the innermost; gathered in reverse order.
        expert_dim: the dimension of the experts, for expert matrices.
        padded: experts inside the step, those of all devices of an expert group, for expert matrices.
    """

    shape: tuple[int, ...]
    parts: tuple[AxisLayout, ...]
    expert_dim: int | None = None
    padded: int = 0

    @property
    def spec(self) -> PartitionSpec:
        """How it is divided between steps."""
        # Innermost is what is undone first: moves, from the outermost axis on, then gathers, from the innermost on.
        undone_last = [part for part in self.parts if not part.moved]
        undone_first = [part for part in reversed(self.parts) if part.moved]
        dims: list[Any] = []
        for dim in range(len(self.shape)):
            names = [part.axes for part in undone_last + undone_first if part.stored == dim]
            dims.append(tuple(itertools.chain(*names)) or None)
        return PartitionSpec(*dims)


def parameter_layouts(boxed: Any, mesh: Mesh) -> Any:
    """The tree of `Layout`, one for each parameter of a model, by the names of its axes.

    Args:
        boxed: the tree of the model's boxes (`Family.boxed`).
        mesh: the devices.
    """
    axes = collective_axes(mesh.shape)

    def layout(box: Parameter) -> Layout:
        shape = box.value.shape
        if "norm" in box.axes:
            return Layout(shape, tuple(AxisLayout(names, size, None, None) for names, size in axes.items()))
        if "expert" in box.axes:
            return _expert_layout(shape, box.axes.index("expert"), axes)
        return Layout(shape, _divide(list(shape), axes))

    return jax.tree.map(layout, boxed, is_leaf=is_box)


def _divide(rest: list[int], axes: Axes) -> tuple[AxisLayout, ...]:
    """Every axis divides the first dimension of `rest` if it can, best at tiles, else another one."""
    rest, parts = list(rest), []
    for names, size in axes.items():
        dim = _best_dimension(rest, size)
        if dim is not None:
            rest[dim] //= size
        parts.append(AxisLayout(names, size, dim, dim))
    return tuple(parts)


def _best_dimension(rest: list[int], size: int) -> int | None:
    """The first dimension that is cut at tiles, else the first that can be cut; the last one only if no other can."""
    possible = [dim for dim, length in enumerate(rest) if length % size == 0]
    upper = [dim for dim in possible if dim < len(rest) - 1]
    at_tiles = [dim for dim in upper if dim < len(rest) - 2 or rest[dim] // size % ROWS == 0]
    return next(iter(at_tiles + upper + possible), None)


def _expert_layout(shape: tuple[int, ...], expert_dim: int, axes: Axes) -> Layout:
    """[E, ...] or, in LA, [L, E, ...]: the axis `expert` divides whole experts; in DR as many others as it takes."""
    experts = shape[expert_dim]
    ordered = {WHOLE: axes[WHOLE]} if WHOLE in axes else {}
    ordered |= axes  # whole rings first: most passes there
    by_experts: Axes = {}
    for names, size in ordered.items():
        divided = _experts_divided(experts, {**by_experts, names: size})
        room = divided[-1][0] // size * math.prod(by_experts.values()) * size
        if names == WHOLE or (expert_dim == 0 and (not by_experts or room <= MOST_PADDING * experts)):
            by_experts[names] = size
        else:
            break
    others = {names: size for names, size in ordered.items() if names not in by_experts}
    product = math.prod(by_experts.values())
    moved = experts % product != 0
    divided = _experts_divided(experts, by_experts)
    parts, rest = [], list(shape)
    rest[expert_dim] = 1 if moved else experts // product
    for (names, size), (padded, kept) in zip(by_experts.items(), divided, strict=True):
        stored = _best_dimension(rest, size) if moved else expert_dim
        if moved and stored is not None:
            rest[stored] //= size
        parts.append(AxisLayout(names, size, stored, None if names == WHOLE else expert_dim, moved, padded, kept))
    return Layout(shape, (*parts, *_divide(rest, others)), expert_dim, divided[0][0] if divided else experts)


def _experts_divided(experts: int, by_experts: Axes) -> list[tuple[int, int]]:
    """(`padded`, `kept`) of each axis, outermost first.

    Where the outermost is `expert`, whose devices never have the same experts, what it leaves is a multiple of the next
    axis: so no whole weight is ever cut.
    """
    found, left = [], experts
    sizes = list(by_experts.values())
    for place, (names, size) in enumerate(by_experts.items()):
        multiple = size * math.prod(sizes[1:2]) if names == WHOLE else size
        padded = -(-left // multiple) * multiple
        found.append((padded, left if place else padded))
        left = padded // size
    return found
