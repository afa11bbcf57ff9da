"""The attentions' kernels as libtpu compiles them: they fit, meet their bounds, and cost no more than is recorded."""

import re
import subprocess
import sys

import pytest

from dreamer_jax.planning.topology import child_environment
from pallas_kernels.depth_attention.shapes import BUNDLES
from pallas_kernels.sequence_attention.shapes import BUNDLES as SEQUENCE_BUNDLES
from tests.aot.predictions import HAS_LIBTPU, MIB, TOPOLOGIES, assert_no_costlier, recorded, rows

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not HAS_LIBTPU, reason="needs the extra tpu"),
]
DEPTH_TEMPORARY = {"depth_attention forward": 1 * MIB, "depth_attention backward": 16 * MIB}  # two rows [T, d]
SEQUENCE_TEMPORARY = 1126 * MIB  # 1.1 GiB, of the gradient at 8 rows of 4096: a part of d_q for each block of keys
PAPER = "T=32768 L=32 d=128"


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_depth_attention_compiles_without_temporaries(chip):
    """Forward and backward, both depths and grouped queries: nothing of the cache's size is copied."""
    found = rows(chip, "depth_attention")
    assert len(found) == 6
    for key, row in found.items():
        assert row["temporary"] <= (4 if "n=4" in key[1] else 1) * DEPTH_TEMPORARY[key[0]], key


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_depth_attention_forward_reads_hardly_more_than_it_must(chip):
    """Over all 32 depths: next to the byte floor, and to XLA, which reads all slots at every depth."""
    row = rows(chip, PAPER, compare=True)["depth_attention forward", PAPER]
    assert row["seconds"] <= 1.15 * row["roofline_seconds"]
    assert row["xla_seconds"] >= 1.9 * row["seconds"]


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_depth_attention_backward_beats_push_form(chip):
    """Recomputation included, which XLA's figure has too."""
    row = rows(chip, PAPER, compare=True)["depth_attention backward", PAPER]
    assert row["xla_seconds"] >= 1.7 * row["seconds"]


@recorded
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_schedules_cost_no_more_than_recorded(chip):
    """The innermost loops' bundles against the tables."""
    found = rows(chip, "depth_attention")
    schedules = {}
    for direction in ("forward", "backward"):
        schedules |= found[f"depth_attention {direction}", PAPER]["schedules"]
    assert_no_costlier({kernel: s["loops"] for kernel, s in schedules.items()}, BUNDLES[chip])


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_sequence_attention_compiles(chip):
    """Forward and gradient, with documents."""
    assert len(rows(chip, "sequence_attention")) == 2


@recorded
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_sequence_attention_costs_no_more_than_recorded(chip):
    """Temporaries, and a grid step's bundles."""
    for key, row in rows(chip, "sequence_attention").items():
        assert row["temporary"] <= SEQUENCE_TEMPORARY, key
        if key[0].endswith("gradient"):
            seen = {kernel.partition("[")[0]: [s["grid"]] for kernel, s in row["schedules"].items()}
            assert_no_costlier(seen, SEQUENCE_BUNDLES[chip])


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
