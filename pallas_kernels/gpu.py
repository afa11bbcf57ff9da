"""What all kernels for NVIDIA GPUs share: Pallas' way to Triton, and whether there is one."""

from __future__ import annotations

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
