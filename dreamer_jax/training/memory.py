"""Whether a train step could fit into a device at all: said before anything is begun."""

from __future__ import annotations

import os

from jax.sharding import Mesh

from dreamer_jax.budget import analytic
from dreamer_jax.config.sections import Config
from dreamer_jax.errors import UserError
from dreamer_jax.families import build

FLOAT32, STREAM = 4, 2
"""Bytes of a number: of weights, moments and gradients, and at least of the stream."""


def check_memory(config: Config, mesh: Mesh) -> None:
    """Refuse what can't fit, whatever else a step needs: a device's part of the float32 weights and moments, a gradient
    of all weights, or the stream of its rows at a single depth. A CPU that lacks the memory waits forever.

    Raises:
        UserError: it is more than the device has.
    """
    room = _memory(mesh)
    if room is None:
        return
    count = analytic.total(analytic.parameters(build(config.model)))
    rows = config.training.batch_size // config.training.microbatches / mesh.size
    trained = 0.0 if config.training.trainable else 2 / mesh.size + 1 / config.mesh.expert
    needs = {
        "model": FLOAT32 * count * (1 / mesh.size + trained),
        "rows": rows * config.data.places * config.model.hidden_size * STREAM,
    }
    what = max(needs, key=lambda name: needs[name])
    if needs[what] <= room:
        return
    asked = {
        "model": f"the model has {count:,.0f} parameters, whose weights, moments and gradients take",
        "rows": f"{rows:g} rows of {config.data.places:,} tokens take",
    }
    fix = {"model": "make it smaller", "rows": "lower training.batch_size or data.sequence_length"}
    raise UserError(
        f"{asked[what]} at least {needs[what] / 2**30:,.0f} GiB of a device, which has {room / 2**30:,.0f}; "
        f"{fix[what]}, or take more devices (mesh.data). `dreamer budget CONFIG` says what takes how much"
    )


def _memory(mesh: Mesh) -> float | None:
    """Bytes of one device, None where nothing says so; the devices of a CPU share the machine's."""
    device = mesh.local_devices[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit") or None
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(mesh.local_devices)
