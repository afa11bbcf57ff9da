"""A run on a bucket: the files through fsspec, the arrays through TensorStore, both against a folder that plays GCS."""

from __future__ import annotations

import pytest

from tests.runs.buckets import run_script

pytest.importorskip("fsspec")

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from dreamer_jax.config import Config, LoadedConfig
from dreamer_jax.config.sections import CheckpointConfig, RunConfig
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.runs.metrics import MetricsWriter, read_metrics
from dreamer_jax.runs.folders import folder_of, open_run, save_configuration
from dreamer_jax.runs.state import TrainState

run = "gs://bucket/runs/one"
state = lambda step: TrainState(jnp.int32(step), {"w": jnp.arange(8.0) + step}, {"m": jnp.ones(3)},
    {"balancing": {"r": jnp.zeros(2)}})
said = []
loaded = LoadedConfig(Config(run=RunConfig(dir=run)), {})
folder = open_run(loaded)
save_configuration(loaded, folder)
writer = MetricsWriter(folder.local, 0)
writer.write(1, {"loss": 2.0})
writer.close()
folder.publish()
checkpoints = Checkpoints(run, CheckpointConfig(keep=2), {"data": "d", "tokenizer": "t"}, said.append)
for step in (1, 2, 3):
    checkpoints.save(state(step))
    checkpoints.settle(wait=True)
    assert checkpoints.saved == step, said
checkpoints.close()
assert checkpoints.folders.all() == checkpoints.folders.complete() == [2, 3], checkpoints.folders.all()

again = folder_of(run)
assert read_metrics(again.local) == [{"step": 1, "loss": 2.0}]
assert (again.local / "config.yaml").read_text().count("gs://bucket/runs/one") == 1
restored = Checkpoints(run, CheckpointConfig(), {"data": "d", "tokenizer": "t"}, said.append).restore(state(0))
np.testing.assert_array_equal(restored.params["w"], np.arange(8.0) + 3)
assert said == []
path = checkpoints.folders[3] / "meta" / "metadata"
path.write_bytes(path.read_bytes()[:-1])
assert checkpoints.newest_good() == 2 and len(said) == 1
print("fine")
"""


def test_a_run_on_a_bucket(tmp_path):
    assert "fine" in run_script(SCRIPT, tmp_path)
