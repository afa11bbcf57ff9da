"""The experts of a step of decoding, for `dreamer bench kernels`: few rows of many experts, in bfloat16 and in int8."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dreamer_jax.benchmarks.expert_cases import BFLOAT16, CHOICES, HIDDEN, PAPER, Read, normal
from dreamer_jax.benchmarks.kernel_case import Case, Launch
from pallas_kernels import tiles
from pallas_kernels.attention_moe import tpu_int8 as linear_int8
from pallas_kernels.attention_moe.shapes import Tiles as LinearTiles
from pallas_kernels.dispatch.api import Dispatch, plan_dispatch
from pallas_kernels.expert_mlp import tpu, tpu_int8
from pallas_kernels.expert_mlp.shapes import Tiles
from pallas_kernels.tiles import Generation
from pallas_kernels.weights import OutputColumns, OutputRows

TOKENS = 64
EXPERTS, SIZE = PAPER[1]
PROJECTION = (32, 1024, 4096)
"""(G, a, b) of the queries, keys and values of sequence attention."""


def decoding_cases() -> list[Case]:
    """Forward of the expert MLP in both forms; a projection in int8."""
    return [_experts(False), _experts(True), _projection()]


def reached(pairs: int, experts: int) -> float:
    """Experts that balanced routing reaches."""
    return experts * (1 - (1 - 1 / experts) ** pairs)


def _target() -> Generation:
    return tiles.generation() or tiles.INTERPRETED


def _rows(key: jax.Array, choices: int, experts: int, block: int, width: int) -> tuple[jax.Array, Dispatch]:
    """Rows in blocks of their experts, and the plan."""
    indices = jax.random.randint(key, (TOKENS, choices), 0, experts)
    plan = plan_dispatch(indices, experts, block, multiple=_target().cores)
    return normal(key, plan.source.size, width), plan


def _launch(bundles: int, blocks: float, steps: int, moved: float, target: Generation) -> Launch:
    return Launch(blocks * steps / target.cores * bundles, moved)


def _experts(int8: bool) -> Case:
    name = "expert_mlp_int8" if int8 else "expert_mlp_forward"
    blocks = reached(TOKENS * CHOICES, EXPERTS)
    weights = 3 * EXPERTS * SIZE * HIDDEN * (1 if int8 else BFLOAT16) + int8 * 4 * EXPERTS * (2 * SIZE + HIDDEN)
    moved = weights * blocks / EXPERTS

    def arguments(key: jax.Array):
        chosen = Tiles.of(TOKENS * CHOICES, EXPERTS, SIZE, HIDDEN, jnp.dtype("bfloat16"), _target())
        assert chosen is not None
        gate_up, down = normal(key, EXPERTS, 2 * SIZE, HIDDEN), normal(key, EXPERTS, SIZE, HIDDEN)
        kept = (OutputRows.in_int8(gate_up), OutputColumns.in_int8(down)) if int8 else (gate_up, down)
        return *_rows(key, CHOICES, EXPERTS, chosen.block, HIDDEN), *kept

    def kernel(rows, plan, gate_up, down, step):
        del step
        if int8:
            return tpu_int8.forward(rows, gate_up, down, plan, target=_target())
        return tpu.forward(rows, gate_up, down, plan, keep=False, target=_target())[0]

    def launches(read: Read, target: Generation) -> list[Launch]:
        rows = 2 * BFLOAT16 * 16 * blocks * HIDDEN
        return [_launch(read(name).loops[0].bundles, blocks, 1, moved + rows, target)]

    return Case(
        f"expert_mlp decode{' int8' if int8 else ''}",
        f"T={TOKENS} k={CHOICES} h={HIDDEN} E={EXPERTS} F={SIZE}",
        arguments,
        kernel,
        None,
        launches,
        flops=6 * TOKENS * CHOICES * HIDDEN * SIZE,
        least_bytes=moved,
    )


def _projection() -> Case:
    experts, inward, outward = PROJECTION
    blocks = reached(TOKENS, experts)
    moved = blocks * (inward * outward + 4 * outward)

    def tiles_of() -> LinearTiles:
        chosen = LinearTiles.of(TOKENS, PROJECTION, jnp.dtype("bfloat16"), _target())
        assert chosen is not None
        return chosen

    def arguments(key: jax.Array):
        routed = OutputColumns.in_int8(normal(key, *PROJECTION))
        return *_rows(key, 1, experts, tiles_of().block, inward), routed

    def kernel(rows, plan, routed, step):
        del step
        return linear_int8.forward(rows, routed, plan, tile=tiles_of().outputs, target=_target())

    def launches(read: Read, target: Generation) -> list[Launch]:
        passes = outward // tiles_of().outputs
        rows = BFLOAT16 * 16 * blocks * (passes * inward + outward)
        return [_launch(read("expert_linear_int8").loops[0].bundles, blocks, passes, moved + rows, target)]

    return Case(
        "expert_linear decode int8",
        f"T={TOKENS} G={experts} {inward}x{outward}",
        arguments,
        kernel,
        None,
        launches,
        flops=2 * TOKENS * inward * outward,
        least_bytes=moved,
    )
