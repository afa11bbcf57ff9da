"""What a run has learned: one checkpoint, the average of several, and a new run that starts from it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from dreamer_jax.config import LoadedConfig
from dreamer_jax.config.sections import Config, RunConfig
from dreamer_jax.errors import UserError
from dreamer_jax.parallel import make_mesh
from dreamer_jax.runs import array_files
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.runs.folders import open_run, path_of, save_configuration
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import Located, load_run, locate_run
from dreamer_jax.runs.step_folders import StepFolders
from dreamer_jax.training.recovery import Recovery, stacking
from dreamer_jax.training.state import _parameters, _require_same_model, check_beginning, create_state
from tests.training.cases import tiny_config

META = {"data": "d", "tokenizer": "t"}
STEPS = (1, 2, 3)


def run_config(directory: Path, **changes) -> Config:
    config = tiny_config(model__variant="LA", checkpoint__keep=3, **changes)
    return dataclasses.replace(config, run=RunConfig(dir=str(directory)))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three checkpoints; the parameters of step n are the first ones times n."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    config = run_config(directory)
    open_run(LoadedConfig(config, {}))
    state = create_state(config, make_mesh(config.mesh))
    checkpoints = Checkpoints(directory, config.checkpoint, META)
    for step in STEPS:
        params, own = (
            jax.tree.map(lambda leaf, n=step: leaf * n + n, tree) for tree in (state.params, state.model_state)
        )
        checkpoints.save(state.replace(step=state.step + step, params=params, model_state=own))
    checkpoints.close()
    return directory


def equal(found, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_average_of_the_last_checkpoints(run):
    """Parameters are averaged; the model's own state and everything else are those of the newest."""
    one, two, three = (load_run(run, step) for step in STEPS)
    found = load_run(run, average=2)
    equal(found.params, jax.tree.map(lambda a, b: (a + b) / 2, two.params, three.params))
    equal(found.model_state, three.model_state)
    assert found.step == 3
    equal(
        load_run(run / "checkpoints" / "2", average=2).params,
        jax.tree.map(lambda a, b: (a + b) / 2, one.params, two.params),
    )
    mean = jax.tree.map(lambda a, b, c: (a + b + c) / 3, one.params, two.params, three.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), load_run(run, average=3).params, mean)


def test_export_reads_the_same_average_leaf_by_leaf(run):
    whole = load_run(run, average=3)
    stored = open_model(run, average=3)
    for path, leaf in jax.tree_util.tree_flatten_with_path(whole.params)[0]:
        found = stored.leaf("params", ".".join(key.key for key in path))
        np.testing.assert_allclose(found[:], leaf, rtol=1e-6)


@pytest.mark.parametrize(
    ("what", "average", "said"),
    [
        (".", 4, "has 3 up to step 3; checkpoint.keep is 3"),
        ("checkpoints/1", 2, "has 1 up to step 1"),
        (".", 0, "1 or more"),
    ],
)
def test_averages_that_can_not_be(run, what, average, said):
    with pytest.raises(UserError, match=said):
        load_run(run / what, average=average)


def test_a_damaged_checkpoint_is_not_averaged(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    damaged = next(path for path in (copy / "checkpoints" / "2" / "params").rglob("*") if path.is_file())
    damaged.write_bytes(b"other")
    load_run(copy)
    with pytest.raises(UserError, match=r"checkpoint 2 of .* can't be used for an average"):
        load_run(copy, average=2)


def test_a_new_run_starts_from_the_weights_of_another(run, tmp_path):
    """With a fresh optimizer, at step 0, and other data; on another mesh."""
    config = run_config(tmp_path / "new", training__initial_weights=str(run), mesh__data=(8,))
    state, trained = create_state(config, make_mesh(config.mesh)), load_run(run)
    equal(state.params, trained.params)
    equal(state.model_state, trained.model_state)
    assert int(state.step) == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(state.optimizer))


def resumed(config: Config, step: int | None = None) -> np.ndarray:
    """The scales of all layers with which a run goes on that may become deeper, saved as those of a step."""
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, allow="depth"))
    loaded, mesh = LoadedConfig(config, {}), make_mesh(config.mesh)
    folder = open_run(loaded)
    data: Any = SimpleNamespace(fingerprint="d", tokenizer=SimpleNamespace(fingerprint="t"))
    recovery = Recovery(loaded, data, mesh, print)
    try:
        state, counters = recovery.resume()
        save_configuration(loaded, folder)
        if step:
            recovery.save_now(state.replace(step=state.step + step), step, counters, 1)
    finally:
        recovery.checkpoints.close()
    return jax.device_get(state.params["layers"]["sequence_norm"]["scale"])


@pytest.mark.slow
def test_layers_are_counted_where_they_lie(tmp_path):
    """In the checkpoint: a run that was to become deeper, and saved nothing since, has no more of them."""
    two, four, eight = (run_config(tmp_path / "run", model__depth=depth) for depth in (2, 4, 8))
    saved = resumed(two, step=1)
    assert len(resumed(four)) == 4
    with pytest.raises(UserError, match=r"checkpoints/1 holds a model of 2 layers .* up to 4, .* but not 8"):
        resumed(eight)
    equal(resumed(two), saved)


@pytest.mark.slow
def test_a_run_from_the_weights_of_another_becomes_deeper(run, tmp_path):
    """Whose depth it no longer has, and which may be gone."""
    base = Path(shutil.copytree(run, tmp_path / "base"))
    config = run_config(tmp_path / "new", training__initial_weights=str(base))
    saved = resumed(config, step=1)
    shutil.rmtree(base)
    deeper = dataclasses.replace(config, model=dataclasses.replace(config.model, depth=3))
    equal(resumed(deeper), saved[stacking(2, 3)])


@pytest.mark.slow_but("lambda>--", "load_run", "init-before-True")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("moment", ["before", "between"])
@pytest.mark.parametrize(
    ("read", "where"),
    [
        (load_run, ""),
        (lambda run: load_run(run, average=2), ""),
        (lambda run: begin(run, run_config(run.parent / "new", training__initial_weights=str(run))), "training.init"),
    ],
)
def test_a_checkpoint_that_is_removed_while_it_is_read(run, tmp_path, monkeypatch, read, where, moment, early):
    """As training does in another process, before arrays are opened or between two reads: it isn't read as zeros."""
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    last = copy / "checkpoints" / "3"
    if early:  # such have no manifests, and count by their meta
        (last / "manifest-0-of-1.json").unlink()
        (last / "meta" / "metadata").write_text(json.dumps(META))
    name = "__init__" if moment == "before" else "pieces"
    real = getattr(array_files._Target, name)

    def removed(*arguments):
        if last.exists():
            StepFolders(path_of(copy)).remove(3)
        return real(*arguments)

    monkeypatch.setattr(array_files._Target, name, removed)
    with pytest.raises(UserError, match=rf"^{where}.*checkpoints/3 was removed while it was read.*checkpoint\.keep"):
        read(copy)


def begin(run: Path, config: Config) -> None:
    create_state(config, make_mesh(config.mesh))


def test_what_a_removed_checkpoint_says_of_itself(run, tmp_path):
    found = locate_run(shutil.copytree(run, tmp_path / "copy"))
    found.folders.remove(3)
    with pytest.raises(UserError, match="was removed while it was read"):
        found.meta  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training__initial_weights": "nowhere"}, "training.initial_weights: nowhere is not a run directory"),
        ({"model__hidden_size": 24}, "training.initial_weights: "),
    ],
)
def test_weights_that_do_not_fit(run, tmp_path, changes, said):
    config = run_config(tmp_path / "new", **{"training__initial_weights": str(run), **changes})
    with pytest.raises(UserError, match=said):
        create_state(config, make_mesh(config.mesh))


@pytest.mark.parametrize("variant", ["DR", "LA+DA"])
def test_weights_of_another_model_are_refused_before_a_run_is_made(run, tmp_path, variant):
    """Those of more parts too, whose other parts would be left out without a word."""
    config = run_config(tmp_path / "new", training__initial_weights=str(run))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, variant=variant))
    with pytest.raises(UserError, match=r"training.initial_weights: .* holds another model: "):
        check_beginning(config)


def test_weights_of_a_model_with_more_parts(tmp_path):
    """Without depth attention the rest would fit."""
    config = run_config(tmp_path / "more")
    more = dataclasses.replace(config, model=dataclasses.replace(config.model, variant="LA+DA"))
    ours, theirs = (_parameters(its.model) for its in (config, more))
    assert ours.items() < theirs.items()
    with pytest.raises(UserError, match=r"holds another model: layers\.depth_attention"):
        _require_same_model(Located(path_of(tmp_path), more, 1), config)


def test_a_checkpoint_is_not_asked_for_another_step(run):
    """The one that would be given is of another step than was asked for."""
    assert locate_run(run / "checkpoints/2", 2).step == 2
    with pytest.raises(UserError, match=f"2 is the checkpoint of step 2, but step 3 is asked for; .* {run}"):
        locate_run(run / "checkpoints/2", 3)
