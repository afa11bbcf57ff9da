"""The depth-attention kernels over windows and with dilation, against the definition."""

import jax.numpy as jnp
import pytest

from pallas_kernels.depth_attention import Window, windowed
from tests.pallas_kernels.test_depth_attention import (
    FLOAT32,
    SMALL,
    assert_close,
    defined,
    inputs,
    scanned,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of tokens, and of slots, at sizes that are quick to interpret."""
    monkeypatch.setattr("pallas_kernels.depth_attention.layout.INTERPRETED", SMALL)


@pytest.fixture(autouse=True)
def only_kernels(monkeypatch):
    """Where XLA computed instead, nothing would be tested."""

    def fail(*arguments):
        raise AssertionError("the kernel wasn't taken")

    monkeypatch.setattr(windowed, "_attend_taped", fail)


CASES = [
    ((7, 256, 1, 1, 128), Window(3, 2)),  # every number of slots below and above; two blocks of tokens
    ((6, 128, 4, 2, 128), Window(2)),  # groups, several key heads
    ((5, 384, 1, 1, 64), Window(0, 2)),  # dilation alone; a small head; as many blocks as cores don't share
    ((8, 128, 1, 1, 128), Window(7)),  # more slots than are worked on at once, and a rest of them
    ((3, 128, 2, 1, 128), Window(1)),  # only itself
]


@pytest.mark.parametrize(("shape", "window"), CASES, ids=str)
def test_kernels_compute_the_definition(shape, window):
    """Values and gradients of all depths; slots that no depth has written yet hold NaN and are never read."""
    arguments = inputs(*shape, jnp.float32)
    actual = scanned(*arguments, unwritten=jnp.nan, window=window)
    assert_close(actual, defined(*arguments, window), FLOAT32)
