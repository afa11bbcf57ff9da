"""An export streams: what it holds beside the mapped files doesn't grow with the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.export.cases import make_run

ROOT = Path(__file__).resolve().parents[2]
MEASURE = """
import json, sys
from pathlib import Path
from dreamer_jax.runs import safetensors_files
from dreamer_jax.export.verification import compare_weights
from dreamer_jax.export.description import read_description
from dreamer_jax.export.writing import export
from dreamer_jax.runs.leaves import open_model

def megabytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024

safetensors_files.PIECE_BYTES = 1 << 21
small, large, out = sys.argv[1:]
for run in (small, large):
    model = open_model(run)
    if run == large:
        before = megabytes("VmHWM")
    folder = Path(out) / Path(run).name
    export(model, folder, "bfloat16", False, lambda path: compare_weights(path, model, read_description(path)))
print(json.dumps([megabytes("VmHWM") - before, (folder / "model.safetensors").stat().st_size / 2**20]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_writing_and_comparing_take_less_than_the_written_size(tmp_path: Path) -> None:
    # The small run warms everything up, so that what is measured is what the size of the model costs.
    sizes = {"hidden_size": 256, "expert_size": 256, "router_size": 32, "sa_head_size": 32, "da_head_size": 32}
    runs = [make_run(tmp_path / name, num_experts=n, **sizes) for name, n in (("small", 8), ("large", 400))]
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, runs), str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    grown, written = json.loads(done.stdout.splitlines()[-1])
    assert written > 150
    assert grown < 1.3 * written
