"""The experts' kernels at the paper's shapes, for `dreamer bench kernels`: rows already in blocks of their experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dreamer_jax.benchmarks.kernel_case import Case, Launch
from dreamer_jax.planning.schedule import Schedule
from pallas_kernels import tiles
from pallas_kernels.attention_moe import shapes as linear_shapes
from pallas_kernels.attention_moe import tpu as linear
from pallas_kernels.dispatch import tpu as dispatch
from pallas_kernels.dispatch.accumulate import accumulate, visits_of
from pallas_kernels.dispatch.api import Dispatch, plan_blocks, plan_dispatch
from pallas_kernels.expert_mlp import ExpertMLP, shapes, tpu
from pallas_kernels.tiles import Generation

TOKENS, CHOICES, HIDDEN, BFLOAT16 = 32768, 8, 1024, 2
PAIRS = TOKENS * CHOICES
DEPTHS = 4
"""Depths of a gradient."""
PAPER = ((537, 480), (1097, 472), (517, 504), (1039, 504))
"""(E, F) of the paper's DR+DA and DR, each at its two depths."""
LINEAR = ((32, 1024, 4096), (32, 2048, 1024), (32, 1024, 384), (32, 128, 1024))
"""(G, a, b) of the projections around sequence and depth attention at L = 32."""
Read = Callable[[str], Schedule]


def expert_cases() -> list[Case]:
    """Forward and gradient of the expert MLP and of the linear experts; the counting sort."""
    mlp = [make(*shape) for make in (_forward, _gradient) for shape in PAPER]
    linear = [make(*shape) for make in (_linear_forward, _linear_gradient) for shape in LINEAR]
    return [*mlp, *linear, *map(_counting_sort, (537, 1097))]


def expected_blocks(pairs: int, experts: int, block: int) -> float:
    """Blocks that balanced routing fills: whole ones, and on average half of one lost on each expert."""
    return pairs / block + experts / 2


def normal(key: jax.Array, *shape: int) -> jax.Array:
    """Bfloat16, a tenth of a standard normal."""
    return jax.random.normal(key, shape, jnp.bfloat16) * 0.1


def _plan(key: jax.Array, tokens: int, choices: int, experts: int, block: int) -> Dispatch:
    indices = jax.random.randint(key, (tokens, choices), 0, experts)
    return plan_dispatch(indices, experts, block, multiple=_target().cores)


def _target() -> Generation:
    return tiles.generation() or tiles.INTERPRETED


def _mlp_tiles(experts: int, size: int, target: Generation) -> shapes.Tiles:
    chosen = shapes.Tiles.of(PAIRS, experts, size, HIDDEN, jnp.dtype("bfloat16"), target)
    assert chosen is not None
    return chosen


def _mlp_arguments(experts: int, size: int, key: jax.Array):
    keys = jax.random.split(key, 4)
    block = _mlp_tiles(experts, size, _target()).block
    blocks = plan_blocks(PAIRS, experts, block, _target().cores)
    plan = _plan(keys[3], TOKENS, CHOICES, experts, block)
    rows, matrices = normal(keys[0], blocks * block, HIDDEN), normal(keys[1], experts, 2 * size, HIDDEN)
    return rows, matrices, normal(keys[2], experts, size, HIDDEN), plan


def _forward(experts: int, size: int) -> Case:
    def kernel(rows, gate_up, down, plan, step):
        del step
        return tpu.forward(rows, gate_up, down, plan, keep=False, target=_target())[0]

    def launches(read: Read, target: Generation) -> list[Launch]:
        return [_mlp_launch(read("expert_mlp_forward"), experts, size, target, 2 * HIDDEN)]

    return Case(
        "expert_mlp forward",
        f"M={PAIRS} h={HIDDEN} E={experts} F={size}",
        lambda key: _mlp_arguments(experts, size, key),
        kernel,
        lambda rows, gate_up, down, plan, step: ragged_experts(rows, gate_up, down, _sizes(plan, rows)),
        launches,
        flops=6 * PAIRS * HIDDEN * size,
        least_bytes=shapes.forward_bytes(PAIRS, experts, size, HIDDEN),
    )


def _gradient(experts: int, size: int) -> Case:
    """DEPTHS depths of the backward scan on a tape: recomputed forward pass, input gradient, weight gradient.

    As many of them share one pass over the gradient's totals as training takes unless told otherwise.
    """

    def arguments(key):
        rows, gate_up, down, plan = _mlp_arguments(experts, size, key)
        shape = (TOKENS, CHOICES), gate_up.shape, rows.dtype
        return rows, gate_up, down, plan, ExpertMLP("pallas", _sharing(experts, size, _target())).start_tape(*shape)

    def launches(read: Read, target: Generation) -> list[Launch]:
        forward, inward, outward = (
            read(name) for name in ("expert_mlp_forward", "expert_mlp_input_gradient", "expert_weight_gradient")
        )
        each = [
            _mlp_launch(forward, experts, size, target, 2 * HIDDEN + 2 * size),
            _mlp_launch(inward, experts, size, target, 2 * HIDDEN + 5 * size),
        ]
        return [*each * DEPTHS, _weight_launch(outward, experts, size, target)]

    return Case(
        "expert_mlp gradient",
        f"M={PAIRS} h={HIDDEN} E={experts} F={size}, {DEPTHS} depths",
        arguments,
        _mlp_depths,
        _ragged_depths,
        launches,
        flops=3 * DEPTHS * 6 * PAIRS * HIDDEN * size,
        least_bytes=DEPTHS * (2 * shapes.forward_bytes(PAIRS, experts, size, HIDDEN))
        + DEPTHS * shapes.weight_gradient_bytes(PAIRS, experts, size, HIDDEN, DEPTHS),
        carried=4,
        figures=lambda target: _weight_figures(experts, size, target),
    )


def _mlp_depths(rows, gate_up, down, plan, tape, step):
    """DEPTHS depths, the tape settled after as many as it has room for."""
    del step

    def depth(_, carry):
        d_rows, tape = carry
        values, kept = tpu.forward(rows, gate_up, down, plan, keep=True, target=_target())
        ones = (plan.source < PAIRS).astype(jnp.float32)
        backward = functools.partial(tpu.input_gradient, target=_target())
        if tape.rows is None:
            d_x, _, factors = backward(d_rows, kept, ones, gate_up, down, plan, None, 0)
            tape = tape.add(factors, rows, d_rows, plan.num_blocks[None], _target())
        else:  # training fetches the rows to where they are kept; here they are copied there
            factors, x_aside, d_aside, *_ = tape.rows
            first = tape.first_block * plan.source.shape[1]
            x_aside = jax.lax.dynamic_update_slice_in_dim(x_aside, rows, first, 0)
            d_aside = jax.lax.dynamic_update_slice_in_dim(d_aside, d_rows, first, 0)
            place = factors, first // plan.source.shape[1]
            d_x, _, factors = backward(d_aside, kept, ones, gate_up, down, plan, *place)
            tape = tape.keep(factors, x_aside, d_aside, plan.num_blocks)
        return d_x + values, tape

    def until_settled(_, carry):
        d_rows, tape = jax.lax.fori_loop(0, carry[1].every, depth, carry)
        return d_rows, tape.settle()

    return jax.lax.fori_loop(0, DEPTHS // tape.every, until_settled, (rows, tape))


def _ragged_depths(rows, gate_up, down, plan, tape, step):
    """The same by XLA's grouped products, differentiated; not in a loop, whose body would be counted once."""
    del step
    sizes = _sizes(plan, rows)
    d_rows, totals = rows, [tape.gate_up, tape.down]
    for _ in range(DEPTHS):
        values, vjp = jax.vjp(lambda x, gate_up, down: ragged_experts(x, gate_up, down, sizes), rows, gate_up, down)
        d_x, *own = vjp(d_rows)
        d_rows, totals = d_x + values, [total + d.astype(jnp.float32) for total, d in zip(totals, own, strict=True)]
    return d_rows, totals


def _counting_sort(experts: int) -> Case:
    """The slots of all (token, choice) pairs, sorted by expert."""

    def arguments(key):
        return jax.random.randint(key, (PAIRS,), 0, experts), jnp.zeros(experts, jnp.int32)

    def launches(read: Read, target: Generation) -> list[Launch]:
        steps = PAIRS / (dispatch.CHUNK * dispatch.CHUNKS)  # of each core, for its share of the experts
        return [Launch(steps * read("dispatch_slots").loops[0].bundles, 4 * PAIRS * 2 * target.cores)]

    return Case(
        "dispatch slots",
        f"M={PAIRS} E={experts}",
        arguments,
        lambda expert, first_slot, step: dispatch.slots(expert, first_slot, target=_target()),
        None,
        launches,
        flops=0,
        least_bytes=8 * PAIRS,
    )


def _mlp_launch(schedule: Schedule, experts: int, size: int, target: Generation, row: int) -> Launch:
    """A walk over the used blocks; `row` elements of each row move, and every expert's matrices once."""
    block = _mlp_tiles(experts, size, target).block
    used = expected_blocks(PAIRS, experts, block)
    moved = BFLOAT16 * (used * block * row + 3 * experts * size * HIDDEN)
    return Launch(_walk(schedule, used, experts) / target.cores, moved)


def _walk(schedule: Schedule, used: float, experts: int, before: int = 0) -> float:
    """Bundles of a walk over the used blocks.

    A step has two ways, for a whole block and for one of which half is filled, as every second expert's last one is.
    The first `before` branches of a step aren't these, however long; they are counted in every step.
    """
    step = schedule.loops[0]
    whole, half = dataclasses.replace(step, branches=step.branches[before:]).longest(2)
    return (used - experts / 2) * (step.bundles - half) + experts / 2 * (step.bundles - whole)


def _weight_launch(schedule: Schedule, experts: int, size: int, target: Generation) -> Launch:
    chosen, sharing = _mlp_tiles(experts, size, target), _sharing(experts, size, target)
    used, passes = DEPTHS * expected_blocks(PAIRS, experts, chosen.block), HIDDEN // chosen.columns
    moved = shapes.weight_gradient_bytes(int(used * chosen.block), experts, size, HIDDEN, sharing / DEPTHS, passes)
    return Launch(used * passes / target.cores * schedule.loops[0].bundles, moved)


def _weight_figures(experts: int, size: int, target: Generation) -> dict[str, float]:
    """The weight gradient's traffic, and what differentiating a scan over depths would move instead."""
    chosen, sharing = _mlp_tiles(experts, size, target), _sharing(experts, size, target)
    rows = int(expected_blocks(PAIRS, experts, chosen.block) * chosen.block)
    ours = shapes.weight_gradient_bytes(rows, experts, size, HIDDEN, sharing, HIDDEN // chosen.columns)
    theirs = shapes.autodiff_weight_gradient_bytes(PAIRS, experts, size, HIDDEN)
    return {
        "depths that share a pass over the totals": sharing,
        "GB the weight gradient moves a depth": ours / 1e9,
        "by autodiff": theirs / 1e9,
        "ratio": ours / theirs,
    }


def _sharing(experts: int, size: int, target: Generation) -> int:
    """Depths that share one pass over the totals by default, at most DEPTHS."""
    block = _mlp_tiles(experts, size, target).block
    rows = plan_blocks(PAIRS, experts, block, target.cores) * block
    return min(DEPTHS, shapes.depths_aside(rows, size, HIDDEN, jnp.dtype("bfloat16"), DEPTHS, target))


def _sizes(plan: Dispatch, rows: jax.Array) -> jax.Array:
    """Rows of each expert's blocks [E], the last one's with the unused blocks."""
    sizes = plan.num_blocks * plan.source.shape[1]
    return sizes.at[-1].add(rows.shape[0] - jnp.sum(sizes))


def ragged_experts(rows: jax.Array, gate_up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    """XLA's grouped products, with the matrices as they are stored: rows sorted by expert, `sizes` [E] of each."""
    dimensions = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    gate, up = jnp.split(jax.lax.ragged_dot_general(rows, gate_up, sizes, dimensions), 2, axis=1)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)


def _linear_tiles(experts: int, inward: int, outward: int, target: Generation) -> linear_shapes.Tiles:
    chosen = linear_shapes.Tiles.of(TOKENS, (experts, inward, outward), jnp.dtype("bfloat16"), target)
    assert chosen is not None
    return chosen


def _linear_arguments(experts: int, inward: int, outward: int, key: jax.Array):
    keys = jax.random.split(key, 4)
    block = _linear_tiles(experts, inward, outward, _target()).block
    plan = _plan(keys[0], TOKENS, 1, experts, block)
    rows = normal(keys[1], plan.source.size, inward)
    return rows, normal(keys[2], experts, inward, outward), normal(keys[3], inward, outward), plan


def _linear_forward(experts: int, inward: int, outward: int) -> Case:
    def kernel(rows, routed, shared, plan, step):
        del step
        tile = _linear_tiles(experts, inward, outward, _target()).outputs
        return linear.forward(rows, routed, shared, plan, tile=tile, target=_target())

    def xla(rows, routed, shared, plan, step):
        del step
        return jax.lax.ragged_dot(rows, routed + shared, _sizes(plan, rows))

    def launches(read: Read, target: Generation) -> list[Launch]:
        chosen = _linear_tiles(experts, inward, outward, target)
        tiles = outward // chosen.outputs
        moved = BFLOAT16 * (TOKENS * (tiles * inward + outward) + experts * inward * outward)
        used = expected_blocks(TOKENS, experts, chosen.block)
        # Before the product the shared matrix is added, in truth once an expert.
        bundles = _walk(read("expert_linear_forward"), used, experts, before=1)
        return [Launch(bundles * tiles / target.cores, moved)]

    return Case(
        "expert_linear forward",
        f"T={TOKENS} G={experts} {inward}x{outward}",
        lambda key: _linear_arguments(experts, inward, outward, key),
        kernel,
        xla,
        launches,
        flops=2 * TOKENS * inward * outward,
        least_bytes=BFLOAT16 * (TOKENS * (inward + outward) + experts * inward * outward),
    )


def _linear_gradient(experts: int, inward: int, outward: int) -> Case:
    """Input and weight gradient, the latter added to float32 totals."""

    def arguments(key):
        rows, routed, shared, plan = _linear_arguments(experts, inward, outward, key)
        d_rows = normal(key, rows.shape[0], outward)
        return rows, d_rows, routed, shared, plan, jnp.zeros((experts, 1, inward, outward), jnp.float32)

    def kernel(rows, d_rows, routed, shared, plan, totals, step):
        del step
        chosen, target = _linear_tiles(experts, inward, outward, _target()), _target()
        inner = linear.input_gradient(d_rows, rows, routed, shared, plan, 0, tile=chosen.inputs, target=target)
        visits = visits_of(plan.num_blocks[None], plan.source.shape[0])
        how = {"block": chosen.block, "tile": chosen.columns, "target": target}
        return inner, accumulate([totals], rows[None], [d_rows], visits, **how)[0]

    def xla(rows, d_rows, routed, shared, plan, totals, step):
        del step
        _, vjp = jax.vjp(lambda x, w, s: jax.lax.ragged_dot(x, w + s, _sizes(plan, rows)), rows, routed, shared)
        d_x, d_routed, d_shared = vjp(d_rows)
        return (d_x, d_shared), totals + d_routed[:, None].astype(jnp.float32)

    def launches(read: Read, target: Generation) -> list[Launch]:
        chosen = _linear_tiles(experts, inward, outward, target)
        tiles, columns = inward // chosen.inputs, outward // chosen.columns
        moved = BFLOAT16 * (TOKENS * (tiles * outward + 2 * inward) + experts * inward * outward)
        grown = BFLOAT16 * TOKENS * (columns * inward + outward) + 8 * experts * inward * outward
        used = expected_blocks(TOKENS, experts, chosen.block)
        inner = _walk(read("expert_linear_input_gradient"), used, experts)
        outer = used * read("expert_weight_gradient").loops[0].bundles
        return [Launch(inner * tiles / target.cores, moved), Launch(outer * columns / target.cores, grown)]

    return Case(
        "expert_linear gradient",
        f"T={TOKENS} G={experts} {inward}x{outward}",
        arguments,
        kernel,
        xla,
        launches,
        flops=3 * 2 * TOKENS * inward * outward,
        least_bytes=BFLOAT16 * TOKENS * (3 * inward + 2 * outward) + 10 * experts * inward * outward,
        carried=5,
    )
