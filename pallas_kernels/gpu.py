"""What all kernels for NVIDIA GPUs share: Pallas' way to Triton, and whether there is one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # deprecated since jax 0.11; the plain forms do without
    plgpu: Any = None

LARGEST = 1 << 31
"""Elements of an array from which on a kernel's 32-bit places would overflow."""


def unsupported(*sizes: int) -> str | None:
    """Why no kernel runs on the GPU at hand, with arrays of so many elements, or None if they do."""
    if plgpu is None:
        return f"jax {jax.__version__} has no Pallas for Triton"
    if "rocm" in jax.devices()[0].client.platform_version.lower():
        return "the kernels are for NVIDIA GPUs"
    return "places in an array are counted in 32 bits" if max(sizes) >= LARGEST else None


def unsupported_products(*sizes: int, dtype: Any) -> str | None:
    """The same of kernels with products, which the matrix units do."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"the matrix units take 16 bits, not {jnp.dtype(dtype)}"
    return unsupported(*sizes)


def compile_for(warps: int, stages: int | None = None) -> dict[str, Any]:
    """The other arguments of `pallas_call`: warps of a program, and loads in flight. Interpreted on a CPU."""
    parameters = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    return {"compiler_params": parameters, "interpret": jax.default_backend() == "cpu"}


def unless_differentiated(form: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """`form`, which only computes forward; and, where a gradient is asked for, `other` of the same arrays."""
    either = jax.custom_vjp(form)
    either.defvjp(lambda *arrays: jax.vjp(other, *arrays), lambda vjp, d_out: vjp(d_out))
    return either


def load(ref: Any, rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    """A tile of two axes, zero outside of the array, which `inside` tells by rows and by columns."""
    mask = mask_of(rows, columns, ref.shape)
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def mask_of(rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """Which of a tile's elements are in the array, by rows and by columns; None for all."""
    masks = [
        part
        for part in (None if rows is None else rows[:, None], None if columns is None else columns[None])
        if part is not None
    ]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), shape) if masks else None


def inside(tile: jax.Array, size: int, length: int) -> jax.Array | None:
    """Which of a tile's places are before the array's end [size]; None where tiles divide it."""
    return None if length % size == 0 else tile * size + jnp.arange(size, dtype=jnp.int32) < length


def tile_of(length: int, largest: int) -> int:
    """The largest power of two up to `largest` and `length`. What sticks out costs less than smaller tiles."""
    return min(largest, 1 << (length.bit_length() - 1))
