"""The attentions' kernels as libtpu compiles them: they fit, meet their bounds, and cost no more than is recorded."""

import functools
import importlib.util
import re
import subprocess
import sys

import pytest

from dreamer_jax.planning import kernels
from dreamer_jax.planning.topology import child_environment, parse_topology
from pallas_kernels.depth_attention.shapes import BUNDLES

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu"),
]
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1"}
MIB = 1 << 20
DEPTH_TEMPORARY = {"depth_attention forward": 1 * MIB, "depth_attention backward": 16 * MIB}  # two rows [T, d]
SEQUENCE_TEMPORARY = 1434 * MIB  # 1.4 GiB, of the gradient at 8 rows of 4096
COSTLIER = 1.05


@functools.cache
def rows(chip, match):
    """(name, shape) -> row, compiled once a chip."""
    found = kernels.predict(parse_topology(TOPOLOGIES[chip]), match, lambda line: None)
    return {(row["name"], row["shape"]): row for row in found}


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_depth_attention_compiles_without_temporaries(chip):
    """Forward and backward, both depths and grouped queries: nothing of the cache's size is copied."""
    found = rows(chip, "depth_attention")
    assert len(found) == 6
    for key, row in found.items():
        assert row["temporary"] <= (4 if "n=4" in key[1] else 1) * DEPTH_TEMPORARY[key[0]], key


@pytest.mark.parametrize(("chip", "floor", "xla"), [("v5p", 1.15, 1.9), ("v5e", 1.15, 1.9), ("v4", 1.3, 1.7)])
def test_depth_attention_forward_reads_hardly_more_than_it_must(chip, floor, xla):
    """Over all 32 depths: next to the byte floor, and to XLA, which reads all slots at every depth.

    A v4 core has a single cross-lane unit, whose sums take longer there than the reading.
    """
    row = rows(chip, "depth_attention")["depth_attention forward", "T=32768 L=32 d=128"]
    assert row["seconds"] <= floor * row["roofline_seconds"]
    assert row["xla_seconds"] >= xla * row["seconds"]


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_depth_attention_backward_beats_push_form(chip):
    """Recomputation included, which XLA's figure has too."""
    row = rows(chip, "depth_attention")["depth_attention backward", "T=32768 L=32 d=128"]
    assert row["xla_seconds"] >= 1.7 * row["seconds"]


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_schedules_cost_no_more_than_recorded(chip):
    """The innermost loops' bundles against the table: a change that costs over 5 % has to be looked at."""
    row = rows(chip, "depth_attention")["depth_attention backward", "T=32768 L=32 d=128"]
    forward = rows(chip, "depth_attention")["depth_attention forward", "T=32768 L=32 d=128"]
    schedules = {**row["schedules"], **forward["schedules"]}
    assert schedules.keys() == BUNDLES[chip].keys()
    for kernel, recorded in BUNDLES[chip].items():
        loops = schedules[kernel]["loops"]
        assert len(loops) == len(recorded), (kernel, loops)
        for actual, expected in zip(loops, recorded, strict=True):
            assert actual <= COSTLIER * expected, (kernel, loops, recorded)


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_sequence_attention_compiles(chip):
    """Forward and gradient, with documents."""
    found = rows(chip, "sequence_attention")
    assert len(found) == 2
    for key, row in found.items():
        assert row["temporary"] <= SEQUENCE_TEMPORARY, key


def test_depth_scan_never_copies_the_cache():
    """The gradient of a whole scan for v4: the cache and the tape go through both loops in place."""
    command = [sys.executable, "-m", "tests.aot.compile_depth_scan", "v4:2x2x1"]
    text = subprocess.run(command, env=child_environment(), check=True, capture_output=True, text=True).stdout
    cached = r"bf16\[6,8192,128\]\S*"
    assert re.search(rf"= \(?[^=]*{cached}.* custom-call\(.*depth_attention_forward", text) is not None
    assert re.search(r"depth_attention_recompute", text) and re.search(r"depth_attention_backward", text)
    # A copy-start into faster memory is the compiler's prefetch; a copy in main memory would be ours to avoid.
    copies = [line.strip()[:160] for line in text.splitlines() if re.search(rf"= {cached} copy\(", line)]
    assert not copies, copies
    assert "f32[6,8192,128]" not in text  # what push form would keep: the gradient of the cache
