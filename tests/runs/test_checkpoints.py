"""Checkpoints of a made-up state, so that nothing has to be compiled: whole, damaged, unwritable, on other meshes."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dreamer_jax.cli.main import main
from dreamer_jax.config import Config, to_yaml
from dreamer_jax.config.sections import CheckpointConfig
from dreamer_jax.errors import UserError
from dreamer_jax.runs.checkpoints import SMALL_FILES, Checkpoints
from dreamer_jax.runs.integrity import is_complete
from dreamer_jax.runs.state import TrainState
from dreamer_jax.runs.step_folders import StepFolders
from dreamer_jax.training.recovery import recorded_config, stacking, with_more_layers, with_other_depth

META = {"data": "d", "tokenizer": "t"}


@contextlib.contextmanager
def trained_elsewhere(directory: Path) -> Iterator[None]:
    """Another process holds the run's lock, as `dreamer train` does."""
    program = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    words = [sys.executable, "-c", program, str(directory / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield
        process.communicate(b"\n")


def mesh_of(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(f"axis{i}" for i in range(len(shape))))


def state_at(step: int, mesh: Mesh | None = None) -> TrainState:
    """Arrays that tell the step; matrices are divided over the mesh's axes."""
    mesh = mesh or mesh_of(1)

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    weights = np.arange(64 * 8, dtype=np.float32).reshape(64, 8) + step
    params = {"matrix": put(weights, mesh.axis_names), "scale": put(np.full(3, step, np.float32))}
    optimizer = {"mu": put(weights / 2, mesh.axis_names), "count": put(np.int32(step))}
    model_state = {"balancing": {"router": put(np.full(4, -step, np.float32))}, "seen": {"mean": put(np.float32(step))}}
    return TrainState(put(jnp.int32(step)), params, optimizer, model_state)


def open_checkpoints(directory: Path, said: list[str], **settings) -> Checkpoints:
    return Checkpoints(directory, CheckpointConfig(**settings), META, said.append)


def save(directory: Path, *steps: int, mesh: Mesh | None = None, **settings) -> list[str]:
    said: list[str] = []
    checkpoints = open_checkpoints(directory, said, **settings)
    for step in steps:
        checkpoints.save(state_at(step, mesh), {"position": step + 5})
    checkpoints.close()
    return said


def folders(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit())


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A run with the steps 1 and 2; tests copy it."""
    directory = tmp_path_factory.mktemp("run")
    assert save(directory, 1, 2) == []
    (directory / "config.yaml").write_text(to_yaml(Config()))
    return directory


def copy_of(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_what_was_saved_comes_back(two):
    checkpoints = open_checkpoints(two, said := [])
    restored = checkpoints.restore(state_at(0))
    assert checkpoints.saved == 2 and said == []
    jax.tree.map(np.testing.assert_array_equal, restored, state_at(2))
    meta = checkpoints.folders.meta(2)
    assert meta["run"] == {"position": 7} and meta["tokenizer"] == "t"
    items = {path.name for path in (two / "checkpoints" / "2").iterdir() if path.is_dir()}
    assert items == {"params", "optimizer", "meta", "balancing", "seen"}, "one for each collection of the model's own"
    jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(state_at(0), 1), state_at(1))


@pytest.mark.parametrize(("before", "after"), [((8,), (1,)), ((1,), (8,)), ((4, 2), (8,)), ((8,), (2, 4))])
def test_any_mesh_to_any_other(before, after, tmp_path):
    save(tmp_path, 3, mesh=mesh_of(*before))
    like = state_at(0, mesh_of(*after))
    restored = open_checkpoints(tmp_path, []).restore(like)
    jax.tree.map(np.testing.assert_array_equal, restored, state_at(3))
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, like)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_every_damaged_file_is_noticed(damage, two, tmp_path):
    """Whatever file of the newest step is damaged, the step before is used, and the reason is said."""
    directory = copy_of(two, tmp_path)
    step = directory / "checkpoints" / "2"
    files = [path for path in sorted(step.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) > 20
    for path in files:
        content = path.read_bytes()
        damage(path)
        checkpoints = open_checkpoints(directory, said := [])
        assert checkpoints.newest_good() == 1, path
        assert len(said) == 1 and "checkpoint 2 can't be used" in said[0] and "the one before" in said[0]
        path.write_bytes(content)
    assert open_checkpoints(directory, []).newest_good() == 2
    for path in files[0], next((directory / "checkpoints" / "1").rglob("*metadata")):
        damage(path)
    assert open_checkpoints(directory, said := []).newest_good() is None
    assert ["the one before" in line for line in said] == [True, False]


def test_a_step_cut_short_is_never_used(two, tmp_path):
    """Killed between Orbax's commit and the manifest; and with a folder under its temporary name."""
    directory = copy_of(two, tmp_path)
    (directory / "checkpoints" / "2" / "manifest-0-of-1.json").unlink()
    (directory / "checkpoints" / "3.orbax-checkpoint-tmp-7").mkdir()
    checkpoints = open_checkpoints(directory, said := [])
    assert checkpoints.saved == 1
    jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(state_at(0)), state_at(1))
    assert "not saved to the end" in said[0]
    checkpoints.save(state_at(2))
    checkpoints.close()
    assert open_checkpoints(directory, []).newest_good() == 2
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["1", "2"]


def test_a_step_of_an_early_version_is_used(two, tmp_path):
    """Those had no manifests, and nothing but the fingerprints in their meta."""
    directory = copy_of(two, tmp_path)
    step = directory / "checkpoints" / "2"
    (step / "manifest-0-of-1.json").unlink()
    (step / "meta" / "metadata").write_text(json.dumps(META))
    checkpoints = open_checkpoints(directory, said := [])
    jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(state_at(0)), state_at(2))
    assert len(said) == 1 and "can't be verified" in said[0]


def test_a_manifest_of_every_process_is_needed(two, tmp_path):
    directory = copy_of(two, tmp_path)
    step = directory / "checkpoints" / "2"
    (step / "manifest-0-of-1.json").rename(step / "manifest-0-of-2.json")
    checkpoints = open_checkpoints(directory, said := [])
    assert checkpoints.newest_good() == 1 and "1 of 2 manifests" in said[0]
    assert not is_complete(checkpoints.folders[2])


def test_kept_by_count_and_by_interval(tmp_path):
    save(tmp_path, *range(1, 11), keep=2, keep_every=4)
    assert folders(tmp_path) == [4, 8, 9, 10]


def test_an_unwritable_place_is_said_and_tried_again(tmp_path):
    checkpoints = open_checkpoints(tmp_path, said := [])
    (tmp_path / "checkpoints").write_text("in the way")
    checkpoints.save(state_at(1))
    checkpoints.settle(wait=True)
    assert checkpoints.failed and checkpoints.saved is None
    assert len(said) == 1 and "checkpoint 1 was not saved" in said[0] and "try again" in said[0]
    (tmp_path / "checkpoints").unlink()
    checkpoints.save(state_at(2))
    checkpoints.settle(wait=True)
    assert not checkpoints.failed and checkpoints.saved == 2
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, open_checkpoints(tmp_path, []).restore(state_at(0)), state_at(2))


def test_a_disk_that_fills_up_in_the_background(two, tmp_path, monkeypatch):
    directory = copy_of(two, tmp_path)
    checkpoints = open_checkpoints(directory, said := [], keep=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dreamer_jax.runs.checkpoints.write_manifest", full)
        checkpoints.save(state_at(3))
        checkpoints.settle(wait=True)
    assert "No space left" in said[0] and checkpoints.failed and checkpoints.saved == 2
    assert checkpoints.newest_good() == 2, "nothing older may go before the new one is whole"
    checkpoints.save(state_at(4))
    checkpoints.close()
    assert folders(directory) == [4]


def test_a_disk_without_room_is_known_before_anything_is_written(two, tmp_path, monkeypatch):
    directory = copy_of(two, tmp_path)
    checkpoints = open_checkpoints(directory, said := [])
    size = SMALL_FILES + sum(leaf.nbytes for leaf in jax.tree.leaves(state_at(3)))
    free = SimpleNamespace(free=size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    checkpoints.save(state_at(3))
    checkpoints.settle(wait=True)
    assert "MiB are free on the disk" in said[0] and checkpoints.failed and folders(directory) == [1, 2]
    free.free = size
    checkpoints.save(state_at(3))
    checkpoints.close()
    assert folders(directory) == [1, 2, 3]


def test_other_data_are_refused(two):
    checkpoints = Checkpoints(two, CheckpointConfig(), META | {"data": "other"})
    with pytest.raises(UserError, match="changed since checkpoint 2"):
        checkpoints.restore(state_at(0))


def test_another_depth():
    """Attention experts that both have keep what they learned; further ones are fresh."""

    def state(depth: int, value: float) -> TrainState:
        leaves = {"qkv": jnp.full((depth, 2, 3), value), "shared": jnp.full((2, 3), value)}
        return TrainState(jnp.int32(value), leaves, {"mu": leaves}, {"balancing": {"router": jnp.full(depth, value)}})

    deeper = with_other_depth(state(2, 7.0), state(3, 1.0))
    assert int(deeper.step) == 7
    for tree in (deeper.params, deeper.optimizer["mu"]):
        np.testing.assert_array_equal(tree["qkv"][:, 0, 0], [7, 7, 1])
        np.testing.assert_array_equal(tree["shared"], np.full((2, 3), 7.0))
    np.testing.assert_array_equal(deeper.model_state["balancing"]["router"], [7, 7, 1])
    assert with_other_depth(state(3, 7.0), state(2, 1.0)).params["qkv"].shape == (2, 2, 3)


def test_another_number_of_loops():
    """Of a second axis too: a layer's relaxations, one a loop."""

    def state(loops: int, value: float) -> TrainState:
        return TrainState(jnp.int32(0), {"down": jnp.full((4, loops, 3), value)}, {}, {})

    more = with_other_depth(state(2, 7.0), state(3, 1.0)).params["down"]
    np.testing.assert_array_equal(more[:, :, 0], [[7, 7, 1]] * 4)
    np.testing.assert_array_equal(with_other_depth(state(3, 7.0), state(2, 1.0)).params["down"], np.full((4, 2, 3), 7))


def test_more_layers():
    """The middle ones twice, as a block, with their moments and biases; what has no layers stays."""

    def state(layers: list[float], step: int) -> TrainState:
        leaves = {"layers": {"out": jnp.asarray(layers)[:, None] + jnp.zeros(3)}, "head": jnp.full((2, 3), step)}
        return TrainState(jnp.int32(step), leaves, {"mu": leaves}, {"balancing": {"router": jnp.asarray(layers)}})

    deeper = with_more_layers(state([0, 1, 2, 3], 7), state([9] * 6, 1))
    for rows in (deeper.params["layers"]["out"][:, 0], deeper.optimizer["mu"]["layers"]["out"][:, 1]):
        np.testing.assert_array_equal(rows, [0, 1, 2, 1, 2, 3])
    np.testing.assert_array_equal(deeper.model_state["balancing"]["router"], [0, 1, 2, 1, 2, 3])
    assert int(deeper.step) == 7 and deeper.params["head"][0, 0] == 7
    assert stacking(4, 8) == [0, 1, 2, 3, 0, 1, 2, 3] and stacking(3, 4) == [0, 1, 1, 2] and stacking(2, 2) == [0, 1]


def test_pruning_leaves_good_steps_before_a_damaged_one(two, tmp_path, capsys):
    """They are all that a training could go on from."""
    directory = copy_of(two, tmp_path)
    flip(next((directory / "checkpoints" / "2" / "params" / "d").iterdir()))
    assert main(["checkpoint", "prune", str(directory), "--keep", "1"]) == 2
    told = capsys.readouterr().err
    assert "the newest step, 2, is damaged" in told and told.count("\n") == 1
    assert folders(directory) == [1, 2]


@pytest.mark.parametrize("foreign", ["manifest", "link", "0030", "²", "file", "meta"])
def test_what_else_lies_there_is_no_step(foreign, two, tmp_path, capsys):
    """Copies of a tool that synchronises, links to what is gone, files: they are passed over."""
    directory = copy_of(two, tmp_path)
    steps = directory / "checkpoints"
    if foreign == "manifest":
        shutil.copy(steps / "2/manifest-0-of-1.json", steps / "2/manifest-0-of-1 (1).json")
    elif foreign == "link":
        (steps / "999").symlink_to(tmp_path / "nowhere")
    elif foreign == "file":
        (steps / "999").write_text("")
    elif foreign == "meta":
        (steps / "3/meta").mkdir(parents=True)
        (steps / "3/meta/metadata").write_text("5")
    else:
        (steps / foreign).mkdir()
    said: list[str] = []
    assert StepFolders(epath.Path(directory)).newest_good(said.append) == 2
    assert bool(said) == (foreign == "meta")
    assert main(["checkpoint", "list", str(directory)]) == 0
    assert main(["checkpoint", "verify", str(directory)]) == (foreign == "meta")
    assert main(["checkpoint", "prune", str(directory), "--keep", "1"]) == 0
    assert "removed 1; left: 2" in capsys.readouterr().out


def test_a_disk_that_is_not_mounted_is_no_new_run(two, tmp_path):
    directory = copy_of(two, tmp_path)
    shutil.rmtree(directory / "checkpoints")
    assert StepFolders(epath.Path(directory)).all() == []
    (directory / "checkpoints").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="checkpoints is no folder, or a link to one that isn't there"):
        StepFolders(epath.Path(directory)).all()


def test_a_configuration_is_read_from_a_step_that_is_whole(tmp_path):
    """Where config.yaml is gone."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), META | {"config": to_yaml(Config())}, print)
    for step in (1, 2):
        checkpoints.save(state_at(step), {})
    checkpoints.close()
    meta = tmp_path / "checkpoints/2/meta/metadata"
    for damage in (b'{"a"', b"\xff\xfe", None):
        meta.unlink() if damage is None else meta.write_bytes(damage)
        assert recorded_config(epath.Path(tmp_path)) == Config()


def test_command_line(two, tmp_path, capsys):
    directory = copy_of(two, tmp_path)
    assert main(["checkpoint", "list", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2"] and "MB" in lines[0]
    (kept := directory / "config.yaml").rename(aside := tmp_path / "aside")
    assert main(["checkpoint", "list", str(directory)]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert main(["checkpoint", "prune", str(directory), "--keep", "1"]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
    kept.write_text(aside.read_text().partition("\ncheckpoint:")[0])  # its rule would be the default one
    assert main(["checkpoint", "prune", str(directory)]) == 2
    assert "was cut short" in capsys.readouterr().err
    aside.rename(kept)
    assert main(["checkpoint", "verify", str(directory)]) == 0
    assert capsys.readouterr().out.count("good") == 2
    flip(next((directory / "checkpoints" / "1" / "params" / "d").iterdir()))
    assert main(["checkpoint", "verify", str(directory)]) == 1
    assert "was changed since it was written" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(directory), "--step", "2"]) == 0
    capsys.readouterr()
    (manifest := next((directory / "checkpoints" / "2").glob("manifest-*"))).rename(aside)
    with trained_elsewhere(directory):
        assert main(["checkpoint", "verify", str(directory), "--step", "2"]) == 0
        assert "being saved or removed by the training of this run" in capsys.readouterr().out
        assert main(["checkpoint", "verify", str(directory), "--step", "1"]) == 1  # it was complete
    assert main(["checkpoint", "verify", str(directory), "--step", "2"]) == 1
    assert "it was not saved to the end" in capsys.readouterr().out
    aside.rename(manifest)
    assert main(["checkpoint", "prune", str(directory), "--keep", "1"]) == 0
    assert folders(directory) == [2] and "removed 1; left: 2" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(directory), "--step", "9"]) == 2
    assert main(["checkpoint", "list", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert main(["checkpoint", "list", "runs/x/checkpoints/15"]) == 2
    assert "runs/x/checkpoints/15 is one checkpoint; name its run, runs/x" in capsys.readouterr().err
