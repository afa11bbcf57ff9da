"""What runs on a GPU where a TPU has kernels, at the paper's shapes, for `dreamer bench kernels` on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dreamer_jax.benchmarks.attention_cases import attention_cases
from dreamer_jax.benchmarks.expert_cases import CHOICES, HIDDEN, LINEAR, PAIRS, PAPER, TOKENS, normal
from dreamer_jax.benchmarks.kernel_case import Case
from pallas_kernels.attention_moe import ExpertLinear
from pallas_kernels.expert_mlp import ExpertMLP
from pallas_kernels.expert_mlp.shapes import forward_bytes


def gpu_cases() -> list[Case]:
    """The attentions, and the experts' operations with the moving of rows, forward and gradient, beside XLA's batches.

    Not beside jax.lax.ragged_dot: on a GPU XLA makes of it one product with all experts' matrices, which fits nowhere.
    """
    mlp = [_mlp(*shape, gradient=gradient) for gradient in (False, True) for shape in PAPER]
    linear = [_linear(*shape, gradient=gradient) for gradient in (False, True) for shape in LINEAR]
    return [*attention_cases(), *mlp, *linear]


def _mlp(experts: int, size: int, gradient: bool) -> Case:
    def arguments(key):
        keys = jax.random.split(key, 5)
        indices = jax.lax.top_k(jax.random.uniform(keys[0], (TOKENS, experts)), CHOICES)[1]
        floats = normal(keys[1], TOKENS, HIDDEN), jax.random.uniform(keys[2], (TOKENS, CHOICES))
        return indices, (*floats, normal(keys[3], experts, 2 * size, HIDDEN), normal(keys[4], experts, size, HIDDEN))

    return _case(
        "expert_mlp",
        f"T={TOKENS} k={CHOICES} h={HIDDEN} E={experts} F={size}",
        arguments,
        ExpertMLP(),
        ExpertMLP("xla"),
        gradient,
        flops=6 * PAIRS * HIDDEN * size,
        least_bytes=forward_bytes(PAIRS, experts, size, HIDDEN),
    )


def _linear(experts: int, inward: int, outward: int, gradient: bool) -> Case:
    def arguments(key):
        keys = jax.random.split(key, 5)
        floats = normal(keys[0], TOKENS, inward), jax.random.uniform(keys[1], (TOKENS,))
        matrices = normal(keys[2], experts, inward, outward), normal(keys[3], inward, outward)
        return jax.random.randint(keys[4], (TOKENS,), 0, experts), (*floats, *matrices)

    return _case(
        "expert_linear",
        f"T={TOKENS} G={experts} {inward}x{outward}",
        arguments,
        ExpertLinear(),
        ExpertLinear("xla"),
        gradient,
        flops=2 * TOKENS * inward * outward,
        least_bytes=2 * (TOKENS * (inward + outward) + experts * inward * outward),
    )


def _case(
    name: str,
    shape: str,
    arguments: Callable[[jax.Array], tuple[Any, ...]],
    operation: Callable[..., jax.Array],
    plain: Callable[..., jax.Array],
    gradient: bool,
    flops: float,
    least_bytes: float,
) -> Case:
    """Of (x, integers, *floats) -> y: the value, or all gradients, which take two more products of every kind."""

    def run(operation):
        def value(integers, floats, step):
            del step
            return operation(floats[0], integers, *floats[1:])

        def gradients(integers, floats, step):
            out, vjp = jax.vjp(lambda floats: value(integers, floats, step), floats)
            return vjp(out)

        return gradients if gradient else value

    return Case(
        f"{name} {'gradient' if gradient else 'forward'}",
        shape,
        arguments,
        run(operation),
        run(plain),
        lambda read, target: [],  # no schedule to read
        flops=flops * (3 if gradient else 1),
        least_bytes=least_bytes * (3 if gradient else 1),
    )
