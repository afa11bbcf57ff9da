"""What `dreamer bench kernels` needs to know of a kernel at one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dreamer_jax.planning.schedule import Schedule
from pallas_kernels.tiles import Generation


@dataclass(frozen=True)
class Launch:
    """What one launch costs a chip: the longer of both is its time.

    Attributes:
        bundles: that its busiest core issues.
        bytes: that move between the chip and its memory.
    """

    bundles: float
    bytes: float


@dataclass(frozen=True)
class Case:
    """A kernel at one shape.

    Attributes:
        name: kernel and direction, such as "depth_attention forward".
        shape: as people write it.
        arguments: key -> the arguments of `kernel` and `xla`, without the step; only traced when predicting.
        kernel, xla: (*arguments, step) -> results; the same work with a kernel and by XLA. The step, a scalar int32,
            is the last argument. No `xla` where what XLA counts for it says nothing (it counts a sort as one pass).
        steps: values of the step; times are sums over all of them.
        carried: the argument (a pytree) that the last result replaces from step to step, None if there is none.
        launches: (schedule of a Pallas kernel by its name, TPU) -> what the launches of all steps cost.
        flops: of matrix products, all steps.
        least_bytes: that all steps must move.
        figures: TPU -> more numbers for the row, by name.
    """

    name: str
    shape: str
    arguments: Callable[[jax.Array], tuple[Any, ...]]
    kernel: Callable[..., Any]
    xla: Callable[..., Any] | None
    launches: Callable[[Callable[[str], Schedule], Generation], Sequence[Launch]]
    flops: float
    least_bytes: float
    steps: Sequence[int] = (0,)
    carried: int | None = None
    figures: Callable[[Generation], dict[str, float]] = lambda target: {}
