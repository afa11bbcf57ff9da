"""Where parameters lie between steps, and how experts that nothing divides are padded inside one."""

import itertools
import math
from types import SimpleNamespace

import pytest

from dreamer_jax.config import load_config
from dreamer_jax.families import build
from dreamer_jax.parallel import parameter_layouts
from dreamer_jax.parallel.mesh import collective_axes

PAPER = "dr_da_32"


@pytest.mark.parametrize(
    ("axes", "padded", "held"),
    [
        ({"data0": 4, "data1": 4, "data2": 4}, 1104, [1104, 72]),  # the first two together
        ({"data0": 4, "data1": 4, "data2": 2, "expert": 2}, 1120, [1120, 560, 36]),
        ({"data0": 2, "data1": 2, "expert": 2}, 1100, [1100, 550, 276]),
        ({"data0": 16, "data1": 16, "expert": 1}, 1104, [1104, 80]),
        ({"data0": 16, "data1": 4, "expert": 4}, 1152, [1152, 288, 20]),
        ({"expert": 8}, 1104, [1104]),
    ],
)
def test_1097_experts_are_padded_for_one_axis_after_the_other(axes, padded, held):
    """A chip computes with little more than its share; what an inner axis pads is dropped when it is gathered."""
    family = build(load_config(PAPER).config.model)
    layouts = parameter_layouts(family.boxed, SimpleNamespace(shape={"slice": 1, **axes}))
    for name in ("gate_up", "down"):
        layout = layouts["layer"]["expert_attention"][name]
        assert layout.shape[0] == 1097 and layout.padded == padded
        moved = [part for part in layout.parts if part.moved]
        assert [part.padded for part in moved] == held
        gathered = [part for part in moved if part.computed is not None]
        assert all(part.computed == 0 for part in gathered)
        for outer, inner in itertools.pairwise(moved):  # a gather ends with what the axis outside of it holds
            assert inner.kept == outer.padded // outer.size
        if gathered:  # nothing is cut off the whole weight
            assert gathered[0].kept == gathered[0].padded == padded // axes.get("expert", 1)


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ([4, 4, 2, 2], [("data0", "data1"), ("data2",), ("expert",)]),
        ([2, 4, 4, 1], [("data1", "data2"), ("data0",)]),
        ([4, 4, 1], [("data0",), ("data1",)]),  # they are all chips
        ([16, 4, 4], [("data0",), ("data1",), ("expert",)]),  # the experts' axis is no ring of weights
        ([2, 2, 2], [("data0",), ("data1",), ("expert",)]),
    ],
)
def test_two_rings_of_four_go_together(sizes, together):
    """And every chip is in one group of each collective, whatever the mesh."""
    mesh = {"slice": 2, **{f"data{i}": size for i, size in enumerate(sizes[:-1])}, "expert": sizes[-1]}
    axes = collective_axes(mesh)
    assert list(axes) == together
    assert math.prod(axes.values()) == math.prod(sizes)
