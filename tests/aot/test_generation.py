"""A generation engine's programs as libtpu compiles them: keys and values stay where they lie."""

import json
import subprocess
import sys

import pytest

from dreamer_jax.planning.topology import child_environment
from tests.aot.predictions import HAS_LIBTPU, TOPOLOGIES

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not HAS_LIBTPU, reason="needs the extra tpu"),
]


CASES = [*((chip, "dr_da_16") for chip in TOPOLOGIES), *(("v5e", name) for name in ("odd_heads", "two_keys", "huginn"))]


@pytest.mark.parametrize(("chip", "model"), [*CASES, ("v5e", "single")])
def test_keys_and_values_are_not_copied(chip, model):
    """Prompts, tokens one after another, and guesses at several depths, of 16 rows of 2,048 positions. libtpu 0.0.42
    would never end compiling a Huginn's tokens, were it told where operations come from."""
    command = [sys.executable, "-m", "tests.aot.compile_generation", TOPOLOGIES[chip], model]
    done = subprocess.run(command, env=child_environment(), check=True, capture_output=True, text=True, timeout=600)
    print(done.stdout)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["program"] for each in found] == ["prompts", "tokens static", "tokens lossless"]
    most = 0.2 if model == "single" else 0.06  # of float32 some weights are rounded first
    for each in found:
        assert each["aliased"] >= each["pool"] >= 1 << 30, each
        assert each["temporary"] < most * each["pool"] and not each["copies"], each
