"""A served engine's programs as libtpu compiles them: attention reads pages where they lie, and no pool is copied."""

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dreamer_jax.planning.topology import child_environment
from tests.aot.compile_serving import model_of
from tests.aot.predictions import HAS_LIBTPU, TOPOLOGIES

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not HAS_LIBTPU, reason="needs the extra tpu"),
]


def compiled(*words: str, kernel: bool = True) -> list[dict[str, Any]]:
    """What `compile_serving` has found; every program reads pages where they lie, if by the kernel, and copies no
    pool."""
    command = [sys.executable, "-m", "tests.aot.compile_serving", *words]
    done = subprocess.run(command, env=child_environment(), check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(done.stdout)
    assert [each["program"] for each in found][:2] == ["tick one-by-one", "chunk one-by-one"]
    for each in found:
        assert each["reads_pages"] == kernel and each["aliased"] >= each["pool"] >= 1 << 31, each
        assert each["temporary"] < 0.02 * each["pool"] and not each["copies"], each
    return found


@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("model", ["dr_da_16", "la_16"])
def test_pages_are_read_where_they_lie(chip, model):
    """Ticks of both kinds and chunks: 32 places of 2,048 positions, 4 GiB of pages that stay in place."""
    assert not any(each["collectives"] for each in compiled(TOPOLOGIES[chip], model))


def test_few_key_heads_are_no_reason_to_copy_pages():
    """Not even where what a position has left at its last depth is copied to all deeper ones."""
    compiled(TOPOLOGIES["v5e"], "two_keys")


@pytest.mark.parametrize("model", ["odd_heads", "odd_heads_single"])
def test_heads_that_no_kernel_takes_are_no_reason_to_copy_pages(model):
    """Of size 96, as Huginn's; nor, of a model in float32, to convert them."""
    compiled(TOPOLOGIES["v5e"], model, kernel=False)


def test_rows_that_fill_no_tile_are_no_reason_to_copy_weights():
    """They are 340 MiB. A lossless tick still copies the head, which is a fifth of them."""
    tick, chunk, _ = compiled(TOPOLOGIES["v5p"], "odd_sizes")
    assert tick["temporary"] < 32 << 20 and chunk["temporary"] < 32 << 20


def test_experts_in_eight_bits_are_read_where_they_lie():
    """By the kernels that take them, and a program is given a byte less for each of their numbers, but for scales."""
    leaves = jax.tree.leaves(model_of("dr_da_16 int8").params)
    numbers = sum(leaf.size for leaf in leaves if leaf.dtype == jnp.int8)
    sixteen, eight = (compiled(TOPOLOGIES["v5e"], f"dr_da_16{form}") for form in ("", " int8"))
    for before, now in zip(sixteen, eight, strict=True):
        assert not before["eight_bits"] and now["eight_bits"] == ["expert_linear_int8", "expert_mlp_int8"]
        assert 0.98 * numbers < before["arguments"] - now["arguments"] <= numbers
        assert numbers > 0.35 * (before["arguments"] - before["pool"])  # of two bytes: more than half of the weights


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
@pytest.mark.parametrize(("model", "expert"), [("dr_da_16", 4), ("huginn", 2)])
def test_four_chips_send_each_other_rows_and_nothing_else(chip, model, expert):
    """16 rows a chip. Along `expert` the rows of a step travel, gathered and scattered; beside them one number for each
    loop and branch that the chips agree on. No keys, no weights; nothing over the other axis."""
    found = compiled(TOPOLOGIES[chip], model, str(expert))
    assert len(found) == 3
    lanes = 4  # of the lossless sampler: all depths, and a guess after a quarter of them
    for each, positions, agreements in zip(found, (16, 64, 16 * lanes), (7, 1, 4), strict=True):
        sent = each["collectives"]
        assert {(its["axes"], its["group"]) for its in sent} == {("expert", expert)}
        agreed = [its for its in sent if its["kind"] == "all-reduce"]
        assert sum(its["count"] for its in agreed) == agreements, sent
        assert all(its["bytes"] == 4 for its in agreed), sent
        rows = [its for its in sent if its["kind"] != "all-reduce"]
        assert {its["kind"] for its in rows} == {"all-gather", "reduce-scatter"}, sent
        assert max(its["bytes"] for its in rows) == expert * positions * 1024 * 2, sent


def test_chips_without_experts_to_share_send_each_other_nothing():
    """Rows over all four, everything else on each."""
    assert not any(each["collectives"] for each in compiled(TOPOLOGIES["v5e"], "huginn", "1"))
