"""`analysis.every`: the statistics go into metrics.jsonl and TensorBoard, and training is none the wiser."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dreamer_jax.analysis.collection import collect
from dreamer_jax.analysis.sampling import Sampler
from dreamer_jax.analysis.summary import scalars, summarise
from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.parallel import make_mesh
from dreamer_jax.runs.metrics import read_metrics
from dreamer_jax.training.state import create_state
from tests.analysis.cases import CONFIG
from tests.training.cases import random_batch, tiny_config


@pytest.mark.slow
def test_samples_the_first_row_of_every_device():
    config = tiny_config(mesh__data=(4,))
    mesh = make_mesh(config.mesh, jax.devices()[:4])
    sampler, batch, state = Sampler(config, mesh), random_batch(0), create_state(config, mesh)
    sample = sampler.sample(batch)
    np.testing.assert_array_equal(sample["tokens"], batch["tokens"][[0, 2, 4, 6]])
    values = sampler.scalars(sampler.observer(state.params, state.model_state, sample), state.model_state)
    one = collect(config.model, state.params, state.model_state, [sample], make_mesh(MeshConfig(data=(1,))))
    expected = scalars(summarise(config.model, one, state.model_state))
    assert values == pytest.approx(expected, abs=1e-6)
    assert values["analysis/depth_attention/on_itself/0"] == pytest.approx(1)
    assert values["analysis/depth_attention/depths_back/0"] == pytest.approx(0)
    assert all(np.isfinite(value) for value in values.values())


@pytest.mark.slow
def test_training_writes_them_and_is_not_changed_by_them(tmp_path):
    files = {}
    for every in ("0", "2"):
        directory = tmp_path / every
        path = tmp_path / f"{every}.yaml"
        path.write_text(CONFIG.format(variant="DR+DA", directory=directory))
        assert main(["train", str(path), "--analysis.every", every]) == 0
        files[every] = read_metrics(directory)
    with_samples = [r for r in files["2"] if any(name.startswith("analysis/") for name in r)]
    assert [r["step"] for r in with_samples] == [2]
    assert {"analysis/global_gini", "analysis/residual/distance/2", "analysis/lens/accuracy/0"} <= with_samples[
        0
    ].keys()

    def losses(records):
        return [(r["step"], r["loss"], r["gradient_norm"]) for r in records if "loss" in r]

    assert losses(files["0"]) == losses(files["2"])
    assert load_config(tmp_path / "2" / "config.yaml").config.analysis.every == 2
