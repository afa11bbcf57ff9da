"""What the tests of kernels share: predictions for a chip of every generation, and the rule for recorded bundles."""

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from importlib import metadata

import pytest

from dreamer_jax.benchmarks import kernels
from dreamer_jax.planning.topology import parse_topology

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1"}
MIB = 1 << 20
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
RECORDED_WITH = "0.0.42"
recorded = pytest.mark.skipif(
    HAS_LIBTPU and not metadata.version("libtpu").startswith(RECORDED_WITH),
    reason=f"the tables in pallas_kernels are of libtpu {RECORDED_WITH}; another version schedules otherwise",
)
COSTLIER = 1.05


@functools.cache
def rows(chip, match, compare=False):
    """(name, shape) -> row of `dreamer bench kernels`, compiled once a chip."""
    found = kernels.predict(parse_topology(TOPOLOGIES[chip]), match, lambda line: None, compare)
    return {(row["name"], row["shape"]): row for row in found}


def assert_no_costlier(seen: Mapping[str, Sequence[int]], recorded: Mapping[str, Sequence[int]]) -> None:
    """Kernel -> bundles of its loops, those compiled against a table: whatever costs 5 % more has to be looked at."""
    assert seen.keys() == recorded.keys()
    for kernel, expected in recorded.items():
        assert len(seen[kernel]) == len(expected), (kernel, seen[kernel], expected)
        for now, before in zip(seen[kernel], expected, strict=True):
            assert now <= COSTLIER * before, (kernel, seen[kernel], expected)
