"""The experts' kernels as libtpu compiles them: they fit, copy no weight, meet their bounds and what is recorded."""

import functools
import json
import subprocess
import sys
import tempfile

import pytest

from dreamer_jax.benchmarks.expert_cases import DEPTHS, LINEAR, PAIRS, PAPER, TOKENS
from dreamer_jax.chips import chip_named
from dreamer_jax.planning.topology import child_environment
from pallas_kernels import tiles
from pallas_kernels.attention_moe.shapes import BUNDLES as LINEAR_BUNDLES
from pallas_kernels.dispatch.shapes import BUNDLES as DISPATCH_BUNDLES
from pallas_kernels.dispatch.shapes import EXPERTS as DISPATCH_EXPERTS
from pallas_kernels.expert_mlp.shapes import BUNDLES
from tests.aot.compile_experts import copies
from tests.aot.predictions import HAS_LIBTPU, MIB, TOPOLOGIES, assert_no_costlier, recorded, rows

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not HAS_LIBTPU, reason="needs the extra tpu"),
]


def row_of(chip, direction, experts, size):
    """The expert MLP's row of a paper's shape."""
    depths = "" if direction == "forward" else f", {DEPTHS} depths"
    return rows(chip, "expert_mlp")[f"expert_mlp {direction}", f"M={PAIRS} h=1024 E={experts} F={size}{depths}"]


@functools.cache
def compiled(chip):
    """Name -> what tests/aot/compile_experts.py found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.aot.compile_experts", TOPOLOGIES[chip], folder]
        environment = child_environment() | {"XLA_FLAGS": f"--xla_dump_to={folder}"}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {program["name"]: program for program in found}


@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize(("experts", "size"), PAPER)
def test_gradient_copies_no_weight(chip, experts, size):
    """All in place: temporaries are rows in blocks (x, values, their gradients; gate, up, three factors) and sums."""
    found = compiled(chip)[f"mlp {experts} {size}"]
    assert not found["copies"]
    kernels = ["dispatch_slots", "expert_mlp_forward", "expert_mlp_input_gradient", "expert_weight_gradient"]
    assert found["kernels"] == kernels
    rows = (PAIRS + experts * 127) * (4 * 1024 + 5 * size) * 2
    assert found["temporary"] <= rows + 2 * TOKENS * 1024 * 4, found["temporary"] / rows


@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize(("experts", "inward", "outward"), LINEAR)
def test_linear_gradient_copies_no_weight(chip, experts, inward, outward):
    """The same of the attention MoE: temporaries are three times the blocked rows, in and out, and indices."""
    found = compiled(chip)[f"linear {experts} {inward} {outward}"]
    assert not found["copies"]
    linear = ["expert_linear_forward", "expert_linear_input_gradient"]
    assert found["kernels"] == ["dispatch_slots", *linear, "expert_weight_gradient"]
    blocked = (TOKENS + experts * 255) * (inward + outward) * 2
    assert found["temporary"] <= 3 * blocked + 8 * MIB, found["temporary"] / blocked


def test_copies_are_seen():
    """The rule finds a copy, a conversion and a sum of weights, and nothing in their use."""
    text = """
  %copy.1 = bf16[537,960,1024]{2,1,0:T(8,128)(2,1)} copy(%p), metadata={}
  %wide = f32[537,480,1024]{2,1,0:T(8,128)} convert(%down)
  %total = (f32[537,480,1024]{2,1,0:T(8,128)}, u32[]) copy-start(%x)
  %call = (bf16[330880,1024]{1,0}) custom-call(%rows, bf16[537,2,480,1024]{3,2,1,0} %bitcast)
  %view = bf16[537,2,480,1024]{3,2,1,0} bitcast(%p)
"""
    assert len(copies(text, r"537,[\d,]*1024")) == 3


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_kernels_need_no_temporaries(chip):
    """None of the forward kernel's; of the counting sort its cores' slots."""
    for experts, size in PAPER:
        assert row_of(chip, "forward", experts, size)["temporary"] <= MIB
    for (name, shape), row in rows(chip, "dispatch").items():
        assert row["temporary"] <= 4 * MIB, (name, shape)


def test_forward_of_the_paper_on_v5p():
    """At most 2.5 ms predicted at E = 537, the matrix unit at least 90 % busy between its first and last product."""
    row = row_of("v5p", "forward", 537, 480)
    assert row["seconds"] <= 2.5e-3
    assert row["schedules"]["expert_mlp_forward"]["matrix"] >= 0.90


@pytest.mark.parametrize(("experts", "size"), PAPER)
def test_backward_on_v5p(experts, size):
    """By default: at most 1.45 times its products at peak, the weight gradient's traffic a third of autodiff's."""
    gradient = row_of("v5p", "gradient", experts, size)
    backward = (gradient["seconds"] - DEPTHS * gradient["launch_seconds"][0]) / DEPTHS
    chip = chip_named("v5p")
    assert chip is not None
    products = 2 * 6 * PAIRS * 1024 * size / chip.peak_flops
    assert backward <= 1.45 * products, backward / products
    assert gradient["figures"]["ratio"] <= 1 / 3


@recorded
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_schedules_cost_no_more_than_recorded(chip):
    """A grid step's bundles of the expert MLP's kernels at the paper's first shape."""
    seen = {}
    for row in (row_of(chip, "forward", 537, 480), row_of(chip, "gradient", 537, 480)):
        seen |= {("keep " if "grad" in row["name"] else "") + k: [s["grid"]] for k, s in row["schedules"].items()}
    assert_no_costlier(seen, {kernel: [bundles] for kernel, bundles in BUNDLES[chip].items()})


@recorded
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_schedules_of_linear_experts_and_dispatch(chip):
    """The same of the attention MoE's at all projections, and of the counting sort at both depths' experts."""
    found, seen = rows(chip, "expert_linear"), {}
    for direction in ("forward", "gradient"):
        for experts, inward, outward in LINEAR:
            row = found[f"expert_linear {direction}", f"T={TOKENS} G={experts} {inward}x{outward}"]
            for kernel, schedule in row["schedules"].items():
                seen.setdefault(kernel, []).append(schedule["grid"])
    assert_no_costlier(seen, LINEAR_BUNDLES[chip])
    found = rows(chip, "dispatch slots")
    loops = [
        found["dispatch slots", f"M={PAIRS} E={experts}"]["schedules"]["dispatch_slots"]["grid"]
        for experts in DISPATCH_EXPERTS
    ]
    assert_no_costlier({"dispatch_slots": loops}, DISPATCH_BUNDLES[chip])


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_eight_bits_are_kept_where_they_are_faster(chip):
    """There they wait for HBM alone, and take little more than half of the time of sixteen."""
    found = {name: row for (name, _), row in rows(chip, "decode").items()}
    half = found["expert_mlp decode int8"]["seconds"] / found["expert_mlp decode"]["seconds"]
    assert tiles.GENERATIONS[chip].int8 == (half < 1)
    if half < 1:
        assert half < 0.55
        for name in ("expert_mlp decode int8", "expert_linear decode int8"):
            assert found[name]["seconds"] <= 1.1 * found[name]["roofline_seconds"]


def test_tables_are_complete():
    """Every generation whose clock is known has its bundles."""
    assert set(BUNDLES) == set(LINEAR_BUNDLES) == set(DISPATCH_BUNDLES) == set(TOPOLOGIES) <= set(tiles.GENERATIONS)
