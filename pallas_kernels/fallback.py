"""When a kernel can't be taken: the reasons that all share, and one log line for each."""

from __future__ import annotations

import functools
import logging

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tiles


def no_kernels_here() -> str | None:
    """Why kernels can't run where the code being traced will; None on a known TPU, and on a CPU (interpreted)."""
    if tiles.generation() is not None or jax.default_backend() == "cpu":
        return None
    if pltpu.is_tpu_device():
        return f"no tiles for {pltpu.get_tpu_info().chip_version}, only for {', '.join(tiles.GENERATIONS)}"
    return f"the kernels are for TPUs, and this is {jax.default_backend()}"


@functools.cache
def say_once(line: str) -> None:
    """Log a line the first time it comes up in this process."""
    logging.getLogger("pallas_kernels").warning(line)
