"""The seam for kernels: the four operations a layer is made of, as functions, chosen in one place.

The model receives them; it never asks for a platform or a mesh. Expert parallelism passes its own `expert_mlp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

import pallas_kernels.attention_moe.reference
import pallas_kernels.attention_moe.xla
import pallas_kernels.depth_attention.xla
import pallas_kernels.expert_mlp.reference
import pallas_kernels.expert_mlp.xla
import pallas_kernels.sequence_attention.gpu
import pallas_kernels.sequence_attention.xla
from dreamer_jax.config.values import Implementation
from pallas_kernels.tiles import generation


@dataclass(frozen=True)
class Operations:
    """What a layer computes with; shapes and meaning are those of the XLA functions named in `XLA` below.

    Attributes:
        sequence_attention: (q, k, v, segment_ids) -> out.
        depth_attention: (q, k, v, cache, depth, tape) -> (out, cache).
        expert_mlp: (x, indices, weights, gate_up, down) -> out.
        expert_linear: (x, index, score, routed, shared) -> out.
        depth_tape: (cache, heads, size) -> the empty tape of this depth attention.
        expert_tape: ((T, k), shape of gate_up, dtype, depths=1, total=1) -> the empty tape of this expert_mlp, which
            then takes it as `tape`; None if it has no tape.
        settle_tape: expert tape -> expert tape, see `pallas_kernels.expert_mlp.settle`.
        linear_tape: (T, shape of routed, dtype) -> the empty tape of this expert_linear, which then takes it as `tape`:
            totals of the gradient of `routed`; None if it has no tape.
    """

    sequence_attention: Callable[..., jax.Array]
    depth_attention: Callable[..., tuple[jax.Array, Any]]
    expert_mlp: Callable[..., jax.Array]
    expert_linear: Callable[..., jax.Array]
    depth_tape: Callable[..., Any] = pallas_kernels.depth_attention.xla.start_tape
    expert_tape: Callable[..., Any] = lambda *_, **__: None
    settle_tape: Callable[..., Any] = pallas_kernels.expert_mlp.settle
    linear_tape: Callable[..., Any] = lambda *_: None


XLA = Operations(
    pallas_kernels.sequence_attention.xla.sequence_attention,
    pallas_kernels.depth_attention.xla.depth_attention,
    pallas_kernels.expert_mlp.xla.expert_mlp,
    pallas_kernels.attention_moe.xla.expert_linear,
)
"""Runs everywhere; what `auto` takes where no kernel is faster."""

REFERENCE = Operations(
    pallas_kernels.sequence_attention.xla.sequence_attention,
    pallas_kernels.depth_attention.xla.depth_attention,
    pallas_kernels.expert_mlp.reference.expert_mlp,
    pallas_kernels.attention_moe.reference.expert_linear,
)
"""The definitions, for tests and for counting: exactly the model's matrix products, far too much memory to train."""


PALLAS = Operations(
    pallas_kernels.sequence_attention.sequence_attention,
    pallas_kernels.depth_attention.depth_attention,
    pallas_kernels.expert_mlp.expert_mlp,
    pallas_kernels.attention_moe.expert_linear,
    pallas_kernels.depth_attention.start_tape,
    pallas_kernels.expert_mlp.start_tape,
    linear_tape=pallas_kernels.attention_moe.start_tape,
)
"""Kernels; each takes XLA for the shapes and platforms it has none for, with one log line that says why."""


def resolve_operations(implementation: Implementation = "auto") -> Operations:
    """The operations of a backend, for the platform that the code being traced is for.

    `auto` is `pallas` on a TPU (also one that is compiled for without being there) and `xla` elsewhere; `pallas` on a
    CPU interprets the kernels, which is for tests.
    """
    if implementation == "pallas" or (implementation == "auto" and generation() is not None):
        return PALLAS
    if jax.default_backend() == "gpu":
        return replace(XLA, sequence_attention=pallas_kernels.sequence_attention.gpu.sequence_attention)
    return XLA
