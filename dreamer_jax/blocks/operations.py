"""What blocks compute with: operations as objects that own call, tape, settling and gradients.

Families get them and never ask for a platform or a mesh; expert parallelism puts its own in place of `expert_mlp` and
`feed_forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels.attention_moe.reference
import pallas_kernels.expert_mlp.reference
from dreamer_jax.config.values import Implementation
from pallas_kernels.attention_moe import ExpertLinear
from pallas_kernels.depth_attention import DepthAttention
from pallas_kernels.expert_mlp import ExpertMLP
from pallas_kernels.kept import keep
from pallas_kernels.sequence_attention import SequenceAttention
from pallas_kernels.sequence_attention.bidirectional import bidirectional_attention


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, out: jax.Array) -> jax.Array:
    """(silu(x gate^T) * (x up^T)) out: [T, h], and [F, h] three times -> [T, h]."""
    gates, values = (keep(jnp.einsum("th,fh->tf", x, matrix)) for matrix in (gate, up))
    return (jax.nn.silu(gates) * values) @ out


@dataclass(frozen=True)
class Operations:
    """The operations of a model. Each has the contract of the class that it is named after, or is one.

    Attributes:
        sequence_attention, depth_attention, expert_mlp, expert_linear: see the classes of pallas_kernels.
        feed_forward: see `swiglu`.
        bidirectional_attention: see the function of pallas_kernels.
    """

    sequence_attention: Any
    depth_attention: Any
    expert_mlp: Any
    expert_linear: Any
    feed_forward: Callable[..., Any] = swiglu
    bidirectional_attention: Callable[..., Any] = bidirectional_attention


def operations_of(
    implementation: Implementation = "auto", gradient_depths: int = 1, total_depth: int = 1, recompute: bool = False
) -> Operations:
    """The operations of a backend.

    Args:
        implementation: see `pallas_kernels.backend`.
        gradient_depths, total_depth, recompute: see `ExpertMLP`.
    """
    return Operations(
        SequenceAttention(implementation),
        DepthAttention(implementation),
        ExpertMLP(implementation, gradient_depths, total_depth, recompute),
        ExpertLinear(implementation, gradient_depths, total_depth),
    )


def in_int8(operations: Operations) -> Operations:
    """The same, whose `arrange` makes whole numbers of eight bits of matrices."""
    apart = {name: replace(getattr(operations, name), int8=True) for name in ("expert_mlp", "expert_linear")}
    return replace(operations, **apart)


@dataclass(frozen=True)
class Plain:
    """A function as an operation without a tape, for definitions and tests.

    Attributes:
        function: without the tape.
    """

    function: Callable[..., Any]

    def __call__(self, *arguments: Any, tape: None = None, **options: Any) -> Any:
        """What the function makes of them."""
        return self.function(*arguments, **options)

    def start_tape(self, *sizes: Any, **options: Any) -> None:
        """There is none."""

    def arrange(self, weight: Any, *others: Any, expert: bool = True) -> Any:
        """The weights as they are."""
        return (weight, *others) if others else weight


REFERENCE = Operations(
    SequenceAttention("xla"),
    DepthAttention("xla"),
    Plain(pallas_kernels.expert_mlp.reference.expert_mlp),
    Plain(pallas_kernels.attention_moe.reference.expert_linear),
)
"""The definitions, for tests and for counting: exactly the model's matrix products, far too much memory to train."""
