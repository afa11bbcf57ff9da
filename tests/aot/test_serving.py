"""A served engine's programs as libtpu compiles them: attention reads pages where they lie, and no pool is copied."""

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


@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("model", ["dr_da_16", "la_16"])
def test_pages_are_read_where_they_lie(chip, model):
    """Ticks of both kinds and chunks: 16 rows of 2,048 positions, 2 GiB of pages that stay in place."""
    command = [sys.executable, "-m", "tests.aot.compile_serving", TOPOLOGIES[chip], model]
    done = subprocess.run(command, env=child_environment(), check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["program"] for each in found][:2] == ["tick one-by-one", "chunk one-by-one"]
    for each in found:
        assert each["reads_pages"] and each["aliased"] >= each["pool"] >= 1 << 31, each
        assert each["temporary"] < 0.02 * each["pool"], each
