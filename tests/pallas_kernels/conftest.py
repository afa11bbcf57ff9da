"""What the tests of several files ask for."""

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels import tiles
from pallas_kernels.attention_moe.shapes import Tiles as LinearTiles
from pallas_kernels.expert_mlp.shapes import Tiles
from tests.pallas_kernels.expert_cases import CHOICES, EXPERTS, SIZE, TOKENS


@pytest.fixture
def little_memory(monkeypatch):
    """So little vector memory that every kernel takes its columns in two tiles, at h = 512 and a = b = 256."""
    small = dataclasses.replace(tiles.INTERPRETED, vmem=620_000)
    for module in ("tiles", "dispatch.stream"):
        monkeypatch.setattr(f"pallas_kernels.{module}.INTERPRETED", small)
    linear = LinearTiles.of(TOKENS, (EXPERTS, 256, 256), jnp.float32, small)
    assert Tiles.of(TOKENS * CHOICES, EXPERTS, SIZE, 512, jnp.float32, small).columns == 256
    assert (linear.outputs, linear.inputs, linear.columns) == (128, 128, 128)
