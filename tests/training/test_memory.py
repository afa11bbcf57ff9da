"""What can't fit is refused before a run is begun."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from dreamer_jax.budget import analytic
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.training.memory import check_memory
from tests.training.cases import tiny_config


def mesh_of(size: int, room: float):
    """Accelerators with that many bytes each."""
    device = SimpleNamespace(platform="tpu", memory_stats=lambda: {"bytes_limit": room})
    return SimpleNamespace(size=size, local_devices=[device])


def test_weights_moments_and_gradients():
    """16 bytes a number on one device; on eight 5.5, all but the gradient divided; 4 where a part is trained."""
    config = tiny_config()
    count = analytic.total(analytic.parameters(build(config.model)))
    partly = tiny_config(training__trainable="head")
    for its, size, of_each in ((config, 1, 16), (config, 8, 5.5), (partly, 1, 4)):
        check_memory(its, mesh_of(size, of_each * count))
        with pytest.raises(UserError, match=f"the model has {count:,.0f} parameters.*make it smaller"):
            check_memory(its, mesh_of(size, of_each * count - 1))


def test_rows():
    config = tiny_config(data__sequence_length=10**9)
    rows = 8 * 10**9 * 16 * 2
    check_memory(config, mesh_of(1, rows))
    message = re.escape("8 rows of 1,000,000,000 tokens take at least 238 GiB of a device, which has 238")
    with pytest.raises(UserError, match=message):
        check_memory(config, mesh_of(1, rows - 1))
    check_memory(tiny_config(data__sequence_length=10**9, training__microbatches=2), mesh_of(1, rows / 2))
    check_memory(config, mesh_of(4, rows / 4))


def test_where_nothing_says_how_much_there_is():
    mesh = mesh_of(1, 0)
    for told in (None, {}, {"bytes_limit": 0}):  # of a device, or of an allocator without a limit
        mesh.local_devices[0].memory_stats = lambda told=told: told
        check_memory(tiny_config(data__sequence_length=10**9), mesh)
