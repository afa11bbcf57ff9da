"""What names a run, and what of it may change when it goes on."""

from __future__ import annotations

import dataclasses
import os
import tempfile

import pytest

from dreamer_jax.config import LoadedConfig, load_config, to_yaml
from dreamer_jax.config.loading import load_text
from dreamer_jax.config.sections import RunConfig
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.runs.folders import open_run, run_and_step, save_configuration, write_atomically
from tests.training.cases import tiny_config


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("runs/one", ("runs/one", None)),
        ("runs/one/", ("runs/one", None)),
        ("runs/one/checkpoints/500", ("runs/one", 500)),
        ("checkpoints/7/", (".", 7)),
        ("runs/checkpoints/new", ("runs/checkpoints/new", None)),
        ("gs://bucket/one", ("gs://bucket/one", None)),
        ("gs://bucket/one/checkpoints/3", ("gs://bucket/one", 3)),
    ],
)
def test_a_run_or_a_checkpoint_in_it(path, expected):
    assert run_and_step(path) == expected


def test_a_configuration_in_a_checkpoint_is_read_without_a_file(monkeypatch):
    """Who only reads a run may have no folder to write into."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    config = tiny_config()
    assert load_text(to_yaml(config)).config == config
    with pytest.raises(ConfigError, match=r"config\.yaml:2: unknown key 'model\.dept'"):
        load_text("model:\n  dept: 3\n")


def opened(directory, **training):
    config = tiny_config(**{f"training__{key}": value for key, value in training.items()})
    config = dataclasses.replace(config, run=RunConfig(dir=str(directory)))
    return open_run(LoadedConfig(config, {}))


def test_a_run_may_become_longer_unless_its_rate_depends_on_the_end(tmp_path):
    """A constant rate is what it was. One that falls until the last step would have been another from the start."""
    opened(tmp_path / "constant", steps=10)
    opened(tmp_path / "constant", steps=20)
    opened(tmp_path / "cosine", steps=10, schedule="cosine")
    with pytest.raises(UserError, match=r"training.steps: 10 -> 20[^$]*checkpoint.allow learning_rate"):
        opened(tmp_path / "cosine", steps=20, schedule="cosine")
    with pytest.raises(UserError, match=r"training.schedule: constant -> trapezoid"):
        opened(tmp_path / "constant", steps=10, schedule="trapezoid")


def test_an_edited_configuration_is_not_what_was_trained(tmp_path):
    """config.yaml agrees with itself; the newest checkpoint says what the run is. What `checkpoint.allow` names may be
    newer than that: a start that allowed it may have been killed before it saved."""

    def begun(**changes):
        config = dataclasses.replace(tiny_config(**changes), run=RunConfig(dir=str(tmp_path / "run")))
        return LoadedConfig(config, {})

    now = begun()
    open_run(now)
    for same in (
        {},
        {"training__learning_rate": 0.5},
        {"model__depth": 3},
        {"training__steps": 99},
        {"data__tokenizer": "moved.json"},
    ):
        open_run(now, recorded=lambda _, its=same: begun(**its).config)
    with pytest.raises(
        UserError, match=r"config.yaml was edited[^$]*model.sa_rope_base: 77.0 -> [^$]*Put the old values"
    ):
        open_run(now, recorded=lambda _: begun(model__sa_rope_base=77.0).config)
    with pytest.raises(UserError, match=r"config.yaml was edited[^$]*training.weight_decay: 0.5 -> "):
        open_run(now, recorded=lambda _: begun(training__weight_decay=0.5).config)


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as found:
        write_atomically(tmp_path / "a.json", "{}")
    assert found.value.filename == str(tmp_path / "a.json") and not list(tmp_path.iterdir())


def test_files_that_were_moved(tmp_path):
    """The refusal says where their new places go; not where something else changed, too."""

    def begun(**changes):
        return LoadedConfig(dataclasses.replace(tiny_config(**changes), run=RunConfig(dir=str(tmp_path / "run"))), {})

    open_run(begun())
    where = tmp_path / "run" / "config.yaml"
    for more, told in (({}, True), ({"training__weight_decay": 0.5}, False)):
        with pytest.raises(UserError, match=r"data.tokenizer: .* -> moved.json") as found:
            open_run(begun(data__tokenizer="moved.json", **more))
        assert (f"If those files were only moved, write their new places into {where}" in str(found.value)) is told


@pytest.mark.parametrize("changes", [{"model__depth_counters": "up"}, {"model__depth_scaling": "ntk"}])
def test_what_only_begins_like_an_allowed_key_is_refused(tmp_path, changes):
    def at_depth(depth, **more):
        config = tiny_config(model__depth=depth, checkpoint__allow="depth", **more)
        loaded = LoadedConfig(dataclasses.replace(config, run=RunConfig(dir=str(tmp_path / "run"))), {})
        return loaded, open_run(loaded)

    at_depth(2)
    save_configuration(*at_depth(3))
    saved = load_config(tmp_path / "run" / "config.yaml").config
    assert saved.model.depth == 3 and saved.checkpoint.allow == "", "it is for one start"
    with pytest.raises(UserError) as found:
        at_depth(3, **changes)
    assert "checkpoint.allow" not in str(found.value)
