"""Ouro's folders: published ones come in, runs go out and come back, and what doesn't fit is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.export.ouro_form import OuroForm
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.writing import export
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import OURO, ouro_run, use_of, write_folder
from tests.outside import official_outputs


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return ouro_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def folder(run: Path) -> Path:
    return write(run, run.parent / "folder")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def write(run: Path, out: Path, dtype: str = "float32", shard_bytes: int = 1 << 40) -> Path:
    export(open_model(run), out, dtype, False, lambda folder: None, shard_bytes)
    return out


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(its.array()) for name, its in safetensors_files.open_tensors(folder).items()}


def change(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None takes them away."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def same_params(a: Path, b: Path) -> None:
    jax.tree.map(np.testing.assert_array_equal, load_run(a).params, load_run(b).params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_gives_identical_bytes(run: Path, tmp_path: Path, dtype: str) -> None:
    first = write(run, tmp_path / "first", dtype)
    import_run(first, tmp_path / "back")
    second = write(tmp_path / "back", tmp_path / "second", dtype)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    original, back = load_run(run), load_run(tmp_path / "back")
    assert (back.step, back.meta) == (original.step, original.meta)
    assert dataclasses.replace(back.config, run=original.config.run) == original.config
    if dtype == "float32":
        same_params(run, tmp_path / "back")


def test_the_card_says_what_the_cache_is_for() -> None:
    last, loops = (use_of(OuroForm(), dataclasses.replace(OURO, cache=cache)) for cache in ("last", "loops"))
    assert "`model.cache: last`, which is for `dreamer generate`" in last and "cache" not in loops


def test_what_is_written(folder: Path) -> None:
    settings, tensors = json.loads((folder / "config.json").read_text()), arrays_of(folder)
    assert (settings["model_type"], settings["total_ut_steps"], settings["head_dim"]) == ("ouro", 3, 6)
    assert settings["early_exit_threshold"] == 1.0 and not settings["tie_word_embeddings"]
    assert tensors["model.early_exit_gate.weight"].shape == (1, 16)
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (24, 16)
    assert tensors["model.layers.1.self_attn.v_proj.weight"].shape == (12, 16)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (16, 12)
    assert len(tensors) == 2 * 11 + 5


def test_several_files_with_an_index(run: Path, tmp_path: Path) -> None:
    folder = write(run, tmp_path / "sharded", shard_bytes=10_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    import_run(folder, tmp_path / "back")
    same_params(run, tmp_path / "back")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def published(request, tmp_path_factory):
    """(folder, official outputs) of the tiny Ouro."""
    arrays, said = official_outputs("ouro_tiny")
    tensors = {name[2:]: arrays[name].astype(request.param) for name in arrays.files if name.startswith("w/")}
    settings = said["config"] | {"torch_dtype": request.param}
    return write_folder(tmp_path_factory.mktemp(request.param) / "folder", tensors, settings), arrays


def test_the_published_form_gives_the_official_outputs(published, tmp_path: Path) -> None:
    """And import, export and import again change no bit of it."""
    folder, arrays = published
    model = dreamer_jax.load(folder)
    dtype, found = model.config.model.dtype, model.config.model
    assert (found.rope_base, found.norm_epsilon, found.head_size, found.cache) == (1000.0, 1e-3, 16, "loops")
    assert model.config.data.sequence_length == 64
    if dtype == "float32":
        np.testing.assert_allclose(model.logits(arrays["input_ids"]), arrays["logits_per_loop"][-1], atol=1e-4)
    import_run(folder, tmp_path / "run")
    ours, theirs = arrays_of(write(tmp_path / "run", tmp_path / "again", dtype)), arrays_of(folder)
    assert set(ours) == set(theirs)
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype and ours[name].tobytes() == theirs[name].tobytes(), name
    import_run(tmp_path / "again", tmp_path / "back")
    same_params(tmp_path / "run", tmp_path / "back")


def test_changed_settings_count_more_than_the_run_s(copy: Path, tmp_path: Path) -> None:
    change(copy, total_ut_steps=5, early_exit_threshold=0.5, rope_theta=None, rope_parameters={"rope_theta": 500})
    import_run(copy, tmp_path / "back")
    config = load_run(tmp_path / "back").config
    assert config.model == dataclasses.replace(OURO, depth=5, exit_threshold=0.5, rope_base=500.0)
    assert config.data.task == "boolean"


# Refusals.


def refused(folder: Path, place: Path, capsys, message: str) -> None:
    """One line on stderr, exit code 2, nothing left behind."""
    before = sorted(place.iterdir())
    capsys.readouterr()
    assert main(["import", str(folder), str(place / "refused")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error, error
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "type 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"early_exit_step": 2}, "early_exit_step stops at one loop"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is of type 'yarn'"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "16"}, "hidden_size can't be '16'"),
        ({"total_ut_steps": 10**30}, "total_ut_steps can't be 10"),
        ({"hidden_size": 32}, "has shape"),
        ({"head_dim": None, "num_attention_heads": 5}, "num_attention_heads 5 does not divide hidden_size 16"),
        ({"num_key_value_heads": 3}, "model.kv_heads: 3 does not divide"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "is not part of the model"),
        ({"early_exit_threshold": 2.0}, "model.exit_threshold: 2 is no probability"),
        ({"training_run": {"step": -1}}, "training_run is damaged"),
    ],
)
def test_settings_that_cannot_be_computed_are_refused(copy, tmp_path, capsys, changes, message: str) -> None:
    change(copy, **changes)
    refused(copy, tmp_path, capsys, message)


def test_tensors_that_do_not_fit_are_refused(folder: Path, tmp_path: Path, capsys) -> None:
    settings = json.loads((folder / "config.json").read_text())
    for i, name in enumerate(("model.embed_tokens.weight", "model.early_exit_gate.bias", "lm_head.weight")):
        tensors = arrays_of(folder)
        del tensors[name]
        refused(write_folder(tmp_path / str(i), tensors, settings), tmp_path, capsys, f"{name} is missing")
    tensors = arrays_of(folder) | {"model.layers.0.self_attn.q_proj.bias": np.zeros(24, np.float32)}
    refused(
        write_folder(tmp_path / "more", tensors, settings), tmp_path, capsys, "q_proj.bias is not part of the model"
    )


def test_truncated_files_are_refused(copy: Path, tmp_path: Path, capsys) -> None:
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(copy, tmp_path, capsys, "truncated")
    path.unlink()
    refused(copy, tmp_path, capsys, "has no model.safetensors")
