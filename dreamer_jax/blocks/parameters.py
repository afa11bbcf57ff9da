"""Parameters: their boxes with axis names and a role, what follows from the role, and the base of all blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Counted
from dreamer_jax.errors import UserError

Role = Literal["matrix", "embedding", "norm", "bias", "gate", "router_key", "injection"]
"""What a parameter is for. Compute precision, weight decay and export follow it; its name says nothing.

matrix: multiplies activations. embedding: rows that are looked up, and the output head. norm: scales of a norm. bias:
is added. gate: of a gate or a halting unit. router_key: keys that tokens are routed by. injection: the matrix of what
enters every depth.
"""

FLOAT32: frozenset[Role] = frozenset({"norm", "bias", "gate", "router_key"})
"""Roles that stay float32 in the compute copy; routing in particular is float32."""
DECAYED: frozenset[Role] = frozenset({"matrix", "embedding", "router_key"})
"""Roles that weight decay applies to."""

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
"""(key, shape, dtype) -> array."""
PyTree = Any


class Parameter(flax.struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter in its box, as `init` makes it.

    Attributes:
        value: float32.
        axes: a name for each axis. Those that other rooms know: "expert", which expert parallelism divides; "layer", of
            what differs between depths; "norm", never divided.
        role: see `Role`.
    """

    value: Any
    axes: tuple[str, ...] = flax.struct.field(pytree_node=False)
    role: Role = flax.struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """The value."""
        return self.value

    def replace_boxed(self, val: Any) -> Parameter:
        """Another value in the same box."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Parameter:
        """The box of a value with one more axis, named `params[nn.meta.PARTITION_NAME]`."""
        return self.replace(axes=(*self.axes[:index], params[nn.meta.PARTITION_NAME], *self.axes[index:]))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Parameter:
        """The inverse of `add_axis`."""
        return self.replace(axes=(*self.axes[:index], *self.axes[index + 1 :]))


class Block(nn.Module, Counted):
    """The base of all blocks: a module whose weights have roles, and that counts itself."""

    def weight(
        self, name: str, init: Initializer, shape: tuple[int, ...], axes: tuple[str, ...], role: Role = "matrix"
    ) -> Any:
        """A parameter; a given one is taken as it is, whatever its form (see pallas_kernels/weights.py).

        Args:
            name: in this module.
            init: draws it.
            shape, axes, role: see `Parameter`.
        """
        if self.has_variable("params", name):
            return self.get_variable("params", name)

        def boxed(key: jax.Array) -> Parameter:
            return Parameter(init(key, shape, jnp.float32), axes, role)

        return self.param(name, boxed)

    def folded(self, name: str) -> bool:
        """Whether folding has taken a parameter, or a module's parameters, away from those that are given."""
        return not self.is_initializing() and not self.has_variable("params", name)


def normal(std: float) -> Initializer:
    """N(0, std^2)."""
    return nn.initializers.normal(std)


def truncated_normal(std: float) -> Initializer:
    """N(0, std^2) cut off at three standard deviations, not scaled up for what that takes away."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return std * jax.random.truncated_normal(key, -3, 3, shape, dtype)

    return init


def uniform(bound: float) -> Initializer:
    """Uniform between -bound and bound."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def is_box(leaf: Any) -> bool:
    """Whether a leaf of a boxed tree is a `Parameter`."""
    return isinstance(leaf, Parameter)


def roles_of(boxed: PyTree) -> PyTree:
    """The tree of roles of a boxed tree of parameters.

    Raises:
        UserError: a leaf isn't boxed, or its role isn't known: it would be cast and decayed as nobody meant it.
    """

    def role(path: Any, box: Any) -> Role:
        if not is_box(box) or box.role not in get_args(Role):
            found = f"role '{box.role}'" if is_box(box) else f"a {type(box).__name__} that isn't boxed (`Parameter`)"
            raise UserError(f"parameter {jax.tree_util.keystr(path)}: {found}; roles are {', '.join(get_args(Role))}")
        return box.role

    return jax.tree_util.tree_map_with_path(role, boxed, is_leaf=is_box)


def compute_copy(params: PyTree, roles: PyTree, dtype: Any) -> PyTree:
    """Parameters as a model computes with them: in `dtype`, but for the roles that stay float32."""
    return jax.tree.map(lambda leaf, role: leaf if role in FLOAT32 else leaf.astype(dtype), params, roles)
