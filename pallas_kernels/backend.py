"""Which form of an operation runs: one rule for all of them, asked by each kernel's api.py and nowhere else.

`auto` takes kernels on a TPU (also one that is compiled for without being there), an operation's own form on a GPU or a
CPU where there is one, and the plain forms elsewhere; `pallas` asks for kernels everywhere, on a CPU for the TPU's,
interpreted, for tests; `xla` is always the plain form, the only one that can be differentiated twice. Where an
operation has no kernel for the shapes or the platform at hand its plain form stands in, and one log line says why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal

import jax
from jax.experimental.pallas import tpu as pltpu

from dreamer_jax.config.values import Implementation
from pallas_kernels import tiles

NO_FORM = "there is none for GPUs"
Backend = Literal["pallas", "gpu", "cpu", "xla"]


def backend(
    operation: str,
    implementation: Implementation,
    unsupported: Callable[[], str | None],
    unsupported_on_gpu: Callable[[], str | None] = lambda: NO_FORM,
) -> Backend:
    """The backend of an operation for the platform that the code being traced is for.

    Args:
        operation: its name, for the log.
        implementation: what the configuration asks for.
        unsupported: why no kernel takes the shapes at hand, or None; asked only where kernels are wanted.
        unsupported_on_gpu: the same of the operation's form for NVIDIA GPUs, on one.
    """
    if implementation != "xla" and on_gpu():
        reason = unsupported_on_gpu()
        if reason is None:
            return "gpu"
        _say_once(f"{operation} without a kernel: {reason}")
        return "xla"
    if implementation == "pallas" or (implementation == "auto" and tiles.generation() is not None):
        reason = _no_kernels_here() or unsupported()
        if reason is None:
            return "pallas"
        _say_once(f"{operation} without a kernel: {reason}")
    return "cpu" if implementation == "auto" and on_cpu() else "xla"


def target() -> tiles.Generation:
    """What kernels are cut for: the TPU generation at hand, or the interpreter's sizes."""
    return tiles.generation() or tiles.INTERPRETED


def on_cpu() -> bool:
    """Whether the code being traced is for a CPU."""
    return jax.default_backend() == "cpu" and tiles.generation() is None


def on_gpu() -> bool:
    """Whether it is for a GPU."""
    return jax.default_backend() == "gpu" and tiles.generation() is None


def in_place(implementation: Implementation) -> bool:
    """Whether decoding computes with matrices where they lie, in the form that suits a CPU (`OutputRows`)."""
    return implementation != "pallas" and on_cpu()


def _no_kernels_here() -> str | None:
    """Why kernels can't run where the code being traced will; None on a known TPU, and on a CPU (interpreted)."""
    if tiles.generation() is not None or jax.default_backend() == "cpu":
        return None
    if pltpu.is_tpu_device():
        return f"no tiles for {pltpu.get_tpu_info().chip_version}, only for {', '.join(tiles.GENERATIONS)}"
    return f"the kernels are for TPUs, and this is {jax.default_backend()}"


@functools.cache
def _say_once(line: str) -> None:
    """Log a line the first time it comes up in this process."""
    logging.getLogger("pallas_kernels").warning(line)
